"""What the ranks of the last stage say of a step, each of its part of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from daskserve.workers.cuda.staging import start_fetch
from daskserve.workers.parallel.micro_batches import MicroBatch
from daskserve.workers.scores import Scores, likeliest


@dataclass(frozen=True, slots=True)
class Answer:
    """Of R rows and a part of the vocabulary; both tensors may be sent as they are.

    Parameters
    ----------
    best
        float64 [2, R]: of each row the likeliest token of the part, counted in the whole
        vocabulary, and its logit.
    logits
        [F, part] of the F rows that were asked for, in the type of the weights, which computed
        them.
    """

    best: torch.Tensor
    logits: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int, num_asked: int, part: range, dtype: torch.dtype) -> Answer:
        """Room for what another rank says."""
        best = torch.empty(2, num_rows, dtype=torch.float64)
        return cls(best, torch.empty(num_asked, len(part), dtype=dtype))

    @classmethod
    def of(
        cls,
        outputs: Sequence[tuple[MicroBatch, torch.Tensor]],
        num_rows: int,
        asked: Sequence[int],
        part: range,
        dtype: torch.dtype,
    ) -> Answer:
        """From what this rank's stage computed: micro-batches and their logits."""
        answer = cls.empty(num_rows, len(asked), part, dtype)
        best, places = answer.best.numpy(), {row: place for place, row in enumerate(asked)}
        for micro_batch, logits in outputs:
            tokens, values = likeliest(logits.numpy())
            best[:, micro_batch.rows] = tokens + part.start, values
            for index, row in enumerate(micro_batch.rows.tolist()):
                if row in places:
                    answer.logits[places[row]] = logits[index]
        return answer


@dataclass(frozen=True, slots=True)
class Answering:
    """An answer that a card may still be computing.

    Parameters
    ----------
    is_done
        Whether it is there.
    take
        Gives it; waits without a deadline where it is not there yet.
    """

    is_done: Callable[[], bool]
    take: Callable[[], Answer]

    @classmethod
    def done(cls, answer: Answer) -> Answering:
        """One that is there."""
        return cls(lambda: True, lambda: answer)

    @classmethod
    def fetched(cls, best: torch.Tensor, logits: torch.Tensor) -> Answering:
        """One whose tensors are on a device: starts copying them."""
        fetch = start_fetch(best, logits)
        return cls(fetch.is_done, lambda: Answer(*fetch()))


def merged(answers: Sequence[Answer], asked: Sequence[int]) -> Scores:
    """The answers of all parts, in the order of the vocabulary."""
    tokens, values = answers[0].best.numpy().copy()
    for answer in answers[1:]:
        other_tokens, other_values = answer.best.numpy()
        # No number anywhere: no number at all.
        is_better = (other_values > values) | np.isnan(other_values)
        tokens[is_better], values[is_better] = other_tokens[is_better], other_values[is_better]
    whole = torch.cat([answer.logits.float() for answer in answers], dim=1).numpy()
    logits = dict(zip(asked, whole, strict=True))
    return Scores(tokens.astype(np.int64), values.astype(np.float32), logits)
