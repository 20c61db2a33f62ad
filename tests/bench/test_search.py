from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.bench.record import OK, Record
from daskserve.bench.results import Results
from daskserve.bench.search import RateSearch, judged, seconds_needed
from daskserve.core.slo import SLO
from daskserve.errors import InvalidParameter

SLO_1 = SLO(ttft_s=0.5, tpot_s=0.1)


def tried(search, capacity):
    rates = []
    while (rate := search.next_rate()) is not None:
        rates.append(rate)
        search.note(rate, rate <= capacity)
    return rates


@given(st.floats(0.01, 1000), st.floats(0.01, 1000), st.sampled_from([0.02, 0.1]))
def test_the_highest_rate_that_works_is_found(start, capacity, tolerance):
    search = RateSearch(start, tolerance=tolerance)
    rates = tried(search, capacity)
    assert search.met <= capacity <= search.met * (1 + tolerance)
    assert len(rates) < 2 * abs(math.log2(capacity / start)) + 12


def test_a_cap_that_works_ends_the_search():
    search = RateSearch(1.0, cap=5.0)
    assert tried(search, 100.0) == [1.0, 2.0, 4.0, 5.0]
    assert (search.met, search.failed) == (5.0, math.inf)


def test_nothing_works_down_to_the_floor():
    search = RateSearch(8.0, floor=1.5)
    assert tried(search, 0.1) == [8.0, 4.0, 2.0]
    assert search.met == 0


@pytest.mark.parametrize("start", [0, -1, math.nan, math.inf])
def test_the_start_must_be_a_rate(start):
    with pytest.raises(InvalidParameter, match="rate"):
        RateSearch(start)


def queued(rate, capacity):
    """Two minutes of a single server of fixed service time: TTFT is wait and service (M/D/1)."""
    count = int(rate * 120)
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / rate, count))
    free_at, records = 0.0, []
    for index, arrival_s in enumerate(arrivals.tolist()):
        free_at = max(free_at, arrival_s) + 1 / capacity
        record = Record(index, arrival_s, 5, 2, 2, arrival_s, free_at, free_at + 0.05, status=OK)
        record.end_s = record.last_s
        records.append(record)
    return Results.of([records]), count


def test_a_calm_queue_is_met_and_a_growing_one_is_not():
    assert judged(5.0, SLO_1, *queued(5.0, 10.0)).verdict == "met"
    probe = judged(12.0, SLO_1, *queued(12.0, 10.0))
    assert (probe.verdict, probe.limited_by) == ("missed", "ttft")


def test_a_queue_that_grows_within_its_limits_is_not_met():
    loose = SLO(ttft_s=60.0, tpot_s=0.1)
    probe = judged(12.0, loose, *queued(12.0, 10.0))
    assert probe.attainment > 0.9
    assert (probe.verdict, probe.limited_by) == ("unstable", "stability")


def test_a_run_that_was_ended_early_has_missed():
    results, count = queued(5.0, 10.0)
    assert judged(5.0, SLO_1, results, count + 1).verdict == "missed"
    assert judged(5.0, SLO_1, Results.of([[]]), 100).verdict == "missed"


def test_a_loose_slo_needs_a_longer_run():
    results, _ = queued(5.0, 10.0)
    loose = SLO(ttft_s=5.0, tpot_s=0.1)
    assert seconds_needed(5.0, SLO_1, results) < seconds_needed(5.0, loose, results)
