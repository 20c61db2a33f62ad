"""Small random models of every family that the engine runs exactly, built once per session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

VOCAB = 211

_ROTARY = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    initializer_range=0.15,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_OPT = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    ffn_dim=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    max_position_embeddings=256,
    init_std=0.15,
    word_embed_proj_dim=48,
)
_MOE = dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)

FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", _ROTARY),
    "opt": ("opt", _OPT),
    "opt-350m": ("opt", _OPT | dict(word_embed_proj_dim=32, do_layer_norm_before=False)),
    "qwen2": ("qwen2", _ROTARY | dict(head_dim=8)),
    "qwen3": ("qwen3", _ROTARY),
    "qwen3_moe": ("qwen3_moe", _ROTARY | _MOE),
    "mistral": ("mistral", _ROTARY | dict(sliding_window=9)),
    "mixtral": ("mixtral", _ROTARY | dict(num_local_experts=4, sliding_window=None)),
    "gemma2": ("gemma2", _ROTARY | dict(sliding_window=9, query_pre_attn_scalar=16)),
    "gemma3": ("gemma3_text", _ROTARY | dict(sliding_window=9, sliding_window_pattern=2)),
    "phi3": ("phi3", _ROTARY | dict(sliding_window=None)),
    "gpt2": (
        "gpt2",
        dict(vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=6, n_positions=256)
        | dict(initializer_range=0.15, bos_token_id=1, eos_token_id=2),
    ),
    "gpt_neox": ("gpt_neox", _ROTARY),
    "olmo2": ("olmo2", _ROTARY),
    "granite": ("granite", _ROTARY | dict(attention_multiplier=0.2, residual_multiplier=0.5)),
    "smollm3": ("smollm3", _ROTARY | dict(no_rope_layers=[1, 0, 1], use_sliding_window=False)),
}

OTHERS: dict[str, tuple[str, dict]] = {
    "falcon": (
        "falcon",
        dict(vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2) | dict(num_attention_heads=6),
    ),
    "gpt_oss": ("gpt_oss", _ROTARY | dict(num_local_experts=4, sliding_window=9)),
}


def build(name: str, folder: Path) -> Path:
    """Write a random fp32 model of this family as a model directory."""
    model_type, settings = FAMILIES.get(name) or OTHERS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start as all ones or zeros: hide nothing
                parameter += torch.randn_like(parameter) * 0.2
    disable_progress_bar()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def family_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``family_dir(name)``: directory of that family's small random fp32 model."""
    return functools.cache(lambda name: build(name, tmp_path_factory.mktemp(name)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", FAMILIES)
