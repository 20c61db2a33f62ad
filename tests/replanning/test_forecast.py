import numpy as np
import pytest

from daskserve.errors import InvalidParameter
from daskserve.replanning.forecast import RateForecast


def filled(rates, bucket_s=600.0, season_s=86_400.0) -> tuple[RateForecast, float]:
    forecast = RateForecast(bucket_s, season_s)
    for number, rate in enumerate(rates):
        forecast.arrived((number + 0.5) * bucket_s, round(rate * bucket_s))
    return forecast, len(rates) * bucket_s


def test_too_short_a_past_gives_no_forecast():
    assert RateForecast().ahead(0.0, 600) is None
    forecast, now_s = filled([5.0] * 5)
    assert forecast.ahead(now_s, 600) is None


def test_steady_traffic_goes_on():
    rng = np.random.default_rng(0)
    forecast, now_s = filled(rng.poisson(6000, 60) / 600)
    ahead = forecast.ahead(now_s, 600)
    assert ahead.low <= 10 <= ahead.high and ahead.high - ahead.low < 1


def test_a_daily_pattern_is_found_after_a_day_and_its_interval_holds():
    hours = np.arange(0, 96, 1 / 6)
    rates = 10 + 8 * np.sin(2 * np.pi * hours / 24)
    forecast, now_s = filled(rates[:-36])  # six hours are left out
    ahead = forecast.ahead(now_s, 6 * 3600)
    assert ahead.method == "season"
    assert ahead.rate_rps == pytest.approx(rates[-1], rel=0.1)
    first_day, now_s = filled(rates[:72])
    assert first_day.ahead(now_s, 3600).method != "season"


def test_a_silence_counts():
    forecast, _ = filled([10.0] * 20)
    assert forecast.ahead(40 * 600, 600).rate_rps < 1


def test_a_bucket_must_fit_into_a_season():
    with pytest.raises(InvalidParameter, match="bucket_s"):
        RateForecast(100, 50)
