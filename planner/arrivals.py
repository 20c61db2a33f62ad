"""Arrival processes: fitted to a trace, sampled at any rate with a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from daskserve.errors import InvalidParameter

MIN_FIT_REQUESTS = 30
"""Fewer arrivals tell nothing about burstiness; the fit is then Poisson."""


class ArrivalProcess(Protocol):
    """Anything that can place ``num_requests`` arrivals at a rate."""

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
        if not (np.isfinite(self.cv) and self.cv > 0):
            raise InvalidParameter("cv", self.cv, "must be a finite number above 0")

    def sample(self, num_requests: int, rate: float, generator: np.random.Generator) -> np.ndarray:
        shape = 1.0 / self.cv**2
        return _arrivals(generator.gamma(shape, 1.0 / shape, num_requests), rate)


def _arrivals(gaps: np.ndarray, rate: float) -> np.ndarray:
    """Running sums of unit-mean gaps, first arrival at 0, at ``rate`` requests per second."""
    arrival = np.cumsum(gaps)
    return (arrival - arrival[0]) / rate


def fit_arrivals(arrival_s: np.ndarray) -> ArrivalProcess:
    """The process that the gaps of a trace look like: Poisson or gamma."""
    gaps = np.diff(arrival_s)
    if len(gaps) < MIN_FIT_REQUESTS or gaps.mean() == 0:
        return Poisson()
    cv = float(gaps.std() / gaps.mean())
    # Within sampling error of 1 the simpler process says the same.
    if abs(cv - 1.0) < 3.0 / np.sqrt(len(gaps)):
        return Poisson()
    return Gamma(max(cv, 0.05))
