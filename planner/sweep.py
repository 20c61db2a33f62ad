"""Attainment over rates and over scales of the SLO (DistServe's Figures 8 and 9) in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from daskserve.errors import InvalidParameter
from daskserve.planner.arrivals import ArrivalProcess, cycle_s, fit_arrivals
from daskserve.planner.search.simulated import Executor, run_all
from daskserve.planner.simulator import Deployment
from daskserve.planner.simulator.driving import run_arrays
from daskserve.planner.simulator.result import tpot_s, ttft_s
from daskserve.planner.slo_classes import AnySLO, SLOClasses, shares_of
from daskserve.planner.stationarity import first_look, judge, requests_needed, steady_part
from daskserve.planner.workload import Workload

SHARES = ("attainment", "ttft_attainment", "tpot_attainment")


def sweep(
    workload: Workload,
    deployments: Deployment | Mapping[str, Deployment],
    slo: AnySLO,
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
        Both limits, of every class, are multiplied by these; below 1 is stricter.
    max_requests
        Most requests of one run; runs are as long as a steady state needs, up to this.
    executor
        As in `plan`; the results do not depend on it.

    Returns
    -------
    xarray.Dataset
        Dimensions ``system`` (with several deployments), ``rate``, ``slo_scale``, ``seed``:
        ``attainment`` (both limits), ``ttft_attainment``, ``tpot_attainment``; the first also by
        ``slo_class`` as ``class_attainment``, against ``target``; and ``is_steady`` without
        ``slo_scale``: whether the run under the unscaled SLO was long enough and did not drift.
    """
    _check(rates, slo_scales, seeds)
    systems = {"": deployments} if isinstance(deployments, Deployment) else deployments
    if not systems or (num_gpus is not None and set(num_gpus) != set(systems)):
        limit = f"must name the systems that are swept: {', '.join(systems)}"
        raise InvalidParameter("num_gpus", num_gpus, limit)
    classes = SLOClasses.of(slo)
    if len(workload):
        classes.check(workload)
    scaled = tuple(classes.scaled(k, k) for k in slo_scales)
    process = arrivals or fit_arrivals(workload.arrays()[0])
    tasks = [
        _Task(workload, one, classes, scaled, rate * gpus, seed, process, max_requests)
        for name, one in systems.items()
        for gpus in [num_gpus[name] if num_gpus else 1]
        for rate in rates
        for seed in seeds
    ]
    coords: dict[str, list] = {"system": list(systems), "rate": list(rates)}
    coords |= {"slo_scale": list(slo_scales), "seed": list(seeds)}
    found = _dataset(run_all(executor, _run, tasks), coords, classes)
    return found.isel(system=0, drop=True) if isinstance(deployments, Deployment) else found


def _dataset(
    answers: list[tuple[np.ndarray, bool]], coords: dict[str, list], slo: SLOClasses
) -> xr.Dataset:
    """Answers of every system, rate and seed, the seed fastest."""
    num_systems, num_rates, num_scales, num_seeds = (len(values) for values in coords.values())
    shape = (num_systems, num_rates, num_seeds)
    names = (*SHARES, *slo.names)
    shares = np.array([share for share, _ in answers]).reshape(*shape, len(names), num_scales)
    steady = np.array([is_steady for _, is_steady in answers]).reshape(shape)
    by_name = np.moveaxis(shares, (3, 4), (0, 3))
    data: dict = {name: (tuple(coords), by_name[i]) for i, name in enumerate(SHARES)}
    data["class_attainment"] = (("slo_class", *coords), by_name[len(SHARES) :])
    for name in ("target", "ttft_s", "tpot_s"):
        limit = slo.attainment if name == "target" else getattr(slo, name)
        data[name] = ("slo_class", limit)
    data["is_steady"] = (("system", "rate", "seed"), steady)
    return xr.Dataset(data, coords | {"slo_class": list(slo.names)})


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """One deployment at one rate under one seed; what travels to a worker."""

    workload: Workload
    deployment: Deployment
    slo: SLOClasses
    scaled: tuple[SLOClasses, ...]
    rate: float
    seed: int
    arrivals: ArrivalProcess
    max_requests: int


def _run(task: _Task) -> tuple[np.ndarray, bool]:
    """Shares (`SHARES` and classes by row; SLOs by column), and whether the run was steady."""
    if task.rate == 0 or len(task.workload) == 0:
        return np.full((len(SHARES) + len(task.slo.names), len(task.scaled)), np.nan), False
    most = task.max_requests
    done, index = _simulate(task, first_look(task.rate, cycle_s(task.arrivals), most))
    needed = int(1.1 * requests_needed(task.rate, task.slo, done, index))
    if needed > len(done) < most:
        done, index = _simulate(task, min(needed, most))
    probe = judge(task.rate, task.slo, done, index)
    return _shares(done, index, task.scaled), probe.is_long_enough and not probe.is_drifting


def _simulate(task: _Task, num_requests: int) -> tuple[np.ndarray, np.ndarray]:
    """``DONE`` rows and their classes."""
    trace = task.workload.resample(num_requests, task.rate, task.seed, task.arrivals)
    return run_arrays(task.deployment, *trace.arrays())[0], task.slo.index_of(trace)


def _shares(done: np.ndarray, index: np.ndarray, slos: Sequence[SLOClasses]) -> np.ndarray:
    steady = steady_part(done)
    measured, index = done[steady], index[steady]
    ttft, tpot = ttft_s(measured), tpot_s(measured)
    columns = []
    for slo in slos:
        in_ttft, in_tpot = ttft <= slo.ttft_s[index], ~(tpot > slo.tpot_s[index])
        of_all = [(in_ttft & in_tpot).mean(), in_ttft.mean(), in_tpot.mean()]
        columns.append(of_all + [one.attainment for one in shares_of(slo, index, ttft, tpot)])
    return np.array(columns).T


def _check(rates: Sequence[float], slo_scales: Sequence[float], seeds: Sequence[int]) -> None:
    for name, values, least in (("rates", rates, 0.0), ("slo_scales", slo_scales, 1e-9)):
        if len(values) == 0 or not all(np.isfinite(v) and v >= least for v in values):
            raise InvalidParameter(name, list(values), "must be finite numbers, not negative")
    if len(seeds) == 0:
        raise InvalidParameter("seeds", seeds, "must hold at least one seed")
