"""How the layers are shared out among the stages, so that all take as long.

The last stage multiplies with the vocabulary head as well, which decode does for every token and
prefill for the last one of a prompt only.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from daskserve.core.instance import Role
from daskserve.core.shards import balanced_layers
from daskserve.workers.parallel.families import family_of

_ROWS, _CONTEXT_TOKENS = 32, 512  # of a usual decode step

_DECODE_SHARE = {Role.PREFILL: 0.0, Role.COLOCATED: 0.5, Role.DECODE: 1.0}


def stage_layers(config: PretrainedConfig, pp: int, role: Role) -> tuple[int, ...]:
    """Layers of each of ``pp`` stages of an instance with this role."""
    extra = head_in_layers(config) * _DECODE_SHARE[role]
    return balanced_layers(config.num_hidden_layers, pp, extra)


def head_in_layers(config: PretrainedConfig) -> float:
    """As how many layers the vocabulary head counts in a usual decode step, by numbers read."""
    family = family_of(config)
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_features = head_dim * (getattr(config, "num_key_value_heads", None) or heads)
    inner = family.num_inner * getattr(config, family.inner_size)
    layer = hidden * (2 * heads * head_dim + 2 * kv_features + inner)
    layer += _ROWS * _CONTEXT_TOKENS * 2 * kv_features
    # Logits are written, converted and read.
    head = config.vocab_size * (hidden + 3 * _ROWS)
    return head / layer
