"""What the planner knows of a model: weights, KV bytes per token and FLOPs, from its config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from daskserve.core.placement import Parallelism
from daskserve.errors import ModelError, WorkloadError
from daskserve.planner.model_config import Shape, read_shape
from daskserve.planner.model_presets import MODEL_CONFIGS


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Size and shape of one model; every figure follows from its config.

    Parameters
    ----------
    num_parameters, num_active_parameters
        All weights, and those that one token multiplies with (experts chosen, no embedding
        look-up).
    kv_values_per_token
        K and V values per token, all layers.
    attention_width
        Heads times head dimension (mean of the K and V sides): the width of the attention
        products.
    sliding_window, num_sliding_layers
        Layers that attend to the last ``sliding_window`` tokens only. Their KV is kept all the
        same, so the window saves time but not memory.
    num_experts, experts_per_token, expert_parameters
        Mixture of experts: routed experts per layer, chosen per token, and weights of all of
        them over all layers. 0 for dense models.
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    vocab_size: int
    num_parameters: float
    num_active_parameters: float
    kv_values_per_token: int
    attention_width: float
    context_tokens: int
    sliding_window: int = 0
    num_sliding_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_parameters: float = 0.0
    weight_bytes_per_parameter: float = 2.0
    kv_bytes_per_value: float = 2.0

    @classmethod
    def from_config(cls, config: Mapping, name: str = "") -> ModelSpec:
        """Spec of a Hugging Face ``config.json`` given as a mapping.

        Raises
        ------
        ModelError
            The architecture is not a decoder-only transformer or a size is missing.
        """
        shape = read_shape(config)
        return cls._from_shape(shape, name or config.get("_name_or_path") or shape.model_type)

    @classmethod
    def load(cls, name: str) -> ModelSpec:
        """Spec of a preset (``opt-13b``, ``llama-3.1-70b``), a directory or a config file."""
        key = name.lower().rsplit("/", 1)[-1]
        path = Path(name).expanduser()
        config_file = path / "config.json" if path.is_dir() else path
        if config_file.is_file():
            try:
                config = json.loads(config_file.read_text(encoding="utf-8"))
            except (ValueError, OSError) as error:
                raise ModelError(f"{config_file} cannot be read as JSON: {error}") from error
            return cls.from_config(config, path.name if path.is_dir() else path.parent.name)
        if key not in MODEL_CONFIGS:
            known = ", ".join(sorted(MODEL_CONFIGS))
            raise ModelError(
                f"unknown model {name!r}: give a directory with config.json or one of {known}"
            )
        return cls.from_config(MODEL_CONFIGS[key], key)

    @classmethod
    def _from_shape(cls, shape: Shape, name: str) -> ModelSpec:
        return cls(
            name=name,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            num_parameters=shape.num_parameters,
            num_active_parameters=shape.num_active_parameters,
            kv_values_per_token=shape.kv_values_per_token,
            attention_width=shape.attention_width,
            context_tokens=shape.context_tokens,
            sliding_window=shape.sliding_window,
            num_sliding_layers=shape.num_sliding_layers,
            num_experts=shape.num_experts,
            experts_per_token=shape.experts_per_token,
            expert_parameters=shape.expert_parameters,
            weight_bytes_per_parameter=shape.weight_bytes_per_parameter,
        )

    def with_precision(
        self, weight_bytes: float | None = None, kv_bytes: float | None = None
    ) -> ModelSpec:
        """The same model with other bytes per weight or per KV value (1 for fp8)."""
        for value in (weight_bytes, kv_bytes):
            if value is not None and not 0 < value <= 8:
                raise ModelError(f"bytes per value must be above 0 and at most 8, got {value}")
        return replace(
            self,
            weight_bytes_per_parameter=weight_bytes or self.weight_bytes_per_parameter,
            kv_bytes_per_value=kv_bytes or self.kv_bytes_per_value,
        )

    @property
    def weight_bytes(self) -> float:
        return self.num_parameters * self.weight_bytes_per_parameter

    @property
    def kv_bytes_per_token(self) -> float:
        return self.kv_values_per_token * self.kv_bytes_per_value

    def weight_bytes_read(self, num_tokens: Any) -> Any:
        """Bytes of weights that a pass over ``num_tokens`` (number or array) reads.

        Embedding rows hardly count. Experts are taken as chosen evenly, so n tokens touch
        ``1 - (1 - k/E)**n`` of them.
        """
        always = self.num_active_parameters
        experts = 0.0 * num_tokens
        if self.num_experts:
            share = self.experts_per_token / self.num_experts
            always -= share * self.expert_parameters
            experts = self.expert_parameters * (1.0 - (1.0 - share) ** num_tokens)
        return (always + experts) * self.weight_bytes_per_parameter

    def attention_flops(self, context_tokens: float, window: bool = True) -> float:
        """FLOPs of attention for one new token over ``context_tokens``, all layers."""
        full_layers = self.num_layers - self.num_sliding_layers
        seen = min(context_tokens, self.sliding_window) if window else context_tokens
        pairs = full_layers * context_tokens + self.num_sliding_layers * seen
        return 4.0 * self.attention_width * pairs

    def prefill_flops(self, prompt_tokens: float) -> float:
        """FLOPs of one causal pass over a prompt, the head applied to its last token only."""
        full_layers = self.num_layers - self.num_sliding_layers
        window = self.sliding_window
        inside = min(prompt_tokens, window)
        sliding_pairs = inside**2 / 2 + (prompt_tokens - inside) * window
        pairs = full_layers * prompt_tokens**2 / 2 + self.num_sliding_layers * sliding_pairs
        head = self.hidden_size * self.vocab_size
        matmul = (self.num_active_parameters - head) * prompt_tokens + head
        return 2.0 * matmul + 4.0 * self.attention_width * pairs

    def decode_flops(self, context_tokens: float) -> float:
        """FLOPs of one new token at ``context_tokens``."""
        return 2.0 * self.num_active_parameters + self.attention_flops(context_tokens)

    def divides(self, parallelism: Parallelism) -> bool:
        """Whether TP divides the heads and PP the layers; fewer KV heads than TP are copied."""
        heads_divide = self.num_heads % parallelism.tp == 0
        kv_divide = (
            self.num_kv_heads % parallelism.tp == 0 or parallelism.tp % self.num_kv_heads == 0
        )
        return heads_divide and kv_divide and self.num_layers % parallelism.pp == 0

    def check_lengths(self, total_tokens: np.ndarray) -> None:
        """Raise WorkloadError if any request (prompt and output) is longer than the context."""
        too_long = total_tokens > self.context_tokens
        if too_long.any():
            raise WorkloadError(
                f"{int(too_long.sum())} of {len(total_tokens)} requests are longer than the"
                f" context of {self.name} ({int(total_tokens.max())} > {self.context_tokens}"
                " tokens), no engine would take them; drop them with Workload.within or"
                " --drop-too-long"
            )

    def kv_copies(self, tp: int) -> float:
        """Times that each KV head is stored over a tensor-parallel group."""
        return max(1.0, tp / self.num_kv_heads)
