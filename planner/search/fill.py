"""The other direction: the most that given GPUs or a budget can serve."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from daskserve.errors import InvalidParameter
from daskserve.planner.hardware import Cluster
from daskserve.planner.search.algorithms import Solution
from daskserve.planner.search.best import evaluate_best
from daskserve.planner.search.units import Evaluator, Unit


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

    def __str__(self) -> str:
        limits = [str(self.cluster)]
        if self.max_gpus is not None:
            limits.append(f"{self.max_gpus} GPUs")
        if self.max_price_per_hour is not None:
            limits.append(f"{self.max_price_per_hour:g} $/h")
        return " and ".join(limits)

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


def filled_copies(units: Sequence[Unit], limits: Limits) -> list[Unit]:
    """As many copies of each unit as allowed, all sharing one queue."""
    counts = [(unit, limits.most_copies(unit)) for unit in units]
    return [unit.times(count) for unit, count in counts if count > 0]


def filled_pairs(
    evaluator: Evaluator, pairs: Iterable[tuple[Unit, Unit]], limits: Limits
) -> list[Unit]:
    """Each pair of a prefill and a decode split in the counts that serve the most within limits.

    ``evaluator`` gives rates by formula: those of prefill grow with its count, while what is left
    for decode shrinks.
    """
    found = []
    for prefill, decode in pairs:
        low, high = 1, _most_prefill(prefill, decode, limits)
        if high == 0:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            unit = filled_up(prefill, middle, decode, limits)
            rates = [evaluator.evaluate([Unit((group,))])[0].rate for group in unit.groups]
            low, high = (middle, high) if rates[0] < rates[1] else (low, middle)
        ends = [filled_up(prefill, count, decode, limits) for count in {low, high}]
        found.append(max(ends, key=lambda unit: evaluator.evaluate([unit])[0].rate))
    return found


def _most_prefill(prefill: Unit, decode: Unit, limits: Limits) -> int:
    """Prefill instances that leave room for one decode instance."""
    return _most(lambda count: limits.allow(joined(prefill, count, decode, 1)))


def filled_up(prefill: Unit, num_prefill: int, decode: Unit, limits: Limits) -> Unit:
    """``num_prefill`` instances and as many decode instances as are left room for."""
    most = _most(lambda count: limits.allow(joined(prefill, num_prefill, decode, count)))
    return joined(prefill, num_prefill, decode, most)


def joined(prefill: Unit, num_prefill: int, decode: Unit, num_decode: int) -> Unit:
    """Instances of two one-instance units as one."""
    return Unit((*prefill.times(num_prefill).groups, *decode.times(num_decode).groups))


def _most(is_allowed: Callable[[int], bool]) -> int:
    """The largest count that is allowed; smaller ones are then allowed too."""
    high = 1
    while is_allowed(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_allowed(middle) else (low, middle)
    return low
