from __future__ import annotations

import io
import math
import random

import orjson
import pytest

from daskserve.batch.outcome import Outcome
from daskserve.batch.progress import ProgressView
from daskserve.batch.stats import LatencyHistogram
from daskserve.batch.summary import BatchSummary, Tally
from daskserve.core.request import Completion, Timeline
from daskserve.core.slo import SLO


def answered(row, ttft_s, tpot_s, num_tokens=11):
    timeline = Timeline(ttft_s / 4, ttft_s * 3 / 4, 0.0, 0.0, tpot_s * (num_tokens - 1))
    return Outcome(row, 20, num_tokens, timeline)


def test_percentiles_are_within_half_a_percent():
    rng = random.Random(0)
    values = sorted(rng.lognormvariate(-2, 2) for _ in range(5000))
    histogram = LatencyHistogram()
    for value in values:
        histogram.add(value)
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = values[math.ceil(share * len(values)) - 1]
        assert histogram.percentile(share) == pytest.approx(exact, rel=0.0051)


def test_histogram_of_nothing_and_of_zero():
    histogram = LatencyHistogram()
    assert histogram.percentile(0.5) is None
    histogram.add(0.0)
    assert histogram.percentile(0.5) < 2e-6


def test_summary_of_a_resumed_job_counts_all_rows_and_rates_this_run():
    tally = Tally(SLO(ttft_s=0.5, tpot_s=0.05))
    tally.add_earlier(answered(0, 0.1, 0.01))
    tally.add_earlier(Outcome.failure(1, "b", "invalid_row", "not JSON"))
    tally.add(answered(2, 0.1, 0.01))
    tally.add(answered(3, 0.9, 0.01))
    tally.add(answered(4, 0.1, 0.09))
    summary = tally.summary(elapsed_s=2.0, num_retries=1, num_duplicates=0)
    assert (summary.num_rows, summary.num_succeeded, summary.num_failed) == (5, 4, 1)
    assert summary.num_earlier == 2 and summary.exit_code == 3
    assert summary.attainment == 0.5
    assert summary.goodput_rows_per_s == 0.5
    assert summary.output_tokens == 44 and summary.output_tokens_per_s == 33 / 2
    assert summary.failures == ("b: not JSON",)
    assert summary.stages_s["prefill_queue_s"] == pytest.approx(0.3 / 4)


def test_summary_survives_its_file():
    tally = Tally(SLO(1, 1))
    tally.add(answered(0, 0.1, 0.01))
    summary = tally.summary(1.0, 0, 0)
    assert BatchSummary.from_record(orjson.loads(orjson.dumps(summary.to_record()))) == summary


def test_summary_text_names_counts_latencies_stages_slo_and_three_reasons():
    tally = Tally(SLO(ttft_s=0.5, tpot_s=0.05))
    tally.add(answered(0, 0.1, 0.01))
    for row in range(1, 6):
        tally.add(Outcome.failure(row, f"id-{row}", "invalid_row", "not JSON"))
    text = str(tally.summary(1.0, 2, 1))
    assert "6 rows: 1 answered, 5 failed (2 retries, 1 late duplicates dropped)" in text
    assert "prefill queue 25.0 ms (12%)" in text
    assert "SLO (TTFT 500.0 ms, TPOT 50.0 ms): 100.0% of the answered rows met it" in text
    assert "failed: id-3: not JSON\n... and 2 more failed rows" in text


def test_summary_of_no_answer_has_no_latencies():
    summary = Tally(SLO(1, 1)).summary(0.0, 0, 0)
    assert summary.ttft_s == {"p50": None, "p90": None, "p99": None}
    assert "no answered row" in str(summary)


def test_plain_progress_lines(monkeypatch):
    monkeypatch.setattr("daskserve.batch.progress.time.monotonic", iter(range(0, 999)).__next__)
    tally, stream = Tally(None), io.StringIO()
    with ProgressView(tally, 4, interval_s=2, stream=stream) as view:
        for row in range(3):
            tally.add(answered(row, 0.1, 0.01))
            view.update()
        tally.add(Outcome.failure(3, "d", "invalid_row", "why"))
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("2/4 rows, 11 tok/s, TTFT 100")
    assert lines[0].endswith("ETA 2 s")
    assert lines[-1].startswith("4/4 rows, 1 failed")
    assert len(lines) == 2


def test_terminal_progress_is_a_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    tally, stream = Tally(None), Terminal()
    with ProgressView(tally, 2, interval_s=1, stream=stream):
        tally.add(answered(0, 0.1, 0.01))
    assert "1/2 rows" in stream.getvalue() and "TPOT 10.0 ms" in stream.getvalue()


def test_an_outcome_has_the_times_that_the_journal_keeps():
    timeline = Timeline(0.0123456789, 0.1, 0.2, 0.3, 0.4000000004)
    outcome = Outcome.of(3, Completion("r", "hi", (1, 2), "length", 5, timeline))
    assert outcome == Outcome.from_record(outcome.to_record())
    assert outcome.timeline.ttft_s == pytest.approx(timeline.ttft_s, abs=1e-6)
