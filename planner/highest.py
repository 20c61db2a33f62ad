"""The other direction: the most that each way serves on given GPUs or for a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from daskserve.core.instance import Role
from daskserve.errors import ClusterError
from daskserve.planner.options import option_of, placed
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.plan_result import Option
from daskserve.planner.search.algorithms import CHUNKS, Solution
from daskserve.planner.search.climb import best_deployment
from daskserve.planner.search.fill import (
    Limits,
    filled_copies,
    filled_pairs,
    filled_up,
    most_of_units,
)
from daskserve.planner.search.simulated import SimulatedEvaluator
from daskserve.planner.search.space import SearchSpace
from daskserve.planner.search.units import Unit

TRIES = 3
"""Arrangements of one way that are placed before it is given up as too large for the nodes."""


def highest_options(
    request: PlanRequest, evaluator: SimulatedEvaluator, limits: Limits
) -> list[Option]:
    """The most that each way serves within limits, measured on the whole deployment."""
    return list(_options(request, evaluator, limits))


def _options(
    request: PlanRequest, evaluator: SimulatedEvaluator, limits: Limits
) -> Iterator[Option]:
    asked, name = request.algorithm, "Algorithm 1, pooled"
    prefill, decode = (
        [unit for space in request.spaces for unit in space.phase_units(evaluator, role)]
        for role in (Role.PREFILL, Role.DECODE)
    )
    if asked in ("auto", "1"):
        pairs = [(one, other) for one in prefill for other in decode]
        first = _of_pairs(request, evaluator, limits, name, pairs)
        yield first
    if asked in ("auto", "single"):
        same = list(zip(prefill, decode, strict=True))
        yield _of_pairs(request, evaluator, limits, "one parallelism", same)
    if asked in ("2", "3", "joint") or (asked == "auto" and not first.is_usable):
        ways = {"2": "Algorithm 2", "joint": "joint"}
        yield _of_units(request, evaluator, limits, ways.get(asked, "Algorithm 3"))
    if asked in ("auto", "colocated"):
        yield _colocated(request, evaluator, limits)


def _of_pairs(
    request: PlanRequest,
    evaluator: SimulatedEvaluator,
    limits: Limits,
    name: str,
    pairs: Iterable[tuple[Unit, Unit]],
) -> Option:
    def neighbours(unit: Unit) -> Iterator[Unit]:
        prefill, decode = (Unit((replace(group, count=1),)) for group in unit.groups)
        for change in (-1, 1):
            count = unit.groups[0].count + change
            if count > 0 and filled_up(prefill, count, decode, limits).groups[1].count > 0:
                yield filled_up(prefill, count, decode, limits)

    units = filled_pairs(evaluator.sized, pairs, limits)
    return _best(request, evaluator, limits, name, units, neighbours)


def _colocated(request: PlanRequest, evaluator: SimulatedEvaluator, limits: Limits) -> Option:
    units = [
        replace(unit, chunk_tokens=chunk)
        for space in request.spaces
        for unit in space.phase_units(evaluator, Role.COLOCATED)
        for chunk in CHUNKS
    ]
    filled = filled_copies(units, limits)
    return _best(request, evaluator, limits, "colocated", filled, lambda unit: ())


def _best(
    request: PlanRequest,
    evaluator: SimulatedEvaluator,
    limits: Limits,
    name: str,
    units: list[Unit],
    neighbours: Callable[[Unit], Iterable[Unit]],
) -> Option:
    def can_be_placed(unit: Unit) -> bool:
        try:
            placed(request, evaluator, unit, 1)
        except ClusterError:
            return False
        return True

    best = best_deployment(
        evaluator,
        [unit for unit in units if can_be_placed(unit)],
        lambda unit: filter(can_be_placed, neighbours(unit)),
    )
    if best is None:
        return Option(name, rejected=_nothing(evaluator, limits, units))
    [estimate] = evaluator.evaluate([best])
    goodput = evaluator.found[best]
    if estimate.rate == 0:
        return Option(name, rejected=f"{best} is {estimate.status}: {goodput.reason}")
    solution = Solution(name, best, 1, estimate.rate)
    return option_of(request.at_rate(estimate.rate), evaluator, name, solution, goodput)


def _of_units(
    request: PlanRequest, evaluator: SimulatedEvaluator, limits: Limits, name: str
) -> Option:
    """Copies of a unit whose KV stays on its nodes: together they hold what each holds alone."""
    units = [unit for space in request.spaces for unit in _cut(space, evaluator, name)]
    option = Option(name, rejected=_nothing(evaluator, limits, units))
    for solution in most_of_units(name, evaluator, units, limits)[:TRIES]:
        at_rate = request.at_rate(solution.rate)
        option = option_of(at_rate, evaluator, name, solution, evaluator.found[solution.unit])
        if option.is_usable:
            break
    return option


def _cut(space: SearchSpace, evaluator: SimulatedEvaluator, name: str) -> list[Unit]:
    units = {"Algorithm 2": space.paired_units, "joint": space.joint_units}
    return units.get(name, space.mixed_units)(evaluator)


def _nothing(evaluator: SimulatedEvaluator, limits: Limits, units: list[Unit]) -> str:
    """Why no unit serves anything here."""
    if not units:
        return f"no instance of this kind stays within {limits}"
    if not any(evaluator.bound(unit) > 0 for unit in units):
        return "no parallelism meets the SLO at any rate"
    return f"nothing that meets the SLO stays within {limits}"
