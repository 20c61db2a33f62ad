"""What a step says of the next token of every row: the likeliest, and logits where they are asked.

Most rows need no more than the likeliest token, so that an instance of several ranks does not
send its whole vocabulary from rank to rank for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Scores:
    """Of the R rows of a step.

    Parameters
    ----------
    likeliest
        int64 [R]: the token with the largest logit, the first of equals.
    best
        float32 [R]: its logit; not finite where the model's logits are no numbers.
    logits
        float32 [vocab] by row, at least of those rows that were asked for.
    """

    likeliest: np.ndarray
    best: np.ndarray
    logits: np.ndarray | Mapping[int, np.ndarray]

    @classmethod
    def of(cls, logits: torch.Tensor) -> Scores:
        """From all logits, float32 [R, vocab]."""
        rows = logits.numpy()
        return cls(*likeliest(rows), rows)


def likeliest(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The token with the largest logit in each row, and that logit."""
    # numpy's argmax is vectorised; torch's on CPU is several times slower.
    tokens = rows.argmax(axis=1)
    return tokens, rows[np.arange(len(rows)), tokens]
