"""What this machine can do at most, and what it is."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

from daskserve.calibrate.grid import Point
from daskserve.core.instance import EngineConfig
from daskserve.planner.latency.calibration import HardwareFacts, MachineFacts
from daskserve.planner.model_spec import ModelSpec
from daskserve.workers.profile import Machine

HARDWARE = "CPU"
"""The name of this machine's share in ``daskserve plan --gpus CPU:2``."""

_READ_BYTES, _SQUARE = 2**28, 1536
_TRIES = 5
_PACKAGES = ("daskserve", "torch", "transformers", "numpy", "numba", "distributed")


def machine_facts(config: EngineConfig) -> MachineFacts:
    """The CPU, its cores that may be used, and the versions of what computes on it."""
    return MachineFacts(
        cpu=Machine.of(config).cpu,
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=_memory_bytes(),
        system=platform.platform(),
        versions={"python": platform.python_version()}
        | {name: _version(name) for name in _PACKAGES},
    )


def hardware_facts(
    config: EngineConfig,
    num_threads: int,
    model: ModelSpec,
    medians_s: Mapping[Point, float],
    link_bytes_per_s: float,
) -> HardwareFacts:
    """An instance's share of this machine.

    FLOP/s and bandwidth are the most that anything reached here with so many threads: a plain
    matrix product, a plain read of memory much larger than the caches, or a measured step. So no
    measurement is raised by the guard, and no extrapolation beats all of them.
    """
    torch.set_num_threads(num_threads)
    square = torch.ones(_SQUARE, _SQUARE, dtype=getattr(torch, config.dtype))
    flops = 2.0 * _SQUARE**3 / _fastest_s(lambda: square @ square)
    memory = torch.ones(_READ_BYTES // 4)
    bandwidth = _READ_BYTES / _fastest_s(memory.sum)
    head = model.hidden_size * model.vocab_size
    for point, step_s in medians_s.items():
        if point.phase == "prefill":
            products = 2.0 * (model.num_active_parameters - head) * point.total_tokens
            attention = point.batch * model.prefill_flops(point.tokens) - products
            flops = max(flops, (products + max(attention, 0.0)) / step_s)
            bandwidth = max(bandwidth, model.weight_bytes_read(point.total_tokens) / step_s)
        else:
            flops = max(flops, point.batch * model.decode_flops(point.tokens) / step_s)
            kv_bytes = model.kv_bytes_per_token * point.total_tokens
            read = model.weight_bytes_read(point.batch) + kv_bytes
            bandwidth = max(bandwidth, read / step_s)
    share = min(num_threads / len(os.sched_getaffinity(0)), 1.0)
    return HardwareFacts(
        name=HARDWARE,
        memory_bytes=_memory_bytes() * share,
        flops_per_s=flops,
        memory_bytes_per_s=bandwidth,
        link_bytes_per_s=min(link_bytes_per_s, bandwidth),
    )


def _fastest_s(action: Callable[[], object]) -> float:
    times = []
    for _ in range(_TRIES):
        started_at = time.perf_counter()
        action()
        times.append(time.perf_counter() - started_at)
    return min(times)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
