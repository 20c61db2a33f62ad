"""GPUs through NVIDIA's management library, which asks the driver and starts no context."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU.

    Parameters
    ----------
    index
        As NVML and ``CUDA_VISIBLE_DEVICES`` count.
    uuid
        Tells it from every other one.
    total_bytes, free_bytes
        Its memory.
    num_nvlinks
        Links that are up.
    pcie
        Generation and width of its slot, such as ``4 x16``.
    """

    index: int
    name: str
    uuid: str
    total_bytes: int
    free_bytes: int
    num_nvlinks: int = 0
    pcie: str = ""


def gpus() -> list[GPU]:
    """All GPUs of the host; none without a driver or without ``nvidia-ml-py``."""
    with _nvml() as nvml:
        if nvml is None:
            return []
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return [_gpu(nvml, index, handle) for index, handle in enumerate(handles)]


def driver_version() -> str:
    """Of NVIDIA's driver; empty without one."""
    with _nvml() as nvml:
        return "" if nvml is None else _text(nvml.nvmlSystemGetDriverVersion())


def visible_gpus(every: list[GPU]) -> list[GPU]:
    """Those that a process with this environment works with, in its order."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return every
    chosen = [word.strip() for word in given.split(",") if word.strip()]
    return [gpu for word in chosen for gpu in every if _is_named(gpu, word)]


def _is_named(gpu: GPU, word: str) -> bool:
    return gpu.index == int(word) if word.isdigit() else gpu.uuid.startswith(word)


@contextmanager
def _nvml() -> Iterator[Any]:
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        logger.debug("no GPUs: %s", error)
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int, handle: Any) -> GPU:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return GPU(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        num_nvlinks=_num_nvlinks(nvml, handle),
        pcie=_pcie(nvml, handle),
    )


def _num_nvlinks(nvml: Any, handle: Any) -> int:
    count = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            count += nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED
        except nvml.NVMLError:  # there are no more, or none at all
            break
    return count


def _pcie(nvml: Any, handle: Any) -> str:
    try:
        generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        return f"{generation} x{nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)}"
    except nvml.NVMLError:
        return ""


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
