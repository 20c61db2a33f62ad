"""Chooses the next token of every row of a step.

Random draws are counter-based: seed and token index alone decide the draw, so that a retry, a
preemption or another batch around it repeats a request's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from daskserve.core.params import SamplingParams

INVALID = -1
"""Chosen for a row whose logits are not finite: its request fails, its neighbours go on."""

_FIRST_CANDIDATES = 256
_COLDEST = 1e-5  # a smaller temperature would overflow float32, and is greedy long before
_MASK = 2**64 - 1


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that decides output token ``index`` of a request (SplitMix64)."""
    x = (_mixed(seed) + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    return (_mixed(x) >> 11) * 2.0**-53


def _mixed(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def sample(
    logits: torch.Tensor, draws: Sequence[tuple[int, SamplingParams, int, int]]
) -> np.ndarray:
    """One token id per row, int64 [R].

    Parameters
    ----------
    logits
        float32 [R, vocab].
    draws
        Rows that are not greedy: (row, params, seed, index of the output token).
    """
    rows = logits.numpy()
    # numpy's argmax is vectorised; torch's on CPU is several times slower.
    tokens = rows.argmax(axis=1)
    best = rows[np.arange(len(rows)), tokens]
    invalid = ~np.isfinite(best)
    for row, params, seed, index in draws:
        if not invalid[row]:
            tokens[row] = _draw(rows[row], params, uniform(seed, index))
    tokens[invalid] = INVALID
    return tokens


def _draw(logits: np.ndarray, params: SamplingParams, u: float) -> int:
    if params.top_k == 0 and params.top_p == 1.0:
        return _pick(_weights(logits, params.temperature), u)
    order, weights, total = _candidates(logits, params)
    if params.top_p < 1.0:
        cumulative = np.cumsum(weights, dtype=np.float64)
        kept = int(np.searchsorted(cumulative, params.top_p * total)) + 1
        weights = weights[:kept]
    return int(order[_pick(weights, u)])


def _weights(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Unnormalised probabilities; the best token has 1."""
    return np.exp((logits - logits.max()) / np.float32(max(temperature, _COLDEST)))


def _pick(weights: np.ndarray, u: float) -> int:
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return min(index, len(weights) - 1)


def _candidates(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray, float]:
    """Likeliest tokens in falling order, their weights, and the weight that top_p refers to.

    Sorting a whole vocabulary costs milliseconds, so the head is taken first and widened until
    it holds enough probability. Equal logits are ordered by token id.
    """
    weights = _weights(logits, params.temperature)
    vocab = len(logits)
    count = min(params.top_k or _FIRST_CANDIDATES, vocab)
    total = None if params.top_k else float(weights.sum(dtype=np.float64))
    while True:
        head = np.argpartition(-weights, count - 1)[:count] if count < vocab else np.arange(vocab)
        head = head[np.lexsort((head, -weights[head]))]
        kept = weights[head]
        mass = float(kept.sum(dtype=np.float64))
        if total is None:
            return head, kept, mass
        if count == vocab or mass >= params.top_p * total:
            return head, kept, total
        count = min(count * 8, vocab)
