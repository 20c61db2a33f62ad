"""Rates, attainment and percentiles of a window over snapshots."""

from __future__ import annotations

import math

import pytest

from daskserve.core.instance import InstanceLoad
from daskserve.core.request import Timeline
from daskserve.core.slo import SLO
from daskserve.observe import Finished, InstanceFigures, JobProgress, Place, Snapshot, Window
from daskserve.observe.jobs import FailedRow
from daskserve.observe.sample import Sample

LIMITS = SLO(ttft_s=0.2, tpot_s=0.05)


def finished(at: float, ttft_s: float = 0.1, decode_s: float = 0.3, tokens: int = 11) -> Finished:
    return Finished(at, 100, tokens, Timeline(prefill_s=ttft_s, decode_s=decode_s))


def decode_instance(at: float, num_tokens: int, **load) -> InstanceFigures:
    figures = {"used_kv_blocks": 25, "free_kv_blocks": 75, "num_tokens": num_tokens, **load}
    place = Place("decode-0", "node-1", "cpu 0", tp=2)
    return InstanceFigures("tcp://a:1", "DECODE", "ready", place, InstanceLoad(**figures), at)


def test_a_snapshot_survives_json():
    job = JobProgress("1", "out.jsonl", 10, 4, 1, failed_rows=(FailedRow(3, "c", "bad", "why"),))
    snapshot = Snapshot(
        5.0, 1e9, 7, "mock", LIMITS, (decode_instance(4.5, 10),), {"DECODE": {"waiting": 2}},
        12, 1, (finished(4.0),), (job,),
    )  # fmt: skip
    assert Snapshot.from_record(snapshot.to_record()) == snapshot


def test_rates_attainment_and_percentiles_are_of_the_window():
    window = Window(10.0, LIMITS)
    window.sample(Snapshot(100.0, 0.0, num_arrived=50))
    met, late, slow = finished(101), finished(101, ttft_s=0.3), finished(101, decode_s=0.6)
    one_token = finished(101, decode_s=0.0, tokens=1)
    told = (met, late, slow, one_token)
    snapshot = Snapshot(110.0, 0.0, num_arrived=90, num_failed=5, finished=told,
                        instances=(decode_instance(109, 0),))  # fmt: skip
    sample = window.sample(snapshot)
    assert sample.arrived_per_s == 4.0 and sample.failed_per_s == 0.5
    assert sample.finished_per_s == pytest.approx(0.4)
    assert sample.attainment == 0.5
    assert sample.goodput_per_gpu == pytest.approx(0.2 / 2)
    assert sample.ttft_s.p50 == pytest.approx(0.1) and sample.ttft_s.p99 > 0.2
    assert sample.tpot_s.p50 == pytest.approx(0.03)
    assert sample.output_tokens_per_s == pytest.approx(3.4)
    dollars = 2 * 1.8 / 3600 / (40 + 3.4) * 1e6
    assert sample.cost_per_million_tokens(1.8) == pytest.approx(dollars)
    assert Sample.from_record(sample.to_record()) == sample
    later = window.sample(Snapshot(121.0, 0.0, num_arrived=90, num_failed=5))
    assert later.finished_per_s == 0 and later.attainment is None and later.ttft_s.p50 is None


@pytest.mark.parametrize("window_s", [3.0, 10.0])
def test_a_steady_stream_has_its_rate_whatever_the_window(window_s):
    window = Window(window_s)
    for second in range(1, 40):
        told = tuple(finished(second - 0.5 - i / 20) for i in range(20))
        sample = window.sample(Snapshot(float(second), 0.0, num_arrived=20 * second, finished=told))
        if second > window_s + 1:
            assert sample.finished_per_s == pytest.approx(20)
            assert sample.arrived_per_s == pytest.approx(20)
    assert sample.goodput_per_gpu is None and sample.attainment is None  # no SLO


def test_the_first_look_counts_only_what_is_recent():
    sample = Window(10.0).sample(Snapshot(100.0, 0.0, finished=(finished(50), finished(95))))
    assert sample.finished_per_s == pytest.approx(0.1)


def test_tokens_per_second_are_between_two_reports():
    window = Window(10.0)
    for now, at, tokens, expected in (
        (1.0, 1.0, 500, 0.0),
        (2.0, 2.0, 800, 300.0),
        (2.5, 2.0, 800, 300.0),  # nothing new was told
        (4.0, 4.0, 900, 50.0),
        (5.0, 5.0, 100, 0.0),  # another process under the same address
        (30.0, 5.0, 100, 0.0),
    ):
        snapshot = Snapshot(now, 0.0, instances=(decode_instance(at, tokens),))
        [instance] = window.sample(snapshot).instances
        assert instance.tokens_per_s == expected
    assert instance.state == "silent" and instance.kv_share == 0.25


def test_requests_wait_for_one_stage_each():
    prefill = InstanceFigures("tcp://a:2", "PREFILL", "ready", load=InstanceLoad(4, num_holding=9))
    roles = {"PREFILL": {"waiting": 3}, "DECODE": {"waiting": 5}}
    sample = Window(10.0).sample(Snapshot(1.0, 0.0, instances=(prefill,), roles=roles))
    assert sample.waiting == {"prefill": 7, "decode": 5, "transfer": 4}


def test_another_schedulers_clock_starts_anew():
    window = Window(10.0)
    window.sample(Snapshot(1000.0, 0.0, num_arrived=900, finished=(finished(999),)))
    sample = window.sample(Snapshot(5.0, 0.0, num_arrived=1))
    assert sample.finished_per_s == 0 and sample.arrived_per_s == 0
    assert math.isfinite(window.sample(Snapshot(6.0, 0.0, num_arrived=3)).arrived_per_s)


def test_a_jobs_pace_leaves_out_earlier_runs():
    job = JobProgress("1", "out.jsonl", 100, num_done=60, num_earlier=40, elapsed_s=10.0)
    assert job.share == 0.6 and job.rows_per_s == 2.0 and job.left_s == 20.0
