"""Arrival processes: fitted to a trace, sampled at any rate with a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from daskserve.errors import InvalidParameter

MIN_FIT_REQUESTS = 30
"""Fewer arrivals tell nothing about burstiness; the fit is then Poisson."""
SIMPLER_BY = 0.1
"""A process with more parameters must come closer by this much (in logs of dispersion)."""


class ArrivalProcess(Protocol):
    """Anything that can place ``num_requests`` arrivals at a mean rate, the first at 0."""

    def sample(
        self, num_requests: int, rate: float, generator: np.random.Generator
    ) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals."""

    def sample(self, num_requests: int, rate: float, generator: np.random.Generator) -> np.ndarray:
        return _arrivals(generator.exponential(1.0, num_requests), rate)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma-distributed gaps; ``cv`` is their coefficient of variation, 1 is Poisson."""

    cv: float

    def __post_init__(self) -> None:
        _check_positive("cv", self.cv)

    def sample(self, num_requests: int, rate: float, generator: np.random.Generator) -> np.ndarray:
        shape = 1.0 / self.cv**2
        return _arrivals(generator.gamma(shape, 1.0 / shape, num_requests), rate)


@dataclass(frozen=True, slots=True)
class Bursts:
    """Busy and quiet phases that take turns, Poisson within each (an MMPP of two states).

    Parameters
    ----------
    busy_s, quiet_s
        Mean seconds of a phase, exponentially distributed; they do not change with the rate.
    quiet_ratio
        Rate of quiet phases over that of busy ones, 0..1.
    """

    busy_s: float
    quiet_s: float
    quiet_ratio: float

    def __post_init__(self) -> None:
        _check_positive("busy_s", self.busy_s)
        _check_positive("quiet_s", self.quiet_s)
        if not 0 <= self.quiet_ratio <= 1:
            raise InvalidParameter("quiet_ratio", self.quiet_ratio, "must be 0..1")

    def sample(self, num_requests: int, rate: float, generator: np.random.Generator) -> np.ndarray:
        # Phases from a stream of their own: the same seed has the same ones at every rate.
        generator, phases = generator.spawn(2)
        cycle_s = self.busy_s + self.quiet_s
        busy_rate = rate * cycle_s / (self.busy_s + self.quiet_ratio * self.quiet_s)
        # In operational time arrivals are Poisson of rate 1; phases stretch it to seconds.
        operational = np.cumsum(generator.exponential(1.0, num_requests))
        per_cycle = rate * cycle_s
        cycles = int(operational[-1] / per_cycle) + 1
        seconds, work = np.zeros(1), np.zeros(1)
        while work[-1] <= operational[-1]:
            lengths = phases.exponential(1.0, (cycles, 2)) * (self.busy_s, self.quiet_s)
            rates = (busy_rate, busy_rate * self.quiet_ratio)
            seconds = np.append(seconds, seconds[-1] + np.cumsum(lengths.ravel()))
            work = np.append(work, work[-1] + np.cumsum((lengths * rates).ravel()))
        # A quiet phase without arrivals adds no work: the later end is where work goes on.
        arrival = np.interp(operational, *_strictly_rising(work, seconds))
        return arrival - arrival[0]


def cycle_s(process: ArrivalProcess) -> float:
    """Mean seconds of a busy and a quiet phase together; 0 where arrivals have no phases."""
    return process.busy_s + process.quiet_s if isinstance(process, Bursts) else 0.0


def _strictly_rising(work: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keep both ends of every idle stretch apart by the smallest step that interp can see."""
    nudge = np.arange(len(work)) * 1e-12 * max(work[-1], 1.0)
    return work + nudge, seconds


def _check_positive(name: str, value: float) -> None:
    if not (np.isfinite(value) and value > 0):
        raise InvalidParameter(name, value, "must be a finite number above 0")


def _arrivals(gaps: np.ndarray, rate: float) -> np.ndarray:
    """Running sums of unit-mean gaps, first arrival at 0, at ``rate`` requests per second."""
    arrival = np.cumsum(gaps)
    return (arrival - arrival[0]) / rate


def dispersion(arrival_s: np.ndarray, window_s: float) -> float:
    """Variance over mean of the counts in whole windows; 1 for Poisson."""
    counts = _counts(arrival_s, window_s)
    mean = counts.mean() if len(counts) else 0.0
    return float(counts.var() / mean) if mean > 0 else 1.0


def _counts(arrival_s: np.ndarray, window_s: float) -> np.ndarray:
    """Arrivals per window; the last, incomplete window is left out."""
    num_windows = int((arrival_s[-1] - arrival_s[0]) / window_s)
    index = ((arrival_s - arrival_s[0]) / window_s).astype(np.int64)
    return np.bincount(index[index < num_windows], minlength=num_windows).astype(np.float64)


def dispersion_curve(arrival_s: np.ndarray, windows_s: np.ndarray) -> np.ndarray:
    """Dispersion at several windows: how burstiness shows at each time scale."""
    return np.array([dispersion(arrival_s, float(window_s)) for window_s in windows_s])


def fit_arrivals(arrival_s: np.ndarray) -> ArrivalProcess:
    """The simplest process whose dispersion looks like the trace's at every time scale.

    Candidates are Poisson, gamma gaps with the trace's coefficient of variation, and busy and
    quiet phases; each is sampled once and compared from two mean gaps up to a thirtieth of the
    span.
    """
    gaps = np.diff(arrival_s)
    if len(gaps) < MIN_FIT_REQUESTS or gaps.mean() == 0:
        return Poisson()
    mean_gap_s, span_s = float(gaps.mean()), float(arrival_s[-1] - arrival_s[0])
    windows_s = np.geomspace(2.0 * mean_gap_s, max(span_s / 30.0, 4.0 * mean_gap_s), 6)
    target = np.log(np.maximum(dispersion_curve(arrival_s, windows_s), 1e-3))
    candidates: list[ArrivalProcess] = [Poisson(), Gamma(max(float(gaps.std()) / mean_gap_s, 0.05))]
    bursts = fit_bursts(arrival_s, windows_s)
    if bursts is not None:
        candidates.append(bursts)
    best, best_distance = candidates[0], np.inf
    for process in candidates:
        sample = process.sample(len(arrival_s), 1.0 / mean_gap_s, np.random.default_rng(0))
        curve = np.log(np.maximum(dispersion_curve(sample, windows_s), 1e-3))
        distance = float(np.abs(curve - target).mean())
        if distance < best_distance - SIMPLER_BY:
            best, best_distance = process, distance
    return best


def fit_bursts(arrival_s: np.ndarray, windows_s: np.ndarray) -> Bursts | None:
    """Phases whose dispersion curve is closest to the trace's; None when it is no higher than 1.

    A rate that switches with variance v and relaxation rate k has dispersion
    ``1 + 2 v / (rate k) (1 - (1 - exp(-k t)) / (k t))`` at window t. The share of busy time is
    that of windows above the mean, as long as quiet rates stay at or above 0.
    """
    curve = dispersion_curve(arrival_s, windows_s)
    if curve.max() <= 1.1:
        return None
    rate = (len(arrival_s) - 1) / float(arrival_s[-1] - arrival_s[0])
    relaxation, amplitude = _relaxation(curve, windows_s)
    variance = amplitude * rate * relaxation / 2.0
    if variance <= 0:
        return None
    counts = _counts(arrival_s, float(min(max(1.0 / relaxation, windows_s[0]), windows_s[-1])))
    busy = min(float((counts > counts.mean()).mean()), rate**2 / (rate**2 + variance))
    busy = min(max(busy, 0.02), 0.98)
    spread = np.sqrt(variance)
    busy_rate = rate + spread * np.sqrt((1.0 - busy) / busy)
    quiet_rate = max(0.0, rate - spread * np.sqrt(busy / (1.0 - busy)))
    return Bursts(
        busy_s=1.0 / (relaxation * (1.0 - busy)),
        quiet_s=1.0 / (relaxation * busy),
        quiet_ratio=float(quiet_rate / busy_rate),
    )


def _relaxation(curve: np.ndarray, windows_s: np.ndarray) -> tuple[float, float]:
    """``(k, 2 v / (rate k))`` by relative least squares over a grid of k."""
    best = (1.0 / windows_s[-1], 0.0, np.inf)
    for k in np.geomspace(0.1 / windows_s[-1], 10.0 / windows_s[0], 60):
        x = k * windows_s
        shape = 1.0 - (1.0 - np.exp(-x)) / x
        weighted = shape / curve
        amplitude = max(0.0, float(weighted @ ((curve - 1.0) / curve) / (weighted @ weighted)))
        error = float((((1.0 + amplitude * shape) / curve - 1.0) ** 2).sum())
        if error < best[2]:
            best = (float(k), amplitude, error)
    return best[0], best[1]
