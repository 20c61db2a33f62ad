"""Finds the best of many units without evaluating those that cannot win."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from daskserve.planner.search.units import Evaluator, Scored, Unit

WAVE = 8
"""Units evaluated at once, whatever the number of workers: so results do not depend on it."""

Cost = Callable[[Unit, float], float]
"""Cost of a unit that serves a rate; smaller is better, infinite when it cannot serve."""


def gpus_per_rate(unit: Unit, rate: float) -> float:
    """GPUs per request/s: the paper's objective turned round."""
    return unit.num_gpus / rate if rate > 0 else math.inf


def gpus_for(target_rate: float) -> Cost:
    """GPUs of as many whole units as reach a rate; ties go to the better rate per GPU."""

    def cost(unit: Unit, rate: float) -> float:
        if rate <= 0:
            return math.inf
        copies = 1 if math.isinf(rate) else max(1, math.ceil(target_rate / rate - 1e-9))
        tie_break = 0.0 if math.isinf(rate) else min(unit.num_gpus / rate, 1e6) * 1e-7
        return copies * unit.num_gpus + tie_break

    return cost


def evaluate_best(
    evaluator: Evaluator, units: Sequence[Unit], costs: Sequence[Cost] = (gpus_per_rate,)
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
