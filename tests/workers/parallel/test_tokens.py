"""Tokens equal to ``generate`` for every shape, however requests are scheduled."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM

from daskserve.core.instance import Role
from daskserve.models.catalog import resolve

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]
MODELS = ["tiny-random-llama", "tiny-random-opt"]
SETTINGS = {
    "whole": dict(prefill_budget_tokens=64, max_batch_size=4),
    "chunked": dict(chunk_tokens=24, max_batch_size=8),
    "preempted": dict(num_kv_blocks=8),
}


@functools.cache
def reference_model(name: str):
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(resolve(name), dtype=torch.float32).eval()


@functools.cache
def generate(name: str, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    output = reference_model(name).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
    )
    return tuple(output[0, len(prompt) :].tolist())


def answers(rig_type, engine, requests) -> list:
    rig = rig_type(engine)
    for request in requests:
        rig.submit(request)
    outcomes = rig.run()
    assert rig.used_blocks() == 0
    return [outcomes[request.request_id] for request in requests]


def cases() -> list:
    """All of them; by default those one thing away from whole prompts on Llama's 2 x 2."""
    found = []
    for model, shape, settings in itertools.product(MODELS, SHAPES, SETTINGS):
        common = ("tiny-random-llama", (2, 2), "whole")
        num_other = sum(a != b for a, b in zip((model, shape, settings), common, strict=True))
        marks = [pytest.mark.slow] if num_other > 1 else []
        name = f"{model}-{shape}-{settings}"
        found.append(pytest.param(model, shape, settings, marks=marks, id=name))
    return found


@pytest.mark.parametrize(("model", "shape", "settings"), cases())
def test_every_shape_equals_generate(model, shape, settings, ranks_of, rig_type, make_request):
    engine = ranks_of(model, *shape).engine(Role.COLOCATED, **SETTINGS[settings])
    lengths = range(20, 26) if settings == "preempted" else (1, 15, 17, 40, 100, 31)
    requests = [make_request(f"r{n}", n, max_tokens=30) for n in lengths]
    got = answers(rig_type, engine, requests)
    for request, answer in zip(requests, got, strict=True):
        assert answer.token_ids == generate(model, request.prompt_token_ids, 30)
    if settings == "preempted":
        assert sum(answer.timeline.num_recomputes for answer in got) > 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_drawn_tokens_and_their_logprobs_do_not_depend_on_the_shape(
    shape, ranks_of, rig_type, make_engine, make_request
):
    model = "tiny-random-llama"
    requests = [
        make_request(f"d{n}", n, seed=n, max_tokens=12, temperature=temperature, logprobs=named)
        for n, temperature, named in ((5, 0.0, None), (9, 0.7, None), (20, 1.1, 2), (33, 0.0, 1))
    ]
    expected = answers(rig_type, make_engine(Role.COLOCATED, model), requests)
    got = answers(rig_type, ranks_of(model, *shape).engine(Role.COLOCATED), requests)
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in expected]
    for one, other in zip(got, expected, strict=True):
        for entry, wanted in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert entry.logprob == pytest.approx(wanted.logprob, abs=1e-3)


def test_a_pipeline_has_a_step_in_every_stage(ranks_of, rig_type, make_request):
    engine = ranks_of("tiny-random-llama", 1, 2).engine(Role.COLOCATED, prefill_budget_tokens=24)
    begin, most = engine.open_steps.begin, []

    def noting(step, **kwargs):
        begin(step, **kwargs)
        most.append(len(engine.open_steps))

    engine.open_steps.begin = noting
    requests = [make_request(f"o{n}", 20, max_tokens=10) for n in range(6)]
    answers(rig_type, engine, requests)
    assert max(most) == 2 and most.count(2) > len(most) / 2


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 1), (1, 2), (1, 3)], ids=str)
def test_a_real_model_equals_generate(shape, smollm2_dir, ranks_of, rig_type, make_request):
    engine = ranks_of("smollm2-135m", *shape).engine(Role.COLOCATED, prefill_budget_tokens=128)
    requests = [make_request(f"s{n}", n, max_tokens=12) for n in (3, 40, 150)]
    for request, answer in zip(requests, answers(rig_type, engine, requests), strict=True):
        assert answer.token_ids == generate("smollm2-135m", request.prompt_token_ids, 12)
