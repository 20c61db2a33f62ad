"""What rate to expect: the simplest way that would have been least wrong so far, and how wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daskserve.errors import InvalidParameter

_LEAST_ERRORS = 8
_SMOOTHING = 0.3
_MOST_SEASONS = 8


@dataclass(frozen=True, slots=True)
class Forecast:
    """Parameters
    ----------
    rate_rps
        Expected requests/s.
    low, high
        Between them were 90 % of what came true, as far as the past tells.
    method
        ``last`` (as in the last bucket), ``smoothed``, or ``season`` (as one season ago).
    """

    rate_rps: float
    low: float
    high: float
    method: str


class RateForecast:
    """Counts arrivals in buckets and forecasts the next ones.

    Parameters
    ----------
    bucket_s
        Width of a bucket.
    season_s
        After which traffic is taken to be alike, a day.
    """

    def __init__(self, bucket_s: float = 600.0, season_s: float = 86_400.0) -> None:
        if not 0 < bucket_s < season_s:
            raise InvalidParameter("bucket_s", bucket_s, f"must be above 0 and below {season_s:g}")
        self._bucket_s = bucket_s
        self._season = round(season_s / bucket_s)
        self._counts: list[float] = []
        self._first: int | None = None

    def arrived(self, at_s: float, count: int) -> None:
        """So many requests came at that time; times never go back."""
        number = int(at_s // self._bucket_s)
        if self._first is None:
            self._first = number
        place = max(number - self._first, 0)
        self._counts += [0.0] * (place + 1 - len(self._counts))
        self._counts[place] += count
        most = _MOST_SEASONS * self._season
        if len(self._counts) > most:
            dropped = len(self._counts) - most
            del self._counts[:dropped]
            self._first += dropped

    def ahead(self, now_s: float, horizon_s: float) -> Forecast | None:
        """The rate ``horizon_s`` from now; None until the past is long enough to judge by."""
        if self._first is None:
            return None
        complete = int(now_s // self._bucket_s) - self._first
        counts = self._counts[:complete] + [0.0] * (complete - len(self._counts))
        series = np.array(counts) / self._bucket_s
        steps = max(1, round(horizon_s / self._bucket_s))
        best: Forecast | None = None
        smallest = np.inf
        for method, expected in self._candidates(series, steps).items():
            errors = series[steps:] - expected[: len(series) - steps]
            errors = errors[~np.isnan(errors)]
            if len(errors) < _LEAST_ERRORS:
                continue
            size = float(np.abs(errors).mean())
            if size < smallest:
                smallest = size
                low, high = np.quantile(errors, (0.05, 0.95))
                rate = float(expected[-1])
                best = Forecast(rate, max(rate + low, 0.0), max(rate + high, 0.0), method)
        return best

    def _candidates(self, series: np.ndarray, steps: int) -> dict[str, np.ndarray]:
        """Of each way, what it says at every bucket of the rate ``steps`` later."""
        smoothed = series.copy()
        for place in range(1, len(series)):
            smoothed[place] += (1 - _SMOOTHING) * (smoothed[place - 1] - series[place])
        season = np.full(len(series), np.nan)
        back = self._season - steps
        if 0 <= back < len(series):
            season[back:] = series[: len(series) - back]
        return {"last": series, "smoothed": smoothed, "season": season}
