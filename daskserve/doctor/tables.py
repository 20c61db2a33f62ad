"""What doctor found, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from daskserve.host.packages import PACKAGES
from daskserve.host.report import HostReport
from daskserve.service.presence import Presence

_GB = 1e9


def host_lines(host: HostReport) -> Iterator[str]:
    """One host, a fact a line."""
    m = host.machine
    yield f"{m.host}: {m.system}, {m.processor or 'processor unknown'}"
    features = ", ".join(m.features) or "none of those that the kernels use"
    yield f"  cores       {m.num_cores} ({features})"
    yield f"  memory      {m.available_bytes / _GB:.1f} of {m.total_bytes / _GB:.1f} GB available"
    yield "  GPUs        " + (f"driver {host.driver}" if host.gpus else "none")
    for gpu in host.gpus:
        links = f"{gpu.num_nvlinks} NVLinks" if gpu.num_nvlinks else "no NVLink"
        yield (
            f"    {gpu.index}: {gpu.name}, {gpu.free_bytes / _GB:.1f} of"
            f" {gpu.total_bytes / _GB:.1f} GB free, {links}, PCIe {gpu.pcie or 'unknown'}"
        )
    for interface in host.interfaces:
        speed = f"{interface.bytes_per_s / _GB:.2f} GB/s" if interface.bytes_per_s else "no speed"
        yield f"  interface   {interface.name}: {', '.join(interface.addresses)} ({speed})"
    if not host.infiniband:
        yield "  InfiniBand  none"
    for port in host.infiniband:
        name = f"{port.device}/{port.port}"
        yield f"  InfiniBand  {name}: {port.link_layer} {port.rate}, {port.state}"
    for room in host.rooms:
        yield f"  disk        {room.folder}: {room.free_bytes / _GB:.1f} GB free"
    yield "  versions    " + ", ".join(f"{name} {v}" for name, v in host.versions.items())
    for name, purpose in PACKAGES.items():
        if name not in host.versions:
            yield f"  missing     {name}" + (f": {purpose}" if purpose else "")


def worker_lines(processes: Sequence[Presence]) -> Iterator[str]:
    """The workers of a cluster, by host."""
    workers = [p for p in processes if p.who not in ("client", "scheduler")]
    yield f"{len(workers)} workers"
    for worker in sorted(workers, key=lambda w: (w.host, w.instance, w.number, w.who)):
        if worker.error:
            yield f"  {worker.who}: {worker.error}"
            continue
        rank = f"rank {worker.number} of {worker.instance}" if worker.instance else "no rank"
        role = f", {worker.role.value}" if worker.role else ""
        where = "" if worker.node is None else f", for node {worker.node}, GPU {worker.gpu}"
        has = f", {worker.gpu_name}" if worker.gpu_name else ""
        yield f"  {worker.host} {worker.who}: {rank}{role}{where}{has}"
