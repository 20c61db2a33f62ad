"""Says in sentences why a plan is what it is, and what would change it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from daskserve.core.instance import Role
from daskserve.core.slo import SLO
from daskserve.planner.goodput import Goodput
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.plan_result import Option
from daskserve.planner.search.pooled import least_count
from daskserve.planner.search.simulated import SimulatedEvaluator, run_all, run_task
from daskserve.planner.search.sizing import largest_batch
from daskserve.planner.search.units import Unit
from daskserve.planner.step_times import StepTimes

FACTORS = (0.8, 1.25)
BINDS = {
    "ttft": "the TTFT limit",
    "tpot": "the TPOT limit",
    "stability": "plain capacity: beyond it the queue grows",
    None: "nothing below the planned rate",
}


def explain(
    request: PlanRequest, evaluator: SimulatedEvaluator, chosen: Option, options: Sequence[Option]
) -> tuple[str, ...]:
    """Sentences about a plan, the most important first."""
    lines = [choice_of_algorithm(options)]
    lines += binding_resources(request, evaluator, chosen)
    lines.append(runner_up(request, chosen, options))
    lines.append(disaggregation(chosen, options))
    lines += sensitivity(request, evaluator, chosen)
    return tuple(line for line in lines if line)


def choice_of_algorithm(options: Sequence[Option]) -> str:
    """Which algorithm the links allow."""
    first = next((one for one in options if one.name.startswith("Algorithm 1")), None)
    if first is None:
        return ""
    if first.traffic is None:
        return (
            "Algorithm 1 (instances anywhere) applies: all KV stays inside one node."
            if first.placement is not None
            else ""
        )
    if first.traffic.fits:
        return f"Algorithm 1 (instances anywhere) applies: {first.traffic}."
    return (
        f"Algorithm 1 (instances anywhere) is out: {first.traffic}. Algorithm 3 keeps"
        " same-stage segments on one node, so that KV stays on its links."
    )


def binding_resources(
    request: PlanRequest, evaluator: SimulatedEvaluator, chosen: Option
) -> list[str]:
    """What limits each phase of the chosen option."""
    lines = []
    for group in chosen.solution.unit.groups:
        step = evaluator.step_times(group.gpu, group.parallelism)
        kind = request.cluster.group_of(group.gpu).gpu
        parts = []
        if group.role is not Role.DECODE:
            parts.append(_prefill_bound(step, kind.ridge_flops_per_byte))
        if group.role is not Role.PREFILL:
            parts.append(_decode_bound(step, evaluator))
        measured = _measured_alone(evaluator, chosen, group)
        if measured is not None:
            parts.append(f"its rate ends at {BINDS[measured.limited_by]}")
        lines.append(f"{str(group.role).capitalize()} ({group.parallelism}): {'; '.join(parts)}.")
    return lines


def _measured_alone(evaluator: SimulatedEvaluator, chosen: Option, group) -> Goodput | None:
    alone = Unit((replace(group, count=1),), chunk_tokens=chosen.solution.unit.chunk_tokens)
    return evaluator.found.get(alone) or evaluator.found.get(chosen.solution.unit)


def _prefill_bound(step: StepTimes, ridge: float) -> str:
    budget = step.prefill_budget_tokens
    small, full = step.prefill_s(1.0, 0.0), step.prefill_s(float(budget), 0.0)
    kind = "compute" if full > 1.5 * small else "reading weights"
    return (
        f"bound by {kind} at L_m = {budget} tokens (ridge point {ridge:.0f} FLOP/byte,"
        f" {full * 1e3:.0f} ms per pass)"
    )


def _decode_bound(step: StepTimes, evaluator: SimulatedEvaluator) -> str:
    demand = evaluator.sized.demand
    batch, interval = largest_batch(step, demand)
    by_memory = int(step.kv_capacity_tokens / (step.num_stages * demand.mean_context))
    if batch >= step.max_batch_size:
        why = "the largest batch that was planned for"
    elif by_memory <= batch + 1:
        why = f"KV memory: {step.kv_capacity_tokens} tokens"
    else:
        why = f"TPOT: memory would hold {by_memory}"
    return f"batches end at {batch} requests ({interval * 1e3:.0f} ms per token) by {why}"


def runner_up(request: PlanRequest, chosen: Option, options: Sequence[Option]) -> str:
    """What the next best way costs."""
    others = [one for one in options if one.is_usable and one is not chosen]
    if not others:
        rejected = [one for one in options if one.rejected]
        reasons = "; ".join(f"{one.name}: {one.rejected}" for one in rejected)
        return f"No other way is usable. {reasons}" if reasons else ""
    weigh = request.weights.weight
    second = min(others, key=lambda one: weigh(one.solution.all_instances))
    more = second.num_gpus - chosen.num_gpus
    price = round(second.price_per_hour - chosen.price_per_hour, 2) + 0.0
    return f"Runner-up: {second}; it needs {more:+d} GPUs ({price:+.2f} $/h) for the same rate."


def disaggregation(chosen: Option, options: Sequence[Option]) -> str:
    """Why splitting the phases wins or loses."""
    together = next((one for one in options if one.name == "colocated"), None)
    split = [one for one in options if one.name.startswith(("Algorithm", "joint"))]
    if together is None or not split:
        return ""
    if together.solution is None:
        return f"Colocated instances are out: {together.rejected}."
    best = min((one for one in split if one.is_usable), key=lambda o: o.num_gpus, default=None)
    if best is None:
        return f"Disaggregation is out: {split[-1].rejected}."
    measured = _limit_of(together)
    if best.num_gpus < together.num_gpus:
        return (
            f"Disaggregation wins with {best.num_gpus} GPUs against {together.num_gpus}: prompts"
            f" delay decoding when they share GPUs, and {measured} ends the colocated rate early."
        )
    if best.num_gpus == together.num_gpus:
        return f"Disaggregation and colocation need the same {best.num_gpus} GPUs."
    return (
        f"Disaggregation loses with {best.num_gpus} GPUs against {together.num_gpus}: at this"
        " rate and SLO the interference is tolerable, while separate phases hold their weights"
        " twice and come in whole instances."
    )


def _limit_of(option: Option) -> str:
    for one in option.solution.considered:
        evidence = one.estimate.evidence
        if one.unit.groups[0].parallelism == option.solution.unit.groups[0].parallelism:
            return BINDS.get(getattr(evidence, "limited_by", None), "the SLO")
    return "the SLO"


def sensitivity(request: PlanRequest, evaluator: SimulatedEvaluator, chosen: Option) -> list[str]:
    """The chosen deployment's rate under other limits, and the GPUs for other rates."""
    unit = chosen.solution.all_instances
    slo = request.slo
    limits = [(1.0, 1.0), *((f, 1.0) for f in FACTORS), *((1.0, f) for f in FACTORS)]
    base = evaluator.task(unit, effort=evaluator.effort.quick())
    tasks = [
        replace(base, slo=SLO(slo.ttft_s * ttft, slo.tpot_s * tpot, slo.attainment))
        for ttft, tpot in limits
    ]
    rates = [answer.rate or 0.0 for answer in run_all(evaluator.executor, run_task, tasks)]
    now = rates[0]
    shown = [f"As planned it serves up to {now:.4g} requests/s"]
    for (ttft, tpot), rate in zip(limits[1:], rates[1:], strict=True):
        name, factor = ("TTFT", ttft) if tpot == 1.0 else ("TPOT", tpot)
        change = f" ({rate / now - 1:+.0%})" if now > 0 else ""
        shown.append(f"{name} x {factor:g}: {rate:.4g}{change}")
    lines = ["; ".join(shown) + "."]
    if now > 0:
        others = [
            f"{request.asked_rate * factor:.4g} requests/s about"
            f" {_gpus_at(evaluator, unit, now, request.asked_rate * factor)} GPUs"
            for factor in (0.5, 2.0)
        ]
        lines.append(f"The same splits at other rates: {', '.join(others)}.")
    return lines


def _gpus_at(evaluator: SimulatedEvaluator, unit: Unit, measured: float, rate: float) -> int:
    """GPUs for another rate by the formula, scaled to what was measured for the unit."""
    total = 0
    for group in unit.groups:
        alone = Unit((group,), chunk_tokens=unit.chunk_tokens)
        formula = evaluator.sized.evaluate([alone])[0].rate
        # A phase with room to spare has not shown its own limit: trust its formula to a fifth.
        scale = min(1.0, max(0.8, measured / formula)) if 0 < formula < math.inf else 1.0
        count = least_count(
            lambda n, g=group, s=scale: (
                s
                * evaluator.sized.evaluate(
                    [Unit((replace(g, count=n),), chunk_tokens=unit.chunk_tokens)]
                )[0].rate
            ),
            rate,
        )
        total += count * group.parallelism.num_gpus
    return total
