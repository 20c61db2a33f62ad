"""Attainment over rates and over scales of the SLO (DistServe's Figures 8 and 9) in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from daskserve.core.slo import SLO
from daskserve.errors import InvalidParameter
from daskserve.planner.arrivals import ArrivalProcess
from daskserve.planner.simulator import Deployment
from daskserve.planner.simulator.driving import run_arrays
from daskserve.planner.simulator.result import is_met, tpot_s, ttft_s
from daskserve.planner.stationarity import MARGIN, judge, requests_needed
from daskserve.planner.workload import Workload

_FIRST_LOOK = 1000


def sweep(
    workload: Workload,
    deployment: Deployment,
    slo: SLO,
    rates: Sequence[float],
    *,
    slo_scales: Sequence[float] = (1.0,),
    seeds: Sequence[int] = (0, 1, 2),
    max_requests: int = 30_000,
    arrivals: ArrivalProcess | None = None,
) -> xr.Dataset:
    """Attainment at every rate, and under the SLO times every scale.

    Parameters
    ----------
    rates
        Requests/s of the whole deployment; 0 has no requests and gives NaN (no data).
    slo_scales
        Both limits are multiplied by these; below 1 is stricter.
    max_requests
        Most requests of one run; runs are as long as a steady state needs, up to this.

    Returns
    -------
    xarray.Dataset
        Dimensions ``rate``, ``slo_scale``, ``seed``: ``attainment`` (both limits),
        ``ttft_attainment``, ``tpot_attainment``; and ``is_steady`` by rate and seed: whether
        the run under the unscaled SLO was long enough and did not drift.
    """
    _check(rates, slo_scales, seeds)
    scaled = [SLO(slo.ttft_s * k, slo.tpot_s * k, slo.attainment) for k in slo_scales]
    shares = np.full((3, len(rates), len(slo_scales), len(seeds)), np.nan)
    steady = np.zeros((len(rates), len(seeds)), bool)
    for i, rate in enumerate(rates):
        for k, seed in enumerate(seeds):
            if rate > 0 and len(workload) > 0:
                trace = _Trace(workload, deployment, slo, rate, seed, arrivals)
                done, steady[i, k] = trace.run(max_requests)
                shares[:, i, :, k] = _shares(done, scaled)
    dims = ("rate", "slo_scale", "seed")
    names = ("attainment", "ttft_attainment", "tpot_attainment")
    data = {name: (dims, values) for name, values in zip(names, shares, strict=True)}
    coords = {"rate": list(rates), "slo_scale": list(slo_scales), "seed": list(seeds)}
    attributes = {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s}
    return xr.Dataset(data | {"is_steady": (("rate", "seed"), steady)}, coords, attributes)


def _shares(done: np.ndarray, slos: Sequence[SLO]) -> np.ndarray:
    """Shares that meet both limits, TTFT, TPOT (rows) of each SLO (columns)."""
    margin = int(len(done) * MARGIN)
    measured = done[margin : len(done) - margin]
    ttft, tpot = ttft_s(measured), tpot_s(measured)
    columns = [
        (is_met(slo, ttft, tpot).mean(), (ttft <= slo.ttft_s).mean(), (~(tpot > slo.tpot_s)).mean())
        for slo in slos
    ]
    return np.array(columns).T


@dataclass(frozen=True, slots=True)
class _Trace:
    workload: Workload
    deployment: Deployment
    slo: SLO
    rate: float
    seed: int
    arrivals: ArrivalProcess | None

    def run(self, max_requests: int) -> tuple[np.ndarray, bool]:
        """Rows of a run as long as needed, and whether it was steady."""
        done = self._simulate(min(_FIRST_LOOK, max_requests))
        needed = int(1.1 * requests_needed(self.rate, self.slo, done))
        if needed > len(done) < max_requests:
            done = self._simulate(min(needed, max_requests))
        probe = judge(self.rate, self.slo, done)
        return done, probe.is_long_enough and not probe.is_drifting

    def _simulate(self, num_requests: int) -> np.ndarray:
        trace = self.workload.resample(num_requests, self.rate, self.seed, self.arrivals)
        return run_arrays(self.deployment, *trace.arrays())[0]


def _check(rates: Sequence[float], slo_scales: Sequence[float], seeds: Sequence[int]) -> None:
    for name, values, least in (("rates", rates, 0.0), ("slo_scales", slo_scales, 1e-9)):
        if len(values) == 0 or not all(np.isfinite(v) and v >= least for v in values):
            raise InvalidParameter(name, list(values), "must be finite numbers, not negative")
    if len(seeds) == 0:
        raise InvalidParameter("seeds", seeds, "must hold at least one seed")
