"""What the planner's simulator expects of each split for the traffic of late."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from daskserve.core.placement import Parallelism
from daskserve.core.slo import SLO
from daskserve.errors import ConfigError
from daskserve.planner.arrivals import MIN_FIT_REQUESTS, Poisson, fit_arrivals
from daskserve.planner.goodput import goodput, probe_rate
from daskserve.planner.simulator import Deployment
from daskserve.planner.step_times import StepTimes
from daskserve.planner.workload import Workload
from daskserve.replanning.decision import Prediction
from daskserve.replanning.split import Split

_FIT_REQUESTS = 10 * MIN_FIT_REQUESTS
"""Of so many the burstiness is believed; fewer are taken to come independently."""


class Planner(Protocol):
    """What the policy asks of the planner."""

    def predict(
        self, history: Workload, splits: Sequence[Split], rate_rps: float
    ) -> list[Prediction]: ...


@dataclass(frozen=True, slots=True)
class Outlook:
    """Simulates splits; some tenths of a CPU-second for six instances.

    Parameters
    ----------
    step_times
        Of one instance, by shape; splits of other shapes are refused.
    slo
        What counts as goodput.
    kv_bytes_per_token, link_bandwidth, link_latency_s
        Of the KV transfers, see `Deployment`.
    prefill_slowdown, decode_slowdown
        What steps take longer beside instances of the other role, see `Deployment`.
    max_requests
        Most requests of one simulated run.
    tolerance
        Relative width to which goodput is found.
    """

    step_times: dict[Parallelism, StepTimes]
    slo: SLO
    kv_bytes_per_token: float = 0.0
    link_bandwidth: float = math.inf
    link_latency_s: float = 0.0
    prefill_slowdown: float = 0.0
    decode_slowdown: float = 0.0
    max_requests: int = 20_000
    tolerance: float = 0.03

    def deployment(self, split: Split) -> Deployment:
        """As the simulator takes it (ConfigError for a shape without step times)."""
        times = self.step_times.get(split.shape)
        if times is None:
            known = ", ".join(str(shape) for shape in self.step_times)
            raise ConfigError(f"no step times for {split.shape}; there are those of {known}")
        return Deployment(
            prefill=times,
            num_prefill=split.num_prefill,
            decode=times,
            num_decode=split.num_decode,
            kv_bytes_per_token=self.kv_bytes_per_token,
            link_bandwidth=self.link_bandwidth,
            link_latency_s=self.link_latency_s,
            prefill_slowdown=self.prefill_slowdown,
            decode_slowdown=self.decode_slowdown,
        )

    def predict(
        self, history: Workload, splits: Sequence[Split], rate_rps: float
    ) -> list[Prediction]:
        """Goodput of every split, and its attainment at the rate; 0 where nothing is met.

        Parameters
        ----------
        history
            Requests of late: lengths are drawn from them, arrivals are as bursty as theirs.
        rate_rps
            At which the attainment is asked for.
        """
        arrival_s = history.arrays()[0]
        is_long = len(arrival_s) >= _FIT_REQUESTS
        arrivals = fit_arrivals(arrival_s) if is_long else Poisson()
        found = []
        for split in splits:
            deployment = self.deployment(split)
            answer = goodput(
                history,
                deployment,
                self.slo,
                seeds=(0,),
                tolerance=self.tolerance,
                max_requests=self.max_requests,
                arrivals=arrivals,
            )
            if answer.status in ("error", "no_data"):
                raise ConfigError(f"the planner has no answer for {split}: {answer.reason}")
            attainment = None
            if rate_rps > 0:
                probe = probe_rate(
                    history, deployment, self.slo, rate_rps, 0, self.max_requests, arrivals
                )
                attainment = probe.attainment
            found.append(Prediction(split, answer.rate or 0.0, attainment))
        return found
