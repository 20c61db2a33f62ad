"""GPUs, nodes and links: what a plan may use, how fast it is and what it costs."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields, replace

from daskserve.errors import ClusterError, InvalidParameter

GBPS = 1e9 / 8
"""One Gbit/s in bytes per second."""


@dataclass(frozen=True, slots=True)
class GPU:
    """One accelerator (or CPU core), by its data sheet.

    Parameters
    ----------
    memory_bytes
        Memory that the driver reports.
    flops
        Dense FLOP/s in the 16-bit format of the weights.
    memory_bandwidth, link_bandwidth
        Bytes/s of the memory, and of the link to other GPUs of the node in one direction.
    price_per_hour
        Dollars; rough on-demand prices of late 2025, replace them with yours.
    """

    name: str
    memory_bytes: float
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    price_per_hour: float

    def __post_init__(self) -> None:
        for item in fields(self)[1:]:
            value = getattr(self, item.name)
            low_enough = value >= 0 if item.name == "price_per_hour" else value > 0
            if not (math.isfinite(value) and low_enough):
                raise InvalidParameter(item.name, value, f"of GPU {self.name} must be above 0")

    def priced(self, price_per_hour: float) -> GPU:
        """The same GPU at another price."""
        return replace(self, price_per_hour=price_per_hour)

    @property
    def ridge_flops_per_byte(self) -> float:
        """Arithmetic intensity above which the GPU is bound by compute."""
        return self.flops / self.memory_bandwidth


GPUS = {
    "A100": GPU("A100", 85.9e9, 312e12, 2.0e12, 300e9, 1.80),
    "H100": GPU("H100", 85.5e9, 989e12, 3.35e12, 450e9, 3.00),
    "H200": GPU("H200", 150.7e9, 989e12, 4.8e12, 450e9, 3.80),
    "B200": GPU("B200", 192.2e9, 2250e12, 7.7e12, 900e9, 5.50),
    "L40S": GPU("L40S", 48.3e9, 362e12, 0.864e12, 32e9, 1.00),
}


def this_cpu() -> GPU:
    """One core of this machine as a "GPU": theoretical peaks from the CPU's feature flags.

    Memory bandwidth cannot be read anywhere; 16 GB/s per core is what one core of a current
    server streams. Profile the engine for real figures.
    """
    cores = max(1, len(os.sched_getaffinity(0)))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / cores
    flags, hertz = _cpu_flags()
    # Multiply-adds per cycle and core, twice: AMX bf16 tiles, AVX-512 and AVX2 fp32 units.
    per_cycle = 1024 if "amx_bf16" in flags else 64 if "avx512f" in flags else 32
    return GPU("CPU", memory, per_cycle * hertz, 16e9, 2.3e9, 0.05)


def _cpu_flags() -> tuple[set[str], float]:
    flags: set[str] = set()
    hertz = 2.5e9
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() in ("flags", "Features"):
                    flags = set(value.split())
                elif key.strip() == "cpu MHz":
                    hertz = float(value) * 1e6
    except OSError:
        pass  # not Linux: the defaults describe a plain core
    return flags, hertz


def gpu_named(name: str) -> GPU:
    """Preset by name, any case; ``CPU`` is one core of this machine."""
    key = name.strip().upper()
    if key == "CPU":
        return this_cpu()
    if key not in GPUS:
        raise ClusterError(f"unknown GPU {name!r}: known are {', '.join(GPUS)}, CPU")
    return GPUS[key]


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes that are alike."""

    gpu: GPU
    num_nodes: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        for name in ("num_nodes", "gpus_per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidParameter(name, value, "must be a whole number of at least 1")

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class Cluster:
    """Groups of nodes joined by one network.

    Parameters
    ----------
    groups
        One for an ordinary cluster; several for mixed GPU types. Nodes count on from group to
        group.
    network_bandwidth
        Bytes/s that one node sends, and at the same time receives, to all others together.
    network_latency_s, link_latency_s
        Seconds until the first byte, between nodes and inside a node.
    prefill_slowdown, decode_slowdown
        What a step takes longer beside an instance of the other role on its node, as of
        `Deployment`; 0 for GPUs, which share nothing.
    """

    groups: tuple[NodeGroup, ...]
    network_bandwidth: float = 400 * GBPS
    network_latency_s: float = 20e-6
    link_latency_s: float = 5e-6
    prefill_slowdown: float = 0.0
    decode_slowdown: float = 0.0

    def __post_init__(self) -> None:
        if not self.groups:
            raise InvalidParameter("groups", self.groups, "must hold at least one group of nodes")
        if not (self.network_bandwidth > 0 and not math.isnan(self.network_bandwidth)):
            raise InvalidParameter("network_bandwidth", self.network_bandwidth, "must be above 0")
        for name in ("network_latency_s", "link_latency_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InvalidParameter(name, getattr(self, name), "must be at least 0 seconds")
        for name in ("prefill_slowdown", "decode_slowdown"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InvalidParameter(name, getattr(self, name), "must be at least 0")
        names = [group.gpu.name for group in self.groups]
        if len(set(names)) < len(names):
            raise InvalidParameter("groups", names, "must each hold another GPU type")

    @classmethod
    def of(
        cls,
        gpu: str | GPU,
        num_nodes: int = 1,
        gpus_per_node: int = 8,
        network_gbps: float = 400.0,
        price_per_hour: float | None = None,
    ) -> Cluster:
        """One kind of node: ``Cluster.of("H100", 2, network_gbps=25)``."""
        kind = gpu_named(gpu) if isinstance(gpu, str) else gpu
        if price_per_hour is not None:
            kind = kind.priced(price_per_hour)
        group = NodeGroup(kind, num_nodes, gpus_per_node)
        return cls((group,), network_bandwidth=network_gbps * GBPS)

    def group_of(self, gpu_name: str) -> NodeGroup:
        for group in self.groups:
            if group.gpu.name == gpu_name:
                return group
        known = ", ".join(group.gpu.name for group in self.groups)
        raise ClusterError(f"the cluster has no {gpu_name}: it has {known}")

    def first_node(self, group: NodeGroup) -> int:
        """Number of the group's first node."""
        return sum(g.num_nodes for g in self.groups[: self.groups.index(group)])

    @property
    def num_nodes(self) -> int:
        return sum(group.num_nodes for group in self.groups)

    @property
    def num_gpus(self) -> int:
        return sum(group.num_gpus for group in self.groups)

    @property
    def price_per_hour(self) -> float:
        return sum(group.num_gpus * group.gpu.price_per_hour for group in self.groups)

    def __str__(self) -> str:
        kinds = [f"{g.num_nodes} x {g.gpus_per_node} {g.gpu.name}" for g in self.groups]
        return f"{' + '.join(kinds)}, {self.network_bandwidth / GBPS:g} Gbit/s per node"
