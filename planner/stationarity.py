"""Whether a simulated run says anything about the long run.

A queue that grows looks fine while it is short: at a rate above capacity the first few hundred
requests still meet their limits. So a run counts only if it is long enough for a small overload
to break the limits by itself, if its halves agree and if its waiting times do not drift.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daskserve.planner.simulator.result import STAGES, is_met, tpot_s, ttft_s
from daskserve.planner.slo_classes import (
    AnySLO,
    ClassShare,
    SLOClasses,
    binding,
    shares_of,
)

MARGIN = 0.1
"""Share of the requests at each end that is not measured: the system fills and empties there."""

FIRST_LOOK = 1000
"""Requests of a first look at a rate whose arrivals come evenly."""

BURST_CYCLES = 40
"""Busy and quiet phases that a run of bursty arrivals should see: each is hardly more than one
sample."""

STEADY_REQUESTS = 25_000
"""So many Poisson arrivals show an overload of 2 % as a drift, whatever the limits tolerate."""

_BATCHES = 20
_OVERLOAD = 0.02
_SLIGHT_OVERLOAD = 0.001
_LIFETIMES = 10
_FEW_LIFETIMES = 4
_MANY_REQUESTS = 50_000
_MOST_REQUESTS = 1_000_000
_SIGMAS = 2.0


@dataclass(frozen=True, slots=True)
class Probe:
    """What one run at one rate showed.

    Parameters
    ----------
    rate
        Requests/s.
    num_requests
        Simulated; `steady_part` of them is measured.
    attainment, first_half, second_half
        Share that met both of its limits: of all measured, and of each half of them.
    ttft_attainment, tpot_attainment
        Share that met the one limit.
    classes
        The same for each class of requests; the target must be met by every one of them.
    is_long_enough
        Whether the run is long against the limits and against a request's life.
    is_drifting
        Whether waiting times grew or the halves disagree: not a steady state.
    is_surely_missed
        Whether the target is out of reach beyond noise: more requests cannot mend it.
    verdict
        ``met``, ``missed`` or ``unstable`` (attained so far, but not a steady state).
    """

    rate: float
    num_requests: int
    attainment: float
    first_half: float
    second_half: float
    ttft_attainment: float
    tpot_attainment: float
    is_long_enough: bool
    is_drifting: bool
    is_surely_missed: bool
    verdict: str
    classes: tuple[ClassShare, ...]

    @property
    def binding(self) -> ClassShare:
        """The class that misses its target first."""
        return binding(self.classes)

    @property
    def limited_by(self) -> str:
        """What fails first here: ``ttft``, ``tpot`` or ``stability``."""
        return "stability" if self.verdict == "unstable" else self.binding.limited_by


def requests_needed(
    rate: float, slo: AnySLO, done: np.ndarray, slo_class: np.ndarray | None = None
) -> int:
    """Requests that make a run at ``rate`` long enough, judged from a shorter one.

    Above capacity by 2 %, waiting times grow by 0.02 s per second. Either the run lasts twice as
    long as it takes that growth to use up what the limits tolerate (the TTFT limit, or the TPOT
    limit times the tokens), so that half of it is spent beyond them; or it has so many requests
    that the growth stands out of the noise. In both cases it lasts ten lives of a request, or four
    where that is very many requests, whose noise is small. Of several classes the least tolerant
    breaks first, and even the rarest must be seen often enough.
    """
    slo, index = SLOClasses.of(slo), _index(slo_class, done)
    tokens = float(done["output_tokens"].mean())
    tolerated_s = float(np.maximum(slo.ttft_s, slo.tpot_s * max(tokens - 1, 1)).min())
    horizon = rate * 2 * tolerated_s / _OVERLOAD
    gaps_s = np.diff(done["arrival_s"])
    burstiness = float(gaps_s.var() / gaps_s.mean() ** 2) if gaps_s.mean() > 0 else 1.0
    steady = STEADY_REQUESTS * max(1.0, (1 + burstiness) / 2)
    life = rate * float(np.nan_to_num(_total_s(done)).mean())
    lives = max(_FEW_LIFETIMES * life, min(_LIFETIMES * life, _MANY_REQUESTS))
    counts = np.bincount(index, minlength=len(slo.names))
    seen = FIRST_LOOK * (len(done) / max(int(counts.min()), 1) - 1.0)
    return int(max(min(horizon, steady), lives, seen)) + 1


def most_requests(
    rate: float, slo: AnySLO, mean_output_tokens: float, asked: int, rarest: float = 1.0
) -> int:
    """Requests of the longest run: as asked, or what a few lives of a request take at this rate.

    ``rarest`` is the smallest share that a class has of the requests: it must be seen as well.
    """
    slo = SLOClasses.of(slo)
    seen = int(2 * FIRST_LOOK / rarest) if rarest < 1.0 else 0
    life = rate * float(slo.tpot_s.min()) * mean_output_tokens
    return max(asked, int(min(max((_FEW_LIFETIMES + 2) * life, seen), _MOST_REQUESTS)))


def first_look(rate: float, cycle_s: float, most: int) -> int:
    """Requests of the first run at a rate; ``cycle_s`` is that of the arrivals, 0 without one."""
    return min(max(FIRST_LOOK, int(BURST_CYCLES * cycle_s * rate)), most)


def steady_part(done: np.ndarray) -> slice:
    """Rows to measure: without a tenth at each end, or at the start as long as a request lives."""
    margin = int(len(done) * MARGIN)
    arrival_s = done["arrival_s"]
    life_s = float(np.nan_to_num(_total_s(done)).mean())
    filled = int(np.searchsorted(arrival_s, arrival_s[0] + life_s))
    return slice(max(margin, min(filled, len(done) // 4)), len(done) - margin)


def judge(rate: float, slo: AnySLO, done: np.ndarray, slo_class: np.ndarray | None = None) -> Probe:
    """Judge a run.

    Parameters
    ----------
    done
        The simulator's rows in order of arrival, at least 100.
    slo_class
        The class of each, by its place among those of ``slo``; None: all are of the first.
    """
    slo, steady = SLOClasses.of(slo), steady_part(done)
    measured, index = done[steady], _index(slo_class, done)[steady]
    ttft, tpot = ttft_s(measured), tpot_s(measured)
    met = is_met(slo, ttft, tpot, index)
    waiting_s = measured["prefill_queue_s"] + measured["kv_transfer_s"] + measured["decode_queue_s"]
    halves = _batch_means(met).reshape(2, -1)
    first, second = halves.mean(axis=1)
    classes = shares_of(slo, index, ttft, tpot)
    surely_missed = any(
        _is_surely_missed(met[index == place], share.target) for place, share in enumerate(classes)
    )
    waits = _batch_means(np.nan_to_num(waiting_s)).reshape(2, -1)
    drifting = _is_drifting(halves, waits, float(np.ptp(measured["arrival_s"])))
    long_enough = len(done) >= requests_needed(rate, slo, measured, index)
    if surely_missed or (
        not drifting and any(share.attainment < share.target for share in classes)
    ):
        verdict = "missed"
    else:
        verdict = "met" if long_enough and not drifting else "unstable"
    return Probe(
        rate=rate,
        num_requests=len(done),
        attainment=float(met.mean()),
        first_half=float(first),
        second_half=float(second),
        ttft_attainment=float((ttft <= slo.ttft_s[index]).mean()),
        tpot_attainment=float((~(tpot > slo.tpot_s[index])).mean()),
        is_long_enough=long_enough,
        is_drifting=drifting,
        is_surely_missed=surely_missed,
        verdict=verdict,
        classes=classes,
    )


def _index(slo_class: np.ndarray | None, done: np.ndarray) -> np.ndarray:
    return np.zeros(len(done), np.int64) if slo_class is None else slo_class


def _is_surely_missed(met: np.ndarray, target: float) -> bool:
    """Whether the second half of a class's requests is below the target beyond noise."""
    if len(met) < _BATCHES:
        return False  # too few to tell; `requests_needed` asks for more
    second = _batch_means(met).reshape(2, -1)[1:]
    return bool(second.mean() + _SIGMAS * _standard_error(second)[0] < target)


def _total_s(done: np.ndarray) -> np.ndarray:
    stages = (done[name] for name in STAGES)
    return np.asarray(sum(stages))


def _is_drifting(met: np.ndarray, waiting_s: np.ndarray, span_s: float) -> bool:
    """Halves by row, batch means by column.

    Waits that grow by less than the slightest overload would have them are those of a busier
    half, not of a queue without end.
    """
    disagree = abs(met[0].mean() - met[1].mean()) > 0.01 + _SIGMAS * _difference_error(met)
    before, after = waiting_s.mean(axis=1)
    least = max(_SIGMAS * _difference_error(waiting_s), _SLIGHT_OVERLOAD * span_s / 2)
    grows = after - before > least and after > 1.3 * before
    return bool(disagree or grows)


def _batch_means(values: np.ndarray) -> np.ndarray:
    edges = np.linspace(0, len(values), _BATCHES + 1).astype(np.int64)[:-1]
    sums = np.add.reduceat(values.astype(np.float64), edges)
    return np.asarray(sums / np.diff(np.r_[edges, len(values)]))


def _standard_error(halves: np.ndarray) -> np.ndarray:
    return np.asarray(halves.std(axis=1, ddof=1) / np.sqrt(halves.shape[1]))


def _difference_error(halves: np.ndarray) -> float:
    return float(np.hypot(*_standard_error(halves)))
