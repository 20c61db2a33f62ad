"""What is left for KV once weights and activations have their place."""

from __future__ import annotations

from dataclasses import dataclass

from daskserve.core.placement import Parallelism
from daskserve.errors import ConfigError, ModelError
from daskserve.planner.hardware import GPU
from daskserve.planner.model_spec import ModelSpec

BLOCK_TOKENS = 16
ACTIVATION_BYTES_PER_HIDDEN = 24
"""Two-byte activations alive at once in a layer, in units of the hidden size: residual, norms,
projections and the two or three MLP rows."""
LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """How much of a GPU's memory the engine may plan with.

    Parameters
    ----------
    utilisation
        Share of the memory that may be used; the rest is for the driver, graphs and
        fragmentation.
    kv_share
        Share of what is left for KV that a plan uses; below 1 to try a smaller pool.
    """

    utilisation: float = 0.92
    kv_share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("utilisation", "kv_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0 and at most 1")


def kv_capacity_tokens(
    model: ModelSpec,
    gpu: GPU,
    parallelism: Parallelism,
    step_tokens: int,
    batch_size: int,
    budget: MemoryBudget | None = None,
) -> int:
    """Tokens of KV that an instance holds; 0 when the weights do not fit.

    ``step_tokens`` and ``batch_size`` are the largest step: its activations and logits take
    memory too. What as many requests of the longest context would not fill is not planned with.
    """
    budget = budget or MemoryBudget()
    num_gpus = parallelism.num_gpus
    activations = step_tokens * model.hidden_size * ACTIVATION_BYTES_PER_HIDDEN
    logits = batch_size * model.vocab_size * LOGIT_BYTES / parallelism.tp
    free = gpu.memory_bytes * budget.utilisation - model.weight_bytes / num_gpus
    free -= activations + logits
    if free <= 0:
        return 0
    per_token = model.kv_bytes_per_token * model.kv_copies(parallelism.tp) / num_gpus
    largest_use = batch_size * parallelism.pp * model.context_tokens
    in_memory = int(free * budget.kv_share / per_token)
    return min(in_memory, largest_use) // BLOCK_TOKENS * BLOCK_TOKENS


def check_split(model: ModelSpec, parallelism: Parallelism) -> None:
    """Raises ModelError unless TP divides the heads and PP the layers."""
    if not model.divides(parallelism):
        raise ModelError(
            f"{model.name} cannot be split as {parallelism}: TP must divide"
            f" {model.num_heads} heads and fit {model.num_kv_heads} KV heads, PP must divide"
            f" {model.num_layers} layers"
        )
