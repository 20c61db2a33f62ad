"""What a simulation answers."""

from __future__ import annotations

import numpy as np
import pytest

from daskserve.core.slo import SLO
from daskserve.errors import ConfigError, InvalidParameter, WorkloadError
from daskserve.planner.simulator import Deployment, simulate, simulate_stream
from daskserve.planner.simulator.driving import Simulation
from daskserve.planner.simulator.result import STAGES
from daskserve.planner.workload import Workload

EMPTY = Workload.from_arrays([], [], [])


@pytest.fixture
def deployment(step_times):
    return Deployment.disaggregated(step_times(), 2, step_times(), 2)


def test_timelines_have_stages_and_what_follows_from_them(deployment, workload):
    lines = simulate(workload(200, 20), deployment).timelines
    total_s = sum(lines[name] for name in STAGES)
    assert (total_s >= lines["ttft_s"]).all()
    several = lines["output_tokens"] > 1
    tpot_s = (total_s - lines["ttft_s"]) / (lines["output_tokens"] - 1).where(several)
    np.testing.assert_allclose(lines["tpot_s"], tpot_s)
    assert np.isnan(lines["tpot_s"].values[~several.values]).all()


def test_attainment_is_that_of_the_slo(deployment, workload):
    result = simulate(workload(300, 30), deployment)
    slo = SLO(ttft_s=0.15, tpot_s=0.02)
    pairs = zip(result.timelines["ttft_s"].values, result.timelines["tpot_s"].values, strict=True)
    expected = slo.attained((ttft, None if np.isnan(tpot) else tpot) for ttft, tpot in pairs)
    assert result.attainment(slo) == pytest.approx(expected)
    assert 0 < expected < 1


def test_an_empty_trace_is_no_data(deployment):
    result = simulate(EMPTY, deployment)
    assert result.timelines.sizes["request"] == 0
    assert result.attainment(SLO(1, 1)) is None
    assert np.isnan(result.percentiles()["ttft_s"]).all()
    assert simulate_stream(EMPTY, deployment, SLO(1, 1)).attainment is None
    assert simulate_stream(EMPTY, deployment, SLO(1, 1)).ttft.quantile(0.5) is None


def test_instances_show_how_busy_they_were(deployment, workload):
    instances = simulate(workload(300, 20), deployment).instances
    assert instances["role"].values.tolist() == ["prefill", "prefill", "decode", "decode"]
    assert ((instances["busy_share"] > 0) & (instances["busy_share"] <= 1)).all()
    assert (instances["peak_kv_blocks"] <= instances["total_kv_blocks"]).all()


def test_half_the_memory_changes_the_answer(step_times, workload):
    trace, slo = workload(500, 25), SLO(0.5, 0.02)
    shares = [
        simulate(trace, Deployment.colocated(step_times(kv_capacity_tokens=size), 2)).attainment(
            slo
        )
        for size in (8000, 16_000)
    ]
    assert shares[0] < shares[1]


def test_a_stream_agrees_with_the_timelines(deployment, workload):
    trace, slo = workload(3000, 25), SLO(0.2, 0.016)
    result = simulate(trace, deployment)
    summary = simulate_stream(trace, deployment, slo, window_s=10)
    assert summary.num_requests == 3000
    assert summary.attainment == pytest.approx(result.attainment(slo))
    for name, histogram in (("ttft_s", summary.ttft), ("tpot_s", summary.tpot)):
        exact = np.nanquantile(result.timelines[name], [0.5, 0.9, 0.99], method="inverted_cdf")
        assert [histogram.quantile(q) for q in (0.5, 0.9, 0.99)] == pytest.approx(exact, rel=0.01)
    windows = summary.windows()
    assert windows["num_requests"].sum() == 3000
    weighted = (windows["attainment"] * windows["num_requests"]).sum() / 3000
    assert weighted == pytest.approx(summary.attainment)


def test_chunks_must_go_on_rising(deployment):
    chunks = [(np.array([5.0]), [10], [10]), (np.array([4.0]), [10], [10])]
    with pytest.raises(WorkloadError, match="not sorted"):
        list(Simulation(deployment, chunks).ended())


@pytest.mark.parametrize(
    "changes",
    [
        dict(mode="both"),
        dict(num_prefill=2),
        dict(num_decode=-1),
        dict(decode=None, num_decode=0),
        dict(chunk_tokens=64),
        dict(mode="chunked"),
        dict(mode="chunked", chunk_tokens=0),
        dict(mode="prefill_first", link_latency_s=0.1),
        dict(kv_bytes_per_token=float("nan")),
        dict(link_bandwidth=0.0),
        dict(block_size=0),
        dict(max_tokens=0),
    ],
)
def test_deployments_that_make_no_sense(step_times, changes):
    fields = dict(mode="disaggregated", decode=step_times(), num_decode=1) | changes
    with pytest.raises(ConfigError):
        Deployment(**fields)


def test_a_window_has_a_length(deployment):
    with pytest.raises(InvalidParameter, match="window_s"):
        simulate_stream(EMPTY, deployment, SLO(1, 1), window_s=0)
