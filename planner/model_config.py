"""Reads the sizes that matter out of a Hugging Face config, whatever names it uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from daskserve.errors import ModelError

UNGATED_MLP = {"opt", "gpt2", "gpt_neox", "gptj", "bloom", "falcon", "phi", "starcoder2", "mpt"}
"""Two MLP matrices; every other family here has a gate as well."""

NOT_TRANSFORMERS = {
    *("mamba", "mamba2", "falcon_mamba", "rwkv", "jamba", "bamba", "zamba", "zamba2"),
    *("recurrent_gemma", "qwen3_next", "nemotron_h"),
}
"""Layers with a recurrent state instead of KV."""

QUANTISED_BYTES = {"fp8": 1.0, "gptq": 0.5, "awq": 0.5, "mxfp4": 0.53, "compressed-tensors": 1.0}
DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8_e4m3fn": 1.0}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes read from a config; see ModelSpec for their meaning."""

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    vocab_size: int
    context_tokens: int
    num_parameters: float
    num_active_parameters: float
    kv_values_per_token: int
    attention_width: float
    sliding_window: int
    num_sliding_layers: int
    num_experts: int
    experts_per_token: int
    expert_parameters: float
    weight_bytes_per_parameter: float


def read_shape(config: Mapping) -> Shape:
    """Sizes of a decoder-only transformer. Raises ModelError for anything else."""
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        config = {**config, **nested}
    model_type = str(config.get("model_type", ""))
    if config.get("is_encoder_decoder") or model_type in NOT_TRANSFORMERS:
        raise ModelError(
            f"{model_type or 'this model'} is not a decoder-only transformer: its memory and time"
            " do not follow from KV per token"
        )
    layers = _size(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    heads = _size(config, "num_attention_heads", "n_head", "n_heads")
    hidden = _size(config, "hidden_size", "n_embd", "d_model")
    vocab = _size(config, "vocab_size")
    attention, kv_values, width, kv_heads = _attention(config, model_type, hidden, heads)
    dense_mlp, moe_layers, experts, chosen, expert, always = _mlp(
        config, model_type, hidden, layers
    )
    embedding, positions = _embeddings(config, model_type, hidden, vocab)
    tied = config.get("tie_word_embeddings", model_type in ("opt", "gpt2", "bloom", "falcon"))
    norms = (2 * layers + 1) * hidden * (2 if model_type in UNGATED_MLP else 1)
    body = layers * attention + (layers - moe_layers) * dense_mlp + moe_layers * always + norms
    all_experts = moe_layers * experts * expert
    window, sliding_layers = _window(config, model_type, layers)
    return Shape(
        model_type=model_type,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        hidden_size=hidden,
        vocab_size=vocab,
        context_tokens=_context(config),
        num_parameters=body + all_experts + embedding * (1 if tied else 2) + positions,
        num_active_parameters=body + moe_layers * chosen * expert + hidden * vocab,
        kv_values_per_token=layers * kv_values,
        attention_width=width,
        sliding_window=window,
        num_sliding_layers=sliding_layers,
        num_experts=experts,
        experts_per_token=chosen,
        expert_parameters=all_experts,
        weight_bytes_per_parameter=_weight_bytes(config),
    )


def _size(config: Mapping, *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ModelError(f"{name}={value!r} in the config must be a whole number above 0")
            return value
    if default is not None:
        return default
    raise ModelError(f"the config has no {names[0]}; is it the config of a language model?")


def _attention(
    config: Mapping, model_type: str, hidden: int, heads: int
) -> tuple[float, int, float, int]:
    """``(parameters per layer, KV values per token and layer, attention width, KV heads)``."""
    if config.get("kv_lora_rank"):
        return _latent_attention(config, hidden, heads)
    kv_heads = _size(config, "num_key_value_heads", "num_kv_heads", "n_head_kv", default=heads)
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv_heads = 1
    head_dim = _size(config, "head_dim", default=max(hidden // heads, 1))
    if "head_dim" not in config and hidden % heads:
        raise ModelError(f"hidden size {hidden} is not divisible by {heads} heads")
    if heads % kv_heads:
        raise ModelError(f"{heads} heads cannot share {kv_heads} KV heads evenly")
    query, key = heads * head_dim, kv_heads * head_dim
    biases = 0
    if config.get("attention_bias", config.get("enable_bias")) or model_type in ("opt", "gpt2"):
        biases = query + 2 * key + hidden
    elif model_type in ("qwen2", "qwen2_moe"):
        biases = query + 2 * key
    return hidden * (query + 2 * key) + query * hidden + biases, 2 * key, float(query), kv_heads


def _latent_attention(config: Mapping, hidden: int, heads: int) -> tuple[float, int, float, int]:
    """Multi-head latent attention (DeepSeek): one compressed KV row for all heads."""
    rank = _size(config, "kv_lora_rank")
    rope = _size(config, "qk_rope_head_dim")
    nope = _size(config, "qk_nope_head_dim")
    value = _size(config, "v_head_dim")
    query_rank = config.get("q_lora_rank")
    query_width = heads * (nope + rope)
    query = hidden * query_width
    if query_rank:
        query = query_rank * (hidden + query_width)
    keys_values = hidden * (rank + rope) + rank * heads * (nope + value)
    width = heads * (nope + rope + value) / 2
    # Every rank of a tensor-parallel group keeps the whole compressed row: one KV head.
    return query + keys_values + heads * value * hidden, rank + rope, width, 1


def _mlp(
    config: Mapping, model_type: str, hidden: int, layers: int
) -> tuple[int, int, int, int, float, float]:
    """``(dense, MoE layers, experts, chosen, parameters per expert, always active per layer)``."""
    ungated = model_type in UNGATED_MLP
    inner = _size(config, "ffn_dim", "intermediate_size", "n_inner", "d_ff", default=4 * hidden)
    matrices = 2 if ungated else 3
    dense = matrices * hidden * inner
    if ungated and model_type != "falcon":
        dense += inner + hidden
    experts = _size(config, "num_local_experts", "n_routed_experts", "num_experts", default=1)
    if experts == 1:
        return dense, 0, 0, 0, 0, 0
    chosen = _size(config, "num_experts_per_tok", "moe_top_k", "num_experts_per_token")
    expert = matrices * hidden * _size(config, "moe_intermediate_size", default=inner)
    shared = config.get("shared_expert_intermediate_size") or 0
    shared += (config.get("n_shared_experts") or 0) * (config.get("moe_intermediate_size") or 0)
    always = matrices * hidden * shared + hidden * experts
    dense_layers = config.get("first_k_dense_replace") or len(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1
    moe_layers = (layers - dense_layers) // (step if isinstance(step, int) else 1)
    return dense, moe_layers, experts, chosen, expert, always


def _embeddings(config: Mapping, model_type: str, hidden: int, vocab: int) -> tuple[int, int]:
    width = config.get("word_embed_proj_dim") or hidden
    positions = 0
    if model_type in ("opt", "gpt2"):
        positions = hidden * (_context(config) + (2 if model_type == "opt" else 0))
    if width != hidden:
        positions += 2 * width * hidden
    return vocab * width, positions


def _context(config: Mapping) -> int:
    return _size(config, "max_position_embeddings", "n_positions", "seq_length", default=2048)


def _window(config: Mapping, model_type: str, layers: int) -> tuple[int, int]:
    window = config.get("sliding_window") or 0
    if not window or config.get("use_sliding_window") is False:
        return 0, 0
    kinds = config.get("layer_types")
    if kinds:
        sliding = sum(kind == "sliding_attention" for kind in kinds)
        return (int(window), sliding) if sliding else (0, 0)
    if config.get("sliding_window_pattern"):
        return int(window), layers - layers // int(config["sliding_window_pattern"])
    if model_type == "gemma2":
        return int(window), (layers + 1) // 2
    if model_type in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"):
        first = config.get("max_window_layers") or 0
        return (int(window), layers - first) if layers > first else (0, 0)
    return int(window), layers


def _weight_bytes(config: Mapping) -> float:
    quantised = config.get("quantization_config")
    if isinstance(quantised, Mapping):
        method = str(quantised.get("quant_method", "")).lower()
        bits = quantised.get("bits")
        if isinstance(bits, int | float) and bits > 0:
            return bits / 8
        if method in QUANTISED_BYTES:
            return QUANTISED_BYTES[method]
        raise ModelError(f"unknown quantisation {method!r}: known are {', '.join(QUANTISED_BYTES)}")
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    name = name.removeprefix("torch.")
    # float32 checkpoints are served in two bytes: the engine's default is bfloat16.
    return min(DTYPE_BYTES.get(name, 2.0), 2.0)
