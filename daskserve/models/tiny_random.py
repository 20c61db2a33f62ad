"""``tiny-random-<architecture>``: small models of each family, built on the spot for tests.

The weights are random with a fixed seed. They are larger than a trained model's initial ones,
and biases and norms are not left at 0 and 1, so that attention is far from uniform and a mistake
in positions, masks, biases or norms changes the tokens.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from pathlib import Path
from typing import Any

from daskserve.errors import ModelError
from daskserve.models import byte_tokenizer
from daskserve.models.cache import build_once
from daskserve.models.engine_packages import (
    TRANSFORMERS_LOCK,
    engine_packages,
    no_progress_bars,
)

PREFIX = "tiny-random-"
MOCK = "mock"
MOCK_CONTEXT_TOKENS = 8192
_CONTEXT_TOKENS = 2048
_SEED = 20240611
_WEIGHT_STD = 0.15
_VECTOR_STD = 0.1

_DECODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": _CONTEXT_TOKENS,
    "tie_word_embeddings": False,
}
_OPT = {
    "model_type": "opt",
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": _CONTEXT_TOKENS,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOWED = {"sliding_window": 32, "num_hidden_layers": 3, "head_dim": 8}

# Only what differs from the family's own defaults; ``model_type`` is the name unless given.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _DECODER,
    "opt": _OPT,
    "opt-350m": _OPT | {"word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "qwen2": _DECODER,
    "qwen3": _DECODER | {"head_dim": 16},
    "qwen3_moe": _DECODER
    | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mistral": _DECODER | {"sliding_window": None},
    "mixtral": _DECODER | _EXPERTS,
    "gemma2": _DECODER | _WINDOWED | {"query_pre_attn_scalar": 8, "tie_word_embeddings": True},
    "gemma3": _DECODER
    | _WINDOWED
    | {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 8,
        "sliding_window_pattern": 3,
    },
    "phi3": _DECODER | {"original_max_position_embeddings": _CONTEXT_TOKENS},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": _CONTEXT_TOKENS},
    "gpt_neox": {key: value for key, value in _DECODER.items() if key != "num_key_value_heads"},
    "olmo2": _DECODER,
    "granite": _DECODER | {"attention_multiplier": 0.3, "residual_multiplier": 0.7},
    "smollm3": _DECODER | {"num_hidden_layers": 4, "no_rope_layer_interval": 4},
    "gpt_oss": _DECODER | _EXPERTS | {"sliding_window": 32, "head_dim": 8},
    "falcon": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "multi_query": True,
        "max_position_embeddings": _CONTEXT_TOKENS,
    },
}


def names() -> list[str]:
    """Every name that ``build`` accepts."""
    return [MOCK, *(PREFIX + architecture for architecture in ARCHITECTURES)]


def build(name: str) -> Path:
    """The directory of a random model or of the mock, made in the cache if it is not there."""
    if name == MOCK:
        return build_once(f"{MOCK}-{_fingerprint({})}", _write_mock)
    architecture = name.removeprefix(PREFIX)
    if architecture not in ARCHITECTURES:
        near = difflib.get_close_matches(architecture, ARCHITECTURES, n=1)
        hint = f" (did you mean {PREFIX}{near[0]}?)" if near else ""
        raise ModelError(f"no model {name!r}{hint}; {PREFIX}* is one of {', '.join(ARCHITECTURES)}")
    config = _full_config(architecture)
    return build_once(f"{name}-{_fingerprint(config)}", lambda folder: _write_model(folder, config))


def _full_config(architecture: str) -> dict[str, Any]:
    shared = {
        "model_type": architecture,
        "vocab_size": byte_tokenizer.VOCAB_SIZE,
        "initializer_range": _WEIGHT_STD,
        "bos_token_id": None,
        "eos_token_id": byte_tokenizer.END_OF_TURN_ID,
        "pad_token_id": byte_tokenizer.PAD_ID,
    }
    return shared | ARCHITECTURES[architecture]


def _fingerprint(config: dict[str, Any]) -> str:
    """Changes with the recipe, so that an old build in the cache is not taken for a new one."""
    sources = [Path(__file__), Path(byte_tokenizer.__file__)]
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:10]


def _write_mock(folder: Path) -> None:
    byte_tokenizer.write(folder)
    config = {
        "model_type": MOCK,
        "vocab_size": byte_tokenizer.VOCAB_SIZE,
        "max_position_embeddings": MOCK_CONTEXT_TOKENS,
        "eos_token_id": byte_tokenizer.END_OF_TURN_ID,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _write_model(folder: Path, config: dict[str, Any]) -> None:
    with engine_packages("building a random model"):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

    with TRANSFORMERS_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * _VECTOR_STD)
    model.generation_config.eos_token_id = byte_tokenizer.END_OF_TURN_ID
    model.generation_config.pad_token_id = byte_tokenizer.PAD_ID
    with no_progress_bars():
        model.save_pretrained(folder)
    byte_tokenizer.write(folder)
