import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskserve.errors import InvalidParameter
from daskserve.planner.arrivals import Bursts, Gamma, Poisson
from daskserve.replanning.drift import DriftSettings, DriftTest

STATED = DriftSettings()


def alarms(arrival_s, prompt, output, settings_=STATED) -> list:
    """Every alarm, each followed by a new start; requests are served as they come."""
    test, found = DriftTest(settings_), []
    for at_s, *lengths in zip(arrival_s.tolist(), prompt.tolist(), output.tolist(), strict=True):
        drift = test.saw(at_s, 1, lengths[:1], lengths[1:])
        if drift is not None:
            found.append(drift)
            test.restart(at_s)
    return found


def traffic(process, hours: float, rate: float, seed: int, scale: float = 1.0):
    rng = np.random.default_rng(seed)
    count = int(hours * 3600 * rate)
    arrival_s = process.sample(count, rate, rng)
    lengths = (rng.lognormal(mean, 1.2, count).astype(np.int64) + 1 for mean in (5, 4))
    return arrival_s, *(np.maximum((each * scale).astype(np.int64), 1) for each in lengths)


# So many would be allowed on average at one false alarm per hour.
@pytest.mark.parametrize("process", [Poisson(), Gamma(2.0), Bursts(30, 120, 0.3)])
def test_no_more_false_alarms_than_stated(process):
    hours = 6
    allowed = DriftSettings(false_alarms_per_hour=1.0)
    found = alarms(*traffic(process, hours, 1.0, seed=1), allowed)
    # Poisson with that mean exceeds this once in ten thousand runs.
    assert len(found) <= hours + 4 * hours**0.5


@pytest.mark.slow
@pytest.mark.parametrize("process", [Poisson(), Gamma(2.0), Bursts(30, 120, 0.3)])
def test_a_thousand_hours_without_change_give_at_most_the_stated_alarms(process):
    found = alarms(*traffic(process, 1000, 1.0, seed=2), STATED)
    assert len(found) <= 1000 * STATED.false_alarms_per_hour


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), rate=st.floats(3, 10), scale=st.sampled_from([0.3, 3.0]))
def test_a_change_of_lengths_is_found_within_a_minute(seed, rate, scale):
    before = traffic(Poisson(), 0.15, rate, seed)
    after = traffic(Poisson(), 0.05, rate, seed + 1, scale)
    changed_s = before[0][-1]
    found = alarms(
        np.concatenate([before[0], changed_s + after[0]]),
        *(np.concatenate([before[i], after[i]]) for i in (1, 2)),
    )
    assert found and changed_s < found[0].at_s <= changed_s + 60
    assert {one.name for one in found[0].evidence} <= {"prompt_tokens", "output_tokens"}


def test_twice_the_rate_is_found_where_bursts_are_not():
    calm, busy = traffic(Poisson(), 0.5, 5.0, 1), traffic(Poisson(), 0.05, 10.0, 2)
    arrival_s = np.concatenate([calm[0], calm[0][-1] + busy[0]])
    lengths = (np.concatenate([calm[i], busy[i]]) for i in (1, 2))
    found = alarms(arrival_s, *lengths)
    assert found and [one.name for one in found[0].evidence] == ["rate_rps"]
    assert found[0].evidence[0].now > 1.5 * found[0].evidence[0].before


def test_slow_drift_adds_up():
    rng = np.random.default_rng(0)
    arrival_s = np.arange(4 * 3600, dtype=float)
    drifting = np.exp(rng.normal(5, 1, len(arrival_s)) + arrival_s / 7200)
    still = np.exp(rng.normal(4, 1, len(arrival_s)))
    found = alarms(arrival_s, drifting.astype(np.int64) + 1, still.astype(np.int64) + 1)
    assert found and all(d.evidence[0].name == "prompt_tokens" for d in found)


def test_long_silence_is_no_drift_of_lengths():
    arrival_s, prompt, output = traffic(Poisson(), 0.3, 5.0, 3)
    gap = np.where(np.arange(len(arrival_s)) < len(arrival_s) // 2, 0.0, 3600.0)
    found = alarms(arrival_s + gap, prompt, output)
    assert not any(one.name != "rate_rps" for drift in found for one in drift.evidence)


def test_settings_out_of_range_are_refused():
    with pytest.raises(InvalidParameter, match="false_alarms_per_hour=0"):
        DriftSettings(false_alarms_per_hour=0)
    with pytest.raises(InvalidParameter, match="block_s"):
        DriftSettings(block_s=0)
