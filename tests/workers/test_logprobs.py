"""Log-probabilities are transformers' own, on every way through the engines."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from daskserve.core.instance import Role
from daskserve.core.params import SamplingParams
from daskserve.errors import InvalidParameter
from daskserve.models.catalog import resolve
from daskserve.workers.sampler import INVALID, logprobs, sample
from daskserve.workers.scores import Scores

MODEL = "tiny-random-llama"
MODES = {
    "whole": dict(roles=[Role.COLOCATED]),
    "chunked": dict(roles=[Role.COLOCATED], chunk_tokens=24),
    "disaggregated": dict(roles=[Role.PREFILL, Role.DECODE]),
}


@functools.cache
def reference():
    return AutoModelForCausalLM.from_pretrained(resolve(MODEL), dtype=torch.float32).eval()


def expected(prompt: tuple[int, ...], answer: tuple[int, ...]) -> torch.Tensor:
    """[answer, vocab]: the model's log-probabilities at every token of an answer."""
    ids = torch.tensor([prompt + answer])
    with torch.inference_mode():
        logits = reference()(ids).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("mode", MODES)
def test_they_equal_those_of_transformers(mode, rig_type, make_engine, make_request) -> None:
    options = dict(MODES[mode])
    roles = options.pop("roles")
    rig = rig_type(*(make_engine(role, MODEL, num_kv_blocks=14, **options) for role in roles))
    asks = [dict(logprobs=5), dict(logprobs=0), {}, dict(logprobs=20, temperature=1.3)]
    # Some are preempted on the way, in a pool this small.
    requests = [
        make_request(f"r{i}", 17 + 9 * i, seed=i, max_tokens=25, **ask)
        for i, ask in enumerate(asks)
    ]
    for request in requests:
        rig.submit(request, streams=True)
    outcomes = rig.run()
    for request in requests:
        completion = outcomes[request.request_id]
        num_top = request.params.logprobs
        if num_top is None:
            assert completion.logprobs is None
            continue
        values = expected(request.prompt_token_ids, completion.token_ids)
        assert len(completion.logprobs) == completion.num_output_tokens
        for entry, token_id, row in zip(
            completion.logprobs, completion.token_ids, values, strict=True
        ):
            assert entry.logprob == pytest.approx(row[token_id].item(), abs=2e-4)
            best = row.topk(num_top)
            assert [i for i, _ in entry.top] == best.indices.tolist()
            assert [v for _, v in entry.top] == pytest.approx(best.values.tolist(), abs=2e-4)


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=300),
    st.integers(0, 20),
    st.floats(0.0, 2.0),
)
def test_they_are_a_distribution_whatever_the_temperature(row, num_top, temperature) -> None:
    logits = torch.tensor([row, row])
    draws = [(0, SamplingParams(temperature=temperature), 5, 0)] if temperature else []
    scores = Scores.of(logits)
    tokens = sample(scores, draws)
    entry = logprobs(scores, [(0, num_top)], tokens)[0]
    exact = torch.tensor(row, dtype=torch.float64).log_softmax(-1).numpy()
    assert entry.logprob == pytest.approx(exact[tokens[0]], abs=1e-4)
    assert len(entry.top) == min(num_top, len(row))
    named = [i for i, _ in entry.top]
    assert len(set(named)) == len(named)
    assert [row[i] for i in named] == sorted(row, reverse=True)[:num_top]
    assert [v for _, v in entry.top] == pytest.approx(exact[named].tolist(), abs=1e-4)


def test_a_row_without_a_token_has_none() -> None:
    logits = torch.full((2, 4), float("nan"))
    logits[1] = 0.0
    scores, tokens = Scores.of(logits), np.array([INVALID, 2])
    assert set(logprobs(scores, [(0, 1), (1, 1)], tokens)) == {1}


@pytest.mark.parametrize("value", [-1, 21, 1.0, True, "5"])
def test_wrong_numbers_are_refused(value) -> None:
    with pytest.raises(InvalidParameter, match="logprobs"):
        SamplingParams(logprobs=value)
