"""Step times from the data sheet: the slower of arithmetic and memory, with efficiencies."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from daskserve.core.placement import Parallelism
from daskserve.errors import ConfigError, ModelError
from daskserve.planner.hardware import GPU
from daskserve.planner.latency.guard import at_least_physical
from daskserve.planner.latency.memory import MemoryBudget, check_split, kv_capacity_tokens
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.step_times import StepTimes, saturating_tokens

ACTIVATION_BYTES = 2
SHARES = ("compute", "memory", "attention", "kv_read", "link")


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """What real kernels reach of the data sheet.

    The defaults are those fitted to Llama-3.1 8B and 70B on H100 with vLLM, rounded.

    Parameters
    ----------
    compute, attention
        Share of the FLOP/s that matrix products and causal attention reach.
    memory, kv_read, link
        Share of the bandwidth that reading weights, reading KV, and all-reduces reach.
    all_reduce_s, layer_s
        Fixed seconds of one all-reduce, and of the launches of one layer.
    activation_passes
        Times that small operators move a layer's activations through memory.
    """

    compute: float = 0.70
    memory: float = 0.85
    attention: float = 0.60
    kv_read: float = 0.90
    link: float = 0.80
    all_reduce_s: float = 6e-6
    layer_s: float = 35e-6
    activation_passes: float = 12.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            high = 1.0 if item.name in SHARES else np.inf
            low_enough = value > 0 if item.name in SHARES else value >= 0
            if not (low_enough and value <= high and np.isfinite(value)):
                limit = "above 0 and at most 1" if item.name in SHARES else "at least 0"
                raise ConfigError(f"{item.name}={value} must be {limit}")


@dataclass(frozen=True, slots=True)
class Roofline:
    """Latency model from a data sheet.

    Parameters
    ----------
    network_bandwidth
        Bytes/s between pipeline stages; None uses the GPU's link.
    typical_context_tokens
        Decides for sliding-window layers whether their reads are counted as growing with the
        context or as one full window: both are upper bounds, this picks the closer one.
    max_batch_size
        Largest micro-batch that the arrays cover.
    prefill_budget_tokens
        L_m; None takes the length at which prefill reaches 90 % of its best throughput.
    """

    efficiencies: Efficiencies = field(default_factory=Efficiencies)
    network_bandwidth: float | None = None
    typical_context_tokens: int = 1024
    memory: MemoryBudget = field(default_factory=MemoryBudget)
    max_batch_size: int = 512
    prefill_budget_tokens: int | None = None

    def step_times(self, model: ModelSpec, gpu: GPU, parallelism: Parallelism) -> StepTimes:
        check_split(model, parallelism)
        tp = parallelism.tp
        knots = prefill_knots(model.context_tokens)
        linear = self.prefill_linear_s(model, gpu, tp, knots)
        batch = np.arange(1, self.max_batch_size + 1, dtype=np.float64)
        base = self.decode_base_s(model, gpu, tp, batch)
        boundaries = parallelism.pp - 1
        linear = linear + boundaries * self._stage_transfer_s(model, gpu, knots)
        base = base + boundaries * self._stage_transfer_s(model, gpu, batch)
        budget = self.prefill_budget_tokens or saturating_tokens(knots, linear)
        capacity = kv_capacity_tokens(
            model, gpu, parallelism, budget, self.max_batch_size, self.memory
        )
        if capacity == 0:
            raise ModelError(
                f"{model.name} ({model.weight_bytes / 1e9:.0f} GB of weights) does not fit on"
                f" {parallelism.num_gpus} x {gpu.name} ({gpu.memory_bytes / 1e9:.0f} GB each)"
            )
        per_context = self.decode_per_context_s(model, gpu, tp)
        step = StepTimes(
            prefill_knots_tokens=knots,
            prefill_knots_s=linear,
            prefill_quadratic_s=self.prefill_quadratic_s(model, gpu, tp),
            decode_base_s=np.concatenate([[0.0], base]),
            decode_per_context_s=np.full(self.max_batch_size + 1, per_context),
            num_stages=parallelism.pp,
            kv_capacity_tokens=capacity,
            prefill_budget_tokens=budget,
        )
        return at_least_physical(step, model, gpu, parallelism)

    def prefill_linear_s(
        self,
        model: ModelSpec,
        gpu: GPU,
        tp: int,
        tokens: np.ndarray,
        num_prompts: float | np.ndarray = 1.0,
    ) -> np.ndarray:
        """One pass over ``tokens`` prompt tokens, without the quadratic part of attention."""
        e = self.efficiencies
        head = model.hidden_size * model.vocab_size
        flops = 2.0 * (model.num_active_parameters - head) * tokens + 2.0 * head * num_prompts
        attention = sliding_flops(model, tokens) / (tp * gpu.flops * e.attention)
        return self._matrices_s(model, gpu, tp, flops, tokens) + attention

    def prefill_quadratic_s(self, model: ModelSpec, gpu: GPU, tp: int) -> float:
        """Seconds per squared prompt token: causal attention of the layers without a window."""
        full_layers = model.num_layers - model.num_sliding_layers
        flops = 2.0 * model.attention_width * full_layers
        return flops / (tp * gpu.flops * self.efficiencies.attention)

    def decode_base_s(self, model: ModelSpec, gpu: GPU, tp: int, batch: np.ndarray) -> np.ndarray:
        """One decode pass at each batch size, contexts left out."""
        flops = 2.0 * model.num_active_parameters * batch
        window = self._saturated_window_tokens(model) * batch
        return self._matrices_s(model, gpu, tp, flops, batch) + window * self._kv_token_s(
            model, gpu, tp, model.num_sliding_layers
        )

    def decode_per_context_s(self, model: ModelSpec, gpu: GPU, tp: int) -> float:
        """Seconds per token of context: reading its KV."""
        saturated = self._saturated_window_tokens(model) > 0
        growing = model.num_layers - (model.num_sliding_layers if saturated else 0)
        return self._kv_token_s(model, gpu, tp, growing)

    def _saturated_window_tokens(self, model: ModelSpec) -> int:
        sliding = model.num_sliding_layers and model.sliding_window < self.typical_context_tokens
        return model.sliding_window if sliding else 0

    def _kv_token_s(self, model: ModelSpec, gpu: GPU, tp: int, layers: int) -> float:
        kv_bytes = model.kv_bytes_per_token * model.kv_copies(tp) * layers / model.num_layers
        return kv_bytes / (tp * gpu.memory_bandwidth * self.efficiencies.kv_read)

    def _matrices_s(self, model: ModelSpec, gpu: GPU, tp: int, flops: Any, tokens: Any) -> Any:
        """Matrix products, small operators and all-reduces of a pass over ``tokens``."""
        e = self.efficiencies
        compute = flops / (tp * gpu.flops * e.compute)
        weights = model.weight_bytes_read(tokens) / (tp * gpu.memory_bandwidth * e.memory)
        row_bytes = tokens * model.hidden_size * ACTIVATION_BYTES
        small = row_bytes * e.activation_passes / (gpu.memory_bandwidth * e.memory)
        layer = e.layer_s + small + self._all_reduces_s(gpu, tp, row_bytes)
        # Root of the sum of squares: near the ridge neither limit is reached alone.
        return np.sqrt(compute**2 + weights**2) + model.num_layers * layer

    def _all_reduces_s(self, gpu: GPU, tp: int, row_bytes: Any) -> Any:
        """The two all-reduces of one layer."""
        if tp == 1:
            return np.zeros_like(row_bytes)
        e = self.efficiencies
        moved = row_bytes * 2.0 * (tp - 1) / tp
        return 2.0 * (e.all_reduce_s + moved / (gpu.link_bandwidth * e.link))

    def _stage_transfer_s(self, model: ModelSpec, gpu: GPU, tokens: np.ndarray) -> np.ndarray:
        bandwidth = self.network_bandwidth or gpu.link_bandwidth
        return tokens * model.hidden_size * ACTIVATION_BYTES / bandwidth + 2e-5


def prefill_knots(context_tokens: int) -> np.ndarray:
    """Token counts from 0 up to the context length: every one up to 16, where a mixture of
    experts reads more weights with each token, then 41 % apart."""
    steps = np.concatenate([np.arange(1.0, 16.0), 16.0 * 2.0 ** np.arange(0, 40, 0.5)])
    inside = steps[steps < context_tokens]
    return np.unique(np.round(np.concatenate([[0.0, 1.0], inside, [max(context_tokens, 2)]])))


def sliding_flops(model: ModelSpec, tokens: np.ndarray) -> np.ndarray:
    """FLOPs of causal attention in sliding-window layers over one prompt."""
    inside = np.minimum(tokens, model.sliding_window)
    pairs = inside**2 / 2.0 + (tokens - inside) * model.sliding_window
    return 4.0 * model.attention_width * model.num_sliding_layers * pairs
