"""The load of one run: when requests arrive and how long they are, drawn with a seed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from daskserve.errors import ConfigError
from daskserve.planner.arrivals import ArrivalProcess, Gamma, Poisson
from daskserve.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class Constant:
    """Arrivals at equal distances."""

    def sample(self, num_requests: int, rate: float, generator: np.random.Generator) -> np.ndarray:
        return np.arange(num_requests) / rate


def arrival_process(name: str, burstiness: float) -> ArrivalProcess | None:
    """By name, None for ``workload``: the trace's own.

    Parameters
    ----------
    burstiness
        Of gamma gaps, as vLLM has it: 1 is Poisson, less is burstier (ConfigError).
    """
    if not (math.isfinite(burstiness) and burstiness > 0):
        raise ConfigError(f"--burstiness {burstiness:g} must be a finite number above 0")
    processes: dict[str, ArrivalProcess | None] = {
        "poisson": Poisson(),
        "gamma": Gamma(burstiness**-0.5),
        "constant": Constant(),
        "workload": None,
    }
    return processes[name]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt or of an answer: evenly from ``low`` to ``high``, both included."""

    low: int
    high: int

    @classmethod
    def read(cls, option: str, text: str) -> Lengths:
        """``512``, or ``100-1000`` (ConfigError)."""
        low, _, high = text.partition("-")
        try:
            lengths = cls(int(low), int(high or low))
        except ValueError:
            raise ConfigError(
                f"{option} {text!r} must be a number, or two as in 100-1000"
            ) from None
        if not 1 <= lengths.low <= lengths.high:
            raise ConfigError(f"{option} {text!r} must be at least 1, the lower number first")
        return lengths

    def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
        return generator.integers(self.low, self.high + 1, count)


@dataclass(frozen=True, eq=False)
class Offered:
    """Draws the load at any rate.

    Parameters
    ----------
    lengths
        Requests to draw lengths from, jointly.
    arrivals
        None: those of ``lengths``, in its order, faster or slower.
    """

    lengths: Workload
    arrivals: ArrivalProcess | None
    seed: int

    @classmethod
    def uniform(
        cls, prompt: Lengths, output: Lengths, arrivals: ArrivalProcess | None, seed: int
    ) -> Offered:
        """Lengths that do not depend on one another."""
        generator = np.random.default_rng(seed)
        pool = 1 if prompt.low == prompt.high and output.low == output.high else 10_000
        drawn = (lengths.draw(pool, generator) for lengths in (prompt, output))
        return cls(Workload.from_arrays(np.zeros(pool), *drawn), arrivals, seed)

    def at(self, rate: float | None, num_requests: int | None) -> Workload:
        """Requests at ``rate`` per second, infinity for all at once, None for the trace's own.

        Raises
        ------
        ConfigError, WorkloadError
            No number of requests, or a rate that is none.
        """
        if rate == math.inf:
            count = num_requests or len(self.lengths)
            drawn = self.lengths.resample(count, 1.0, self.seed, Poisson())
            return Workload.from_arrays(np.zeros(count), *drawn.arrays()[1:])
        if self.arrivals is None:
            trace = self.lengths if rate is None else self.lengths.scaled_to(rate)
            return Workload(trace.dataset.isel(request=slice(num_requests)))
        if rate is None or num_requests is None:
            raise ConfigError("drawn arrivals need --rate, and --requests or --duration")
        return self.lengths.resample(num_requests, rate, self.seed, self.arrivals)


def first_seconds(load: Workload, duration_s: float) -> Workload:
    """The requests of the first so many seconds."""
    arrival_s = load.arrays()[0]
    return Workload(load.dataset.isel(request=arrival_s - arrival_s[:1] < duration_s))
