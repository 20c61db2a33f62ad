"""What a plan would serve under other limits, and need at other rates."""

from __future__ import annotations

from dataclasses import replace

from daskserve.planner.goodput import Goodput
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.search.algorithms import Solution
from daskserve.planner.search.objective import copies_for
from daskserve.planner.search.pooled import smallest_counts
from daskserve.planner.search.simulated import SimulatedEvaluator
from daskserve.planner.search.units import Unit
from daskserve.planner.slo_classes import of_class

FACTORS = (0.8, 1.25)
RATE_FACTORS = (0.5, 2.0)
ENDS = {
    "ttft": "beyond, TTFT{} fails",
    "tpot": "beyond, TPOT{} fails",
    "stability": "beyond, the queue grows without end",
}


def most_served(evaluator: SimulatedEvaluator, solution: Solution) -> tuple[float, Goodput]:
    """The highest rate of a solution with one seed, and what was found for its unit.

    Units that keep KV on their nodes serve what one serves, times their number; all other
    instances share their queues.
    """
    [answer] = evaluator.quick([evaluator.task(solution.unit)])
    return solution.num_units * (answer.rate or 0.0), answer


def other_limits(request: PlanRequest, evaluator: SimulatedEvaluator, solution: Solution) -> str:
    """The highest rate of the chosen instances, also under tighter and looser limits.

    A factor applies to the limits of every class.
    """
    slo = request.classes
    scales = [*((f, 1.0) for f in FACTORS), *((1.0, f) for f in FACTORS)]
    base = evaluator.task(solution.unit)
    tasks = [replace(base, slo=slo.scaled(ttft, tpot)) for ttft, tpot in scales]
    now, found = most_served(evaluator, solution)
    if now == 0:
        return ""
    ends = ENDS[found.limited_by or "ttft"].format(of_class(found.limiting_class))
    shown = [f"With one seed it serves up to {now:.4g} requests/s ({ends})"]
    for (ttft, tpot), answer in zip(scales, evaluator.quick(tasks), strict=True):
        name, factor = ("TTFT", ttft) if tpot == 1.0 else ("TPOT", tpot)
        rate = solution.num_units * (answer.rate or 0.0)
        outcome = f"{rate:.4g} ({rate / now - 1:+.0%})" if rate else answer.status
        shown.append(f"{name} limit x {factor:g}: {outcome}")
    return "; ".join(shown) + "."


def other_rates(request: PlanRequest, evaluator: SimulatedEvaluator, solution: Solution) -> str:
    """GPUs that the same splits need at half and twice the rate."""
    found = []
    for factor in RATE_FACTORS:
        rate = request.asked_rate * factor
        gpus = _gpus_at(evaluator, solution, rate)
        found.append(f"{rate:.4g} requests/s {f'{gpus} GPUs' if gpus else 'out of reach'}")
    return f"The same splits at other rates: {', '.join(found)}."


def _gpus_at(evaluator: SimulatedEvaluator, solution: Solution, rate: float) -> int:
    """0 when no count holds the rate."""
    unit = solution.unit
    if unit.num_segments:
        return copies_for(rate, solution.unit_rate) * unit.num_gpus
    alone = [
        Unit((replace(group, count=1),), chunk_tokens=unit.chunk_tokens) for group in unit.groups
    ]
    counts = smallest_counts(evaluator, alone, rate)
    if not all(counts):
        return 0
    return sum(count * one.num_gpus for count, one in zip(counts, alone, strict=True))
