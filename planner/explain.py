"""Says in sentences why a plan is what it is: what binds, what the alternatives lose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from daskserve.core.instance import Role
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.plan_result import Option
from daskserve.planner.search.algorithms import Solution
from daskserve.planner.search.objective import Objective
from daskserve.planner.search.simulated import SimulatedEvaluator, check_rate, run_all
from daskserve.planner.search.sizing import largest_batch
from daskserve.planner.search.units import Instances, Unit
from daskserve.planner.sensitivity import most_served, other_limits, other_rates
from daskserve.planner.slo_classes import binding
from daskserve.planner.step_times import StepTimes

SAME = 0.01
"""Rates that differ by less than this share are called the same."""


def explain(
    request: PlanRequest,
    evaluator: SimulatedEvaluator,
    chosen: Option,
    options: Sequence[Option],
    is_highest: bool,
) -> tuple[str, ...]:
    """Sentences about a plan, the most important first.

    ``is_highest``: the GPUs were given and the rate was looked for, not the other way round.
    """
    solution = chosen.solution
    assert solution is not None  # only usable options are chosen
    lines = [interval(chosen) if is_highest else "", binding_class(chosen)]
    lines.append(choice_of_algorithm(options, chosen))
    lines += binding_resources(request, evaluator, solution)
    lines.append(runner_up(request, evaluator, chosen, options, is_highest))
    lines.append(disaggregation(request, evaluator, options, is_highest))
    lines.append(other_limits(request, evaluator, solution))
    lines.append(other_rates(request, evaluator, solution))
    return tuple(line for line in lines if line)


def interval(chosen: Option) -> str:
    """How sure a measured rate is."""
    goodput, solution = chosen.goodput, chosen.solution
    if goodput is None or goodput.low is None or goodput.high is None or solution is None:
        return ""
    low, high = (solution.num_units * value for value in (goodput.low, goodput.high))
    return (
        f"The rate is {solution.rate:.4g} requests/s, 90 % interval {low:.4g} to {high:.4g} over"
        f" {len(goodput.by_seed)} seeds."
    )


def binding_class(chosen: Option) -> str:
    """What each class attains, and which comes closest to missing its target."""
    if len(chosen.classes) < 2:
        return ""
    tightest = binding(chosen.classes)
    return f"SLO class {tightest.name} binds, by {tightest.limited_by.upper()}: {tightest}."


def choice_of_algorithm(options: Sequence[Option], chosen: Option) -> str:
    """Which algorithm the links allow, by the KV of the chosen instances if they may be anywhere.

    Where those are colocated or keep KV on nodes, by that of the instances of Algorithm 1.
    """
    anywhere = next((one for one in options if one.name.startswith("Algorithm 1")), None)
    if anywhere is None or anywhere.solution is None:
        return ""
    first = chosen if chosen.traffic is not None and chosen.solution else anywhere
    if first.traffic is None:
        return (
            "Algorithm 1 (instances anywhere) applies: all KV stays inside one node."
            if first.placement is not None
            else ""
        )
    assert first.solution is not None
    traffic = f"with {first.solution.all_instances} {first.traffic}"
    if first.traffic.fits:
        return f"Algorithm 1 (instances anywhere) applies: {traffic}."
    return (
        f"Algorithm 1 (instances anywhere) is out: {traffic}. Algorithms 2 and 3 keep"
        " same-stage segments on one node, so that KV stays on its links."
    )


def binding_resources(
    request: PlanRequest, evaluator: SimulatedEvaluator, solution: Solution
) -> list[str]:
    """What limits each phase, and how much of it is used."""
    lines = []
    for group in solution.unit.groups:
        step = evaluator.step_times(group.gpu, group.parallelism)
        parts = []
        if group.role is not Role.DECODE:
            kind = request.cluster.group_of(group.gpu).gpu
            parts.append(_prefill_bound(step, kind.ridge_flops_per_byte))
        if group.role is not Role.PREFILL:
            parts.append(_decode_bound(step, evaluator))
        if group.role is not Role.COLOCATED:
            share = used_share(evaluator, group, request.asked_rate / solution.num_units)
            parts.append(f"{share:.0%} of its capacity is used")
        count = group.count * solution.num_units
        head = f"{str(group.role).capitalize()}, {count} x {group.parallelism} on {group.gpu}"
        lines.append(f"{head}: {'; '.join(parts)}.")
    return lines


def used_share(evaluator: SimulatedEvaluator, group: Instances, rate: float) -> float:
    """The rate over what the instances serve alone by formula."""
    [alone] = evaluator.sized.evaluate([Unit((group,))])
    return min(1.0, rate / alone.rate) if alone.rate > 0 else 1.0


def _prefill_bound(step: StepTimes, ridge: float) -> str:
    budget = step.prefill_budget_tokens
    small, full = step.prefill_s(1.0, 0.0), step.prefill_s(float(budget), 0.0)
    kind = "compute" if full > 1.5 * small else "reading weights"
    return (
        f"prompts are bound by {kind}, {full * 1e3:.0f} ms for a pass over L_m = {budget} tokens"
        f" (ridge point {ridge:.0f} FLOP/byte)"
    )


def _decode_bound(step: StepTimes, evaluator: SimulatedEvaluator) -> str:
    demand = evaluator.sized.demand
    batch, interval = largest_batch(step, demand)
    by_memory = int(step.kv_capacity_tokens / (step.num_stages * demand.mean_context))
    if batch >= step.max_batch_size:
        why = "the largest batch that step times are known for"
    elif by_memory <= batch + 1:
        why = f"KV memory ({step.kv_capacity_tokens} tokens)"
    else:
        why = f"the TPOT limit (memory would hold {by_memory})"
    return f"batches end at {batch} requests, {interval * 1e3:.0f} ms per token, by {why}"


def runner_up(
    request: PlanRequest,
    evaluator: SimulatedEvaluator,
    chosen: Option,
    options: Sequence[Option],
    is_highest: bool,
) -> str:
    """What the next best way loses."""
    assert chosen.solution
    mine = chosen.solution.all_instances
    others = [one for one in options if one.is_usable and one is not chosen]
    different = [one for one in others if one.solution and one.solution.all_instances != mine]
    if not different:
        known = "Other ways end at the same instances." if others else "No other way is usable."
        return known if len(options) > 1 else ""
    second = different[0]
    assert second.solution
    if is_highest:
        return f"Runner-up: {second}; it serves {_against(second.solution, chosen.solution)}."
    if not _same_weight(request.weights, chosen, second):
        more = second.num_gpus - chosen.num_gpus
        price = second.price_per_hour - chosen.price_per_hour
        return f"Runner-up: {second}; {more:+d} GPUs and {price:+.2f} $/h for the same rate."
    rates = [_room(request, evaluator, one.solution) for one in (second, chosen) if one.solution]
    return (
        f"Runner-up: {second}; it needs no more, but serves up to"
        f" {rates[0]:.4g} against {rates[1]:.4g} requests/s."
    )


def _room(request: PlanRequest, evaluator: SimulatedEvaluator, solution: Solution) -> float:
    """What instances serve that were found to hold the asked rate."""
    return max(request.asked_rate, most_served(evaluator, solution)[0])


def _same_weight(weights: Objective, one: Option, other: Option) -> bool:
    assert one.solution and other.solution
    return weights.weight(one.solution.all_instances) == weights.weight(
        other.solution.all_instances
    )


def _against(mine: Solution, theirs: Solution) -> str:
    return f"{mine.rate:.4g} requests/s ({mine.rate / theirs.rate - 1:+.0%})"


def disaggregation(
    request: PlanRequest,
    evaluator: SimulatedEvaluator,
    options: Sequence[Option],
    is_highest: bool,
) -> str:
    """Why splitting the phases wins or loses."""
    together = next((one for one in options if one.name == "colocated"), None)
    split = [one for one in options if one.name != "colocated"]
    if together is None or not split:
        return ""
    if together.solution is None:
        return f"Colocated instances are out: {together.rejected}."
    # Options are ordered, the best first.
    best = next((one for one in split if one.is_usable), None)
    if best is None or best.solution is None:
        return f"Disaggregation is out: {split[0].rejected}."
    if is_highest:
        return _by_rate(best.solution, together)
    weights, unit = request.weights, "$/h" if request.objective == "price" else "GPUs"
    mine, theirs = (weights.weight(one.solution.all_instances) for one in (best, together)
                    if one.solution)  # fmt: skip
    figures = f"{mine:g} {unit} against {theirs:g}"
    if mine < theirs:
        return f"Disaggregation wins, {figures}: {_why_wins(request, evaluator, best, together)}."
    if mine > theirs:
        return f"Disaggregation loses, {figures}: {_why_loses(request, evaluator, best, together)}."
    rates = [_room(request, evaluator, one.solution) for one in (best, together) if one.solution]
    return (
        f"Disaggregation and colocation both need {mine:g} {unit}; with them they serve up to"
        f" {rates[0]:.4g} and {rates[1]:.4g} requests/s."
    )


def _by_rate(best: Solution, together: Option) -> str:
    assert together.solution is not None
    verdict = "wins" if best.rate > together.solution.rate else "loses"
    if abs(best.rate / together.solution.rate - 1) < SAME:
        verdict = "makes no difference"
    ends = together.goodput.limited_by if together.goodput else None
    why = {
        "ttft": "colocated prompts wait for decoding and end at TTFT",
        "tpot": "prompts delay the tokens of requests on the same GPUs, which end at TPOT",
        "stability": "colocated instances end where they are busy all the time",
    }
    return (
        f"Disaggregation {verdict}: {best.rate:.4g} requests/s against"
        f" {together.solution.rate:.4g}" + (f"; {why[ends]}." if ends else ".")
    )


def _why_wins(
    request: PlanRequest, evaluator: SimulatedEvaluator, best: Option, together: Option
) -> str:
    """What requests would see on colocated instances that are no more than the best split."""
    assert best.solution and together.solution
    weigh, unit = request.weights.weight, together.solution.all_instances
    share = weigh(best.solution.all_instances) / weigh(unit)
    count = int(unit.groups[0].count * share)
    if count == 0:
        return "one colocated instance alone needs more"
    fewer = replace(unit, groups=(replace(unit.groups[0], count=count),))
    task = evaluator.task(fewer, request.asked_rate, evaluator.effort.quick())
    [check] = run_all(evaluator.executor, check_rate, [task])
    probe, share = check.probes[0], check.probes[0].binding
    slower = (
        "prompts delay the tokens of requests on the same GPUs"
        if share.limited_by == "tpot"
        else "prompts wait for decoding on the same GPUs"
    )
    if probe.verdict == "unstable":
        slower = "work arrives faster than they do it"
    return (
        f"on {fewer} {slower}, TTFT is met by {share.ttft_attainment:.0%} and TPOT by"
        f" {share.tpot_attainment:.0%} of {share.name or 'the requests'}"
    )


def _why_loses(
    request: PlanRequest, evaluator: SimulatedEvaluator, best: Option, together: Option
) -> str:
    """Colocated requests still meet the limits, while whole instances per phase idle."""
    assert best.solution and together.solution
    rate = request.asked_rate
    share = evaluator.check(together.solution.all_instances, rate).binding
    each = rate / best.solution.num_units
    groups = best.solution.unit.groups
    used = [f"{used_share(evaluator, one, each):.0%} of {one.role.lower()}" for one in groups]
    return (
        f"sharing GPUs still meets TTFT for {share.ttft_attainment:.0%} and TPOT for"
        f" {share.tpot_attainment:.0%} of {share.name or 'the requests'}, while separate"
        f" phases hold the weights twice and come in whole instances ({', '.join(used)} used)"
    )
