"""The paper's latency model (appendix A): C1..C5 over weights and attention, fitted per TP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from daskserve.core.placement import Parallelism
from daskserve.errors import ModelError
from daskserve.planner.hardware import GPU
from daskserve.planner.latency.guard import at_least_physical
from daskserve.planner.latency.memory import MemoryBudget, check_split, kv_capacity_tokens
from daskserve.planner.latency.roofline import prefill_knots
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.step_times import StepTimes, saturating_tokens


@dataclass(frozen=True, slots=True)
class PaperCoefficients:
    """Seconds per unit; the FlashAttention block size b of the paper is part of ``c2``.

    ``T_prefill = c1 * t * W + c2 * 3 * h * t2 + c3`` and ``T_decode = c4 * W + c5 * 3 * h * t``
    with t the sum of lengths, t2 the sum of their squares, h the attention width over all
    layers, and W the weights that a token multiplies with. For OPT, W is the paper's
    ``4 h^2 + 2 h m`` per layer; written this way it also holds for gated, grouped and MoE
    models.

    ``growth`` holds pairs (B, c): ``c * W`` is added to ``T_decode`` of a batch of B requests,
    linear between the pairs. The paper has none, since its GPUs read weights for longer than
    they multiply; on CPUs more requests cost more, by steps that depend on how products of few
    rows are computed there.

    ``per_prompt`` is added to ``T_prefill`` for each prompt of a step: one is computed in whole
    tiles, of which the last is hardly ever full. The paper has none either.
    """

    c1: float
    c2: float
    c3: float
    c4: float
    c5: float
    growth: tuple[tuple[int, float], ...] = ()
    per_prompt: float = 0.0

    def decode_s_per_weight(self, batch: np.ndarray) -> np.ndarray:
        """C4 and what batches of so many requests add."""
        if not self.growth:
            return np.full(batch.shape, self.c4)
        sizes, added = np.array(self.growth).T
        return self.c4 + np.interp(batch, sizes, added)


def attention_unit(model: ModelSpec) -> float:
    """The paper's 3 h, over all layers."""
    return 3.0 * model.attention_width * model.num_layers


@dataclass(frozen=True, slots=True)
class PaperModel:
    """Latency model of one GPU type, by TP degree."""

    coefficients: Mapping[int, PaperCoefficients]
    memory: MemoryBudget = field(default_factory=MemoryBudget)
    max_batch_size: int = 512

    def step_times(self, model: ModelSpec, gpu: GPU, parallelism: Parallelism) -> StepTimes:
        check_split(model, parallelism)
        if parallelism.tp not in self.coefficients:
            known = ", ".join(str(tp) for tp in sorted(self.coefficients))
            raise ModelError(f"no profile at TP={parallelism.tp}; there are TP {known}")
        c = self.coefficients[parallelism.tp]
        knots = prefill_knots(model.context_tokens)
        linear = c.c1 * model.num_active_parameters * knots + c.c3
        budget = saturating_tokens(knots, linear)
        capacity = kv_capacity_tokens(
            model, gpu, parallelism, budget, self.max_batch_size, self.memory
        )
        if capacity == 0:
            raise ModelError(f"{model.name} does not fit on {parallelism.num_gpus} x {gpu.name}")
        batch = np.arange(self.max_batch_size + 1, dtype=np.float64)
        base = c.decode_s_per_weight(batch) * model.num_active_parameters
        base[0] = 0.0
        step = StepTimes(
            prefill_knots_tokens=knots,
            prefill_knots_s=linear,
            prefill_quadratic_s=c.c2 * attention_unit(model),
            decode_base_s=base,
            decode_per_context_s=np.full_like(base, c.c5 * attention_unit(model)),
            num_stages=parallelism.pp,
            kv_capacity_tokens=capacity,
            prefill_budget_tokens=budget,
            prefill_per_prompt_s=c.per_prompt,
        )
        return at_least_physical(step, model, gpu, parallelism)
