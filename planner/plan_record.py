"""A plan as plain values: for files and for pages, with its curves and what they were asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.planner.estimate import estimate, sized_evaluator
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.plan_result import Option, Plan
from daskserve.planner.search.deploy import deployment_of
from daskserve.planner.search.simulated import Executor
from daskserve.planner.search.sized import SizedEvaluator
from daskserve.planner.search.sizing import largest_batch
from daskserve.planner.search.units import Instances, Unit
from daskserve.planner.step_times import StepTimes
from daskserve.planner.sweep import sweep

CURVE_SHARES = (0.3, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 1.5)
"""Rates of the curves, as parts of the rate that is planned for."""
FRONT_SHARES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
CURVE_REQUESTS = 8000


@dataclass(frozen=True, slots=True)
class Way:
    """One way to serve the rate: a row of the ranking.

    Parameters
    ----------
    binding
        The phase that is used most, and what limits it.
    note
        Why it cannot be used; empty when it can.
    """

    name: str
    instances: str = ""
    num_gpus: int = 0
    rate: float = 0.0
    price_per_hour: float | None = None
    price_per_million_tokens: float | None = None
    is_chosen: bool = False
    is_usable: bool = False
    binding: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """Attainment over rates of one way."""

    name: str
    rates: tuple[float, ...]
    attainment: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """The lightest instances of one way for one rate, by formula."""

    name: str
    rate: float
    num_gpus: int
    price_per_hour: float
    instances: str


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """What was asked, what was found, and the pictures of it.

    Parameters
    ----------
    question
        As the asker put it; plain values.
    status
        ``estimate``, or of a simulated plan ``found``, ``infeasible`` or ``no_data``.
    target
        Share of requests that must meet the SLO.
    """

    question: dict[str, Any]
    status: str
    rate: float
    target: float
    reason: str = ""
    ways: tuple[Way, ...] = ()
    explanation: tuple[str, ...] = ()
    curves: tuple[Curve, ...] = ()
    front: tuple[FrontPoint, ...] = field(default=())

    @property
    def chosen(self) -> Way | None:
        return next((way for way in self.ways if way.is_chosen), None)

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> PlanRecord:
        """Inverse of `to_record`; KeyError or TypeError for anything else."""
        parts = {
            "ways": tuple(Way(**one) for one in record["ways"]),
            "explanation": tuple(record["explanation"]),
            "curves": tuple(
                Curve(one["name"], tuple(one["rates"]), tuple(one["attainment"]))
                for one in record["curves"]
            ),
            "front": tuple(FrontPoint(**one) for one in record["front"]),
        }
        return cls(**{**record, **parts})


def estimated(
    request: PlanRequest, question: dict[str, Any], sized: SizedEvaluator | None = None
) -> PlanRecord:
    """By formula alone; see `daskserve.planner.estimate`.

    Parameters
    ----------
    sized
        From `daskserve.planner.estimate.sized_evaluator`: what it knows of this request at other
        rates or prices is not computed again.
    """
    sized = sized or sized_evaluator(request)
    sketches = estimate(request, sized)
    _, prompt, output = request.workload.arrays()
    tokens = float((prompt + output).mean()) * request.asked_rate * 3600
    usable = [one for one in sketches if one.unit is not None and one.fits]
    ways = []
    for one in sketches:
        note = "" if one.fits else f"needs more than the {request.cluster.num_gpus} GPUs there are"
        if one.unit is None:
            note = "no split meets the SLO at any rate"
        per_million = one.price_per_hour / tokens * 1e6 if tokens > 0 else math.nan
        ways.append(
            Way(
                one.name,
                str(one.unit or ""),
                one.num_gpus,
                one.rate,
                _number(one.price_per_hour),
                _number(per_million),
                is_chosen=bool(usable) and one is usable[0],
                is_usable=one in usable,
                binding=_binding(sized, one.unit, request.asked_rate) if one.unit else "",
                note=note,
            )
        )
    reason = "" if usable else f"by formula nothing serves it: {ways[0].note}"
    target = float(request.classes.attainment.max())
    return PlanRecord(question, "estimate", request.asked_rate, target, reason, tuple(ways))


def record_of(
    answer: Plan, request: PlanRequest, question: dict[str, Any], executor: Executor | None = None
) -> PlanRecord:
    """A plan with its ranking, curves and front.

    Parameters
    ----------
    answer, request
        From `daskserve.planner.planning.plan`, and what was asked.
    executor
        Simulates the points of the curves.
    """
    target = float(request.classes.attainment.max())
    found = PlanRecord(question, answer.status, answer.rate, target, answer.reason)
    if answer.status == "no_data":
        return found
    sized = sized_evaluator(request)
    return replace(
        found,
        ways=tuple(_way(answer, option, sized) for option in answer.options),
        explanation=answer.explanation,
        curves=tuple(_curves(answer, request, sized, executor)),
        front=tuple(_front(request, sized)),
    )


def _way(answer: Plan, option: Option, sized: SizedEvaluator) -> Way:
    solution = option.solution
    binding = ""
    if solution is not None:
        binding = _binding(sized, solution.all_instances, min(answer.rate, solution.rate))
    return Way(
        option.name,
        str(solution.all_instances) if solution else "",
        option.num_gpus,
        solution.rate if solution else 0.0,
        _number(option.price_per_hour),
        _number(answer.price_per_million_tokens(option)) if solution else None,
        option is answer.chosen,
        option.is_usable,
        binding,
        option.rejected,
    )


def _binding(sized: SizedEvaluator, unit: Unit, rate: float) -> str:
    """The phase that is used most, by formula, and by what it is limited."""

    def used(group: Instances) -> float:
        [alone] = sized.evaluate([Unit((group,), chunk_tokens=unit.chunk_tokens)])
        return min(1.0, rate / alone.rate) if alone.rate > 0 else 1.0

    group = max(unit.groups, key=used)
    return f"{group.role.lower()} {used(group):.0%} used, limited by {_limit(sized, group)}"


def _limit(sized: SizedEvaluator, group: Instances) -> str:
    step = sized.step_times(group.gpu, group.parallelism)
    if step is None:
        return ""
    if group.role is Role.PREFILL:
        full = step.prefill_s(float(step.prefill_budget_tokens), 0.0)
        return "compute" if full > 1.5 * step.prefill_s(1.0, 0.0) else "reading weights"
    batch, _ = largest_batch(step, sized.demand)
    by_memory = int(step.kv_capacity_tokens / (step.num_stages * sized.demand.mean_context))
    if batch >= step.max_batch_size:
        limit = "the batch size"
    else:
        limit = "KV memory" if by_memory <= batch + 1 else "TPOT"
    return f"compute and {limit}" if group.role is Role.COLOCATED else limit


def _curves(
    answer: Plan, request: PlanRequest, sized: SizedEvaluator, executor: Executor | None
) -> list[Curve]:
    """The best way apart and the colocated one, each with the instances that it ended at."""
    apart = [o for o in answer.options if o.name != "colocated" and o.solution]
    together = [o for o in answer.options if o.name == "colocated" and o.solution]
    shown = [*apart[:1], *together[:1]]
    systems = {}
    for option in shown:
        assert option.solution
        unit = option.solution.all_instances
        systems[f"{option.name}: {unit}"] = deployment_of(
            unit, request.model, request.cluster, partial(_known_times, sized)
        )
    if not systems or answer.rate <= 0:
        return []
    rates = [answer.rate * share for share in CURVE_SHARES]
    swept = sweep(
        request.workload, systems, request.slo, rates, seeds=(0,),
        max_requests=CURVE_REQUESTS, executor=executor,
    )  # fmt: skip
    shares = swept["attainment"].isel(slo_scale=0, seed=0)
    return [
        Curve(name, tuple(rates), tuple(float(v) for v in shares.sel(system=name).values))
        for name in systems
    ]


def _known_times(sized: SizedEvaluator, gpu: str, parallelism: Parallelism) -> StepTimes:
    times = sized.step_times(gpu, parallelism)
    assert times is not None  # the plan has placed it
    return times


def _front(request: PlanRequest, sized: SizedEvaluator) -> list[FrontPoint]:
    """What each way needs for other rates."""
    points = []
    for share in FRONT_SHARES:
        rate = request.asked_rate * share
        for one in estimate(request.at_rate(rate), sized):
            if one.unit is not None:
                price = one.price_per_hour
                points.append(FrontPoint(one.name, rate, one.num_gpus, price, str(one.unit)))
    return points


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def lightest(points: Sequence[FrontPoint]) -> list[FrontPoint]:
    """Of the points for one rate that with the lowest price; by rate."""
    best: dict[float, FrontPoint] = {}
    for point in points:
        known = best.get(point.rate)
        if known is None or point.price_per_hour < known.price_per_hour:
            best[point.rate] = point
    return [best[rate] for rate in sorted(best)]
