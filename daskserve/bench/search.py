"""The highest rate that a running server sustains within an SLO: its goodput, found by trying."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from daskserve.bench.record import STAGES
from daskserve.bench.results import Results
from daskserve.core.slo import SLO
from daskserve.errors import InvalidParameter
from daskserve.planner.slo_classes import ClassShare
from daskserve.planner.stationarity import Probe, judge, requests_needed

MIN_REQUESTS = 100
"""Fewer show neither a share of 90 % nor whether a queue grows."""

_LEAST_GROWTH = 0.01
"""Half of what waiting grows by, per second, above capacity by 2 %."""

_LEAST_SHARE = 0.1
"""Growth that uses up less of the TTFT limit in a whole run is the noise of a real machine."""

_MAX_STEPS = 40
_DONE = np.dtype(
    [(name, np.float64) for name in ("arrival_s", *STAGES)]
    + [("output_tokens", np.int64), ("decode_instance", np.int64)]
)


@dataclass(slots=True)
class RateSearch:
    """Says which rate to try next: doubles or halves, then bisects geometrically.

    Parameters
    ----------
    start
        Requests/s to try first.
    cap, floor
        No rate above or below is tried.
    tolerance
        Ends when the lowest rate that failed is above the highest that did not by less than
        this share.
    """

    start: float
    cap: float = math.inf
    floor: float = 0.0
    tolerance: float = 0.05
    met: float = 0.0
    failed: float = math.inf
    num_steps: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and self.start > 0):
            raise InvalidParameter("rate", self.start, "must be a finite number above 0")
        if not 0 < self.tolerance <= 1:
            raise InvalidParameter("tolerance", self.tolerance, "must be above 0 and at most 1")
        self.start = min(self.start, self.cap)

    def next_rate(self) -> float | None:
        """Requests/s; None when the search is over."""
        if self.num_steps >= _MAX_STEPS or self.met >= self.cap:
            return None
        if self.failed == math.inf:
            return min(2 * self.met, self.cap) if self.met else self.start
        if not self.met:
            lower = self.failed / 2
            return lower if lower >= self.floor else None
        if self.failed <= self.met * (1 + self.tolerance):
            return None
        return math.sqrt(self.met * self.failed)

    def note(self, rate: float, is_met: bool) -> None:
        """What a rate has shown."""
        self.num_steps += 1
        if is_met:
            self.met = max(self.met, rate)
        else:
            self.failed = min(self.failed, rate)


def judged(rate: float, slo: SLO, results: Results, num_planned: int) -> Probe:
    """What one run shows, by the rules of the planner's own search.

    A run on real hardware cannot always be as long as they ask. One that attains the SLO without
    a drift counts as ``met`` here; ``is_long_enough`` tells the difference.

    Parameters
    ----------
    num_planned
        Requests that the run would have had; it was ended early if it has fewer.
    """
    if len(results) < max(num_planned, MIN_REQUESTS):
        return _hopeless(rate, slo, results)
    probe = judge(rate, slo, _done(results, slo))
    attained = probe.attainment >= slo.attainment and not probe.is_surely_missed
    if probe.verdict == "unstable" and attained and not probe.is_drifting:
        return replace(probe, verdict="met")
    return probe


def seconds_needed(rate: float, slo: SLO, results: Results) -> float:
    """How long a run at this rate should be to tell the long run."""
    return requests_needed(rate, slo, _done(results, slo)) / rate


def _done(results: Results, slo: SLO) -> np.ndarray:
    """As the simulator has it, by what this side saw.

    All of the TTFT, and what the server tells of transfer and decode queue, stands for waiting
    when it grows as in an overload, so that `judge` takes it for a drift. On a real machine it
    always grows or shrinks a little, which is none.
    """
    done = np.zeros(len(results), _DONE)
    for name in ("arrival_s", "output_tokens"):
        done[name] = results.values(name)
    ttft, e2el = results.values("ttft_s"), results.values("e2el_s")
    waits = sum(np.nan_to_num(results.values(name)) for name in ("kv_transfer_s", "decode_queue_s"))
    growth = _growth(done["arrival_s"], ttft + waits)
    span_s = float(np.ptp(done["arrival_s"]))
    is_growing = growth > _LEAST_GROWTH and growth * span_s > _LEAST_SHARE * slo.ttft_s
    ok = results.is_ok
    done["prefill_queue_s" if is_growing else "prefill_s"] = np.where(ok, ttft, np.nan)
    done["decode_queue_s"] = waits if is_growing else 0.0
    done["decode_s"] = np.where(ok, e2el - ttft - done["decode_queue_s"], 0.0)
    return done


def _growth(arrival_s: np.ndarray, waiting_s: np.ndarray) -> float:
    """Seconds of waiting that each second of the run adds, by least squares."""
    known = ~np.isnan(waiting_s)
    times = arrival_s[known] - arrival_s[known].mean() if known.any() else np.zeros(0)
    square = float(times @ times)
    return float(times @ waiting_s[known]) / square if square > 0 else 0.0


def _hopeless(rate: float, slo: SLO, results: Results) -> Probe:
    ok, met = results.is_ok, results.is_met(slo)
    first, second = np.array_split(met, 2)
    in_ttft = _share(ok & (results.values("ttft_s") <= slo.ttft_s))
    in_tpot = _share(ok & ~(results.values("tpot_s") > slo.tpot_s))
    all_alike = ClassShare("", len(met), _share(met), in_ttft, in_tpot, slo.attainment)
    return Probe(
        rate=rate,
        num_requests=len(results),
        attainment=_share(met),
        first_half=_share(first),
        second_half=_share(second),
        ttft_attainment=in_ttft,
        tpot_attainment=in_tpot,
        is_long_enough=False,
        is_drifting=False,
        is_surely_missed=True,
        verdict="missed",
        classes=(all_alike,),
    )


def _share(met: np.ndarray) -> float:
    return float(met.mean()) if len(met) else 0.0
