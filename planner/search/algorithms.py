"""Placement algorithms: 1 and 2 as printed in the paper, 3 ours, and the alternatives to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from daskserve.core.instance import Role
from daskserve.planner.search.best import cheapest, evaluate_best
from daskserve.planner.search.objective import Objective, copies_for
from daskserve.planner.search.space import SearchSpace
from daskserve.planner.search.units import Evaluator, Scored, Unit

CHUNKS = (0, 512, 2048)
"""Ways to batch colocated instances: 0 runs whole prompts first, the others are chunked prefill
with that many tokens per mixed step."""

Spaces = SearchSpace | Sequence[SearchSpace]


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
        unit = f"{self.num_units} x [{self.unit}]" if self.num_units > 1 else str(self.unit)
        return f"{self.algorithm}: {unit}, {self.num_gpus} GPUs, {self.rate:.1f} req/s"


def algorithm_1(
    evaluator: Evaluator,
    spaces: Spaces,
    rate: float,
    objective: Objective | None = None,
    fewest: bool = False,
) -> Solution | None:
    """High node affinity: each phase on its own, then enough instances of both.

    ``n = ceil(R / goodput_p)`` prefill and ``m = ceil(R / goodput_d)`` decode instances.

    Parameters
    ----------
    spaces
        One per GPU type; each phase may end on another type.
    fewest
        Minimise the weight for the whole rate. As printed (False) the best goodput per weight
        wins, although instances come whole.

    Returns
    -------
    None when a phase fits nowhere or meets its SLO nowhere.
    """
    objective = objective or Objective()
    chosen = []
    considered: list[Scored] = []
    for role in (Role.PREFILL, Role.DECODE):
        units = [u for space in _each(spaces) for u in space.phase_units(evaluator, role)]
        best, scored = _best(evaluator, units, rate, objective, fewest)
        considered += scored
        if best is None:
            return None
        chosen.append(best)
    prefill, decode = chosen
    return join_phases("Algorithm 1", prefill, decode, rate, tuple(considered))


def join_phases(
    name: str, prefill: Scored, decode: Scored, rate: float, considered: tuple[Scored, ...] = ()
) -> Solution:
    """Replicate each phase to the rate."""
    phases = (prefill, decode)
    counts = [copies_for(rate, one.rate) for one in phases]
    groups = [
        replace(one.unit.groups[0], count=count) for one, count in zip(phases, counts, strict=True)
    ]
    reached = min(one.rate * count for one, count in zip(phases, counts, strict=True))
    return Solution(name, Unit(tuple(groups)), 1, reached, considered)


def algorithm_2(
    evaluator: Evaluator, spaces: Spaces, rate: float, objective: Objective | None = None
) -> Solution | None:
    """Low node affinity as printed: one prefill and one decode segment per stage, same node."""
    units = [u for space in _each(spaces) for u in space.paired_units(evaluator)]
    return _replicated("Algorithm 2", evaluator, units, rate, objective, fewest=False)


def algorithm_3(
    evaluator: Evaluator,
    spaces: Spaces,
    rate: float,
    objective: Objective | None = None,
    fewest: bool = True,
) -> Solution | None:
    """Algorithm 2 with any number of segments of each phase per node.

    Its units include those of Algorithm 2, so it is never worse. ``fewest`` minimises the
    weight for the whole rate, which the best unit per GPU need not do since units come whole;
    without it the best rate per GPU wins.
    """
    units = [u for space in _each(spaces) for u in space.mixed_units(evaluator)]
    return _replicated("Algorithm 3", evaluator, units, rate, objective, fewest)


def joint_enumeration(
    evaluator: Evaluator, spaces: Spaces, rate: float, objective: Objective | None = None
) -> Solution | None:
    """What the original code does: one prefill and one decode instance, every pair of splits.

    Segments of a pair share their nodes, and each may itself be a pipeline inside a node.
    """
    units = [u for space in _each(spaces) for u in space.joint_units(evaluator)]
    return _replicated("joint enumeration", evaluator, units, rate, objective, fewest=False)


def colocated(
    evaluator: Evaluator,
    spaces: Spaces,
    rate: float,
    objective: Objective | None = None,
    chunk_tokens: Sequence[int] = CHUNKS,
) -> Solution | None:
    """No disaggregation, at its own best parallelism (the paper's vLLM++) and way to batch."""
    units = [
        replace(unit, chunk_tokens=chunk)
        for space in _each(spaces)
        for unit in space.phase_units(evaluator, Role.COLOCATED)
        for chunk in chunk_tokens
    ]
    return _replicated("colocated", evaluator, units, rate, objective, fewest=True)


def best_single(
    evaluator: Evaluator, spaces: Spaces, rate: float, objective: Objective | None = None
) -> Solution | None:
    """One parallelism for both phases, replicated per phase: what a split per phase saves."""
    objective = objective or Objective()
    best: Solution | None = None
    for prefill_unit, decode_unit in _same_splits(evaluator, spaces, rate, objective):
        if best is not None and _joint_floor(
            evaluator, prefill_unit, decode_unit, rate, objective
        ) >= objective.weight(best.unit):
            break
        prefill, decode = (
            Scored(unit, evaluator.evaluate([unit])[0]) for unit in (prefill_unit, decode_unit)
        )
        if prefill.rate > 0 and decode.rate > 0:
            found = join_phases("one parallelism", prefill, decode, rate)
            if best is None or objective.weight(found.unit) < objective.weight(best.unit):
                best = found
    return best


def _same_splits(
    evaluator: Evaluator, spaces: Spaces, rate: float, objective: Objective
) -> list[tuple[Unit, Unit]]:
    """Pairs of a prefill and a decode instance split alike, the most promising first."""
    pairs = [
        pair
        for space in _each(spaces)
        for pair in zip(
            space.phase_units(evaluator, Role.PREFILL),
            space.phase_units(evaluator, Role.DECODE),
            strict=True,
        )
        if all(evaluator.bound(unit) > 0 for unit in pair)
    ]
    return sorted(
        pairs, key=lambda pair: _joint_floor(evaluator, pair[0], pair[1], rate, objective)
    )


def _joint_floor(
    evaluator: Evaluator, prefill: Unit, decode: Unit, rate: float, objective: Objective
) -> float:
    """The least weight that the pair could need for the rate."""
    return sum(
        copies_for(rate, evaluator.bound(unit)) * objective.weight(unit)
        for unit in (prefill, decode)
    )


def _each(spaces: Spaces) -> Sequence[SearchSpace]:
    return [spaces] if isinstance(spaces, SearchSpace) else spaces


def _best(
    evaluator: Evaluator, units: list[Unit], rate: float, objective: Objective, fewest: bool
) -> tuple[Scored | None, list[Scored]]:
    cost = objective.for_rate(rate) if fewest else objective.per_rate
    scored = evaluate_best(evaluator, units, [cost])
    return cheapest(scored, cost), scored


def _replicated(
    name: str,
    evaluator: Evaluator,
    units: list[Unit],
    rate: float,
    objective: Objective | None,
    fewest: bool,
) -> Solution | None:
    best, scored = _best(evaluator, units, rate, objective or Objective(), fewest)
    if best is None:
        return None
    return Solution(name, best.unit, copies_for(rate, best.rate), best.rate, tuple(scored))


def idle_share(unit: Unit, phase_rate: Callable[[Unit], float]) -> dict[Role, float]:
    """Share of each phase's capacity that the slower phase leaves unused in a unit.

    ``phase_rate`` gives the goodput of a unit that holds one group alone.
    """
    capacity = {group.role: phase_rate(Unit((group,))) for group in unit.groups}
    reached = min(capacity.values())
    return {role: 1.0 - reached / total for role, total in capacity.items()}
