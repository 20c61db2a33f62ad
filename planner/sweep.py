"""Attainment over rates and over scales of the SLO (DistServe's Figures 8 and 9) in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from daskserve.core.slo import SLO
from daskserve.errors import InvalidParameter
from daskserve.planner.arrivals import ArrivalProcess, cycle_s, fit_arrivals
from daskserve.planner.search.simulated import Executor, run_all
from daskserve.planner.simulator import Deployment
from daskserve.planner.simulator.driving import run_arrays
from daskserve.planner.simulator.result import is_met, tpot_s, ttft_s
from daskserve.planner.stationarity import first_look, judge, requests_needed, steady_part
from daskserve.planner.workload import Workload

SHARES = ("attainment", "ttft_attainment", "tpot_attainment")


def sweep(
    workload: Workload,
    deployments: Deployment | Mapping[str, Deployment],
    slo: SLO,
    rates: Sequence[float],
    *,
    slo_scales: Sequence[float] = (1.0,),
    seeds: Sequence[int] = (0, 1, 2),
    max_requests: int = 30_000,
    arrivals: ArrivalProcess | None = None,
    num_gpus: Mapping[str, int] | None = None,
    executor: Executor | None = None,
) -> xr.Dataset:
    """Attainment at every rate, and under the SLO times every scale.

    Parameters
    ----------
    deployments
        One, or several by name.
    rates
        Requests/s of the whole deployment, or of one GPU when ``num_gpus`` says how many each
        has; 0 has no requests and gives NaN (no data).
    slo_scales
        Both limits are multiplied by these; below 1 is stricter.
    max_requests
        Most requests of one run; runs are as long as a steady state needs, up to this.
    executor
        As in `plan`; the results do not depend on it.

    Returns
    -------
    xarray.Dataset
        Dimensions ``system`` (with several deployments), ``rate``, ``slo_scale``, ``seed``:
        ``attainment`` (both limits), ``ttft_attainment``, ``tpot_attainment``; and ``is_steady``
        without ``slo_scale``: whether the run under the unscaled SLO was long enough and did not
        drift.
    """
    _check(rates, slo_scales, seeds)
    systems = {"": deployments} if isinstance(deployments, Deployment) else deployments
    if not systems or (num_gpus is not None and set(num_gpus) != set(systems)):
        limit = f"must name the systems that are swept: {', '.join(systems)}"
        raise InvalidParameter("num_gpus", num_gpus, limit)
    scaled = tuple(SLO(slo.ttft_s * k, slo.tpot_s * k, slo.attainment) for k in slo_scales)
    process = arrivals or fit_arrivals(workload.arrays()[0])
    tasks = [
        _Task(workload, one, slo, scaled, rate * gpus, seed, process, max_requests)
        for name, one in systems.items()
        for gpus in [num_gpus[name] if num_gpus else 1]
        for rate in rates
        for seed in seeds
    ]
    coords: dict[str, list] = {"system": list(systems), "rate": list(rates)}
    coords |= {"slo_scale": list(slo_scales), "seed": list(seeds)}
    found = _dataset(run_all(executor, _run, tasks), coords)
    found.attrs.update(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s)
    return found.isel(system=0, drop=True) if isinstance(deployments, Deployment) else found


def _dataset(answers: list[tuple[np.ndarray, bool]], coords: dict[str, list]) -> xr.Dataset:
    """Answers of every system, rate and seed, the seed fastest."""
    num_systems, num_rates, num_scales, num_seeds = (len(values) for values in coords.values())
    shape = (num_systems, num_rates, num_seeds)
    shares = np.array([share for share, _ in answers]).reshape(*shape, len(SHARES), num_scales)
    steady = np.array([is_steady for _, is_steady in answers]).reshape(shape)
    by_name = zip(SHARES, np.moveaxis(shares, (3, 4), (0, 3)), strict=True)
    data = {name: (tuple(coords), values) for name, values in by_name}
    return xr.Dataset(data | {"is_steady": (("system", "rate", "seed"), steady)}, coords)


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """One deployment at one rate under one seed; what travels to a worker."""

    workload: Workload
    deployment: Deployment
    slo: SLO
    scaled: tuple[SLO, ...]
    rate: float
    seed: int
    arrivals: ArrivalProcess
    max_requests: int


def _run(task: _Task) -> tuple[np.ndarray, bool]:
    """Shares (both limits, TTFT, TPOT by row; SLOs by column), and whether the run was steady."""
    if task.rate == 0 or len(task.workload) == 0:
        return np.full((3, len(task.scaled)), np.nan), False
    most = task.max_requests
    done = _simulate(task, first_look(task.rate, cycle_s(task.arrivals), most))
    needed = int(1.1 * requests_needed(task.rate, task.slo, done))
    if needed > len(done) < most:
        done = _simulate(task, min(needed, most))
    probe = judge(task.rate, task.slo, done)
    return _shares(done, task.scaled), probe.is_long_enough and not probe.is_drifting


def _simulate(task: _Task, num_requests: int) -> np.ndarray:
    trace = task.workload.resample(num_requests, task.rate, task.seed, task.arrivals)
    return run_arrays(task.deployment, *trace.arrays())[0]


def _shares(done: np.ndarray, slos: Sequence[SLO]) -> np.ndarray:
    measured = done[steady_part(done)]
    ttft, tpot = ttft_s(measured), tpot_s(measured)
    columns = [
        (is_met(slo, ttft, tpot).mean(), (ttft <= slo.ttft_s).mean(), (~(tpot > slo.tpot_s)).mean())
        for slo in slos
    ]
    return np.array(columns).T


def _check(rates: Sequence[float], slo_scales: Sequence[float], seeds: Sequence[int]) -> None:
    for name, values, least in (("rates", rates, 0.0), ("slo_scales", slo_scales, 1e-9)):
        if len(values) == 0 or not all(np.isfinite(v) and v >= least for v in values):
            raise InvalidParameter(name, list(values), "must be finite numbers, not negative")
    if len(seeds) == 0:
        raise InvalidParameter("seeds", seeds, "must hold at least one seed")
