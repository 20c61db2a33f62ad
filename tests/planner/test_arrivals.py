from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.errors import InvalidParameter, WorkloadError
from daskserve.planner.arrivals import Bursts, Gamma, Poisson, dispersion, fit_arrivals
from daskserve.planner.workload import Workload

PROCESSES = [Poisson(), Gamma(0.4), Gamma(3.0), Bursts(20.0, 60.0, 0.1), Bursts(5.0, 5.0, 0.0)]


@pytest.mark.parametrize("process", PROCESSES)
def test_a_resampled_trace_has_the_asked_rate_and_is_sorted(process):
    lengths = Workload.from_arrays([0.0], [10], [5])
    workload = lengths.resample(1000, 7.5, seed=2, arrivals=process)
    assert workload.rate == pytest.approx(7.5)
    assert (np.diff(workload.arrays()[0]) >= 0).all()


@pytest.mark.parametrize("process", PROCESSES)
def test_the_mean_rate_of_a_long_sample(process):
    spans_s = [process.sample(50_000, 10.0, np.random.default_rng(seed))[-1] for seed in range(20)]
    assert 50_000 / np.mean(spans_s) == pytest.approx(10.0, rel=0.05)


def test_phases_of_a_seed_are_the_same_at_every_rate():
    bursts = Bursts(9.0, 41.0, 0.0)
    slow, fast = (bursts.sample(n, n / 500, np.random.default_rng(0)) for n in (2000, 20_000))
    shared_s = min(slow[-1], fast[-1])
    slow, fast = (np.histogram(one[one < shared_s], 40)[0] > 0 for one in (slow, fast))
    assert (slow == fast).mean() > 0.9


@given(st.integers(0, 2**32 - 1), st.sampled_from(PROCESSES))
def test_the_same_seed_gives_the_same_trace(seed, process):
    base = Workload.from_arrays([0.0, 1.0], [3, 400], [9, 2])
    first, second = (base.resample(50, 3.0, seed, arrivals=process) for _ in range(2))
    assert all((a == b).all() for a, b in zip(first.arrays(), second.arrays(), strict=True))


@pytest.mark.parametrize(
    ("process", "kind"),
    [(Poisson(), Poisson), (Gamma(4.0), Gamma), (Gamma(0.3), Gamma), (Bursts(20, 40, 0), Bursts)],
)
def test_a_fit_finds_the_kind_of_process(process, kind):
    arrival = process.sample(20_000, 4.0, np.random.default_rng(5))
    assert isinstance(fit_arrivals(arrival), kind)


def test_a_fit_of_bursts_repeats_the_dispersion():
    arrival = Bursts(20.0, 40.0, 0.05).sample(40_000, 4.0, np.random.default_rng(6))
    again = fit_arrivals(arrival).sample(40_000, 4.0, np.random.default_rng(7))
    for window_s in (1.0, 10.0, 60.0):
        assert dispersion(again, window_s) == pytest.approx(dispersion(arrival, window_s), rel=0.3)


def test_too_few_arrivals_are_taken_as_poisson():
    assert fit_arrivals(np.array([0.0])) == Poisson()
    assert fit_arrivals(np.array([])) == Poisson()
    assert fit_arrivals(np.array([0.0, 0.1, 0.1, 9.0])) == Poisson()


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_parameters(bad):
    with pytest.raises(InvalidParameter):
        Gamma(bad)
    with pytest.raises(InvalidParameter):
        Bursts(bad, 1.0, 0.5)
    with pytest.raises(WorkloadError, match="rate"):
        Workload.from_arrays([0.0], [1], [1]).resample(10, bad, seed=0)
    with pytest.raises(WorkloadError, match="rate"):
        Workload.from_arrays([0.0, 1.0], [1, 1], [1, 1]).scaled_to(bad)


def test_workloads_that_are_not():
    with pytest.raises(WorkloadError, match="not sorted: request 1"):
        Workload.from_arrays([1.0, 0.5], [1, 1], [1, 1])
    with pytest.raises(WorkloadError, match="one of each"):
        Workload.from_arrays([1.0], [1, 1], [1])
    with pytest.raises(WorkloadError, match="at least 1"):
        Workload.from_arrays([1.0], [0], [1])
    empty = Workload.from_arrays([], [], [])
    assert empty.rate is None and len(empty) == 0
    with pytest.raises(WorkloadError, match="no data"):
        empty.resample(10, 1.0, seed=0)


@given(st.floats(0.01, 1e4))
def test_scaling_keeps_the_pattern(rate):
    workload = Workload.uniform(40, 3.0, 100, 10, seed=4)
    scaled = workload.scaled_to(rate)
    assert scaled.rate == pytest.approx(rate)
    ratio = scaled.arrays()[0][1:] / workload.arrays()[0][1:]
    assert ratio == pytest.approx(ratio[0])
