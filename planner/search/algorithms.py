"""Placement algorithms: 1 and 2 as printed in the paper, 3 ours, and one split for both phases."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from daskserve.core.instance import Role
from daskserve.planner.search.best import cheapest, evaluate_best, gpus_for, gpus_per_rate
from daskserve.planner.search.space import SearchSpace
from daskserve.planner.search.units import Evaluator, Scored, Unit


@dataclass(frozen=True, slots=True)
class Solution:
    """What an algorithm answers: a unit, how often it is needed, and what else was looked at.

    Parameters
    ----------
    unit
        Everything that serves together: for Algorithm 1 all instances of both phases.
    num_units
        Copies of ``unit``.
    unit_rate
        Goodput of one copy.
    considered
        Every candidate that was evaluated, for rankings and runners-up.
    """

    algorithm: str
    unit: Unit
    num_units: int
    unit_rate: float
    considered: tuple[Scored, ...] = ()

    @property
    def rate(self) -> float:
        return self.num_units * self.unit_rate

    @property
    def num_gpus(self) -> int:
        return self.num_units * self.unit.num_gpus

    @property
    def all_instances(self) -> Unit:
        return self.unit.times(self.num_units)

    def __str__(self) -> str:
        copies = f"{self.num_units} x " if self.num_units > 1 else ""
        return (
            f"{self.algorithm}: {copies}[{self.unit}], {self.num_gpus} GPUs, {self.rate:.1f} req/s"
        )


def algorithm_1(evaluator: Evaluator, space: SearchSpace, rate: float) -> Solution | None:
    """High node affinity: each phase on its own, then enough instances of both.

    ``n = ceil(R / goodput_p)`` prefill and ``m = ceil(R / goodput_d)`` decode instances.
    None when a phase fits nowhere or meets its SLO nowhere.
    """
    chosen = []
    considered: list[Scored] = []
    for role in (Role.PREFILL, Role.DECODE):
        scored = evaluate_best(evaluator, space.phase_units(evaluator, role))
        considered += scored
        best = cheapest(scored, gpus_per_rate)
        if best is None:
            return None
        chosen.append(best)
    return join_phases("Algorithm 1", *chosen, rate, tuple(considered))


def join_phases(
    name: str, prefill: Scored, decode: Scored, rate: float, considered: tuple[Scored, ...] = ()
) -> Solution:
    """Replicate each phase to the rate."""
    groups = tuple(
        replace(one.unit.groups[0], count=one.num_units(rate)) for one in (prefill, decode)
    )
    reached = min(one.num_units(rate) * one.rate for one in (prefill, decode))
    return Solution(name, Unit(groups), 1, reached, considered)


def algorithm_2(evaluator: Evaluator, space: SearchSpace, rate: float) -> Solution | None:
    """Low node affinity as printed: one prefill and one decode segment per stage, same node."""
    scored = evaluate_best(evaluator, space.paired_units(evaluator))
    best = cheapest(scored, gpus_per_rate)
    if best is None:
        return None
    return _replicated("Algorithm 2", best, rate, scored)


def algorithm_3(
    evaluator: Evaluator, space: SearchSpace, rate: float, fewest_gpus: bool = True
) -> Solution | None:
    """Algorithm 2 with any number of segments of each phase per node.

    Its units include those of Algorithm 2, so it is never worse. ``fewest_gpus`` minimises the
    GPUs for the whole rate, which the best unit per GPU need not do since units come whole;
    without it the best rate per GPU wins.
    """
    costs = (gpus_for(rate), gpus_per_rate)
    scored = evaluate_best(evaluator, space.mixed_units(evaluator), costs)
    best = cheapest(scored, costs[0] if fewest_gpus else costs[1])
    if best is None:
        return None
    return _replicated("Algorithm 3", best, rate, scored)


def best_single(evaluator: Evaluator, space: SearchSpace, rate: float) -> Solution | None:
    """One parallelism for both phases, replicated per phase: what the split per phase saves."""
    prefill = {
        one.unit.groups[0].parallelism: one
        for one in _all(evaluator, space.phase_units(evaluator, Role.PREFILL))
    }
    decode = {
        one.unit.groups[0].parallelism: one
        for one in _all(evaluator, space.phase_units(evaluator, Role.DECODE))
    }
    solutions = [
        join_phases("one parallelism", prefill[key], decode[key], rate)
        for key in prefill
        if key in decode and prefill[key].rate > 0 and decode[key].rate > 0
    ]
    return min(solutions, key=lambda solution: solution.num_gpus) if solutions else None


def _all(evaluator: Evaluator, units: list[Unit]) -> list[Scored]:
    return [Scored(u, e) for u, e in zip(units, evaluator.evaluate(units), strict=True)]


def _replicated(name: str, best: Scored, rate: float, scored: list[Scored]) -> Solution:
    return Solution(name, best.unit, best.num_units(rate), best.rate, tuple(scored))


def idle_share(unit: Unit, prefill_rate: float, decode_rate: float) -> dict[Role, float]:
    """Share of each phase's capacity that the slower phase leaves unused in a unit."""
    capacity = {}
    for role, rate in ((Role.PREFILL, prefill_rate), (Role.DECODE, decode_rate)):
        group = unit.of_role(role)
        capacity[role] = group.count * rate if group else math.inf
    reached = min(capacity.values())
    return {role: 1.0 - reached / total for role, total in capacity.items()}
