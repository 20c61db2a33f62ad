"""Interpolation between measured step times: no formula, but nothing outside what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import nnls

from daskserve.core.placement import Parallelism
from daskserve.errors import ModelError
from daskserve.planner.hardware import GPU
from daskserve.planner.latency.guard import at_least_physical
from daskserve.planner.latency.memory import MemoryBudget, check_split, kv_capacity_tokens
from daskserve.planner.latency.profile import Profile
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.step_times import StepTimes, saturating_tokens


@dataclass(frozen=True, slots=True)
class TableModel:
    """Latency model of the one model and GPU that a profile was measured on.

    Prefill goes through the measured single prompts; decode through a line over the context at
    each measured batch size, and linearly between batch sizes.
    """

    profile: Profile
    memory: MemoryBudget = field(default_factory=MemoryBudget)

    def step_times(self, model: ModelSpec, gpu: GPU, parallelism: Parallelism) -> StepTimes:
        check_split(model, parallelism)
        tp = parallelism.tp
        if tp not in self.profile.tensor_degrees:
            known = ", ".join(str(degree) for degree in self.profile.tensor_degrees)
            raise ModelError(f"no profile at TP={tp}; there are TP {known}")
        knots, linear, quadratic = _prefill(*self.profile.rows("prefill", tp))
        base, per_context = _decode(*self.profile.rows("decode", tp))
        budget = saturating_tokens(knots, linear)
        capacity = kv_capacity_tokens(model, gpu, parallelism, budget, len(base) - 1, self.memory)
        if capacity == 0:
            raise ModelError(f"{model.name} does not fit on {parallelism.num_gpus} x {gpu.name}")
        step = StepTimes(
            prefill_knots_tokens=knots,
            prefill_knots_s=linear,
            prefill_quadratic_s=quadratic,
            decode_base_s=base,
            decode_per_context_s=per_context,
            num_stages=parallelism.pp,
            kv_capacity_tokens=capacity,
            prefill_budget_tokens=budget,
        )
        return at_least_physical(step, model, gpu, parallelism)


def _prefill(
    tokens: np.ndarray, batch: np.ndarray, latency_s: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    """Knots through the single prompts, and the share of squared lengths in them."""
    lengths = np.unique(tokens[batch == 1])
    if len(lengths) < 2:
        raise ModelError("the profile needs prefill rows of batch 1 at two lengths or more")
    times = np.array([latency_s[(tokens == n) & (batch == 1)].mean() for n in lengths])
    total = tokens * batch
    columns = np.stack([np.ones_like(total), total, batch * tokens**2], axis=1) / latency_s[:, None]
    (_, _, quadratic), _ = nnls(columns, np.ones(len(latency_s)))
    linear = times - quadratic * lengths**2
    # Attention cannot take more than a pass took, nor may more tokens become cheaper.
    linear = np.maximum.accumulate(np.maximum(linear, 0.0))
    first = max(0.0, linear[0] - (linear[1] - linear[0]) / (lengths[1] - lengths[0]) * lengths[0])
    return np.concatenate([[0.0], lengths]), np.concatenate([[first], linear]), float(quadratic)


def _decode(
    tokens: np.ndarray, batch: np.ndarray, latency_s: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Base time and time per context token at every batch size up to the largest measured."""
    if len(tokens) == 0:
        raise ModelError("the profile has no decode rows")
    sizes = np.unique(batch)
    lines = []
    for size in sizes:
        rows = batch == size
        weight = 1.0 / latency_s[rows]
        columns = np.stack([np.ones(rows.sum()), tokens[rows] * size], axis=1)
        coefficients, _ = nnls(columns * weight[:, None], np.ones(rows.sum()))
        lines.append(coefficients)
    base, per_context = np.array(lines).T
    every = np.arange(int(sizes[-1]) + 1)
    base = np.interp(every, sizes, base)
    base[0] = 0.0
    return base, np.interp(every, sizes, per_context)
