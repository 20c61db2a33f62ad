"""What hosts lack for a placement: pure judgements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from daskserve.core.placement import InstancePlacement, Placement
from daskserve.host.report import HostReport
from daskserve.planner.hardware import GPUS
from daskserve.planner.model_spec import ModelSpec
from daskserve.service.agreement import is_of_type

_GB = 1e9
_NOT_FOR_US = 0.05  # of a GPU's memory, for the driver's context and the libraries


def lacking_hosts(placement: Placement, hosts: Sequence[HostReport]) -> list[str]:
    """Nodes of the placement that no host can be, each host being one node at most.

    The most demanding nodes are given hosts first, the best host that fits.
    """
    free = list(hosts)
    lacks = []
    nodes = sorted({g.node for i in placement.instances for g in i.gpus})
    wanted = {node: _wanted(placement, node) for node in nodes}
    for node in sorted(nodes, key=lambda node: -wanted[node].total()):
        fitting = [host for host in free if not _missing(wanted[node], host)]
        if fitting:
            free.remove(min(fitting, key=lambda host: len(host.gpus)))
            continue
        needs = ", ".join(f"{count} {name or 'GPUs'}" for name, count in wanted[node].items())
        have = "; ".join(f"{h.machine.host} has {_gpus_of(h)}" for h in free) or "no host is left"
        lacks.append(f"node {node} needs {needs}: {have}")
    return sorted(lacks)


def _wanted(placement: Placement, node: int) -> Counter[str]:
    return Counter(
        instance.gpu_type
        for instance in placement.instances
        for g in instance.gpus
        if g.node == node
    )


def _missing(wanted: Counter[str], host: HostReport) -> bool:
    return any(
        sum(is_of_type(gpu.name, name) for gpu in host.gpus) < count
        for name, count in wanted.items()
    )


def _gpus_of(host: HostReport) -> str:
    counts = Counter(gpu.name for gpu in host.gpus)
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "no GPUs"


def lacking_memory(placement: Placement, spec: ModelSpec, hosts: Sequence[HostReport]) -> list[str]:
    """Ranks whose part of weights and KV is more than their GPU has.

    GPUs that are here count as they are; others by the data sheet of their type.
    """
    lacks = []
    for name, instance in zip(placement.names, placement.instances, strict=True):
        has = _memory_of(instance, hosts)
        needs = rank_bytes(instance, spec)
        if has is not None and needs > has * (1 - _NOT_FOR_US):
            lacks.append(
                f"a rank of {name} needs {needs / _GB:.1f} GB for its weights and KV, a"
                f" {instance.gpu_type} has {has / _GB:.1f} GB: lower kv_capacity_tokens or raise"
                " tp or pp"
            )
    return lacks


def rank_bytes(instance: InstancePlacement, spec: ModelSpec) -> float:
    """Weights and planned KV of one rank."""
    tokens = instance.kv_capacity_tokens or 0
    total = spec.weight_bytes + tokens * spec.kv_bytes_per_token
    return total / instance.parallelism.num_gpus


def _memory_of(instance: InstancePlacement, hosts: Sequence[HostReport]) -> float | None:
    here = [g.total_bytes for h in hosts for g in h.gpus if is_of_type(g.name, instance.gpu_type)]
    if here and instance.gpu_type:
        return min(here)
    sheet = GPUS.get(instance.gpu_type)
    return None if sheet is None else sheet.memory_bytes


def slow_links(placement: Placement, hosts: Sequence[HostReport]) -> list[str]:
    """Hosts whose links to the others are slower than the KV transfers were planned with."""
    planned = placement.network_bandwidth
    if planned is None or placement.num_nodes < 2:
        return []
    lacks = []
    for host in hosts:
        name, speed = host.fastest_link
        if 0 < speed < planned:
            lacks.append(
                f"{host.machine.host}: its fastest link, {name}, carries {speed / _GB:.2f} GB/s;"
                f" the placement was planned with {planned / _GB:.2f} GB/s between nodes"
            )
    return lacks


def missing_packages(hosts: Sequence[HostReport]) -> list[str]:
    """Packages that the hardware of a host is of no use without."""
    notes = []
    for host in hosts:
        name, has = host.machine.host, host.versions
        if "torch" not in has:
            notes.append(f"{name}: no torch, so no engine: pip install 'daskserve[engine]'")
        if host.gpus and "dask-cuda" not in has:
            notes.append(f"{name}: GPUs, but no dask-cuda to start a worker on each")
        if (
            host.gpus
            and any(p.is_active for p in host.infiniband)
            and "distributed-ucxx" not in has
        ):
            notes.append(f"{name}: InfiniBand, but no distributed-ucxx: KV goes over TCP")
    return notes
