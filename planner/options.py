"""The ways to serve a workload that are compared: each algorithm's, colocated, one split."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from daskserve.core.instance import Role
from daskserve.core.placement import Placement
from daskserve.errors import ClusterError
from daskserve.planner.goodput import Goodput
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.plan_result import Option
from daskserve.planner.search.algorithms import (
    CHUNKS,
    Solution,
    algorithm_1,
    algorithm_2,
    algorithm_3,
    joint_enumeration,
)
from daskserve.planner.search.assign import assign
from daskserve.planner.search.deploy import stays_in_node
from daskserve.planner.search.fill import Limits
from daskserve.planner.search.links import KVTraffic, kv_traffic
from daskserve.planner.search.pooled import Pooled, fewest_pooled
from daskserve.planner.search.refine import refine_counts
from daskserve.planner.search.simulated import Check, Effort, Executor, SimulatedEvaluator
from daskserve.planner.search.sized import SizedEvaluator
from daskserve.planner.search.sizing import Demand
from daskserve.planner.search.units import Estimate, Instances, Scored, Unit
from daskserve.planner.slo_classes import of_class

NOTHING_MEETS = "no parallelism meets the SLO at any rate"
NOTHING_HOLDS = (
    "requests alone meet the SLO, but no number of instances that was tried holds the rate"
)


def evaluator_for(request: PlanRequest, executor: Executor | None = None) -> SimulatedEvaluator:
    """What finds goodputs for this request."""
    demand = Demand.of(request.workload, request.classes)
    sized = SizedEvaluator(request.model, request.cluster, request.step_source, demand)
    effort = Effort(seeds=request.seeds, max_requests=request.max_requests)
    return SimulatedEvaluator(sized, request.workload, request.classes, effort, executor)


def all_options(request: PlanRequest, evaluator: SimulatedEvaluator) -> list[Option]:
    """Everything that the asked algorithm allows, usable or not.

    ``auto`` starts with Algorithm 1, which puts instances anywhere. Where the network cannot
    carry its KV, Algorithms 2 and 3 keep KV inside nodes instead.
    """
    options = list(_disaggregated(request, evaluator))
    if request.algorithm in ("auto", "colocated"):
        options.append(_pooled(request, evaluator, "colocated", _colocated_choices))
    if request.algorithm in ("auto", "single"):
        options.append(_pooled(request, evaluator, "one parallelism", _single_choices))
    return options


UNIT_SEARCHES: dict[str, Callable] = {
    "Algorithm 2": algorithm_2,
    "Algorithm 3": algorithm_3,
    "joint": joint_enumeration,
}


def _disaggregated(request: PlanRequest, evaluator: SimulatedEvaluator) -> Iterator[Option]:
    asked = request.algorithm
    if asked == "1":
        yield _as_printed(request, evaluator)
    if asked == "auto":
        first = _pooled(request, evaluator, "Algorithm 1, pooled", _phase_choices)
        yield first
        if first.traffic is None or first.traffic.fits:
            return
    for key, name in (("2", "Algorithm 2"), ("3", "Algorithm 3"), ("joint", "joint")):
        if asked == key or (asked == "auto" and key != "joint"):
            yield _units(request, evaluator, name)


def _units(request: PlanRequest, evaluator: SimulatedEvaluator, name: str) -> Option:
    """Whole units that were simulated as such: copies hold what one holds."""
    search = UNIT_SEARCHES[name]
    solution = search(evaluator, request.spaces, request.asked_rate, request.weights)
    if solution is None:
        return Option(name, rejected=NOTHING_MEETS)
    return option_of(request, evaluator, name, solution, evaluator.found[solution.unit])


def _as_printed(request: PlanRequest, evaluator: SimulatedEvaluator) -> Option:
    """Algorithm 1 with the paper's counts, then settled together."""
    solution = algorithm_1(evaluator, request.spaces, request.asked_rate, request.weights)
    if solution is None:
        return Option("Algorithm 1", rejected=NOTHING_MEETS)
    return _settled(request, evaluator, "Algorithm 1", solution)


FAILS = {
    "ttft": "TTFT fails",
    "tpot": "TPOT fails",
    "stability": "and its queue grows",
}

Choices = Callable[[PlanRequest, SimulatedEvaluator], list[list[tuple[Unit, ...]]]]
"""Lists of choices; one is taken of each list, and all that is taken serves together."""


def _phase_choices(request: PlanRequest, evaluator: SimulatedEvaluator) -> list:
    """Every split for prefill, and independently every split for decode."""
    return [
        [(unit,) for space in request.spaces for unit in space.phase_units(evaluator, role)]
        for role in (Role.PREFILL, Role.DECODE)
    ]


def _single_choices(request: PlanRequest, evaluator: SimulatedEvaluator) -> list:
    """The same split for both phases."""
    prefill, decode = _phase_choices(request, evaluator)
    return [[(*one, *other) for one, other in zip(prefill, decode, strict=True)]]


def _colocated_choices(request: PlanRequest, evaluator: SimulatedEvaluator) -> list:
    """Every split and every way to batch."""
    return [
        [
            (replace(unit, chunk_tokens=chunk),)
            for space in request.spaces
            for unit in space.phase_units(evaluator, Role.COLOCATED)
            for chunk in CHUNKS
        ]
    ]


def _pooled(
    request: PlanRequest, evaluator: SimulatedEvaluator, name: str, choices_of: Choices
) -> Option:
    """The splits that need the least when instances share their queues, counts settled."""
    rate, objective = request.asked_rate, request.weights
    chosen: list[Pooled] = []
    considered: list[Scored] = []
    allow = Limits(request.cluster).allow
    for choices in choices_of(request, evaluator):
        try:
            found = fewest_pooled(evaluator, choices, rate, objective, allow)
        except ClusterError as error:
            have = request.cluster.num_gpus
            return Option(name, rejected=f"{error}; the cluster has {have}", is_too_large=True)
        if not found:
            alone = any(all(evaluator.bound(unit) > 0 for unit in one) for one in choices)
            return Option(name, rejected=NOTHING_HOLDS if alone else NOTHING_MEETS)
        chosen.append(found[0])
        held = Estimate(rate, rate, math.inf, "at_least_cap")
        considered += [Scored(one.together, held) for one in found]
    groups = tuple(group for one in chosen for group in one.together.groups)
    unit = Unit(groups, chunk_tokens=chosen[0].units[0].chunk_tokens)
    return _settled(request, evaluator, name, Solution(name, unit, 1, rate, tuple(considered)))


def _settled(
    request: PlanRequest, evaluator: SimulatedEvaluator, name: str, solution: Solution
) -> Option:
    """Counts that hold the rate together, found by simulating the whole deployment."""
    rate = request.asked_rate
    first = option_of(request, evaluator, name, solution, None)
    if first.traffic is not None and not first.traffic.fits:
        return first
    refined = refine_counts(
        lambda unit: evaluator.check(unit, rate), solution.all_instances, request.weights.weight
    )
    if not refined.answer.holds:
        why = f"does not hold {rate:.4g} requests/s: even {refined.unit} {_share(refined.answer)}"
        return replace(first, rejected=why)
    solution = Solution(name, refined.unit, 1, rate, solution.considered)
    option = option_of(request, evaluator, name, solution, None)
    return replace(option, classes=refined.answer.classes)


def _share(answer: Check) -> str:
    """Such as ``attains 80% of chat, TTFT fails``, without the class where there is one only."""
    return (
        f"attains {answer.attainment:.0%}{of_class(answer.binding.name)},"
        f" {FAILS[answer.limited_by or 'ttft']}"
    )


def option_of(
    request: PlanRequest,
    evaluator: SimulatedEvaluator,
    name: str,
    solution: Solution,
    goodput: Goodput | None,
) -> Option:
    """Price, ranks and KV traffic of a solution."""
    unit = solution.all_instances
    prices = {g.gpu.name: g.gpu.price_per_hour for g in request.cluster.groups}
    price = sum(group.num_gpus * prices[group.gpu] for group in unit.groups)
    placement, traffic, rejected = None, None, ""
    try:
        placement = placed(request, evaluator, solution.unit, solution.num_units)
        traffic = _traffic(request, placement, unit)
        if traffic is not None and not traffic.fits:
            rejected = f"the network is too slow: {traffic}"
    except ClusterError as error:
        rejected = str(error)
    classes = goodput.classes if goodput else ()
    return Option(name, solution, placement, goodput, price, traffic, rejected, classes=classes)


def placed(
    request: PlanRequest, evaluator: SimulatedEvaluator, unit: Unit, num_units: int
) -> Placement:
    """Every rank on a GPU. Raises ClusterError when the nodes cannot hold it."""
    step_times = {
        Instances(g.role, g.parallelism, 1, g.gpu): evaluator.step_times(g.gpu, g.parallelism)
        for g in unit.groups
    }
    return assign(request.cluster, unit, num_units, step_times, request.model.name)


def _traffic(request: PlanRequest, placement: Placement, unit: Unit) -> KVTraffic | None:
    """None where KV stays inside nodes."""
    if stays_in_node(unit, request.cluster) or len(unit.groups) < 2:
        return None
    prompt = float(np.mean(request.workload.arrays()[1]))
    kv_bytes = prompt * request.model.kv_bytes_per_token
    return kv_traffic(placement, request.cluster, request.asked_rate, kv_bytes)
