"""Tokens equal to transformers' ``generate``, in fp32, however requests are scheduled."""

from __future__ import annotations

import functools
import gzip
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from daskserve.core.instance import Role
from daskserve.models.catalog import resolve
from daskserve.text.tokenizer import Tokenizer

BLOCK, CHUNK = 16, 24
CONTEXT = 2048  # of the tiny models

MODES = {
    "whole": dict(roles=[Role.COLOCATED]),
    "chunked": dict(roles=[Role.COLOCATED], chunk_tokens=CHUNK),
    "disaggregated": dict(roles=[Role.PREFILL, Role.DECODE]),
}


@functools.cache
def reference_model(name: str):
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(resolve(name), dtype=torch.float32).eval()


def generate(name: str, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    output = reference_model(name).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
    )
    return tuple(output[0, len(prompt) :].tolist())


@pytest.fixture
def serve(rig_type, make_engine):
    """``serve(mode, requests, model)``: token ids of the answers, in order."""

    def run(mode: str, requests, model: str, **settings) -> list[tuple[int, ...]]:
        options = MODES[mode] | settings
        roles = options.pop("roles")
        rig = rig_type(*(make_engine(role, model, "float32", **options) for role in roles))
        for request in requests:
            rig.submit(request)
        outcomes = rig.run()
        assert rig.used_blocks() == 0
        return [outcomes[request.request_id].token_ids for request in requests]

    return run


@pytest.mark.parametrize("max_batch", [pytest.param(1, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("mode", MODES)
def test_boundary_lengths_equal_generate(mode, max_batch, serve, make_request) -> None:
    model = "tiny-random-llama"
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 100]
    requests = [make_request(f"r{n}", n, max_tokens=20) for n in lengths]
    answers = serve(mode, requests, model, max_batch_size=max_batch, prefill_budget_tokens=64)
    for request, answer in zip(requests, answers, strict=True):
        assert answer == generate(model, request.prompt_token_ids, 20), request.request_id


@pytest.mark.parametrize("mode", MODES)
def test_prompts_at_the_context_limit_equal_generate(mode, serve, make_request) -> None:
    model = "tiny-random-llama"
    sizes = [(CONTEXT - 1, 1), (CONTEXT - 2, 2)]
    requests = [make_request(f"r{n}", n, max_tokens=m, ignore_eos=True) for n, m in sizes]
    answers = serve(mode, requests, model, prefill_budget_tokens=512)
    for request, answer in zip(requests, answers, strict=True):
        params = request.params
        assert answer == generate(model, request.prompt_token_ids, params.max_tokens)


@pytest.mark.parametrize("mode", MODES)
def test_preempted_requests_equal_generate(mode, serve, make_request) -> None:
    model = "tiny-random-llama"
    requests = [make_request(f"p{i}", 20 + i, max_tokens=30) for i in range(6)]
    answers = serve(mode, requests, model, num_kv_blocks=8)
    for request, answer in zip(requests, answers, strict=True):
        assert answer == generate(model, request.prompt_token_ids, 30)


@pytest.mark.parametrize("model", ["tiny-random-opt", "tiny-random-gemma2", "tiny-random-gpt2"])
def test_other_families_equal_generate(model, serve, make_request) -> None:
    requests = [make_request(f"r{n}", n, max_tokens=12) for n in (1, 17, 40, 70)]
    expected = [generate(model, request.prompt_token_ids, 12) for request in requests]
    for mode in ("chunked", "disaggregated"):
        assert serve(mode, requests, model) == expected


def real_prompts(prompts_dir, count: int) -> list[str]:
    """Half of them programs to complete, half of them questions in words."""
    texts = []
    for name, field in [("HumanEval.jsonl.gz", "prompt"), ("gsm8k_test.jsonl.gz", "question")]:
        with gzip.open(prompts_dir / name, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line)[field] for line, _ in zip(lines, range(count), strict=False)]
        texts += rows[: count - count // 2 if not texts else count // 2]
    return texts


def as_requests(texts, tokenizer, make_request, max_tokens):
    return [
        make_request(f"r{i}", tuple(tokenizer.encode(text)), max_tokens=max_tokens)
        for i, text in enumerate(texts)
    ]


def test_a_few_real_prompts_equal_generate(smollm2_dir, prompts_dir, serve, make_request) -> None:
    tokenizer = Tokenizer.load(smollm2_dir)
    requests = as_requests(real_prompts(prompts_dir, 2), tokenizer, make_request, 8)
    answers = serve("disaggregated", requests, "smollm2-135m")
    for request, answer in zip(requests, answers, strict=True):
        assert answer == generate("smollm2-135m", request.prompt_token_ids, 8)


@pytest.fixture(scope="module")
def fifty(smollm2_dir, prompts_dir, make_request):
    tokenizer = Tokenizer.load(smollm2_dir)
    return as_requests(real_prompts(prompts_dir, 50), tokenizer, make_request, 128)


@functools.cache
def is_greedy(prompt: tuple[int, ...], answer: tuple[int, ...]) -> bool:
    """Whether plain transformers picks every token of an answer, from one pass over all of it."""
    ids = torch.tensor([prompt + answer])
    with torch.inference_mode():
        logits = reference_model("smollm2-135m")(ids).logits[0, len(prompt) - 1 : -1]
    return tuple(logits.argmax(-1).tolist()) == answer


def expected_answer(request, answer: tuple[int, ...]) -> tuple[int, ...]:
    """What ``generate`` says; it runs only where one pass over the answer does not settle it."""
    params, prompt = request.params, request.prompt_token_ids
    eos = Tokenizer.load(resolve("smollm2-135m")).eos_token_ids
    is_whole = len(answer) == params.max_tokens or answer[-1] in eos
    if is_whole and not eos & set(answer[:-1]) and is_greedy(prompt, answer):
        return answer
    return generate("smollm2-135m", prompt, params.max_tokens)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("max_batch", [1, 8, 32])
@pytest.mark.parametrize("mode", MODES)
def test_fifty_real_prompts_equal_generate(mode, max_batch, fifty, serve) -> None:
    requests = fifty[::5] if max_batch == 1 else fifty  # one at a time takes minutes for all
    settings = dict(max_batch_size=max_batch, num_kv_blocks=2048, num_threads=2)
    answers = serve(mode, requests, "smollm2-135m", **settings)
    expected = [expected_answer(r, a) for r, a in zip(requests, answers, strict=True)]
    wrong = [r.request_id for r, a, e in zip(requests, answers, expected, strict=True) if a != e]
    assert wrong == []
