"""The applications of DistServe's Table 1: model, SLO and lengths under one name; and mixes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from daskserve.core.slo import SLO
from daskserve.errors import ConfigError, InvalidParameter
from daskserve.planner.arrivals import Poisson
from daskserve.planner.distserve.lengths import synthetic_lengths
from daskserve.planner.slo_classes import LEAST_SHARE
from daskserve.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class Application:
    """One row of Table 1.

    Parameters
    ----------
    lengths
        Name of the synthetic stand-in for the paper's data set: ``sharegpt``, ``humaneval`` or
        ``longbench``.
    """

    name: str
    model: str
    slo: SLO
    lengths: str

    def workload(self, num_requests: int, rate: float, seed: int = 0) -> Workload:
        """Poisson arrivals at ``rate`` requests/s with lengths drawn from the data set."""
        return self.all_lengths().resample(num_requests, rate, seed, arrivals=Poisson())

    def all_lengths(self) -> Workload:
        """Every row of the data set, without arrival times."""
        prompt, output = synthetic_lengths(self.lengths).T
        return Workload.from_arrays(np.zeros(len(prompt)), prompt, output, name=self.lengths)


APPLICATIONS = {
    one.name: one
    for one in (
        Application("chatbot-opt-13b", "opt-13b", SLO(ttft_s=0.25, tpot_s=0.1), "sharegpt"),
        Application("chatbot-opt-66b", "opt-66b", SLO(ttft_s=2.5, tpot_s=0.15), "sharegpt"),
        Application("chatbot-opt-175b", "opt-175b", SLO(ttft_s=4.0, tpot_s=0.2), "sharegpt"),
        Application("code-opt-66b", "opt-66b", SLO(ttft_s=0.125, tpot_s=0.2), "humaneval"),
        Application("summarization-opt-66b", "opt-66b", SLO(ttft_s=15.0, tpot_s=0.15), "longbench"),
    )
}


MIXED_REQUESTS = 20_000
"""Requests of a mix: the rarest class is among them often enough to be drawn from."""


def mixed(shares: Mapping[str, float]) -> Workload:
    """Requests of several applications, each in its share, whose classes are their names.

    Raises
    ------
    ConfigError, InvalidParameter
        Unknown names, different models, shares that are not numbers above 0 or are not 1
        together.
    """
    mix = {application(name): share for name, share in shares.items()}
    if len({one.model for one in mix}) > 1:
        models = ", ".join(f"{one.name} has {one.model}" for one in mix)
        raise ConfigError(f"applications that are mixed must have the same model: {models}")
    for one, share in mix.items():
        if not (math.isfinite(share) and LEAST_SHARE <= share <= 1):
            limit = f"must be a share of at least {LEAST_SHARE:g} and at most 1"
            raise InvalidParameter(one.name, share, limit)
    if abs(sum(shares.values()) - 1.0) > 1e-6:
        raise InvalidParameter("shares", list(shares.values()), "must be 1 together")
    generator = np.random.default_rng(0)
    drawn, names = [], []
    for one, share in mix.items():
        lengths, count = synthetic_lengths(one.lengths), round(share * MIXED_REQUESTS)
        drawn.append(lengths[generator.integers(0, len(lengths), count)])
        names += [one.name] * count
    prompt, output = np.concatenate(drawn).T
    return Workload.from_arrays(np.zeros(len(prompt)), prompt, output, names, name="mixed")


def application(name: str) -> Application:
    """A preset by name. Raises ConfigError with the names that there are."""
    if name not in APPLICATIONS:
        raise ConfigError(f"unknown application {name!r}: known are {', '.join(APPLICATIONS)}")
    return APPLICATIONS[name]
