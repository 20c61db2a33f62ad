"""Days to play: recorded ones compressed, and a synthetic one of two mixes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from daskserve.errors import InvalidParameter
from daskserve.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class Mix:
    """Lognormal lengths.

    Parameters
    ----------
    prompt_tokens, output_tokens
        Medians.
    spread
        Of both, in logs.
    """

    name: str
    prompt_tokens: int
    output_tokens: int
    spread: float = 0.4

    def lengths(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Prompt and output tokens of so many requests, at most eight times the medians."""
        prompt, output = (
            np.clip(rng.lognormal(math.log(median), self.spread, count), 1, 8 * median)
            for median in (self.prompt_tokens, self.output_tokens)
        )
        return prompt.astype(np.int64), np.maximum(output.astype(np.int64), 2)


CODE = Mix("code", 500, 8)
"""Long prompts and short answers, as of an assistant that completes code."""
CONVERSATION = Mix("conversation", 120, 40)
"""Short prompts and long answers."""


def stretch(
    mix: Mix, rate: float, start_s: float, seconds: float, rng: np.random.Generator
) -> Workload:
    """Poisson arrivals of one mix, from ``start_s`` on."""
    count = int(rng.poisson(rate * seconds))
    arrival_s = np.sort(rng.uniform(start_s, start_s + seconds, count))
    return Workload.from_arrays(arrival_s, *mix.lengths(count, rng))


def joined(parts: list[Workload]) -> Workload:
    """One after the other; their arrivals are those of the same clock."""
    columns = zip(*(part.arrays() for part in parts), strict=True)
    return Workload.from_arrays(*(np.concatenate(column) for column in columns))


def two_mixes(rates: tuple[float, float], phase_s: float, num_phases: int, seed: int) -> Workload:
    """Code and conversation in turns, at a rate each.

    Parameters
    ----------
    rates
        Requests/s of code, and of conversation.
    phase_s
        Length of each phase.
    """
    rng = np.random.default_rng(seed)
    mixes = (CODE, CONVERSATION)
    parts = [
        stretch(mixes[number % 2], rates[number % 2], number * phase_s, phase_s, rng)
        for number in range(num_phases)
    ]
    return joined(parts)


def compressed(workload: Workload, speed: float, rate: float | None, seed: int) -> Workload:
    """The same day in less time.

    Parameters
    ----------
    speed
        So many times faster: arrivals come so many times as often.
    rate
        Mean requests/s afterwards; requests are left out at random until it is so. None keeps
        all.

    Raises
    ------
    InvalidParameter
        A speed or rate that is not above 0, or a rate that the day does not have.
    """
    if not (math.isfinite(speed) and speed > 0):
        raise InvalidParameter("speed", speed, "must be a finite number above 0")
    arrival_s, prompt, output = workload.arrays()
    arrival_s = (arrival_s - arrival_s[:1].sum()) / speed
    if rate is not None:
        found = (workload.rate or 0.0) * speed
        if not 0 < rate <= found:
            limit = f"must be above 0 and at most {found:.3g}, the rate of the day at this speed"
            raise InvalidParameter("rate", rate, limit)
        kept = np.random.default_rng(seed).random(len(arrival_s)) < rate / found
        arrival_s, prompt, output = arrival_s[kept], prompt[kept], output[kept]
    return Workload.from_arrays(arrival_s, prompt, output)
