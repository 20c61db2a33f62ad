"""What the last stage says is what all logits in one place would say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from daskserve.core.params import SamplingParams
from daskserve.workers.parallel.answers import Answer, merged
from daskserve.workers.parallel.micro_batches import MicroBatch
from daskserve.workers.parallel.stage import vocabulary_part
from daskserve.workers.sampler import logprobs, sample
from daskserve.workers.scores import Scores

numbers = st.sampled_from([0.0, -1.5, 2.0, 7.25, float("nan"), float("inf"), -float("inf")])


def answered(logits: torch.Tensor, tp: int, num_parts: int, asked: list[int]) -> Scores:
    rows = np.array_split(np.arange(len(logits)), num_parts)
    answers = []
    for rank in range(tp):
        part = vocabulary_part(logits.shape[1], tp, rank)
        outputs = [
            (MicroBatch(None, own, own), logits[torch.from_numpy(own)][:, part.start : part.stop])
            for own in rows
        ]
        answers.append(Answer.of(outputs, len(logits), asked, part, logits.dtype))
    return merged(answers, asked)


@given(
    st.lists(st.lists(numbers, min_size=8, max_size=8), min_size=1, max_size=6),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 3),
)
def test_greedy_tokens_are_those_of_the_whole_vocabulary(rows, tp, num_parts):
    logits = torch.tensor(rows)
    whole, parts = Scores.of(logits), answered(logits, tp, num_parts, [])
    assert sample(parts, []).tolist() == sample(whole, []).tolist()
    assert parts.logits == {}


@pytest.mark.parametrize("tp", [1, 3])
def test_rows_that_are_asked_for_bring_their_logits(tp):
    torch.manual_seed(0)
    logits, asked = torch.randn(5, 50), [1, 4]
    draws = [(row, SamplingParams(temperature=0.8, top_p=0.9), 7, 3) for row in asked]
    whole, parts = Scores.of(logits), answered(logits, tp, 2, asked)
    assert set(parts.logits) == set(asked)
    tokens = sample(whole, draws)
    assert sample(parts, draws).tolist() == tokens.tolist()
    named = [(row, 3) for row in asked]
    assert logprobs(parts, named, tokens) == logprobs(whole, named, tokens)
