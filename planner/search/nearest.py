"""The SLO closest to the asked one that anything meets at all."""

from __future__ import annotations

import numpy as np

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.planner.goodput import best_reachable
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.search.simulated import SimulatedEvaluator
from daskserve.planner.search.units import Instances, Unit
from daskserve.planner.slo_classes import SLOClasses

STEP = 1.05
MOST_STEPS = 60


def nearest_slo(request: PlanRequest, evaluator: SimulatedEvaluator) -> SLOClasses | None:
    """Each limit of each class raised as far as its lone requests need in the best split.

    Both together are met. None when the model fits nowhere.
    """
    slo, sized = request.classes, evaluator.sized
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
    best = best_reachable(request.workload, deployment, nearest, request.seeds[0])
    # A rate above 0 needs some room beyond what a lone request takes.
    nearest = nearest.with_limits(
        [max(now, STEP * one.ttft_s) for now, one in zip(slo.ttft_s, best, strict=True)],
        [max(now, STEP * (one.tpot_s or 0.0)) for now, one in zip(slo.tpot_s, best, strict=True)],
    )
    for _ in range(MOST_STEPS):
        best = best_reachable(request.workload, deployment, nearest, request.seeds[0])
        short = np.array([not one.share.is_met for one in best])
        if not short.any():
            return nearest
        # Each limit suits its share of the requests, but not the same ones.
        nearest = nearest.with_limits(
            np.where(short, _raised(nearest.ttft_s, slo.ttft_s), nearest.ttft_s).tolist(),
            np.where(short, _raised(nearest.tpot_s, slo.tpot_s), nearest.tpot_s).tolist(),
        )
    return nearest


def _raised(limit_s: np.ndarray, asked_s: np.ndarray) -> np.ndarray:
    return np.where(limit_s == asked_s, limit_s, limit_s * STEP)


def _ttft_s(evaluator: SimulatedEvaluator, gpu: str, parallelism: Parallelism) -> float:
    step, demand = evaluator.step_times(gpu, parallelism), evaluator.sized.demand
    alone = [step.latency_s(step.prefill_s(tokens)) for tokens in demand.prompt]
    return float(np.quantile(alone, demand.attainment))


def _tpot_s(evaluator: SimulatedEvaluator, gpu: str, parallelism: Parallelism) -> float:
    step = evaluator.step_times(gpu, parallelism)
    return step.latency_s(step.decode_s(1, evaluator.sized.demand.mean_context))
