"""Simulates a placement as it stands: what ``daskserve simulate`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xarray as xr

from daskserve.core.instance import Role
from daskserve.core.placement import InstancePlacement, Placement
from daskserve.errors import ConfigError, WorkloadError
from daskserve.planner.arrivals import ArrivalProcess, fit_arrivals
from daskserve.planner.goodput import LongRun, long_run
from daskserve.planner.hardware import GPU, Cluster, NodeGroup, gpu_named
from daskserve.planner.latency import CalibratedModel, LatencyModel
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.search.deploy import link_bandwidth, slowdowns
from daskserve.planner.search.units import Instances
from daskserve.planner.simulator import Deployment, SimulationResult
from daskserve.planner.simulator.driving import Simulation, run_arrays
from daskserve.planner.simulator.result import instances_of, timelines_of
from daskserve.planner.slo_classes import AnySLO, SLOClasses, table_of
from daskserve.planner.stationarity import Probe, judge
from daskserve.planner.step_times import StepTimes
from daskserve.planner.workload import Workload

_NO_TIME_S = 1e-9
SHARES = (0.5, 0.9, 0.99)
ROWS = ("ttft_s", "tpot_s", "prefill_queue_s", "prefill_s", "kv_transfer_s", "decode_queue_s",
        "decode_s")  # fmt: skip


@dataclass(frozen=True, eq=False)
class Replay:
    """One or more runs of a placement.

    Parameters
    ----------
    runs
        Results by seed; one when a trace was replayed.
    probes
        What each run says about the long run; None for a replayed trace, which is its own.
    """

    slo: SLOClasses
    rate: float | None
    runs: tuple[SimulationResult, ...]
    probes: tuple[Probe, ...] | None

    @property
    def attainment(self) -> float:
        """Share of all requests that met both limits."""
        shares = [run.attainment(self.slo) for run in self.runs]
        return float(np.mean([share for share in shares if share is not None]))

    @property
    def by_class(self) -> xr.Dataset:
        """Requests, attainment and target by dimensions ``run`` and ``slo_class``."""
        return table_of([run.shares(self.slo) for run in self.runs])

    @property
    def class_attainment(self) -> dict[str, float]:
        """Share of the requests of each class that met both limits, over all runs."""
        table = self.by_class
        counts = table["num_requests"]
        # A short trace may be drawn without any of a rare class.
        share = (table["attainment"].fillna(0) * counts).sum("run") / counts.sum("run")
        return dict(zip(self.slo.names, share.values.tolist(), strict=True))

    @property
    def is_steady(self) -> bool:
        """False when a queue grew in some run: its attainment would go on falling."""
        return self.probes is None or not any(probe.is_drifting for probe in self.probes)

    @property
    def is_met(self) -> bool:
        """Every class meets its own target."""
        met = [self.class_attainment[name] >= slo.attainment for name, slo in self.slo]
        return all(met) and self.is_steady

    def write_timeline(self, path: str | Path) -> None:
        """Every request of the first run as CSV. Raises ConfigError when it cannot be written."""
        timelines = self.runs[0].timelines
        names = [str(name) for name in timelines.data_vars]
        columns = [timelines[name].values for name in names]
        try:
            with open(path, "w", encoding="utf-8") as lines:
                lines.write(",".join(["request", *names]) + "\n")
                for index, row in enumerate(zip(*columns, strict=True)):
                    lines.write(",".join([str(index), *(str(value) for value in row)]) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error

    def __str__(self) -> str:
        requests = sum(run.timelines.sizes["request"] for run in self.runs)
        rate = f" at {self.rate:.4g} requests/s" if self.rate else ""
        lines = self._classes(f"{requests} requests{rate}")
        if not self.is_steady:
            lines.append("unstable: the queue grew during the run, attainment would go on falling")
        rejected = sum(run.num_rejected for run in self.runs)
        if rejected:
            lines.append(f"{rejected} requests fit in no KV pool")
        lines.append(
            f"{'seconds':18s}" + "".join(f"{f'p{share * 100:g}':>10s}" for share in SHARES)
        )
        percentiles = [run.percentiles(SHARES) for run in self.runs]
        for name in ROWS:
            values = np.mean([one[name].values for one in percentiles], axis=0)
            lines.append(f"{name[:-2]:18s}" + "".join(f"{value:10.4f}" for value in values))
        busy = self.runs[0].instances
        for role in dict.fromkeys(busy["role"].values):
            mine = busy["role"].values == role
            share = float(busy["busy_share"].values[mine].mean())
            kv = busy["peak_kv_blocks"].values[mine] / busy["total_kv_blocks"].values[mine]
            lines.append(
                f"{role}: {mine.sum()} instances, {share:.0%} busy, KV peak {kv.max():.0%}"
            )
        return "\n".join(lines)

    def _classes(self, head: str) -> list[str]:
        """A line for each class, below one for all of them if there are several."""
        table = self.by_class
        lines = [f"{head}: {self.attainment:.2%} met the limits of their class"]
        for name, slo in self.slo:
            of_class = table.sel(slo_class=name)
            shares = [f"{share:.2%}" for share in of_class["attainment"].values]
            whose = f"{name}, {int(of_class['num_requests'].sum())} requests" if name else head
            lines.append(
                f"{whose}: {self.class_attainment[name]:.2%} met TTFT {slo.ttft_s:g} s and TPOT"
                f" {slo.tpot_s:g} s ({', '.join(shares)}); target {slo.attainment:.0%}"
            )
        return lines if self.slo.has_names else lines[1:]


def replay(
    placement: Placement,
    model: ModelSpec,
    latency: LatencyModel,
    workload: Workload,
    slo: AnySLO,
    *,
    rate: float | None = None,
    num_requests: int | None = None,
    seeds: Sequence[int] = (0, 1, 2),
) -> Replay:
    """Simulate a placement.

    Parameters
    ----------
    rate
        Requests/s of traces that are drawn from the workload; None replays it as it is.
    num_requests
        Length of drawn traces (None: as long as a plan draws them), or how much of a replayed
        trace to take.

    Raises
    ------
    WorkloadError
        No requests, no rate, or a class without requests or without SLO.
    """
    if len(workload) == 0:
        raise WorkloadError("no data: the workload holds no requests")
    if rate is None:
        workload = Workload(workload.dataset.isel(request=slice(num_requests)))
    classes = SLOClasses.of(slo)
    classes.check(workload)
    deployment = deployment_of_placement(placement, model, latency)
    dispatch_s = latency.dispatch_s if isinstance(latency, CalibratedModel) else 0.0
    if rate is None:
        if workload.rate is None:
            raise WorkloadError("no data: the workload has no arrival times; give a rate")
        done, simulation = run_arrays(deployment, *workload.arrays())
        run = _result(workload, done, simulation, dispatch_s)
        return Replay(classes, workload.rate, (run,), None)
    arrivals = fit_arrivals(workload.arrays()[0])
    drawn = [
        _drawn(deployment, workload, _less(classes, dispatch_s), rate, seed, arrivals, num_requests)
        for seed in seeds
    ]
    runs = tuple(_result(one.trace, one.done, one.simulation, dispatch_s) for one in drawn)
    return Replay(classes, rate, runs, tuple(one.probe for one in drawn))


def _drawn(
    deployment: Deployment,
    workload: Workload,
    classes: SLOClasses,
    rate: float,
    seed: int,
    arrivals: ArrivalProcess,
    num_requests: int | None,
) -> LongRun:
    if num_requests is None:
        return long_run(workload, deployment, classes, rate, seed, arrivals)
    trace = workload.resample(num_requests, rate, seed, arrivals)
    done, simulation = run_arrays(deployment, *trace.arrays())
    return LongRun(trace, done, simulation, judge(rate, classes, done, classes.index_of(trace)))


def _less(classes: SLOClasses, dispatch_s: float) -> SLOClasses:
    """What is left of the limits once a request is dispatched, if anything."""
    slos = [replace(slo, ttft_s=max(slo.ttft_s - dispatch_s, _NO_TIME_S)) for slo in classes.slos]
    return replace(classes, slos=tuple(slos))


def _result(
    workload: Workload, done: np.ndarray, simulation: Simulation, dispatch_s: float
) -> SimulationResult:
    # The same delay for every arrival changes nothing else.
    done["prefill_queue_s"] += dispatch_s
    tables = instances_of(simulation.tables)
    return SimulationResult(timelines_of(done, workload), tables, simulation.now_s)


def deployment_of_placement(
    placement: Placement, model: ModelSpec, latency: LatencyModel
) -> Deployment:
    """Every instance with its own step times and limits, and the links between them.

    KV links are those of the node where the placement keeps every stage's KV on one, else an
    instance's share of the network.
    """
    colocated = placement.of_role(Role.COLOCATED)
    if colocated and len(colocated) < len(placement.instances):
        raise ConfigError("COLOCATED beside PREFILL and DECODE instances cannot be simulated")
    times = {one: _limited(one, model, latency) for one in dict.fromkeys(placement.instances)}
    if colocated:
        chunks = {one.chunk_tokens for one in colocated}
        if len(chunks) > 1:
            raise ConfigError("all COLOCATED instances must have the same chunk_tokens")
        return Deployment.colocated(
            tuple(times[i] for i in colocated), len(colocated), chunks.pop()
        )
    prefill, decode = placement.of_role(Role.PREFILL), placement.of_role(Role.DECODE)
    return Deployment.disaggregated(
        tuple(times[one] for one in prefill),
        len(prefill),
        tuple(times[one] for one in decode),
        len(decode),
        kv_bytes_per_token=model.kv_bytes_per_token,
        **_links(placement, prefill[0], decode[0], latency),
    )


def _limited(instance: InstancePlacement, model: ModelSpec, latency: LatencyModel) -> StepTimes:
    """Step times under the limits that the placement states."""
    step = latency.step_times(model, _gpu(instance, latency), instance.parallelism)
    return step.limited_to(
        kv_capacity_tokens=instance.kv_capacity_tokens,
        prefill_budget_tokens=instance.prefill_budget_tokens,
        max_batch_size=instance.max_batch_size,
    )


def _gpu(instance: InstancePlacement, latency: LatencyModel) -> GPU:
    if not instance.gpu_type:
        raise ConfigError("the placement does not say gpu_type: add it to every instance")
    gpu = gpu_named(instance.gpu_type)
    return latency.measured(gpu) if isinstance(latency, CalibratedModel) else gpu


def _links(
    placement: Placement,
    prefill: InstancePlacement,
    decode: InstancePlacement,
    latency: LatencyModel,
) -> dict:
    gpus = {one: _gpu(one, latency) for one in (prefill, decode)}
    groups = {gpu.name: gpu for gpu in gpus.values()}
    nodes = tuple(NodeGroup(gpu, placement.num_nodes, placement.gpus_per_node)
                  for gpu in groups.values())  # fmt: skip
    network = placement.network_bandwidth
    cluster = Cluster(nodes) if network is None else Cluster(nodes, network)
    if isinstance(latency, CalibratedModel):
        cluster = latency.on(cluster)
    inside = kv_stays_in_nodes(placement)
    prefill_link, decode_link = (
        link_bandwidth(Instances(one.role, one.parallelism, 1, gpus[one].name), cluster, inside)
        for one in (prefill, decode)
    )
    latency_s = cluster.link_latency_s if inside else cluster.network_latency_s
    return {
        "link_bandwidth": prefill_link,
        "decode_link_bandwidth": decode_link,
        "link_latency_s": latency_s,
        **(slowdowns(cluster) if inside else {}),
    }


def kv_stays_in_nodes(placement: Placement) -> bool:
    """Whether every prefill instance finds a decode instance on the same nodes."""
    decode_nodes = {one.nodes for one in placement.of_role(Role.DECODE)}
    return all(one.nodes in decode_nodes for one in placement.of_role(Role.PREFILL))
