"""Prompt and output lengths for the original search, and how it draws requests from them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np

from daskserve.errors import ConfigError, WorkloadError

MAX_TOTAL_TOKENS = 2048
"""Rows that reach OPT's context length are dropped, as the paper does."""


@dataclass(frozen=True, slots=True)
class _LengthModel:
    """Log-normal outputs; log-normal or uniform prompts. Medians in tokens."""

    seed: int
    num_rows: int
    prompt_median: float
    prompt_sigma: float
    output_median: float
    output_sigma: float
    prompt_range: tuple[int, int] | None = None

    def prompt(self, generator: random.Random) -> int:
        if self.prompt_range:
            return generator.randint(*self.prompt_range)
        return _log_normal(generator, self.prompt_median, self.prompt_sigma, 2000)

    def output(self, generator: random.Random) -> int:
        return _log_normal(generator, self.output_median, self.output_sigma, 1024)


SYNTHETIC_LENGTHS = {
    "sharegpt": _LengthModel(1, 5000, 720, 0.7, 155, 0.8),
    "humaneval": _LengthModel(2, 1640, 155, 0.45, 78, 0.7),
    "longbench": _LengthModel(3, 5000, 0, 0, 75, 0.7, prompt_range=(1540, 1940)),
}
"""Stand-ins for the paper's data sets with nearly their means; no third party's text."""


def synthetic_lengths(name: str) -> np.ndarray:
    """Rows of (prompt, output) tokens of a stand-in data set; always the same rows.

    Raises
    ------
    ConfigError
        Unknown name.
    """
    if name not in SYNTHETIC_LENGTHS:
        raise ConfigError(f"no synthetic lengths {name!r}; there are {sorted(SYNTHETIC_LENGTHS)}")
    model = SYNTHETIC_LENGTHS[name]
    generator = random.Random(model.seed)
    rows: list[tuple[int, int]] = []
    while len(rows) < model.num_rows:
        row = (model.prompt(generator), model.output(generator))
        if sum(row) < MAX_TOTAL_TOKENS:
            rows.append(row)
    return np.array(rows, dtype=np.int64)


def draw_lengths(lengths: np.ndarray, num_requests: int, seed: int) -> tuple[np.ndarray, ...]:
    """Prompt and output tokens of ``num_requests`` rows, drawn without replacement.

    The same rows that the original draws with that seed.
    """
    if not 1 <= num_requests <= len(lengths):
        raise WorkloadError(f"cannot draw {num_requests} requests from {len(lengths)} rows")
    rows = random.Random(seed).sample(range(len(lengths)), num_requests)
    drawn = lengths[rows]
    return np.ascontiguousarray(drawn[:, 0]), np.ascontiguousarray(drawn[:, 1])


def draw_arrivals_ms(num_requests: int, rate: float, seed: int) -> np.ndarray:
    """Poisson arrivals at ``rate`` requests/s, the first at 0, as the original draws them."""
    if not (math.isfinite(rate) and rate > 0):
        raise WorkloadError(f"rate={rate!r} must be a finite number of requests/s above 0")
    # The legacy generator: its stream is part of what is compared.
    gaps_ms = np.random.RandomState(seed).gamma(1.0, 1.0 / rate, num_requests - 1) * 1000.0
    return np.concatenate([[0.0], np.cumsum(gaps_ms)])


def _log_normal(generator: random.Random, median: float, sigma: float, most: int) -> int:
    return min(most, max(4, round(generator.lognormvariate(math.log(median), sigma))))
