"""A first answer in a fraction of a second: the ways to serve a rate, sized by formula alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from daskserve.core.instance import Role
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.search.algorithms import CHUNKS
from daskserve.planner.search.fill import Limits
from daskserve.planner.search.pooled import least_count
from daskserve.planner.search.sized import SizedEvaluator
from daskserve.planner.search.sizing import Demand
from daskserve.planner.search.units import Unit

DISAGGREGATED, COLOCATED = "prefill and decode apart", "colocated"


@dataclass(frozen=True, slots=True)
class Sketch:
    """One way, as far as formulas tell.

    Parameters
    ----------
    unit
        All instances; None when no split meets the SLO at any rate.
    rate
        What they serve by formula, in requests/s.
    fits
        The cluster has so many GPUs.
    """

    name: str
    unit: Unit | None = None
    rate: float = 0.0
    price_per_hour: float = math.nan
    fits: bool = False

    @property
    def num_gpus(self) -> int:
        return self.unit.num_gpus if self.unit is not None else 0


def sized_evaluator(request: PlanRequest) -> SizedEvaluator:
    """The formulas for a request; keep it for further rates of the same request."""
    demand = Demand.of(request.workload, request.classes)
    return SizedEvaluator(request.model, request.cluster, request.step_source, demand)


def estimate(request: PlanRequest, evaluator: SizedEvaluator | None = None) -> list[Sketch]:
    """The lightest instances of each way for the asked rate; the better way first.

    Parameters
    ----------
    evaluator
        From `sized_evaluator`, to be used again for another rate.
    """
    sized = evaluator or sized_evaluator(request)
    weigh = request.weights.weight
    phases = [_lightest(request, sized, _units(request, sized, role)) for role in _APART]
    apart = None
    if all(phases):
        apart = Unit(tuple(group for unit in phases if unit for group in unit.groups))
    together = _lightest(request, sized, _chunked(_units(request, sized, Role.COLOCATED)))
    found = [_sketch(request, sized, DISAGGREGATED, apart)]
    found.append(_sketch(request, sized, COLOCATED, together))
    # Ties go to the way that serves more.
    found.sort(key=lambda one: (weigh(one.unit) if one.unit else math.inf, -one.rate))
    return found


_APART = (Role.PREFILL, Role.DECODE)


def _units(request: PlanRequest, sized: SizedEvaluator, role: Role) -> list[Unit]:
    return [unit for space in request.spaces for unit in space.phase_units(sized, role)]


def _chunked(units: Iterable[Unit]) -> list[Unit]:
    return [replace(unit, chunk_tokens=chunk) for unit in units for chunk in CHUNKS]


def _lightest(request: PlanRequest, sized: SizedEvaluator, units: list[Unit]) -> Unit | None:
    """The unit whose copies serve the rate with the least weight, so many times."""
    weigh, rate = request.weights.weight, request.asked_rate
    alone = [(sized.evaluate([unit])[0].rate, unit) for unit in units]
    best: Unit | None = None
    # What serves the most for its weight when alone is likely the best, and bounds the others.
    for each, unit in sorted(alone, key=lambda one: -one[0] / weigh(one[1])):
        if each <= 0:
            continue
        allowed = math.inf if best is None else math.ceil(weigh(best) / weigh(unit) - 1e-9) - 1
        if allowed < 1 or (best is not None and _rate(sized, unit, int(allowed)) < rate):
            continue
        best = unit.times(least_count(partial(_rate, sized, unit), rate))
    return best


def _rate(sized: SizedEvaluator, unit: Unit, count: int) -> float:
    return sized.evaluate([unit.times(count)])[0].rate


def _sketch(request: PlanRequest, sized: SizedEvaluator, name: str, unit: Unit | None) -> Sketch:
    if unit is None:
        return Sketch(name)
    prices = {g.gpu.name: g.gpu.price_per_hour for g in request.cluster.groups}
    price = sum(group.num_gpus * prices[group.gpu] for group in unit.groups)
    fits = Limits(request.cluster).allow(unit)
    return Sketch(name, unit, sized.evaluate([unit])[0].rate, price, fits)
