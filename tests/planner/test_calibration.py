"""The profile file of ``daskserve calibrate``, and plans made with it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from daskserve.cli import main
from daskserve.core.placement import Parallelism
from daskserve.errors import ConfigError, ModelError
from daskserve.planner.hardware import GPU, Cluster, gpu_named
from daskserve.planner.latency import Calibration, read_calibration
from daskserve.planner.model_spec import ModelSpec

SLO = ["--prompt-tokens", "128", "--output-tokens", "16", "--ttft", "1", "--tpot", "0.1"]


def fitted(value: float) -> dict:
    return {"value": value, "low": value, "high": value}


def measured(median_s: float) -> dict:
    return {"median_s": median_s, "spread_s": 0.0, "num_repeats": 3}


def slowdown(mean: float) -> dict:
    return {"mean": mean, "spread": 0.0, "num_repeats": 3}


def coefficients(weights: float) -> dict:
    single = {
        "c1_s_per_weight_token": 20e-6 / weights,
        "c2_s_per_attention_token_squared": 0.0,
        "c3_s": 0.010,
        "per_prompt_s": 0.0,
        "c4_s_per_weight": 0.005 / weights,
        "c5_s_per_attention_token": 0.0,
    }
    growth = [fitted(0.001 * b / weights) | {"batch": b} for b in (1, 4, 24)]
    return {name: fitted(value) for name, value in single.items()} | {"growth_s_per_weight": growth}


def document(**changes) -> dict:
    """A profile of llama-3.1-8b on a fast machine: 10 ms + 20 us per token, 5 ms + 1 ms per row."""
    weights = ModelSpec.load("llama-3.1-8b").num_active_parameters
    error = {"num_fitted": 10, "num_held_out": 5, "median": 0.02, "p90": 0.05, "limit": 0.1}
    return {
        "schema_version": 6,
        "is_trusted": True,
        "why_not": [],
        "measured_at": "2026-01-01T00:00:00+00:00",
        "machine": {
            "cpu": "some",
            "num_cores": 2,
            "memory_bytes": 10**11,
            "system": "Linux",
            "versions": {"torch": "2.13.0"},
        },
        "engine": {
            "model": "llama-3.1-8b",
            "dtype": "bfloat16",
            "num_threads": 1,
            "block_size": 16,
            "prefill_budget_tokens": 384,
            "max_batch_size": 24,
        },
        "model": asdict(ModelSpec.load("llama-3.1-8b")),
        "hardware": {
            "name": "CPU",
            "memory_bytes": 1e11,
            "flops_per_s": 1e16,
            "memory_bytes_per_s": 1e14,
            "link_bytes_per_s": 2e9,
        },
        "coefficients": coefficients(weights),
        "errors": {phase: error | {"paper_median": 0.3} for phase in ("prefill", "decode")},
        "steps": [
            measured(0.0126)
            | {"phase": "prefill", "batch": 1, "tokens": 128}
            | {"predicted_s": 0.01256, "is_held_out": True}
        ],
        "kv_transfers": [measured(0.01) | {"kv_bytes": 2**20}],
        "overheads": {
            "is_colocated": False,
            "dispatch": measured(0.1),
            "hand_over": measured(0.003),
            "prefill_extra": measured(0.002),
            "prefill_extra_per_token_s": 0.0,
            "decode_extra": measured(0.004),
            "decode_extra_per_request_s": 0.0005,
            "kv_latency_s": 0.001,
        },
        "sharing": {
            "prefill": slowdown(0.1),
            "decode": slowdown(0.2),
            "prefill_added_s": 0.003,
            "prefill_following_s": 0.004,
        },
    } | changes


@pytest.fixture
def write(tmp_path):
    def write(**changes) -> str:
        path = tmp_path / "profile.json"
        path.write_text(json.dumps(document(**changes)))
        return str(path)

    return write


def test_what_is_written_is_read_back(write, tmp_path):
    found = read_calibration(write())
    found.write(tmp_path / "again.json")
    assert read_calibration(tmp_path / "again.json") == found
    assert isinstance(found, Calibration) and isinstance(found.model, ModelSpec)


def test_step_times_are_the_fit_and_what_a_service_adds(write):
    latency = read_calibration(write()).latency()
    step = latency.step_times(latency.model, gpu_named("CPU"), Parallelism())
    assert step.prefill_s(1000) == pytest.approx(0.010 + 0.002 + 0.003 + 0.020)
    assert step.decode_s(8, 0) == pytest.approx(0.005 + 0.004 + 0.008 + 0.004, rel=1e-3)
    alone = latency.alone().step_times(latency.model, gpu_named("CPU"), Parallelism())
    assert alone.prefill_s(1000) == pytest.approx(0.030)
    assert (step.prefill_budget_tokens, step.max_batch_size) == (384, 24)
    assert (step.prefill_following_s, alone.prefill_following_s) == (0.004, 0.0)
    cluster = latency.on(Cluster.of("CPU", 1, 2))
    assert cluster.groups[0].gpu.link_bandwidth == 2e9
    assert cluster.link_latency_s == pytest.approx(0.004)
    assert (cluster.prefill_slowdown, cluster.decode_slowdown) == (0.1, 0.2)


def test_other_hardware_models_and_splits_are_refused(write):
    latency = read_calibration(write()).latency()
    h100 = gpu_named("H100")
    assert latency.measured(h100) is h100
    with pytest.raises(ConfigError, match="is of CPU, not of H100"):
        latency.step_times(latency.model, h100, Parallelism())
    with pytest.raises(ConfigError, match="opt-13b has other sizes"):
        latency.step_times(ModelSpec.load("opt-13b"), latency.hardware, Parallelism())
    with pytest.raises(ModelError, match="one process, not of TP2xPP1"):
        latency.step_times(latency.model, latency.hardware, Parallelism(2))
    assert isinstance(latency.hardware, GPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 1, "new": 1}, "schema_version=1; this reads version 6"),
        ({"is_trustd": True}, "is_trustd is not a key; did you mean is_trusted?"),
        ({"is_trusted": "yes"}, "is_trusted: Input should be a valid boolean"),
        ({"overheads": {"is_colocated": False}}, "overheads.dispatch: Field required"),
        ({"model": document()["model"] | {"num_layer": 3}}, "num_layer is not a key; did you mean"),
        ({"model": document()["model"] | {"num_layers": "3"}}, "model.num_layers: "),
        ({"hardware": document()["hardware"] | {"flops_per_s": 0}}, "hardware.flops_per_s: "),
        ({"kv_transfers": [measured(-1.0) | {"kv_bytes": 1}]}, "kv_transfers.0.median_s: "),
        ({"errors": {"prefill": document()["errors"]["prefill"]}}, "errors.decode: Field required"),
    ],
)
def test_what_is_wrong_is_named(write, changes, message):
    with pytest.raises(ConfigError) as caught:
        read_calibration(write(**changes))
    assert message in str(caught.value)


def test_requests_of_a_batch_cost_in_a_service_even_where_steps_do_not_grow(write):
    flat = coefficients(ModelSpec.load("llama-3.1-8b").num_active_parameters)
    latency = read_calibration(write(coefficients=flat | {"growth_s_per_weight": []})).latency()
    step = latency.step_times(latency.model, latency.hardware, Parallelism())
    assert step.decode_s(24, 0) - step.decode_s(1, 0) == pytest.approx(23 * 0.0005)


def test_no_json_and_no_file(tmp_path):
    (tmp_path / "half.json").write_text('{"schema_version": 6')
    with pytest.raises(ConfigError, match="half.json: Invalid JSON"):
        read_calibration(tmp_path / "half.json")
    with pytest.raises(ConfigError, match="cannot read"):
        read_calibration(tmp_path / "none.json")


def test_plan_and_simulate_read_it(write, tmp_path):
    placement = str(tmp_path / "placement.yaml")
    words = [*SLO, "--rate", "20", "--latency", write(), "--seeds", "1"]
    planned = CliRunner().invoke(main, ["plan", "--gpus", "CPU:2", "-o", placement, *words])
    assert planned.exit_code == 0, planned.output
    assert "without 100.0 ms of dispatch" in planned.output
    assert "prefill_budget_tokens: 384" in Path(placement).read_text()
    simulated = CliRunner().invoke(main, ["simulate", placement, *words, "--requests", "500"])
    assert simulated.exit_code == 0, simulated.output
    ttft = next(line for line in simulated.output.splitlines() if line.startswith("ttft"))
    assert float(ttft.split()[1]) > 0.1 + 0.010 + 0.002 + 128 * 20e-6 - 1e-6


def test_the_hand_over_is_simulated(write, tmp_path):
    placement = tmp_path / "placement.yaml"
    row = "- {{role: {}, tp: 1, pp: 1, gpu_type: CPU, gpus: [[0, {}]]}}\n"
    rows = row.format("PREFILL", 0) + row.format("DECODE", 1)
    placement.write_text("version: 1\ngpus_per_node: 2\ninstances:\n" + rows)
    words = [str(placement), *SLO, "--rate", "1", "--latency", write(), "--requests", "100"]
    simulated = CliRunner().invoke(main, ["simulate", *words, "--seeds", "1"])
    assert simulated.exit_code == 0, simulated.output
    line = next(one for one in simulated.output.splitlines() if one.startswith("kv_transfer"))
    kv_bytes = 128 * ModelSpec.load("llama-3.1-8b").kv_bytes_per_token
    assert float(line.split()[1]) == pytest.approx(0.004 + kv_bytes / 2e9, abs=1e-4)


def test_untrusted_profiles_are_refused_unless_told_otherwise(write, tmp_path):
    path = write(is_trusted=False, why_not=["decode: off by 40 %"])
    words = ["plan", "--gpus", "CPU:2", *SLO, "--rate", "20", "--seeds", "1", "--latency", path]
    words += ["-o", str(tmp_path / "placement.yaml")]
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 1
    assert "is not trusted: decode: off by 40 %" in refused.output
    assert CliRunner().invoke(main, [*words, "--allow-untrusted"]).exit_code == 0


def test_contradicting_options_are_refused(write):
    plan = ["plan", *SLO, "--rate", "1"]
    for words, message in (
        (["--gpus", "CPU:2", "--latency", "roofline", "--allow-untrusted"], "is for --latency"),
        (["--gpus", "H100:1", "--latency", write()], "is of CPU, not of H100"),
        (["--gpus", "CPU:2", "--latency", write(), "--model", "opt-13b"], "has other sizes"),
        (["--gpus", "CPU:2", "--latency", write(), "--ttft", "0.05"], "less than the calibrated"),
    ):
        answer = CliRunner().invoke(main, [*plan, *words])
        assert answer.exit_code == 1 and message in answer.output, answer.output
