"""Choosing tokens: what is kept, how often it is drawn, and that seed and index decide."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from daskserve.core.params import SamplingParams
from daskserve.workers.sampler import INVALID, sample, uniform
from daskserve.workers.scores import Scores


def draws(row: list[float], params: SamplingParams, count: int, seed: int = 1) -> np.ndarray:
    logits = torch.tensor([row] * count)
    return sample(Scores.of(logits), [(i, params, seed, i) for i in range(count)])


def test_greedy_rows_take_the_largest_logit() -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    assert sample(Scores.of(logits), []).tolist() == logits.argmax(-1).tolist()


def test_draws_follow_the_softmax() -> None:
    row = [0.0, 1.0, 2.0, -1.0, 0.5] + [-float("inf")] * 600
    for temperature in (0.5, 1.0, 2.0):
        tokens = draws(row, SamplingParams(temperature=temperature), 4000)
        expected = torch.softmax(torch.tensor(row) / temperature, -1).numpy()
        share = np.bincount(tokens, minlength=len(row)) / len(tokens)
        assert np.abs(share - expected).max() < 0.03


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    row = np.log([0.05, 0.5, 0.25, 0.15, 0.05]).tolist()
    assert set(draws(row, SamplingParams(temperature=1.0, top_k=2), 500)) == {1, 2}
    assert set(draws(row, SamplingParams(temperature=1.0, top_p=0.7), 500)) == {1, 2}
    assert set(draws(row, SamplingParams(temperature=1.0, top_p=0.8), 500)) == {1, 2, 3}
    both = SamplingParams(temperature=1.0, top_k=3, top_p=0.5)
    assert set(draws(row, both, 500)) == {1}, "top_p counts within the top_k tokens"


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=700),
    st.floats(0.01, 1.0),
    st.integers(0, 50),
    st.floats(0.0, 2.0),
    st.integers(0, 2**63 - 1),
)
def test_a_drawn_token_is_always_in_the_kept_set(row, top_p, top_k, temperature, seed) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    (token,) = draws(row, params, 1, seed)
    weights = torch.softmax(torch.tensor(row, dtype=torch.float64) / max(temperature, 1e-5), -1)
    likelier = weights[weights > weights[token] * (1 + 1e-4)]
    assert weights[token] > 0
    assert top_k == 0 or len(likelier) < top_k
    kept = torch.sort(weights, descending=True).values[: top_k or len(row)].sum()
    assert likelier.sum() <= top_p * kept * (1 + 1e-4)


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 1e-3])
def test_cold_draws_are_greedy(temperature: float) -> None:
    assert set(draws([1.0, 3.0, 2.0], SamplingParams(temperature=temperature), 50)) == {1}


def test_a_draw_depends_on_seed_and_index_only() -> None:
    params = SamplingParams(temperature=1.0)
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    alone = [sample(Scores.of(logits[i : i + 1]), [(0, params, 7, i)])[0] for i in range(6)]
    batched = sample(Scores.of(logits), [(i, params, 7, i) for i in range(6)])
    assert alone == batched.tolist()


def test_uniform_numbers_differ_by_seed_and_index() -> None:
    numbers = [uniform(seed, index) for seed in range(50) for index in range(50)]
    assert len(set(numbers)) == 2500
    assert 0.0 <= min(numbers) and max(numbers) < 1.0
    assert abs(np.mean(numbers) - 0.5) < 0.02


def test_rows_without_finite_logits_are_marked_not_drawn() -> None:
    logits = torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [-float("inf")] * 2])
    params = SamplingParams(temperature=1.0)
    assert sample(Scores.of(logits), [(1, params, 0, 0)]).tolist() == [1, INVALID, INVALID]
