"""All that a host has, in one object that travels as plain values."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from daskserve.host.gpus import GPU, driver_version, gpus
from daskserve.host.links import InfiniBand, Interface, infiniband, interfaces
from daskserve.host.machine import Machine, Room, machine, room
from daskserve.host.packages import versions


@dataclass(frozen=True, slots=True)
class HostReport:
    """One host.

    Parameters
    ----------
    rooms
        Free space where models, kernels and scratch files go.
    driver
        Version of NVIDIA's driver; empty without one.
    """

    machine: Machine
    rooms: tuple[Room, ...]
    versions: dict[str, str]
    gpus: tuple[GPU, ...]
    driver: str
    interfaces: tuple[Interface, ...]
    infiniband: tuple[InfiniBand, ...]

    @property
    def fastest_link(self) -> tuple[str, float]:
        """Name and bytes/s of the fastest way to other hosts; 0 when none says its speed."""
        links = [(i.name, i.bytes_per_s) for i in self.interfaces if i.name != "lo"]
        links += [(i.device, i.bytes_per_s) for i in self.infiniband if i.is_active]
        return max(links, key=lambda link: link[1], default=("", 0.0))

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> HostReport:
        """Inverse of `to_record`, also after a passage through JSON."""
        return cls(
            machine=Machine(
                **{**record["machine"], "features": tuple(record["machine"]["features"])}
            ),
            rooms=tuple(Room(**one) for one in record["rooms"]),
            versions=dict(record["versions"]),
            gpus=tuple(GPU(**one) for one in record["gpus"]),
            driver=record["driver"],
            interfaces=tuple(
                Interface(**{**one, "addresses": tuple(one["addresses"])})
                for one in record["interfaces"]
            ),
            infiniband=tuple(InfiniBand(**one) for one in record["infiniband"]),
        )


def host_report(cache: Path) -> HostReport:
    """This host; ``cache`` is where models and compiled kernels are kept."""
    return HostReport(
        machine=machine(),
        rooms=(room(cache), room(Path(tempfile.gettempdir())), room(Path.cwd())),
        versions=versions(),
        gpus=tuple(gpus()),
        driver=driver_version(),
        interfaces=tuple(interfaces()),
        infiniband=tuple(infiniband()),
    )
