"""The other direction: the most that given GPUs or a budget can serve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from daskserve.core.instance import Role
from daskserve.errors import InvalidParameter
from daskserve.planner.hardware import Cluster
from daskserve.planner.search.algorithms import Solution
from daskserve.planner.search.best import evaluate_best
from daskserve.planner.search.objective import Objective
from daskserve.planner.search.space import SearchSpace
from daskserve.planner.search.units import Evaluator, Scored, Unit


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be used.

    Parameters
    ----------
    cluster
        Its nodes are the first limit.
    max_gpus, max_price_per_hour
        Further limits on all instances together; None: none.
    """

    cluster: Cluster
    max_gpus: int | None = None
    max_price_per_hour: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_gpus", "max_price_per_hour"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InvalidParameter(name, value, "must be a finite number above 0")

    def allow(self, unit: Unit) -> bool:
        """Whether a unit stays below every count; nodes may still be too small for it."""
        used: dict[str, int] = {}
        for group in unit.groups:
            used[group.gpu] = used.get(group.gpu, 0) + group.num_gpus
        groups = {name: self.cluster.group_of(name) for name in used}
        if any(used[name] > group.num_gpus for name, group in groups.items()):
            return False
        if self.max_gpus is not None and sum(used.values()) > self.max_gpus:
            return False
        price = sum(used[name] * group.gpu.price_per_hour for name, group in groups.items())
        return self.max_price_per_hour is None or price <= self.max_price_per_hour * (1 + 1e-9)

    def most_copies(self, unit: Unit) -> int:
        """How many copies are allowed, segments packed onto whole nodes."""
        most = min(self.cluster.num_gpus, self.max_gpus or self.cluster.num_gpus)
        copies = most // unit.num_gpus
        if unit.num_segments and copies:
            group = self.cluster.group_of(unit.groups[0].gpu)
            per_set = group.gpus_per_node // (unit.num_gpus // unit.num_segments)
            copies = min(copies, group.num_nodes // unit.num_segments * per_set)
        while copies > 0 and not self.allow(unit.times(copies)):
            copies -= 1
        return copies


def most_of_units(
    name: str, evaluator: Evaluator, units: Sequence[Unit], limits: Limits
) -> list[Solution]:
    """As many copies of a unit as allowed, the most productive first."""

    def cost(unit: Unit, rate: float) -> float:
        return -limits.most_copies(unit) * rate if rate > 0 else math.inf

    allowed = [unit for unit in units if limits.most_copies(unit) > 0]
    scored = evaluate_best(evaluator, allowed, [cost])
    solutions = [
        Solution(name, one.unit, limits.most_copies(one.unit), one.rate, tuple(scored))
        for one in scored
        if one.rate > 0
    ]
    return sorted(solutions, key=lambda solution: -solution.rate)


def most_of_phases(
    name: str,
    evaluator: Evaluator,
    spaces: Sequence[SearchSpace],
    limits: Limits,
    same_split: bool = False,
) -> list[Solution]:
    """Prefill and decode instances in the counts that serve the most together.

    ``same_split`` looks only at pairs with one parallelism, whatever each phase would prefer.
    """
    phases = []
    for role in (Role.PREFILL, Role.DECODE):
        units = [u for space in spaces for u in space.phase_units(evaluator, role)]
        allowed = [unit for unit in units if limits.allow(unit)]
        costs = [_no_preference] if same_split else [Objective().per_rate]
        phases.append(evaluate_best(evaluator, allowed, costs))
    considered = tuple(phases[0] + phases[1])
    found = []
    for prefill in phases[0]:
        for decode in phases[1]:
            splits = {one.unit.groups[0].parallelism for one in (prefill, decode)}
            if prefill.rate > 0 and decode.rate > 0 and (len(splits) == 1 or not same_split):
                best = _best_counts(prefill, decode, limits)
                if best is not None:
                    found.append(Solution(name, best[1], 1, best[0], considered))
    return sorted(found, key=lambda solution: -solution.rate)


def _no_preference(unit: Unit, rate: float) -> float:
    """Prunes nothing."""
    return 0.0 if rate > 0 else math.inf


def _best_counts(prefill: Scored, decode: Scored, limits: Limits) -> tuple[float, Unit] | None:
    """Counts with the highest rate of the slower phase."""
    best = None
    num_prefill = 1
    while True:
        wanted = max(1, math.ceil(num_prefill * prefill.rate / decode.rate - 1e-9))
        for num_decode in (wanted, max(1, wanted - 1)):
            unit = _joined(prefill, num_prefill, decode, num_decode)
            if limits.allow(unit):
                rate = min(num_prefill * prefill.rate, num_decode * decode.rate)
                if best is None or rate > best[0]:
                    best = (rate, unit)
        if not limits.allow(_joined(prefill, num_prefill, decode, max(1, wanted - 1))):
            return best
        num_prefill += 1


def _joined(prefill: Scored, num_prefill: int, decode: Scored, num_decode: int) -> Unit:
    counts = ((prefill, num_prefill), (decode, num_decode))
    return Unit(tuple(replace(one.unit.groups[0], count=count) for one, count in counts))
