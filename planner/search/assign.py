"""Puts every rank on a node and a GPU."""

from __future__ import annotations

from collections.abc import Mapping

from daskserve.core.instance import Role
from daskserve.core.placement import GPULocation, InstancePlacement, Placement
from daskserve.errors import ClusterError
from daskserve.planner.hardware import Cluster, NodeGroup
from daskserve.planner.search.units import Instances, Unit
from daskserve.planner.step_times import StepTimes

Times = Mapping[Instances, StepTimes]


class _Nodes:
    """Free GPUs of one group of nodes, taken from index 0 up."""

    def __init__(self, group: NodeGroup, first_node: int) -> None:
        self.group = group
        self.first_node = first_node
        self.taken = [0] * group.num_nodes

    def free(self, node: int) -> int:
        return self.group.gpus_per_node - self.taken[node]

    def take(self, node: int, count: int) -> list[GPULocation]:
        start = self.taken[node]
        self.taken[node] += count
        return [GPULocation(self.first_node + node, start + i) for i in range(count)]


def assign(
    cluster: Cluster,
    unit: Unit,
    num_units: int,
    step_times: Times,
    model: str = "",
) -> Placement:
    """Place ``num_units`` copies of a unit.

    Tensor-parallel groups stay inside a node. A unit cut into segments takes as many
    nodes; several units share a set of nodes if they fit. Other instances go whole into the
    fullest node that has room, and over several nodes only when larger than one.

    Parameters
    ----------
    step_times
        Of every group with count 1: the limits that the instances are to start with.

    Raises
    ------
    ClusterError
        Says how many GPUs are needed and how many there are.
    """
    nodes = {g.gpu.name: _Nodes(g, cluster.first_node(g)) for g in cluster.groups}
    if unit.num_segments:
        instances = _place_segments(nodes, unit, num_units, step_times)
    else:
        instances = _place_anywhere(nodes, unit.times(num_units), step_times)
    gpus_per_node = max(group.gpus_per_node for group in cluster.groups)
    return Placement(tuple(instances), gpus_per_node, model, cluster.network_bandwidth)


def _place_segments(
    nodes: dict[str, _Nodes], unit: Unit, num_units: int, step_times: Times
) -> list[InstancePlacement]:
    there = _nodes_of(nodes, unit.groups[0])
    num_segments, gpus_per_node = unit.num_segments, there.group.gpus_per_node
    units_per_set = max(1, gpus_per_node // (unit.num_gpus // num_segments))
    num_sets = -(-num_units // units_per_set)
    if num_sets * num_segments > there.group.num_nodes:
        raise _too_small(there, num_sets * num_segments * gpus_per_node, unit)
    placed = []
    for index in range(num_units):
        first = index // units_per_set * num_segments
        for group in unit.groups:
            per_node = group.parallelism.num_gpus // num_segments
            for _ in range(group.count):
                gpus = [
                    gpu
                    for node in range(first, first + num_segments)
                    for gpu in there.take(node, per_node)
                ]
                placed.append(_instance(group, gpus, step_times, unit))
    return placed


def _place_anywhere(
    nodes: dict[str, _Nodes], unit: Unit, step_times: Times
) -> list[InstancePlacement]:
    groups = sorted(unit.groups, key=lambda group: -group.parallelism.num_gpus)
    placed = []
    for group in groups:
        there = _nodes_of(nodes, group)
        for _ in range(group.count):
            gpus = _whole(there, group) or _spread(there, group)
            if gpus is None:
                raise _too_small(there, unit.num_gpus, unit)
            placed.append(_instance(group, gpus, step_times, unit))
    return placed


def _nodes_of(nodes: dict[str, _Nodes], group: Instances) -> _Nodes:
    if group.gpu not in nodes:
        raise ClusterError(f"the cluster has no {group.gpu}: it has {', '.join(nodes)}")
    return nodes[group.gpu]


def _whole(there: _Nodes, group: Instances) -> list[GPULocation] | None:
    """All ranks in the fullest node that has room."""
    size = group.parallelism.num_gpus
    fitting = [n for n in range(there.group.num_nodes) if there.free(n) >= size]
    if not fitting:
        return None
    return there.take(min(fitting, key=lambda n: (there.free(n), n)), size)


def _spread(there: _Nodes, group: Instances) -> list[GPULocation] | None:
    """Stage by stage over the emptiest nodes, so that the fewest are touched."""
    tp, stages_left = group.parallelism.tp, group.parallelism.pp
    order = sorted(range(there.group.num_nodes), key=lambda n: (-there.free(n), n))
    if sum(there.free(n) // tp for n in order) < stages_left:
        return None
    gpus: list[GPULocation] = []
    for node in order:
        here = min(stages_left, there.free(node) // tp)
        gpus += there.take(node, here * tp)
        stages_left -= here
        if stages_left == 0:
            break
    return gpus


def _too_small(there: _Nodes, needed: int, unit: Unit) -> ClusterError:
    have, kind = there.group.num_gpus, there.group.gpu.name
    if needed <= have:
        return ClusterError(
            f"{unit} does not fit on {there.group.num_nodes} nodes of"
            f" {there.group.gpus_per_node} {kind}: a tensor-parallel group cannot leave its node"
        )
    return ClusterError(
        f"the placement needs {needed} {kind}, the cluster has {have}; add nodes, lower the rate,"
        " or ask for the highest rate of this cluster"
    )


def _instance(
    group: Instances, gpus: list[GPULocation], step_times: Times, unit: Unit
) -> InstancePlacement:
    step = step_times[Instances(group.role, group.parallelism, 1, group.gpu)]
    colocated = group.role is Role.COLOCATED
    return InstancePlacement(
        role=group.role,
        parallelism=group.parallelism,
        gpus=tuple(gpus),
        gpu_type=group.gpu,
        kv_capacity_tokens=step.kv_capacity_tokens,
        prefill_budget_tokens=step.prefill_budget_tokens,
        max_batch_size=step.max_batch_size,
        chunk_tokens=unit.chunk_tokens or None if colocated else None,
    )
