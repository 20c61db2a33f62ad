"""From a workload and an SLO to a placement that holds both: the planner's front door."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from daskserve.planner.explain import explain
from daskserve.planner.highest import highest_options
from daskserve.planner.options import all_options, evaluator_for
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.plan_result import Option, Plan
from daskserve.planner.search.fill import Limits
from daskserve.planner.search.nearest import nearest_slo
from daskserve.planner.search.simulated import Executor, SimulatedEvaluator
from daskserve.planner.search.units import Unit
from daskserve.planner.sensitivity import most_served


def plan(request: PlanRequest, executor: Executor | None = None) -> Plan:
    """The cheapest placement that serves the asked rate within the SLO.

    Parameters
    ----------
    executor
        Simulates candidates: an executor of ``concurrent.futures`` or a Dask client. Results
        are the same with any number of workers.

    Returns
    -------
    ``no_data`` without requests or at rate 0; ``infeasible`` with the nearest SLO or the
    highest rate that can be reached.
    """
    rate = request.asked_rate
    if len(request.workload) == 0 or rate == 0:
        return _no_data(request)
    evaluator = evaluator_for(request, executor)
    weigh = request.weights.weight
    options = all_options(request, evaluator)
    options.sort(key=lambda one: _rank(one, weigh))
    tied = [one for one in options if _rank(one, weigh) == _rank(options[0], weigh)]
    if options[0].is_usable and len(tied) > 1:
        # The same weight: what serves the most has the most room to spare.
        tied.sort(key=lambda one: -_room(evaluator, one))
        options[: len(tied)] = tied
    answer = Plan("infeasible", rate, request.slo, None, tuple(options), _tokens(request))
    if not options[0].is_usable:
        return _infeasible(answer, request, evaluator)
    lines = explain(request, evaluator, options[0], options, is_highest=False)
    return replace(answer, status="found", chosen=options[0], explanation=lines)


def plan_highest_rate(
    request: PlanRequest,
    max_gpus: int | None = None,
    max_price_per_hour: float | None = None,
    executor: Executor | None = None,
) -> Plan:
    """The placement that serves the most within the SLO, and its rate.

    Parameters
    ----------
    request
        Its rate is not looked at.
    max_gpus, max_price_per_hour
        Limits besides the cluster itself.
    """
    limits = Limits(request.cluster, max_gpus, max_price_per_hour)
    if len(request.workload) == 0:
        return _no_data(request)
    evaluator = evaluator_for(request, executor)
    options = highest_options(request, evaluator, limits)
    options.sort(key=lambda one: (not one.is_usable, -_rate(one)))
    best = options[0]
    rate = _rate(best)
    found = request.at_rate(rate)
    answer = Plan("infeasible", rate, request.slo, None, tuple(options), _tokens(request))
    answer = replace(answer, is_highest=True)
    if not best.is_usable:
        return _infeasible(answer, found, evaluator)
    lines = explain(found, evaluator, best, options, is_highest=True)
    return replace(answer, status="found", chosen=best, explanation=lines)


def _no_data(request: PlanRequest) -> Plan:
    reason = "no data: the workload has no requests or no rate"
    return Plan("no_data", request.asked_rate, request.slo, reason=reason)


def _rank(option: Option, weigh: Callable[[Unit], float]) -> tuple[bool, float]:
    unit = option.solution.all_instances if option.solution else None
    return not option.is_usable, weigh(unit) if unit else math.inf


def _room(evaluator: SimulatedEvaluator, option: Option) -> float:
    return most_served(evaluator, option.solution)[0] if option.solution else 0.0


def _rate(option: Option) -> float:
    return option.solution.rate if option.solution else 0.0


def _tokens(request: PlanRequest) -> float:
    _, prompt, output = request.workload.arrays()
    return float(np.mean(prompt + output))


def _infeasible(answer: Plan, request: PlanRequest, evaluator: SimulatedEvaluator) -> Plan:
    """Say what is missing: the SLO, or the cluster's size."""
    nearest = nearest_slo(request, evaluator)
    if nearest is None:
        return replace(answer, reason=_why_nothing_runs(request, evaluator))
    if nearest == request.classes and not any(
        one.solution or one.is_too_large for one in answer.options
    ):
        return replace(answer, reason=answer.options[0].rejected)
    if not any(one.solution or one.is_too_large for one in answer.options):
        reason = (
            f"no parallelism meets {request.classes} at any rate; the nearest SLO that can be"
            f" met is {nearest.limits(request.classes)}"
        )
        return replace(answer, reason=reason, nearest_slo=nearest.given())
    reasons = [f"{one.name}: {one.rejected}" for one in answer.options if one.rejected]
    best = highest_options(request, evaluator, Limits(request.cluster))
    usable = [_rate(one) for one in best if one.is_usable]
    reached = max(usable, default=0.0)
    reason = (
        f"{answer.rate:.4g} requests/s are out of reach on {request.cluster}, which serves up to"
        f" {reached:.4g}; {reasons[0]}"
    )
    return replace(answer, reason=reason, highest_rate=reached)


def _why_nothing_runs(request: PlanRequest, evaluator: SimulatedEvaluator) -> str:
    """The memory, or whatever the latency model says of the largest split."""
    sized = evaluator.sized
    most = max(space.nodes_per_instance * space.gpus_per_node for space in request.spaces)
    head = f"{request.model.name} runs on no split of up to {most} GPUs of {request.cluster}"
    sizes = [key for key, step in sized.all_step_times() if step is not None]
    if sizes:
        return f"{head}: no KV pool holds a request of {sized.demand.most_tokens} tokens"
    # A split that does not divide says less than one that lacks memory.
    largest = max(sized.reasons, key=lambda key: (request.model.divides(key[1]), key[1].num_gpus))
    return f"{head}: {sized.reasons[largest]}"
