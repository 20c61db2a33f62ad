"""Finds the best of many units without evaluating those that cannot win."""

from __future__ import annotations

import math
from collections.abc import Sequence

from daskserve.planner.search.objective import Cost
from daskserve.planner.search.units import Evaluator, Scored, Unit

WAVE = 8
"""Units evaluated at once, whatever the number of workers: so results do not depend on it."""


def evaluate_best(
    evaluator: Evaluator, units: Sequence[Unit], costs: Sequence[Cost]
) -> list[Scored]:
    """Evaluate units until no other can win under any of the costs.

    Returns
    -------
    Everything evaluated, in the order of ``units``; ``min`` over it with a cost therefore
    resolves ties as a plain loop over ``units`` would.
    """
    bounds = [evaluator.bound(unit) for unit in units]
    best_possible = {
        i: [cost(unit, bound) for cost in costs]
        for i, (unit, bound) in enumerate(zip(units, bounds, strict=True))
        if bound > 0
    }
    order = sorted(best_possible, key=lambda i: (best_possible[i], i))
    found: dict[int, Scored] = {}
    best = [math.inf] * len(costs)
    while order:
        order = [i for i in order if _may_win(best_possible[i], best)]
        wave, order = order[:WAVE], order[WAVE:]
        estimates = evaluator.evaluate([units[i] for i in wave])
        for i, estimate in zip(wave, estimates, strict=True):
            found[i] = Scored(units[i], estimate)
            reached = (cost(units[i], estimate.rate) for cost in costs)
            best = [min(pair) for pair in zip(best, reached, strict=True)]
    return [found[i] for i in sorted(found)]


def _may_win(possible: Sequence[float], best: Sequence[float]) -> bool:
    return any(mine <= theirs for mine, theirs in zip(possible, best, strict=True))


def cheapest(scored: Sequence[Scored], cost: Cost) -> Scored | None:
    """The first of the cheapest that serve anything at all; None when none does."""
    serving = [one for one in scored if one.rate > 0]
    return min(serving, key=lambda one: cost(one.unit, one.rate)) if serving else None
