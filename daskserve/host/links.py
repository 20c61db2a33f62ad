"""Network interfaces and InfiniBand devices, as the kernel lists them."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

_INFINIBAND = Path("/sys/class/infiniband")
_MEGABIT = 1e6 / 8


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface that is up; ``bytes_per_s`` is 0 where its driver does not say."""

    name: str
    addresses: tuple[str, ...]
    bytes_per_s: float
    mtu: int


@dataclass(frozen=True, slots=True)
class InfiniBand:
    """One port of an InfiniBand or RoCE device: its state and rate in the kernel's words."""

    device: str
    port: str
    state: str
    rate: str
    link_layer: str

    @property
    def is_active(self) -> bool:
        return "ACTIVE" in self.state

    @property
    def bytes_per_s(self) -> float:
        """0 when the kernel does not say."""
        first = self.rate.split(" ")[0]
        try:
            return float(first) * 1e9 / 8
        except ValueError:
            return 0.0


def interfaces() -> list[Interface]:
    """Those that are up, loopback too."""
    addresses, found = psutil.net_if_addrs(), []
    for name, stats in sorted(psutil.net_if_stats().items()):
        if not stats.isup:
            continue
        own = [a.address for a in addresses.get(name, []) if a.family in _FAMILIES]
        speed = stats.speed * _MEGABIT if 0 < stats.speed < 65535 else 0.0  # 65535: unknown
        found.append(Interface(name, tuple(own), speed, stats.mtu))
    return found


def infiniband(folder: Path = _INFINIBAND) -> list[InfiniBand]:
    """Every port; none on a machine without such devices."""
    ports = sorted(folder.glob("*/ports/*"))
    return [
        InfiniBand(
            device=port.parent.parent.name,
            port=port.name,
            state=_read(port / "state"),
            rate=_read(port / "rate"),
            link_layer=_read(port / "link_layer"),
        )
        for port in ports
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


_FAMILIES = (socket.AF_INET, socket.AF_INET6)
