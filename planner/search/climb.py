"""Finds the deployment that serves the most: few full searches, many looks at a single rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from daskserve.planner.search.best import WAVE
from daskserve.planner.search.simulated import SimulatedEvaluator, check_rate, run_all
from daskserve.planner.search.units import Unit

MOST_CANDIDATES = 32
"""Deployments that are simulated, those with the highest rates by formula."""
GAIN = 1.01
"""A deployment must serve this much more to replace another."""
MOST_STEPS = 12


def best_deployment(
    evaluator: SimulatedEvaluator,
    candidates: Sequence[Unit],
    neighbours: Callable[[Unit], Iterable[Unit]],
) -> Unit | None:
    """The candidate with the highest rate, then better neighbours of it while there are any.

    One seed decides; None when no candidate serves anything.
    """
    sized = evaluator.sized
    order = sorted(candidates, key=lambda unit: -sized.evaluate([unit])[0].rate)
    order = [unit for unit in order if sized.bound(unit) > 0][:MOST_CANDIDATES]
    best, rate = None, 0.0
    while order:
        # Alone until something serves a rate that the others can be held against.
        width = WAVE if rate > 0 else 1
        wave, order = order[:width], order[width:]
        found, reached = _better(evaluator, wave, rate)
        if found is not None:
            best, rate = found, reached
        order = [unit for unit in order if sized.bound(unit) > GAIN * rate]
    for _ in range(MOST_STEPS):
        if best is None:
            break
        found, reached = _better(evaluator, list(neighbours(best)), rate)
        if found is None:
            break
        best, rate = found, reached
    return best


def _better(
    evaluator: SimulatedEvaluator, units: Sequence[Unit], rate: float
) -> tuple[Unit | None, float]:
    """The best of the units that serve more than ``rate``, and what it serves."""
    quick = evaluator.effort.quick()
    if rate > 0:
        tasks = [evaluator.task(unit, GAIN * rate, quick) for unit in units]
        checks = run_all(evaluator.executor, check_rate, tasks)
        units = [unit for unit, check in zip(units, checks, strict=True) if check.holds]
    answers = evaluator.quick([evaluator.task(unit) for unit in units])
    found, reached = None, rate
    for unit, answer in zip(units, answers, strict=True):
        if (answer.rate or 0.0) > reached:
            found, reached = unit, answer.rate or 0.0
    return found, reached
