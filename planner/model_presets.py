"""Configs of well-known models, cut down to the keys that sizes follow from."""

from __future__ import annotations

from typing import Any


def _opt(layers: int, hidden: int, heads: int) -> dict:
    return {
        "model_type": "opt",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
    }


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, **other: Any) -> dict:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    } | other


_LLAMA_2 = {"vocab_size": 32000, "max_position_embeddings": 4096}

MODEL_CONFIGS = {
    "opt-125m": _opt(12, 768, 12),
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-6.7b": _opt(32, 4096, 32),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "opt-175b": _opt(96, 12288, 96),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, **_LLAMA_2),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13824, **_LLAMA_2),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672, **_LLAMA_2),
    "llama-3.1-8b": _llama(32, 4096, 32, 8, 14336),
    "llama-3.1-70b": _llama(80, 8192, 64, 8, 28672),
    "llama-3.3-70b": _llama(80, 8192, 64, 8, 28672),
    "llama-3.1-405b": _llama(126, 16384, 128, 8, 53248),
    "smollm2-135m": _llama(
        30, 576, 9, 3, 1536, vocab_size=49152, max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "mistral-7b": _llama(
        32, 4096, 32, 8, 14336, model_type="mistral", vocab_size=32000, sliding_window=4096,
        max_position_embeddings=32768,
    ),
    "mixtral-8x7b": _llama(
        32, 4096, 32, 8, 14336, model_type="mixtral", vocab_size=32000, num_local_experts=8,
        num_experts_per_tok=2, max_position_embeddings=32768,
    ),
    "qwen2.5-7b": _llama(
        28, 3584, 28, 4, 18944, model_type="qwen2", vocab_size=152064,
        max_position_embeddings=32768,
    ),
    "qwen3-30b-a3b": _llama(
        48, 2048, 32, 4, 6144, model_type="qwen3_moe", vocab_size=151936, head_dim=128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        max_position_embeddings=40960,
    ),
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8"},
    },
}  # fmt: skip
