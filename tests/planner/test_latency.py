from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.core.placement import Parallelism
from daskserve.errors import ConfigError, ModelError
from daskserve.planner.hardware import GPUS
from daskserve.planner.latency import (
    DistServeA100,
    Efficiencies,
    MemoryBudget,
    PaperCoefficients,
    PaperModel,
    Roofline,
    TableModel,
    fit_efficiencies,
    fit_paper_model,
    kv_capacity_tokens,
    median_error,
    read_profile,
)
from daskserve.planner.model_spec import ModelSpec

SYSTEMS = {"H100": ("h100_sxm", "vllm"), "H200": ("h200_sxm", "trtllm")}
MODELS = {"llama-3.1-8b": "Meta-Llama-3.1-8B", "llama-3.1-70b": "Meta-Llama-3.1-70B"}
A100, H100 = GPUS["A100"], GPUS["H100"]


@pytest.fixture(scope="session")
def measured(step_latency_csv):
    def rows(gpu):
        system, backend = SYSTEMS[gpu]
        return [
            (
                ModelSpec.load(name),
                GPUS[gpu],
                read_profile(step_latency_csv, system=system, backend=backend, model=label),
            )
            for name, label in MODELS.items()
        ]

    return {gpu: rows(gpu) for gpu in SYSTEMS}


@pytest.mark.parametrize(("seen", "unseen"), [("H100", "H200"), ("H200", "H100")])
def test_fitted_on_one_system_it_holds_on_the_other(measured, seen, unseen):
    fitted = Roofline(fit_efficiencies(measured[seen]))
    for phase in ("prefill", "decode"):
        assert median_error(fitted, measured[unseen], phase) <= 0.07


def test_default_efficiencies(measured):
    for rows in measured.values():
        for phase in ("prefill", "decode"):
            assert median_error(Roofline(), rows, phase) <= 0.07


def test_models_of_one_profile_repeat_it(measured):
    for model, gpu, profile in measured["H100"]:
        rows = [(model, gpu, profile)]
        for phase in ("prefill", "decode"):
            assert median_error(TableModel(profile), rows, phase) <= 0.01
            assert median_error(fit_paper_model(model, profile), rows, phase) <= 0.1


def test_published_coefficients_give_the_published_time():
    model = ModelSpec.load("opt-13b")
    step = DistServeA100().step_times(model, A100, Parallelism())
    # 75.19988 ms, of which 2 + 0.0001 * 512 ms are the original's Ray overhead
    assert step.prefill_s(512) == pytest.approx(75.19988e-3 - 2.0512e-3, rel=1e-6)
    assert step.decode_s(1, 512) == pytest.approx(
        1e-3 * (19.934702624895458 + 0.0006269356524350583 * 513 + 0.03850697740828398)
    )
    assert step.kv_capacity_tokens == 66144


def lower_bounds(model, gpu, tp, batch, length):
    flops, bandwidth = tp * gpu.flops, tp * gpu.memory_bandwidth
    # Step times know tokens, not prompts: the head is counted once, a part in ten thousand.
    extra_heads = (batch - 1) * 2 * model.hidden_size * model.vocab_size
    prefill = max(
        (batch * model.prefill_flops(length) - extra_heads) / flops,
        model.weight_bytes_read(batch * length) / bandwidth,
    )
    read = model.weight_bytes_read(batch) + model.kv_bytes_per_token * batch * length
    compute = batch * 2 * model.num_active_parameters / flops
    return prefill, max(compute, read / bandwidth)


@given(
    st.sampled_from(["llama-3.1-8b", "mixtral-8x7b", "qwen3-30b-a3b", "opt-13b"]),
    st.sampled_from(sorted(GPUS)),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 64),
    st.integers(1, 2048),
)
def test_nothing_beats_the_data_sheet(name, gpu, tp, batch, length):
    model, kind = ModelSpec.load(name), GPUS[gpu]
    too_fast = PaperCoefficients(1e-18, 1e-25, 1e-9, 1e-18, 1e-25)
    perfect = Efficiencies(1, 1, 1, 1, 1, 0, 0, 0)
    for latency in (PaperModel({tp: too_fast}), Roofline(perfect)):
        try:
            step = latency.step_times(model, kind, Parallelism(tp))
        except ModelError:
            continue  # does not fit
        prefill, decode = lower_bounds(model, kind, tp, batch, length)
        assert step.prefill_s(batch * length, batch * length**2) >= prefill * (1 - 1e-5)
        assert step.decode_s(batch, batch * length) >= decode * (1 - 1e-5)


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 8000), st.integers(1, 500))
def test_more_work_takes_longer(tp, tokens, batch):
    step = Roofline().step_times(ModelSpec.load("llama-3.1-8b"), H100, Parallelism(tp))
    assert step.prefill_s(tokens + 1) >= step.prefill_s(tokens)
    assert step.decode_s(batch + 1, 1000 * batch) >= step.decode_s(batch, 1000 * batch)
    assert step.decode_s(batch, 1001 * batch) >= step.decode_s(batch, 1000 * batch)


def test_kv_that_no_batch_fills_is_not_planned_with():
    model = replace(ModelSpec.load("opt-13b"), kv_values_per_token=1)
    tokens = kv_capacity_tokens(model, A100, Parallelism(), step_tokens=512, batch_size=8)
    assert tokens == 8 * model.context_tokens
    assert kv_capacity_tokens(model, A100, Parallelism(1, 2), 512, 8) == 2 * tokens


def test_kv_capacity_follows_the_pool():
    model = ModelSpec.load("opt-13b")
    whole = Roofline().step_times(model, A100, Parallelism()).kv_capacity_tokens
    half = Roofline(memory=MemoryBudget(kv_share=0.5)).step_times(model, A100, Parallelism())
    assert half.kv_capacity_tokens == pytest.approx(whole / 2, rel=0.01)
    published = DistServeA100().step_times(model, A100, Parallelism()).kv_capacity_tokens
    assert whole == pytest.approx(published, rel=0.15)


def test_copied_kv_heads_save_no_memory():
    model = ModelSpec.load("llama-3.1-8b")
    spec = ModelSpec.from_config({**_config(model), "num_key_value_heads": 2})
    by_tp = {tp: Roofline().step_times(spec, H100, Parallelism(tp)) for tp in (2, 4)}
    assert by_tp[4].kv_capacity_tokens < 1.3 * by_tp[2].kv_capacity_tokens


def _config(model):
    from daskserve.planner.model_presets import MODEL_CONFIGS

    return MODEL_CONFIGS[model.name]


@pytest.mark.parametrize(
    ("name", "gpu", "parallelism", "message"),
    [
        ("opt-66b", "A100", Parallelism(1, 1), "does not fit on 1 x A100"),
        ("opt-66b", "A100", Parallelism(5, 1), "TP must divide 72 heads"),
        ("opt-66b", "A100", Parallelism(2, 3), "PP must divide 64 layers"),
    ],
)
def test_splits_that_cannot_be(name, gpu, parallelism, message):
    with pytest.raises(ModelError, match=message):
        Roofline().step_times(ModelSpec.load(name), GPUS[gpu], parallelism)


def test_published_coefficients_know_their_limits():
    model = ModelSpec.load("opt-13b")
    with pytest.raises(ConfigError, match="of the A100, not of H100"):
        DistServeA100().step_times(model, H100, Parallelism())
    with pytest.raises(ModelError, match="TP=8"):
        DistServeA100().step_times(model, A100, Parallelism(8))
    with pytest.raises(ConfigError, match="no published profile"):
        DistServeA100().step_times(ModelSpec.load("llama-3.1-8b"), A100, Parallelism())
    with pytest.raises(ConfigError, match="no step times of opt-175b"):
        DistServeA100().step_times(ModelSpec.load("opt-175b"), A100, Parallelism(8))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no data"),
        ("phase,tokens,batch,tp\nprefill,1,1,1\n", "no column latency_s or latency_ms"),
        ("phase,tokens,batch,tp,latency_s\nprefill,1,1,1,0\n", "'0' must be a number above 0"),
        ("phase,tokens,batch,tp,latency_s\nboth,1,1,1,1\n", "phase 'both'"),
    ],
)
def test_bad_profiles(tmp_path, text, message):
    path = tmp_path / "profile.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_profile(path)


def test_efficiencies_are_shares():
    for bad in (0.0, 1.2, float("nan")):
        with pytest.raises(ConfigError, match="compute"):
            Efficiencies(compute=bad)


def test_pipeline_over_a_slow_network_costs_time():
    model = ModelSpec.load("llama-3.1-70b")
    fast = Roofline().step_times(model, H100, Parallelism(2, 4))
    slow = Roofline(network_bandwidth=25e9 / 8).step_times(model, H100, Parallelism(2, 4))
    assert slow.prefill_s(2048) > fast.prefill_s(2048)
    assert np.all(slow.decode_base_s[1:] > fast.decode_base_s[1:])
