"""What is asked of the planner, checked once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from daskserve.errors import InvalidParameter
from daskserve.planner.hardware import Cluster
from daskserve.planner.latency import LatencyModel, Roofline
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.search.objective import Objective
from daskserve.planner.search.space import SearchSpace
from daskserve.planner.slo_classes import AnySLO, SLOClasses
from daskserve.planner.workload import Workload

ALGORITHMS = ("auto", "1", "2", "3", "joint", "colocated", "single")
OBJECTIVES = ("gpus", "price")
MOST_NODES_PER_INSTANCE = 4
LEAST_MAX_REQUESTS = 30_000


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """Inputs of a plan.

    Parameters
    ----------
    workload
        Lengths, and arrivals whose burstiness is fitted; its rate is replaced by ``rate``.
    slo
        One for all requests, or one by name for each class of the workload: then a rate holds
        when every class meets its own target.
    rate
        Requests/s to serve; None takes the workload's own.
    objective
        ``gpus`` or ``price``: what is kept low.
    latency
        Step times; None is a roofline with default efficiencies.
    algorithm
        ``auto`` chooses by the KV bandwidth that the plan needs and the network has; the others
        allow one way only.
    nodes_per_instance
        N of the paper; None: all nodes, at most 4.
    seeds, max_requests
        Simulated traces of one candidate at one rate, and the length of the longest.
    """

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    slo: AnySLO
    rate: float | None = None
    objective: str = "gpus"
    latency: LatencyModel | None = None
    algorithm: str = "auto"
    nodes_per_instance: int | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    max_requests: int = 100_000
    spaces: tuple[SearchSpace, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        _one_of("algorithm", self.algorithm, ALGORITHMS)
        _one_of("objective", self.objective, OBJECTIVES)
        if self.rate is not None and not (math.isfinite(self.rate) and self.rate >= 0):
            raise InvalidParameter("rate", self.rate, "must be a finite number of at least 0")
        if self.objective == "price" and self.cluster.price_per_hour == 0:
            limit = "needs GPUs with prices above 0 $/h"
            raise InvalidParameter("objective", self.objective, limit)
        if self.max_requests < LEAST_MAX_REQUESTS:
            limit = f"must be at least {LEAST_MAX_REQUESTS}: a steady state takes about as many"
            raise InvalidParameter("max_requests", self.max_requests, limit)
        if not self.seeds:
            raise InvalidParameter("seeds", self.seeds, "must hold at least one seed")
        if self.nodes_per_instance is not None and self.nodes_per_instance < 1:
            limit = "must be at least 1"
            raise InvalidParameter("nodes_per_instance", self.nodes_per_instance, limit)
        _, prompt, output = self.workload.arrays()
        self.model.check_lengths(prompt + output)
        if len(self.workload):
            self.classes.check(self.workload)
        object.__setattr__(self, "spaces", tuple(self._spaces()))

    def _spaces(self) -> Iterator[SearchSpace]:
        for group in self.cluster.groups:
            nodes = min(group.num_nodes, self.nodes_per_instance or MOST_NODES_PER_INSTANCE)
            yield SearchSpace(nodes, group.gpus_per_node, group.gpu.name)

    @property
    def classes(self) -> SLOClasses:
        """The SLO of every class; one without a name when one is for all requests."""
        return SLOClasses.of(self.slo)

    @property
    def step_source(self) -> LatencyModel:
        """The latency model that was given, or the roofline in its place."""
        return self.latency or self.roofline

    @property
    def roofline(self) -> Roofline:
        """Default efficiencies, and this cluster's links and typical prompt."""
        typical = int(np.mean(self.workload.arrays()[1])) if len(self.workload) else 1024
        network = self.cluster.network_bandwidth if self.cluster.num_nodes > 1 else None
        return Roofline(network_bandwidth=network, typical_context_tokens=typical)

    @property
    def asked_rate(self) -> float:
        """Requests/s to serve; 0 when neither the caller nor the workload has one."""
        return (self.workload.rate or 0.0) if self.rate is None else self.rate

    @property
    def weights(self) -> Objective:
        prices = {g.gpu.name: g.gpu.price_per_hour for g in self.cluster.groups}
        return Objective(prices) if self.objective == "price" else Objective()

    def at_rate(self, rate: float) -> PlanRequest:
        return replace(self, rate=rate)

    def with_slo(self, slo: AnySLO) -> PlanRequest:
        return replace(self, slo=slo)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidParameter(name, value, f"must be one of {', '.join(allowed)}")
