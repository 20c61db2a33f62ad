"""The SLO closest to the asked one that anything meets at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.core.slo import SLO
from daskserve.planner.goodput import best_reachable
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.search.simulated import SimulatedEvaluator
from daskserve.planner.search.units import Instances, Unit

STEP = 1.05
MOST_STEPS = 60


def nearest_slo(request: PlanRequest, evaluator: SimulatedEvaluator) -> SLO | None:
    """Each limit raised as far as lone requests need in the best split, and both together.

    None when the model fits nowhere.
    """
    slo, sized = request.slo, evaluator.sized
    splits = [
        (space.gpu, parallelism)
        for space in request.spaces
        for parallelism in space.parallelisms(sized)
    ]
    if not splits:
        return None
    prefill = min(splits, key=lambda split: _ttft_s(evaluator, *split))
    decode = min(splits, key=lambda split: _tpot_s(evaluator, *split))
    groups = (
        Instances(Role.PREFILL, prefill[1], 1, prefill[0]),
        Instances(Role.DECODE, decode[1], 1, decode[0]),
    )
    deployment = evaluator.deployment(Unit(groups))
    nearest = slo
    for _ in range(MOST_STEPS):
        best = best_reachable(request.workload, deployment, nearest, request.seeds[0])
        # A rate above 0 needs some room beyond what a lone request takes.
        nearest = replace(
            nearest,
            ttft_s=max(nearest.ttft_s, STEP * best.ttft_s),
            tpot_s=max(nearest.tpot_s, STEP * (best.tpot_s or 0.0)),
        )
        if (
            best_reachable(request.workload, deployment, nearest, request.seeds[0]).attainment
            >= slo.attainment
        ):
            return nearest
        # Each limit suits its share of the requests, but not the same ones.
        nearest = replace(
            nearest,
            ttft_s=_raised(nearest.ttft_s, slo.ttft_s),
            tpot_s=_raised(nearest.tpot_s, slo.tpot_s),
        )
    return nearest


def _raised(limit_s: float, asked_s: float) -> float:
    return limit_s if limit_s == asked_s else limit_s * STEP


def _ttft_s(evaluator: SimulatedEvaluator, gpu: str, parallelism: Parallelism) -> float:
    step, demand = evaluator.step_times(gpu, parallelism), evaluator.sized.demand
    alone = [step.latency_s(step.prefill_s(tokens)) for tokens in demand.prompt]
    return float(np.quantile(alone, demand.attainment))


def _tpot_s(evaluator: SimulatedEvaluator, gpu: str, parallelism: Parallelism) -> float:
    step = evaluator.step_times(gpu, parallelism)
    return step.latency_s(step.decode_s(1, evaluator.sized.demand.mean_context))
