"""Percentiles of any number of latencies in constant memory."""

from __future__ import annotations

import math

_SMALLEST_S = 1e-6
_GROWTH = 1.01


class LatencyHistogram:
    """Counts in bins that grow by 1 %, so a percentile is within 0.5 % of a sample's value."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0

    def add(self, value_s: float) -> None:
        index = math.ceil(math.log(max(value_s, _SMALLEST_S) / _SMALLEST_S, _GROWTH))
        self._counts[index] = self._counts.get(index, 0) + 1
        self.count += 1

    def percentile(self, share: float) -> float | None:
        """Seconds that ``share`` (0..1) of the values stay within; None when there are none."""
        rank = max(1, math.ceil(share * self.count))
        seen = 0
        for index in sorted(self._counts):
            seen += self._counts[index]
            if seen >= rank:
                return _SMALLEST_S * _GROWTH ** (index - 0.5)
        return None
