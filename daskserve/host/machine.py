"""Processors, memory and room on disk."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

_KERNEL_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_ARM_FEATURES = ("asimd", "bf16", "sve")


@dataclass(frozen=True, slots=True)
class Machine:
    """What the engine runs on.

    Parameters
    ----------
    num_cores
        That this process may run on.
    features
        Of the processor, those that matter for the speed of the engine.
    """

    host: str
    system: str
    processor: str
    num_cores: int
    features: tuple[str, ...]
    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """Free bytes of the file system that holds a folder, which need not exist yet."""

    folder: str
    free_bytes: int


def machine() -> Machine:
    flags, name = _processor()
    memory = psutil.virtual_memory()
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Machine(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=name,
        num_cores=num_cores or 1,
        features=tuple(f for f in (*_KERNEL_FEATURES, *_ARM_FEATURES) if f in flags),
        total_bytes=memory.total,
        available_bytes=memory.available,
    )


def room(folder: Path) -> Room:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return Room(str(folder), shutil.disk_usage(existing).free)


def _processor() -> tuple[set[str], str]:
    """Flags and name, from Linux's own list; elsewhere the name alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set(), platform.processor()
    facts = {}
    for line in reversed(lines):  # the first processor's count
        key, _, value = line.partition(":")
        facts[key.strip()] = value.strip()
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    return flags, facts.get("model name") or platform.processor()
