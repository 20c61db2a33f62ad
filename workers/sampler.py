"""Chooses the next token of every row of a step.

Random draws are counter-based: seed and token index alone decide the draw, so that a retry, a
preemption or another batch around it repeats a request's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from daskserve.core.params import SamplingParams
from daskserve.core.request import TokenLogprob
from daskserve.workers.scores import Scores

INVALID = -1
"""Chosen for a row whose logits are not finite: its request fails, its neighbours go on."""

_SPAN = 256
_FLOORS = (1e-3, 1e-5, 0.0)
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


def sample(scores: Scores, draws: Sequence[tuple[int, SamplingParams, int, int]]) -> np.ndarray:
    """One token id per row, int64 [R].

    Parameters
    ----------
    scores
        With the logits of the rows that are not greedy.
    draws
        Rows that are not greedy: (row, params, seed, index of the output token).
    """
    tokens = scores.likeliest.copy()
    invalid = ~np.isfinite(scores.best)
    for row, params, seed, index in draws:
        if not invalid[row]:
            tokens[row] = _draw(scores.logits[row], params, uniform(seed, index))
    tokens[invalid] = INVALID
    return tokens


def logprobs(
    scores: Scores, asked: Sequence[tuple[int, int]], tokens: np.ndarray
) -> dict[int, TokenLogprob]:
    """Log-probabilities of the tokens that were chosen, by row.

    They are of the model's own distribution, whatever temperature, top_p and top_k made of it.

    Parameters
    ----------
    scores
        With the logits of the rows that are asked for.
    asked
        (row, number of the likeliest tokens to name); other rows cost nothing.
    tokens
        int64 [R], what `sample` chose; rows without a valid token are left out.
    """
    return {
        row: _logprob(scores.logits[row], int(tokens[row]), num_top)
        for row, num_top in asked
        if tokens[row] != INVALID
    }


def _logprob(logits: np.ndarray, token_id: int, num_top: int) -> TokenLogprob:
    best = logits.max()
    total = best + math.log(np.exp(logits - best).sum(dtype=np.float64))
    top: np.ndarray = np.empty(0, np.int64)
    if num_top:
        count = min(num_top, len(logits))
        top = np.argpartition(logits, -count)[-count:]
        # Equals in order of id, as everywhere.
        top = top[np.lexsort((top, -logits[top]))]
    return TokenLogprob(
        float(logits[token_id] - total), tuple((int(i), float(logits[i] - total)) for i in top)
    )


def _draw(logits: np.ndarray, params: SamplingParams, u: float) -> int:
    # The best token has weight 1, so that nothing overflows.
    weights = np.exp((logits - logits.max()) / np.float32(max(params.temperature, _COLDEST)))
    least = np.float32(0.0)
    if 0 < params.top_k < len(weights):
        least = np.partition(weights, -params.top_k)[-params.top_k]
    if params.top_p < 1.0:
        least = max(least, _least_of_nucleus(weights[weights >= least], params.top_p))
    if least > 0.0:
        # Tokens as likely as the last one kept are kept too, so that no order of equals matters.
        weights[weights < least] = 0.0
    return _pick_of_all(weights, u)


def _least_of_nucleus(weights: np.ndarray, top_p: float) -> np.float32:
    """Smallest weight in the smallest set that holds ``top_p`` of all weight.

    Sorting a whole vocabulary costs milliseconds, so only tokens above a floor are sorted; it
    is lowered until they hold enough.
    """
    mass = top_p * weights.sum(dtype=np.float64)
    for floor in _FLOORS:
        head = weights[weights >= floor]
        if floor == 0.0 or head.sum(dtype=np.float64) >= mass:
            break
    falling = np.sort(head)[::-1]
    cumulative = np.cumsum(falling, dtype=np.float64)
    return falling[min(int(np.searchsorted(cumulative, mass)), len(falling) - 1)]


def _pick(cumulative: np.ndarray, u: float) -> int:
    """Index at share ``u`` of the weight; never one whose own weight is 0."""
    last = int(np.searchsorted(cumulative, cumulative[-1]))
    return min(int(np.searchsorted(cumulative, u * cumulative[-1], side="right")), last)


def _pick_of_all(weights: np.ndarray, u: float) -> int:
    """As `_pick` over all tokens in order of id, in two levels because sums are slow."""
    starts = np.arange(0, len(weights), _SPAN)
    spans = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    span = _pick(spans, u)
    before = spans[span - 1] if span else 0.0
    inside = np.cumsum(weights[starts[span] : starts[span] + _SPAN], dtype=np.float64)
    share = (u * spans[-1] - before) / (spans[span] - before)
    return int(starts[span]) + _pick(inside, share)
