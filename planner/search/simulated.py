"""Evaluates units by simulation: bisection with a stationarity test, several seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from daskserve.core.placement import Parallelism
from daskserve.errors import DaskserveError, ModelError
from daskserve.planner.arrivals import ArrivalProcess, fit_arrivals
from daskserve.planner.goodput import Goodput, goodput, probe_rate
from daskserve.planner.search.deploy import deployment_of
from daskserve.planner.search.sized import SizedEvaluator
from daskserve.planner.search.units import Estimate, Unit
from daskserve.planner.simulator import Deployment
from daskserve.planner.slo_classes import ClassShare, SLOClasses, binding
from daskserve.planner.stationarity import Probe
from daskserve.planner.step_times import StepTimes
from daskserve.planner.workload import Workload


class Executor(Protocol):
    """Maps a function over tasks: ``concurrent.futures`` executors and Dask clients do."""

    def map(self, function: Any, *iterables: Iterable[Any]) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class Effort:
    """How precisely a rate is looked for.

    Parameters
    ----------
    seeds
        One bisection each.
    tolerance
        Relative width at which a bisection ends.
    max_requests
        Most requests of one simulated trace.
    """

    seeds: tuple[int, ...] = (0, 1, 2)
    tolerance: float = 0.01
    max_requests: int = 100_000

    def quick(self) -> Effort:
        """One seed and a wider end: for comparisons that need a direction, not a figure."""
        return Effort(self.seeds[:1], max(self.tolerance, 0.02), self.max_requests)


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One deployment to look at; what travels to a worker.

    Parameters
    ----------
    arrivals
        How bursty; fitted once for all tasks.
    rate
        For `check_rate` only: the rate that is asked about.
    """

    unit: Unit
    workload: Workload
    deployment: Deployment
    slo: SLOClasses
    effort: Effort
    arrivals: ArrivalProcess
    rate: float = 0.0

    @property
    def key(self) -> tuple[Unit, SLOClasses]:
        """What a search for its rate depends on, within one evaluator and effort."""
        return self.unit, self.slo


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """Whether a deployment holds a rate.

    Parameters
    ----------
    limited_by
        ``ttft``, ``tpot`` or ``stability`` of the first seed that failed; None when all held.
    """

    holds: bool
    limited_by: str | None
    probes: tuple[Probe, ...]

    @property
    def attainment(self) -> float:
        """The least over seeds, of the class that binds."""
        return self.binding.attainment

    @property
    def binding(self) -> ClassShare:
        """The class that came closest to missing its target, or missed it most, with any seed."""
        return binding(probe.binding for probe in self.probes)

    @property
    def classes(self) -> tuple[ClassShare, ...]:
        """Of each class the seed that attained the least."""
        return tuple(map(binding, zip(*(probe.classes for probe in self.probes), strict=True)))


def run_task(task: Task) -> Goodput:
    """The highest rate of a deployment."""
    effort = task.effort
    return goodput(
        task.workload,
        task.deployment,
        task.slo,
        seeds=effort.seeds,
        tolerance=effort.tolerance,
        max_requests=effort.max_requests,
        arrivals=task.arrivals,
    )


def check_rate(task: Task) -> Check:
    """Look at one rate with every seed; stops at the first that fails."""
    probes = []
    for seed in task.effort.seeds:
        probe = probe_rate(
            task.workload,
            task.deployment,
            task.slo,
            task.rate,
            seed,
            task.effort.max_requests,
            task.arrivals,
        )
        probes.append(probe)
        if probe.verdict != "met":
            return Check(False, probe.limited_by, tuple(probes))
    return Check(True, None, tuple(probes))


@dataclass(eq=False)
class SimulatedEvaluator:
    """Goodputs from the simulator, remembered by unit; bounds from the formulas.

    Parameters
    ----------
    executor
        Where candidates are simulated: None here, else an executor or a Dask client. The
        results do not depend on it.
    """

    sized: SizedEvaluator
    workload: Workload
    slo: SLOClasses
    effort: Effort = field(default_factory=Effort)
    executor: Executor | None = None
    found: dict[Unit, Goodput] = field(default_factory=dict)
    checked: dict[tuple[Unit, float], Check] = field(default_factory=dict)
    arrivals: ArrivalProcess = field(init=False)
    _quick: dict[tuple[Unit, SLOClasses], Goodput] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arrivals = fit_arrivals(self.workload.arrays()[0])

    def step_times(self, gpu: str, parallelism: Parallelism) -> StepTimes:
        step = self.sized.step_times(gpu, parallelism)
        if step is None:
            raise ModelError(f"{self.sized.model.name} does not run as {parallelism} on {gpu}")
        return step

    def fits(self, gpu: str, parallelism: Parallelism) -> bool:
        return self.sized.fits(gpu, parallelism)

    def bound(self, unit: Unit) -> float:
        """The measured rate where there is one, else the formula with its margin."""
        if unit in self.found:
            return estimate_of(self.found[unit]).rate
        return self.sized.bound(unit)

    def evaluate(self, units: Sequence[Unit]) -> list[Estimate]:
        new = [unit for unit in dict.fromkeys(units) if unit not in self.found]
        tasks = [self.task(unit) for unit in new]
        for unit, answer in zip(new, run_all(self.executor, run_task, tasks), strict=True):
            if answer.status == "error":
                raise DaskserveError(f"the simulation of {unit} failed: {answer.reason}")
            self.found[unit] = answer
        return [estimate_of(self.found[unit]) for unit in units]

    def quick(self, tasks: Sequence[Task]) -> list[Goodput]:
        """Goodputs with one seed, remembered by deployment and limits."""
        effort = self.effort.quick()
        new = {task.key: replace(task, effort=effort) for task in tasks}
        new = {key: task for key, task in new.items() if key not in self._quick}
        answers = run_all(self.executor, run_task, list(new.values()))
        for key, answer in zip(new, answers, strict=True):
            if answer.status == "error":
                raise DaskserveError(f"the simulation of {key[0]} failed: {answer.reason}")
            self._quick[key] = answer
        return [self._quick[task.key] for task in tasks]

    def check(self, unit: Unit, rate: float) -> Check:
        """Whether a deployment holds a rate."""
        key = (unit, rate)
        if key not in self.checked:
            [self.checked[key]] = run_all(self.executor, check_rate, [self.task(unit, rate)])
        return self.checked[key]

    def task(self, unit: Unit, rate: float = 0.0, effort: Effort | None = None) -> Task:
        deployment = self.deployment(unit)
        effort = effort or self.effort
        return Task(unit, self.workload, deployment, self.slo, effort, self.arrivals, rate)

    def deployment(self, unit: Unit) -> Deployment:
        return deployment_of(unit, self.sized.model, self.sized.cluster, self.step_times)


def run_all(executor: Executor | None, function: Any, tasks: list[Any]) -> list[Any]:
    """``[function(task) for task in tasks]``, on the executor if there is one."""
    if executor is None or not tasks:
        return [function(task) for task in tasks]
    if hasattr(executor, "gather"):  # a Dask client answers with futures
        client: Any = executor
        return list(client.gather(client.map(function, tasks, pure=False)))
    return list(executor.map(function, tasks))


def estimate_of(answer: Goodput) -> Estimate:
    """The numbers of a goodput; 0 where there is no rate."""
    if answer.rate is None:
        return Estimate(0.0, 0.0, 0.0, answer.status, answer)
    high = math.inf if answer.high is None else answer.high
    return Estimate(answer.rate, answer.low or 0.0, high, answer.status, answer)
