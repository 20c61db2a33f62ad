"""What a plan is to keep low: GPUs, or dollars per hour."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from daskserve.planner.search.units import Unit

Cost = Callable[[Unit, float], float]
"""Cost of a unit that serves a rate; smaller is better, infinite when it serves nothing."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Weighs units.

    Parameters
    ----------
    prices
        Dollars per hour by GPU name: units weigh what they cost. Empty: they weigh their GPUs.
    """

    prices: Mapping[str, float] = field(default_factory=dict)

    def weight(self, unit: Unit) -> float:
        """GPUs, or dollars per hour."""
        if not self.prices:
            return float(unit.num_gpus)
        return sum(group.num_gpus * self.prices[group.gpu] for group in unit.groups)

    def per_rate(self, unit: Unit, rate: float) -> float:
        """Weight per request/s: the paper's goodput per GPU turned round."""
        return self.weight(unit) / rate if rate > 0 else math.inf

    def for_rate(self, target_rate: float) -> Cost:
        """Weight of as many whole units as reach a rate; near ties go to the better per rate."""

        def cost(unit: Unit, rate: float) -> float:
            if rate <= 0:
                return math.inf
            weight = self.weight(unit)
            return copies_for(target_rate, rate) * weight + 1e-7 * min(weight / rate, 1e6)

        return cost


def copies_for(target_rate: float, rate: float) -> int:
    """Whole copies of something that serves ``rate`` to reach a target; at least one."""
    # The relative slack keeps rounding from adding a copy where rates divide exactly.
    return max(1, math.ceil(target_rate / rate * (1.0 - 1e-9)))
