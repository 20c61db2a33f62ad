"""Every family that runs on several ranks gives the plain model's logits, kernels included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from daskserve.core.instance import EngineConfig, Role
from daskserve.core.placement import Parallelism
from daskserve.errors import InvalidParameter, ModelError
from daskserve.models.catalog import resolve
from daskserve.workers.forward import ForwardBatch
from daskserve.workers.parallel.loader import read_model

from .conftest import launch

WIDE = dict(
    vocab_size=211,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    max_position_embeddings=256,
    initializer_range=0.15,
)
OPT = dict(
    vocab_size=211,
    hidden_size=128,
    ffn_dim=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=256,
    init_std=0.15,
)
CASES = {
    "llama": ("llama", WIDE | dict(attention_bias=True, mlp_bias=True)),
    "llama-tied": ("llama", WIDE | dict(tie_word_embeddings=True)),
    "mistral": ("mistral", WIDE | dict(sliding_window=19)),
    "qwen2": (
        "qwen2",
        WIDE | dict(use_sliding_window=True, sliding_window=19, max_window_layers=1),
    ),
    "qwen3": ("qwen3", WIDE),
    "opt": ("opt", OPT | dict(word_embed_proj_dim=128)),
    "opt-350m": ("opt", OPT | dict(word_embed_proj_dim=64, do_layer_norm_before=False)),
}


def batch(tokens: np.ndarray, start: int, num_pages: int) -> ForwardBatch:
    end = start + len(tokens)
    return ForwardBatch(
        token_ids=tokens,
        positions=np.arange(start, end),
        query_start=np.array([0, len(tokens)], np.int32),
        context_tokens=np.array([end], np.int32),
        page_table=np.arange(num_pages, 0, -1, dtype=np.int32)[None],
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "shape",
    [Parallelism(2, 3), pytest.param(Parallelism(4, 1), marks=pytest.mark.slow)],
    ids=str,
)
def test_logits_are_those_of_the_plain_model(case, shape, write_model):
    folder = write_model(*CASES[case])
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = np.random.default_rng(0).integers(3, 211, 90)
    with torch.inference_mode():
        expected = plain(torch.from_numpy(tokens)[None]).logits[0]
    # The ranks are threads of this process, in which kernels may be compiled meanwhile.
    config = EngineConfig(model=str(folder), dtype="float32", num_threads=1, rank_timeout_s=90)
    ranks = launch(config, shape)
    try:
        ranks.runner.bind(ranks.runner.new_pool(8, 16).pages)
        for start, end in [(0, 70), (70, 71), (71, 90)]:
            logits = ranks.runner.forward(batch(tokens[start:end], start, 6))
            torch.testing.assert_close(logits[0], expected[end - 1], atol=2e-3, rtol=1e-3)
    finally:
        ranks.close()
    assert ranks.errors == {}


@pytest.mark.parametrize(
    ("role", "layers"), [(Role.PREFILL, (3, 3)), (Role.COLOCATED, (4, 2)), (Role.DECODE, (5, 1))]
)
def test_stages_are_balanced_for_what_the_instance_does(role, layers, write_model):
    settings = WIDE | dict(num_hidden_layers=6, vocab_size=80_000)
    folder = write_model("llama", settings)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = np.random.default_rng(0).integers(3, 80_000, 40)
    with torch.inference_mode():
        expected = plain(torch.from_numpy(tokens)[None]).logits[0, -1]
    config = EngineConfig(model=str(folder), dtype="float32", num_threads=1)
    ranks = launch(config, Parallelism(1, 2), role=role)
    try:
        assert ranks.runner.stage_layers == layers
        pool = ranks.runner.new_pool(8, 16)
        ranks.runner.bind(pool.pages)
        logits = ranks.runner.forward(batch(tokens, 0, 3))
        torch.testing.assert_close(logits[0], expected, atol=2e-3, rtol=1e-3)
        digests = pool.begin_digests([[1, 2, 3], [2]])()
        assert [each.shape for each in digests] == [(6, 4)] * 2
        assert all(np.all(each) for each in digests), "of every layer and head"
    finally:
        ranks.close()


@pytest.mark.parametrize("shape", [Parallelism(2, 2), Parallelism(4, 1)], ids=str)
def test_a_rank_holds_its_share_of_the_weights_only(shape, ranks_of):
    model = "tiny-random-llama"
    ranks = ranks_of(model, shape.tp, shape.pp)
    file = resolve(model) / "model.safetensors"
    with safe_open(file, "pt") as stored:
        sizes = {name: stored.get_tensor(name).numel() for name in stored.keys()}
    total = sum(count for name, count in sizes.items() if "norm" not in name)
    embedding = sizes["model.embed_tokens.weight"]
    layers = total - 2 * embedding
    stages = [ranks.runner.stage, *(follower.stage for follower in ranks.followers.values())]
    for stage in stages:
        held = sum(p.numel() for n, p in stage.base.named_parameters() if "norm" not in n)
        assert held == layers // shape.num_gpus + (embedding if stage.group.is_first else 0)
        assert (stage.head is not None) == stage.group.is_last
        if stage.head is not None:
            assert stage.head.numel() == embedding // shape.tp


@pytest.mark.parametrize(
    ("model", "shape", "error", "message"),
    [
        ("tiny-random-gemma2", (2, 1), ModelError, "gemma2 cannot be served by an instance of"),
        ("tiny-random-llama", (8, 1), InvalidParameter, "tp=8 must divide the model's 4 KV heads"),
        (
            "tiny-random-llama",
            (1, 3),
            InvalidParameter,
            "pp=3 must be at most the model's 2 layers",
        ),
        (
            "tiny-random-opt",
            (3, 1),
            InvalidParameter,
            "tp=3 must divide the model's ffn_dim of 128",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_refused(model, shape, error, message):
    with pytest.raises(error) as caught:
        read_model(Path(resolve(model)), Parallelism(*shape))
    assert message in str(caught.value)


def test_bubbles_are_measured(ranks_of):
    ranks = ranks_of("tiny-random-llama", 1, 2)
    ranks.runner.bind(ranks.runner.new_pool(64, 16).pages)
    tokens = np.random.default_rng(0).integers(3, 200, 500)
    for _ in range(5):
        ranks.runner.forward(batch(tokens, 0, 32))
    ranks.runner.beat()
    assert len(ranks.runner.busy_s) == 2
    assert all(0 < busy_s < ranks.runner.elapsed_s for busy_s in ranks.runner.busy_s)
    assert 0 < ranks.runner.bubble_share < 0.9
