from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.bench.record import OK, Record
from daskserve.bench.results import Results
from daskserve.bench.summary import Summary, failure_lines
from daskserve.bench.tables import scale_lines, scaled, stage_lines
from daskserve.core.slo import SLO
from daskserve.errors import ConfigError, WorkloadError
from daskserve.planner.traces import read_workload

SLO_1 = SLO(ttft_s=0.1, tpot_s=0.02)


def answered(index, sent_s, ttft_s, gaps_s, **given):
    end_s = sent_s + ttft_s + sum(gaps_s)
    record = Record(index, sent_s, 7, 9, len(gaps_s) + 1, sent_s, sent_s + ttft_s, end_s, end_s, OK)
    record.gaps_s = array("f", gaps_s)
    for name, value in given.items():
        setattr(record, name, value)
    return record


def failed(index, sent_s, end_s, status="429 overloaded", **given):
    record = Record(index, sent_s, given.pop("prompt_tokens", 7), 9, sent_s=sent_s, end_s=end_s)
    record.status, record.message = status, "full"
    return record


def sample():
    stages = (0.01, 0.02, 0.003, 0.004, 0.05)
    return [
        answered(0, 0.0, 0.05, [0.01, 0.01, 0.01], stages_s=stages),
        answered(1, 0.02, 0.2, [0.01]),
        answered(2, 0.5, 0.05, []),
        failed(3, 0.6, 2.0),
    ]


def test_figures_by_hand():
    summary = Summary.of(Results.of([sample()]), SLO_1, rate=3.0, num_instances=2)
    assert (summary.num_ok, summary.num_failed, summary.duration_s) == (3, 1, 2.0)
    assert (summary.prompt_tokens, summary.output_tokens) == (21, 7)
    assert summary.peak_concurrency == 2
    # The second misses TTFT, the fourth failed; one output token has no TPOT to miss.
    assert summary.attainment == 0.5
    assert summary.goodput == pytest.approx(1.0)
    assert summary.goodput_per_instance == pytest.approx(0.5)
    ttft, tpot, itl = (summary.latencies[name] for name in ("ttft", "tpot", "itl"))
    assert (ttft.mean_ms, ttft.quantiles_ms[0]) == pytest.approx((100.0, 50.0))
    assert (tpot.mean_ms, tpot.std_ms) == pytest.approx((10.0, 0.0))
    assert itl.mean_ms == pytest.approx(10.0)
    lines = summary.lines()
    assert "Successful requests:                     3" in lines
    assert "Request throughput (req/s):              1.50" in lines
    assert "P99 TTFT (ms):                           197.00" in lines


def test_nothing_measured_shows_no_figures_and_no_crash(tmp_path):
    results = Results.of([[]])
    lines = Summary.of(results, SLO_1).lines()
    assert "Mean TTFT (ms):                          -" in lines
    assert stage_lines(results) == []
    results.write(tmp_path / "empty.nc")
    assert len(Results.read(tmp_path / "empty.nc")) == 0


def test_failures_are_counted_by_kind_most_frequent_first():
    records = [failed(0, 0, 1, "timeout"), failed(1, 0, 1), failed(2, 0, 1), sample()[0]]
    assert failure_lines(records) == [
        "failed: 2 x 429 overloaded, the first: full",
        "failed: 1 x timeout, the first: full",
    ]


def test_a_file_holds_every_request(tmp_path):
    results = Results.of([sample()[:2], sample()[2:]])
    results.write(tmp_path / "run.nc")
    again = Results.read(tmp_path / "run.nc")
    assert again.values("status").tolist() == [OK, OK, OK, "429 overloaded"]
    assert again.values("run").tolist() == [0, 0, 1, 1]
    for name in ("ttft_s", "tpot_s", "e2el_s", "prefill_s", "gap_s", "output_tokens"):
        np.testing.assert_array_equal(again.values(name), results.values(name))
    assert again.is_met(SLO_1).tolist() == [True, False, True, False]


def test_the_planner_reads_the_file_as_a_workload(tmp_path):
    records = [*sample(), failed(4, 0.7, 0.8, prompt_tokens=0)]
    Results.of([records]).write(tmp_path / "run.nc")
    arrival, prompt, output = read_workload(tmp_path / "run.nc").arrays()
    # A failed request was load as well; one whose prompt nobody counted is left out.
    assert arrival.tolist() == [0.0, 0.02, 0.5, 0.6]
    assert prompt.tolist() == [7, 7, 7, 7]
    assert output.tolist() == [4, 2, 1, 9]


def test_clients_side_by_side_add_up():
    """Each record's gaps stay its own, and times are those of the one that started first."""
    first = Results.of([[answered(0, 0.0, 0.1, [0.01]), answered(1, 3.0, 0.1, [0.02])]], 100.0)
    second = Results.of([[answered(0, 1.0, 0.1, [0.03, 0.03]), failed(1, 1.5, 1.6)]], 101.0)
    both = Results.joined([first, second])
    assert both.values("sent_s").tolist() == [0.0, 2.0, 2.5, 3.0]
    assert both.values("num_gaps").tolist() == [1, 2, 0, 1]
    assert both.values("gap_s") == pytest.approx([0.01, 0.03, 0.03, 0.02])
    assert both.is_ok.tolist() == [True, True, False, True]
    assert both.duration_s == pytest.approx(3.12)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text.nc").write_text("no netcdf")
    with pytest.raises(ConfigError, match="cannot read"):
        Results.read(tmp_path / "text.nc")
    with pytest.raises(WorkloadError, match="text.nc"):
        read_workload(tmp_path / "text.nc")
    with pytest.raises(ConfigError, match="cannot read"):
        Results.read(tmp_path / "none.nc")
    with pytest.raises(ConfigError, match="cannot write"):
        Results.of([sample()]).write(tmp_path / "none" / "run.nc")


def test_stages_are_those_of_answers_that_have_them():
    lines = stage_lines(Results.of([sample()]))
    assert any(line.split()[:3] == ["KV", "transfer", "3.00"] for line in lines)
    assert any("CDF" in line for line in lines)
    assert stage_lines(Results.of([sample()[1:]])) == []


def test_scales_print_both_limits():
    lines = scale_lines(Results.of([sample()]), SLO_1, [1, 2])
    assert lines[-2].split() == ["1", "0.1", "0.02", "50.0%", "50.0%", "75.0%"]
    assert lines[-1].split() == ["2", "0.2", "0.04", "75.0%", "75.0%", "75.0%"]


latencies = st.tuples(st.floats(0.001, 1), st.lists(st.floats(0.001, 0.2), max_size=4))


@given(st.lists(latencies, min_size=1, max_size=20), st.floats(0.1, 3), st.floats(1, 4))
def test_a_looser_slo_is_never_met_less(shapes, scale, looser):
    records = [answered(i, i * 0.1, ttft, gaps) for i, (ttft, gaps) in enumerate(shapes)]
    results = Results.of([records])
    strict, loose = (results.is_met(scaled(SLO_1, s)) for s in (scale, scale * looser))
    assert not (strict & ~loose).any()


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 5)), min_size=1, max_size=30))
def test_peak_concurrency_is_the_most_that_overlap(spans):
    spans = [(round(start, 3), round(start, 3) + round(length, 3)) for start, length in spans]
    spans.sort()
    records = [failed(i, start, end) for i, (start, end) in enumerate(spans)]
    expected = max(sum(s <= start < e for s, e in spans) for start, _ in spans)
    assert Summary.of(Results.of([records])).peak_concurrency == expected
