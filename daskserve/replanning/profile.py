"""What the traffic has been like of late: lengths, rate, burstiness, and how it was served.

Fed at every look with the requests that have ended since the last one and with the count of those
that have arrived; everything is answered for a window that ends now.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from daskserve.planner.workload import Workload

KEEP_S = 3600.0
_MOST_KEPT = 100_000
_MOST_DISORDER_S = 3.0  # instances tell what they have served once a second


@dataclass(frozen=True, slots=True)
class Served:
    """One complete answer; times are seconds of one monotonic clock."""

    arrived_s: float
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float | None
    is_met: bool


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of token counts; NaN without any."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: np.ndarray) -> Distribution:
        if not len(values):
            return cls(math.nan, math.nan, math.nan, math.nan)
        p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99)).tolist()
        return cls(float(values.mean()), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class Statistics:
    """A window of traffic.

    Parameters
    ----------
    window_s
        Its width, less if there has been less.
    num_arrived, num_served, num_failed
        Requests that came in the window, and that ended in it, well or not.
    rate_rps
        Arrivals per second.
    burstiness
        Coefficient of variation of the gaps between arrivals, 1 for Poisson; NaN below 3 arrivals.
    prompt_tokens, output_tokens
        Of what was served.
    attainment, goodput_rps
        Of what ended, the share that met its limits (a failure met none), and that per second;
        the share is None when nothing ended.
    """

    window_s: float
    num_arrived: int
    num_served: int
    num_failed: int
    rate_rps: float
    burstiness: float
    prompt_tokens: Distribution
    output_tokens: Distribution
    attainment: float | None
    goodput_rps: float


class WorkloadProfile:
    """Requests of the last hour. Times are seconds of one monotonic clock.

    Parameters
    ----------
    keep_s
        Older requests are forgotten.
    """

    def __init__(self, keep_s: float = KEEP_S) -> None:
        self._keep_s = keep_s
        self._served: deque[Served] = deque(maxlen=_MOST_KEPT)
        self._counts: deque[tuple[float, int, int]] = deque()  # (now, arrived, failed)
        self._began_s: float | None = None

    def saw(self, now_s: float, num_arrived: int, num_failed: int, ended: Iterable[Served]) -> None:
        """What is so now: requests that have come and failed in all, and answers since last time.

        Times must not go back.
        """
        if self._began_s is None:
            self._began_s = now_s
        self._counts.append((now_s, num_arrived, num_failed))
        self._served.extend(ended)
        oldest_s = now_s - self._keep_s
        while self._served and self._served[0].ended_s < oldest_s:
            self._served.popleft()
        while self._counts[0][0] < oldest_s:
            self._counts.popleft()

    def statistics(self, now_s: float, window_s: float) -> Statistics:
        """Of the last ``window_s`` seconds."""
        began_s = self._began_s if self._began_s is not None else now_s
        window_s = max(min(window_s, now_s - began_s), 1e-9)
        served = list(self._since(now_s - window_s))
        arrived, failed = self._counted(now_s - window_s)
        gaps = np.diff(np.sort([one.arrived_s for one in served]))
        has_gaps = len(gaps) >= 2 and gaps.mean() > 0
        num_met = sum(one.is_met for one in served)
        num_ended = len(served) + failed
        return Statistics(
            window_s=window_s,
            num_arrived=arrived,
            num_served=len(served),
            num_failed=failed,
            rate_rps=arrived / window_s,
            burstiness=float(gaps.std() / gaps.mean()) if has_gaps else math.nan,
            prompt_tokens=Distribution.of(np.array([one.prompt_tokens for one in served])),
            output_tokens=Distribution.of(np.array([one.output_tokens for one in served])),
            attainment=num_met / num_ended if num_ended else None,
            goodput_rps=num_met / window_s,
        )

    def history(self, since_s: float) -> Workload:
        """What was served since then, in order of arrival, for the planner.

        Long answers end last, so the first seconds after a change show too few of them; a later
        look sees more.
        """
        served = sorted(self._since(since_s), key=lambda one: one.arrived_s)
        start_s = served[0].arrived_s if served else 0.0
        return Workload.from_arrays(
            [one.arrived_s - start_s for one in served],
            [one.prompt_tokens for one in served],
            [one.output_tokens for one in served],
        )

    def _since(self, since_s: float) -> Iterator[Served]:
        """Answers that ended since then, the newest first; they come in nearly that order."""
        for one in reversed(self._served):
            if one.ended_s < since_s - _MOST_DISORDER_S:
                return
            if one.ended_s >= since_s:
                yield one

    def _counted(self, since_s: float) -> tuple[int, int]:
        """Arrivals and failures since then."""
        if not self._counts:
            return 0, 0
        last = self._counts[-1]
        first = last
        for counts in reversed(self._counts):
            first = counts
            if counts[0] <= since_s:
                break
        return last[1] - first[1], last[2] - first[2]
