"""The simulation against numbers that the original printed, and against plain laws."""

import csv
import json

import numpy as np
import pytest

from daskserve.core.slo import SLO
from daskserve.errors import ConfigError, WorkloadError
from daskserve.planner.distserve import (
    Colocated,
    Disaggregated,
    draw_lengths,
    model_profile,
    simulate,
    synthetic_lengths,
)
from daskserve.planner.distserve.lengths import draw_arrivals_ms
from daskserve.planner.workload import Workload

OPT_13B = model_profile("facebook/opt-13b")

# Means of TTFT and decode time in ms that the original gives for the workload below: model,
# degrees (tp, pp of prefill, of decode), instances of each phase, requests/s. Colocated if the
# decode degrees are None.
ORIGINAL_MEANS = [
    ("opt-13b", (2, 1, 1, 1), (1, 1), 6.0, 141.46777361925405, 6945.196833436918),
    ("opt-13b", (1, 2, 1, 2), (1, 1), 4.0, 171.66090429440155, 4562.515550755564),
    ("opt-13b", (2, 4, 4, 8), (1, 1), 12.0, 133.17625913970787, 2395.922485743466),
    ("opt-13b", (1, 1, 1, 1), (3, 2), 9.0, 127.77810958170558, 6769.994301897851),
    ("opt-13b", (2, 2, 1, 4), (2, 3), 30.0, 116.98094901656611, 4962.191050710048),
    ("opt-66b", (4, 1, 2, 2), (1, 1), 4.0, 392.8239693984024, 11028.51667623659),
    ("opt-66b", (2, 2, 3, 2), (2, 1), 3.0, 362.21099799058874, 7076.230204547689),
    ("opt-13b", (1, 1, None, None), (1, 1), 3.0, 307.0722313413273, 11010.515175985849),
    ("opt-13b", (2, 2, None, None), (1, 1), 5.0, 188.0576985581912, 8660.663142376861),
    ("opt-13b", (1, 4, None, None), (2, 1), 9.0, 203.44176350390003, 10307.197620970803),
    ("opt-66b", (4, 2, None, None), (1, 1), 2.0, 431.61331454024594, 14022.341099366286),
]


def drawn(name, num_requests, rate):
    """The seed-0 workload of the original at a rate."""
    prompt, output = draw_lengths(synthetic_lengths(name), num_requests, seed=0)
    return Workload.from_arrays(draw_arrivals_ms(num_requests, rate, 0) / 1000, prompt, output)


def configuration(tp_prefill, pp_prefill, tp_decode, pp_decode):
    if not tp_decode:
        return Colocated(tp_prefill, pp_prefill)
    return Disaggregated(1, tp_prefill, pp_prefill, tp_decode, pp_decode)


@pytest.mark.parametrize(("pp", "ttft_ms"), [(1, 75.19988), (2, 78.19988)])
def test_a_lone_request_takes_the_published_times(pp, ttft_ms):
    lone = Workload.from_arrays([0.0], [512], [64])
    latencies = simulate(OPT_13B, configuration(1, pp, 1, pp), lone)
    assert latencies.ttft_s[0] * 1000 == pytest.approx(ttft_ms, abs=5e-6)
    assert latencies.decode_s[0] * 1000 == pytest.approx(1431.61127, abs=5e-6)
    assert latencies.tpot_s[0] * 1000 == pytest.approx(22.36893, abs=5e-6)


@pytest.mark.parametrize(
    ("model", "degrees", "counts", "rate", "ttft_ms", "decode_ms"), ORIGINAL_MEANS
)
def test_means_equal_the_original_for_any_pipeline_and_count(
    model, degrees, counts, rate, ttft_ms, decode_ms
):
    generator = np.random.RandomState(5)
    arrival_ms = np.concatenate([[0.0], np.cumsum(generator.exponential(1000 / rate, 199))])
    arrival_ms[100:110] = arrival_ms[100]  # ten at once
    prompt, output = generator.randint(1, 1800, 200), generator.randint(1, 300, 200)
    latencies = simulate(
        model_profile(f"facebook/{model}"),
        configuration(*degrees),
        Workload.from_arrays(arrival_ms / 1000, prompt, output),
        num_prefill=counts[0],
        num_decode=counts[1],
    )
    assert latencies.ttft_s.mean() * 1000 == pytest.approx(ttft_ms, rel=1e-9)
    assert latencies.decode_s.mean() * 1000 == pytest.approx(decode_ms, rel=1e-9)


@pytest.mark.parametrize(
    "case",
    [
        "A-13b-sharegpt-2111-r4.5-n300",
        "B-13b-sharegpt-2111-r6-n300",
        "D-66b-sharegpt-4122-r4-n300",
        "E-66b-humaneval-4122-r8-n300",
    ],
)
def test_every_request_equals_the_original(distserve_dir, case):
    summary = json.loads((distserve_dir / "reference" / "latency-summary.json").read_text())
    (row,) = [row for row in summary if row["id"] == case]
    with open(distserve_dir / "reference" / f"latency-{case}.csv", newline="") as file:
        expected = list(csv.DictReader(file))
    latencies = simulate(
        model_profile("facebook/" + row["model"].replace("_", "-")),
        configuration(row["tp_prefill"], row["pp_prefill"], row["tp_decode"], row["pp_decode"]),
        drawn(row["workload"], row["N"], row["rate"]),
    )
    data = latencies.dataset()
    for name in ("ttft", "decode", "total", "tpot"):
        expected_ms = [float(request[f"{name}_ms"]) for request in expected]
        np.testing.assert_allclose(data[f"{name}_s"].values * 1000, expected_ms, rtol=1e-6)


def test_every_rate_point_equals_the_original_to_the_printed_digits(distserve_dir):
    points = json.loads((distserve_dir / "reference" / "points-n1000.json").read_text())
    assert len(points) == 12
    for point in points:
        latencies = simulate(
            model_profile("facebook/" + point["model"].replace("_", "-")),
            configuration(point["tp_p"], point["pp_p"], point["tp_d"], point["pp_d"]),
            drawn(point["workload"], point["N"], point["rate"]),
        )
        slo = SLO(point["ttft"] / 1000, point["tpot"] / 1000)
        for metric, values in (("ttft", latencies.ttft_s), ("tpot", latencies.tpot_s)):
            for percent in (50, 90, 99):
                percentile_ms = np.quantile(values, percent / 100) * 1000
                assert round(percentile_ms, 3) == point[f"{metric}_p{percent}"]
            limit_s = getattr(slo, f"{metric}_s")
            attained = np.mean(values <= limit_s) * 100
            assert attained == pytest.approx(point[f"att_{metric}"], abs=1e-9)
        assert latencies.attained(slo) * 100 == pytest.approx(point["att_both"], abs=1e-9)
        assert latencies.passes(slo) == all(point["p90_ok"])
        assert round(latencies.total_s.mean() * 1000, 3) == point["mean_total"]


def test_percentiles_of_the_published_case_need_no_files():
    latencies = simulate(OPT_13B, configuration(2, 1, 1, 1), drawn("sharegpt", 300, 4.5))
    ttft_ms = np.quantile(latencies.ttft_s, [0.5, 0.9]) * 1000
    tpot_ms = np.quantile(latencies.tpot_s, [0.5, 0.9]) * 1000
    assert ttft_ms.round(3).tolist() == [79.492, 162.745]
    assert tpot_ms.round(3).tolist() == [48.95, 50.97]


def test_the_same_input_gives_the_same_bytes():
    workload = drawn("sharegpt", 200, 8.0)
    first, second = (simulate(OPT_13B, configuration(1, 2, 1, 4), workload) for _ in range(2))
    assert first.total_s.tobytes() == second.total_s.tobytes()


def test_more_instances_never_slow_the_mean():
    workload = drawn("sharegpt", 300, 9.0)
    few = simulate(OPT_13B, configuration(1, 1, 1, 1), workload)
    many = simulate(OPT_13B, configuration(1, 1, 1, 1), workload, num_prefill=3, num_decode=3)
    assert many.ttft_s.mean() < few.ttft_s.mean()
    assert many.tpot_s.mean() < few.tpot_s.mean()


def test_an_empty_trace_is_no_data():
    empty = Workload.from_arrays([], [], [])
    latencies = simulate(OPT_13B, Colocated(1, 1), empty)
    assert latencies.attained(SLO(0.2, 0.1)) is None
    with pytest.raises(WorkloadError, match="no data"):
        latencies.passes(SLO(0.2, 0.1))


@pytest.mark.parametrize(
    ("prompt", "output", "complaint"),
    [(70_000, 1, "70000 prompt tokens"), (49_990, 20, "50010 tokens")],
)
def test_a_request_that_no_step_can_take_is_named(prompt, output, complaint):
    workload = Workload.from_arrays([0.0, 1.0], [10, prompt], [1, output])
    with pytest.raises(WorkloadError, match=f"request 1 .*{complaint}"):
        simulate(OPT_13B, configuration(1, 1, 1, 1), workload)


def test_counts_that_mean_nothing_are_refused():
    lone = Workload.from_arrays([0.0], [512], [64])
    with pytest.raises(ConfigError, match="num_prefill=0"):
        simulate(OPT_13B, configuration(1, 1, 1, 1), lone, num_prefill=0)
    with pytest.raises(ConfigError, match="colocated"):
        simulate(OPT_13B, Colocated(1, 1), lone, num_decode=2)
