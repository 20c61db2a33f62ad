"""The applications of DistServe's Table 1: model, SLO and lengths under one name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daskserve.core.slo import SLO
from daskserve.errors import ConfigError
from daskserve.planner.arrivals import Poisson
from daskserve.planner.distserve.lengths import synthetic_lengths
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


def application(name: str) -> Application:
    """A preset by name. Raises ConfigError with the names that there are."""
    if name not in APPLICATIONS:
        raise ConfigError(f"unknown application {name!r}: known are {', '.join(APPLICATIONS)}")
    return APPLICATIONS[name]
