import math

import numpy as np
import pytest

from daskserve.replanning.profile import Served, WorkloadProfile


def served(ended_s: float, prompt: int = 100, output: int = 10, is_met: bool = True) -> Served:
    return Served(ended_s - 1.0, ended_s, prompt, output, 0.2, 0.05, is_met)


def test_a_window_tells_rate_lengths_and_attainment():
    profile = WorkloadProfile()
    profile.saw(0.0, 0, 0, [])
    for second in range(1, 101):
        met = second % 4 != 0
        profile.saw(float(second), 2 * second, second // 50, [served(second, second, 5, met)])
    seen = profile.statistics(100.0, 20.0)
    assert seen.num_arrived == 40 and seen.rate_rps == 2.0
    assert seen.prompt_tokens.mean == pytest.approx(90)
    assert seen.output_tokens.p99 == 5
    assert seen.num_failed == 1 and seen.num_served == 21
    assert seen.attainment == 15 / 22 and seen.goodput_rps == 15 / 20


def test_burstiness_is_that_of_the_gaps():
    rng = np.random.default_rng(0)
    for cv in (0.0, 1.0, 3.0):
        gaps = rng.gamma(1 / cv**2, cv**2, 20_000) if cv else np.ones(20_000)
        profile = WorkloadProfile(keep_s=1e9)
        profile.saw(0.0, 0, 0, [])
        profile.saw(30_000.0, 20_000, 0, [served(at) for at in np.cumsum(gaps).tolist()])
        assert profile.statistics(30_000.0, 30_000.0).burstiness == pytest.approx(cv, abs=0.2)


def test_without_traffic_there_are_no_figures():
    profile = WorkloadProfile()
    seen = profile.statistics(10.0, 60.0)
    assert seen.attainment is None and seen.rate_rps == 0 and math.isnan(seen.burstiness)
    assert math.isnan(seen.prompt_tokens.mean)
    assert len(profile.history(0.0)) == 0


def test_history_is_in_order_of_arrival_and_old_requests_are_forgotten():
    profile = WorkloadProfile(keep_s=100)
    late = Served(5.0, 60.0, 7, 70, 0.1, 0.1, True)
    profile.saw(61.0, 3, 0, [served(50.0), served(55.0), late])
    history = profile.history(40.0)
    assert history.arrays()[1].tolist() == [7, 100, 100]
    assert history.arrays()[0].tolist() == [0.0, 44.0, 49.0]
    profile.saw(158.0, 3, 0, [])
    assert len(profile.history(0.0)) == 1
