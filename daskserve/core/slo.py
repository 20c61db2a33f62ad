"""Service-level objectives and the one definition of attainment."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from daskserve.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class SLO:
    """Limits that a request must meet, both of them (DistServe section 2).

    Parameters
    ----------
    ttft_s, tpot_s
        Most seconds to the first token, and per output token after it.
    attainment
        Share of requests that must meet both for a rate to count as goodput.
    """

    ttft_s: float
    tpot_s: float
    attainment: float = 0.9

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidParameter(name, value, "must be a number of seconds")
            if not (math.isfinite(value) and value > 0):
                raise InvalidParameter(name, value, "must be a finite number of seconds above 0")
        if not 0 < self.attainment <= 1:
            raise InvalidParameter("attainment", self.attainment, "must be above 0 and at most 1")

    def is_met(self, ttft_s: float, tpot_s: float | None) -> bool:
        """A request of one output token has no TPOT and counts as meeting it."""
        return ttft_s <= self.ttft_s and (tpot_s is None or tpot_s <= self.tpot_s)

    def attained(self, latencies: Iterable[tuple[float, float | None]]) -> float | None:
        """Share of (TTFT, TPOT) pairs that meet both limits; None when there are none."""
        met = [self.is_met(ttft_s, tpot_s) for ttft_s, tpot_s in latencies]
        return sum(met) / len(met) if met else None
