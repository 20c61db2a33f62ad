"""From a unit of instances to the deployment that is simulated."""

from __future__ import annotations

from collections.abc import Callable

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.planner.hardware import Cluster
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.search.units import Instances, Unit
from daskserve.planner.simulator import Deployment
from daskserve.planner.step_times import StepTimes

TimesOf = Callable[[str, Parallelism], StepTimes]


def deployment_of(unit: Unit, model: ModelSpec, cluster: Cluster, times_of: TimesOf) -> Deployment:
    """One phase alone, both with the links between them, or colocated instances.

    Raises
    ------
    ModelError
        From ``times_of``: the model cannot be split so.
    """
    times = {group.role: times_of(group.gpu, group.parallelism) for group in unit.groups}
    both = unit.of_role(Role.COLOCATED)
    if both:
        return Deployment.colocated(times[Role.COLOCATED], both.count, unit.chunk_tokens or None)
    prefill, decode = unit.of_role(Role.PREFILL), unit.of_role(Role.DECODE)
    if prefill is None and decode is not None:
        return Deployment.decode_alone(times[Role.DECODE], decode.count)
    if prefill is None or decode is None:
        return Deployment.prefill_alone(times[Role.PREFILL], unit.groups[0].count)
    inside = stays_in_node(unit, cluster)
    return Deployment.disaggregated(
        times[Role.PREFILL],
        prefill.count,
        times[Role.DECODE],
        decode.count,
        kv_bytes_per_token=model.kv_bytes_per_token,
        link_bandwidth=link_bandwidth(prefill, cluster, inside),
        decode_link_bandwidth=link_bandwidth(decode, cluster, inside),
        link_latency_s=cluster.link_latency_s if inside else cluster.network_latency_s,
        **(slowdowns(cluster) if inside else {}),
    )


def slowdowns(cluster: Cluster) -> dict[str, float]:
    """What instances of both roles on one node cost each other."""
    return {
        "prefill_slowdown": cluster.prefill_slowdown,
        "decode_slowdown": cluster.decode_slowdown,
    }


def stays_in_node(unit: Unit, cluster: Cluster) -> bool:
    """Whether KV never leaves a node: cut into segments, or small enough for one node."""
    if unit.num_segments:
        return True
    gpus = {group.gpu for group in unit.groups}
    return len(gpus) == 1 and unit.num_gpus <= cluster.group_of(gpus.pop()).gpus_per_node


def link_bandwidth(instance: Instances, cluster: Cluster, inside: bool) -> float:
    """Bytes/s of one instance's KV link.

    Inside a node every rank moves its own slice over its own link. Between nodes the ranks have
    their share of the node's network.
    """
    group = cluster.group_of(instance.gpu)
    ranks = instance.parallelism.num_gpus
    if inside:
        return ranks * group.gpu.link_bandwidth
    return ranks * cluster.network_bandwidth / group.gpus_per_node
