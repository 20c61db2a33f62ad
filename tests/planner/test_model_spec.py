from __future__ import annotations

import json

import pytest

from daskserve.core.placement import Parallelism
from daskserve.errors import ModelError
from daskserve.planner.model_presets import MODEL_CONFIGS
from daskserve.planner.model_spec import ModelSpec

LLAMA = MODEL_CONFIGS["llama-3.1-8b"]


@pytest.mark.parametrize(
    ("name", "kv_bytes", "billions"),
    [
        ("opt-13b", 819_200, 12.85),
        ("opt-66b", 2_359_296, 65.72),
        ("opt-175b", 4_718_592, 174.60),
        ("llama-3.1-70b", 327_680, 70.55),
        ("mixtral-8x7b", 131_072, 46.70),
        ("qwen3-30b-a3b", 98_304, 30.53),
        ("deepseek-v3", 70_272, 671.03),
    ],
)
def test_published_sizes(name, kv_bytes, billions):
    model = ModelSpec.load(name)
    assert model.kv_bytes_per_token == kv_bytes
    assert model.num_parameters == pytest.approx(billions * 1e9, rel=2e-3)


@pytest.mark.parametrize(
    "model_type",
    ["opt", "llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gpt2", "phi3", "bloom"],
)
def test_parameters_equal_those_of_the_model_class(model_type):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    small = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
             "num_key_value_heads": 4, "vocab_size": 5000, "intermediate_size": 512,
             "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    if model_type in ("gpt2", "bloom"):
        small.pop("intermediate_size")  # these have another name for it, or none
    config = transformers.CONFIG_MAPPING[model_type](**small)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    real = sum(parameter.numel() for parameter in built.parameters())
    assert ModelSpec.from_config(config.to_dict()).num_parameters == pytest.approx(real, rel=2e-3)


def test_experts_are_read_only_when_chosen():
    model = ModelSpec.load("mixtral-8x7b")
    one_token = model.weight_bytes_read(1)
    assert one_token == pytest.approx(model.num_active_parameters * 2, rel=1e-6)
    assert one_token < model.weight_bytes_read(4) < model.weight_bytes_read(64)
    assert model.weight_bytes_read(1e4) == pytest.approx(model.weight_bytes, rel=0.01)


def test_sliding_window_saves_time_but_not_memory():
    full = ModelSpec.from_config({**LLAMA, "model_type": "mistral"})
    sliding = ModelSpec.from_config({**LLAMA, "model_type": "mistral", "sliding_window": 1024})
    assert sliding.kv_bytes_per_token == full.kv_bytes_per_token
    assert sliding.prefill_flops(1024) == full.prefill_flops(1024)
    assert sliding.prefill_flops(8192) < full.prefill_flops(8192)
    assert sliding.decode_flops(8192) < full.decode_flops(8192)


def test_reads_a_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    model = ModelSpec.load(str(tmp_path))
    assert (model.num_layers, model.name) == (32, tmp_path.name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"hidden_size": -1}, "hidden_size=-1"),
        ({"num_key_value_heads": 7}, "7 KV heads"),
        ({"model_type": "mamba"}, "not a decoder-only transformer"),
        ({"is_encoder_decoder": True}, "not a decoder-only transformer"),
        ({"quantization_config": {"quant_method": "magic"}}, "unknown quantisation 'magic'"),
    ],
)
def test_configs_that_cannot_be_planned_say_why(change, message):
    with pytest.raises(ModelError, match=message):
        ModelSpec.from_config({**LLAMA, **change})


def test_unknown_name_lists_the_presets():
    with pytest.raises(ModelError, match="opt-175b"):
        ModelSpec.load("opt-9000b")


def test_quantised_weights_are_smaller():
    fp8 = ModelSpec.from_config({**LLAMA, "quantization_config": {"quant_method": "fp8"}})
    assert fp8.weight_bytes == ModelSpec.load("llama-3.1-8b").weight_bytes / 2
    halved = ModelSpec.load("llama-3.1-8b").with_precision(kv_bytes=1)
    assert halved.kv_bytes_per_token == 65_536


def test_splits_must_divide_heads_and_layers():
    model = ModelSpec.load("opt-66b")  # 72 heads, 64 layers
    assert model.divides(Parallelism(tp=8, pp=4)) and model.divides(Parallelism(tp=3))
    assert not model.divides(Parallelism(tp=5)) and not model.divides(Parallelism(pp=3))
    assert ModelSpec.load("llama-3.1-70b").kv_copies(16) == 2
