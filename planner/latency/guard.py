"""The physics guard: no step may beat the data sheet, whatever a profile or a fit says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from daskserve.core.placement import Parallelism
from daskserve.planner.hardware import GPU
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.step_times import StepTimes


def _above_curve(curve: Callable[[np.ndarray], np.ndarray], knots: np.ndarray) -> np.ndarray:
    """Values at the knots such that straight lines between them do not cut below the curve.

    Weights read grow concavely with the tokens (experts), so a chord lies below them, most of all
    near the middle of its interval; both ends are raised by that much, and a fifth more.
    """
    values = curve(knots)
    middle = curve((knots[:-1] + knots[1:]) / 2.0)
    missing = np.maximum(middle - (values[:-1] + values[1:]) / 2.0, 0.0)
    missing[0] = 0.0  # there is no step of less than one token
    return values + 1.2 * np.maximum(np.append(missing, 0.0), np.append(0.0, missing))


def at_least_physical(
    step: StepTimes, model: ModelSpec, gpu: GPU, parallelism: Parallelism
) -> StepTimes:
    """Raise every time that would need more FLOP/s or bandwidth than ``tp`` GPUs have.

    Sufficient for any batch: the linear part pays for the matrix products of all tokens, linear
    and quadratic parts together pay for the attention of a lone prompt of any length.
    """
    flops = parallelism.tp * gpu.flops
    bandwidth = parallelism.tp * gpu.memory_bandwidth
    tokens = step.prefill_knots_tokens
    head = model.hidden_size * model.vocab_size
    products = 2.0 * (model.num_active_parameters - head) * tokens / flops
    reads = _above_curve(model.weight_bytes_read, tokens) / bandwidth
    lone = np.array([model.prefill_flops(float(n)) for n in tokens]) / flops
    squares = step.prefill_quadratic_s * tokens**2
    prefill = np.maximum.reduce([step.prefill_knots_s, products, reads, lone - squares])
    prefill[0] = step.prefill_knots_s[0]
    # Past the last knot the last slope goes on: it must pay for the products as well.
    slope = 2.0 * (model.num_active_parameters - head) / flops
    prefill[-1] = max(prefill[-1], prefill[-2] + slope * (tokens[-1] - tokens[-2]))

    batch = np.arange(len(step.decode_base_s), dtype=np.float64)
    compute = 2.0 * model.num_active_parameters * batch / flops
    base = np.maximum.reduce(
        [step.decode_base_s, compute, model.weight_bytes_read(batch) / bandwidth]
    )
    base[0] = 0.0
    growing = 1.0 - model.num_sliding_layers / model.num_layers
    kv_s = model.kv_bytes_per_token * model.kv_copies(parallelism.tp) * growing / bandwidth
    per_context = np.maximum(step.decode_per_context_s, kv_s)
    return replace(
        step, prefill_knots_s=prefill, decode_base_s=base, decode_per_context_s=per_context
    )
