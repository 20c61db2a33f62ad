from __future__ import annotations

import math

import numpy as np
import pytest

from daskserve.bench.offered import (
    Constant,
    Lengths,
    Offered,
    arrival_process,
    first_seconds,
)
from daskserve.errors import ConfigError
from daskserve.planner.workload import Workload


def offered(name="poisson", burstiness=1.0, seed=0):
    process = arrival_process(name, burstiness)
    return Offered.uniform(Lengths(10, 20), Lengths(5, 5), process, seed)


@pytest.mark.parametrize(
    ("name", "burstiness", "cv"),
    [("poisson", 1.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5), ("constant", 1.0, 0.0)],
)
def test_arrivals_come_at_the_rate_with_the_burstiness_asked(name, burstiness, cv):
    load = offered(name, burstiness).at(50.0, 20_000)
    gaps = np.diff(load.arrays()[0])
    assert load.rate == pytest.approx(50.0)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.05)


def test_lengths_are_drawn_from_the_whole_range():
    _, prompt, output = offered().at(1.0, 2_000).arrays()
    assert set(prompt) == set(range(10, 21))
    assert set(output) == {5}


def test_the_seed_decides():
    same, again, other = (offered(seed=seed).at(3.0, 50).arrays()[0] for seed in (1, 1, 2))
    assert (same == again).all() and (same != other).any()


def test_an_infinite_rate_sends_all_at_once():
    load = offered().at(math.inf, 7)
    assert (load.arrays()[0] == 0).all() and len(load) == 7


def test_a_trace_keeps_its_pattern_at_another_rate():
    trace = Workload.from_arrays([0.0, 1.0, 4.0], [1, 2, 3], [4, 5, 6])
    own = Offered(trace, None, 0)
    assert own.at(None, None).arrays()[0].tolist() == [0.0, 1.0, 4.0]
    assert own.at(1.0, 2).arrays()[0] == pytest.approx([0.0, 0.5])
    assert first_seconds(own.at(None, None), 2.0).arrays()[1].tolist() == [1, 2]
    drawn = Offered(trace, Constant(), 0).at(10.0, 100)
    assert {(2, 5)} <= set(zip(*(v.tolist() for v in drawn.arrays()[1:]), strict=True))


@pytest.mark.parametrize("text", ["", "a", "0", "5-4", "1-2-3", "-3"])
def test_lengths_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match="--prompt-tokens"):
        Lengths.read("--prompt-tokens", text)


@pytest.mark.parametrize("burstiness", [0, -1, math.nan, math.inf])
def test_burstiness_must_be_a_number_above_0(burstiness):
    with pytest.raises(ConfigError, match="--burstiness"):
        arrival_process("gamma", burstiness)


def test_drawn_arrivals_need_a_rate_and_a_number():
    with pytest.raises(ConfigError, match="--rate"):
        offered().at(None, 10)
    with pytest.raises(ConfigError, match="--requests"):
        offered().at(2.0, None)
