"""The worker's side of watching a service: once a second, how the instance is and what it did."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING

from distributed import Worker

from daskserve.config import RankSettings
from daskserve.core.request import Completion, Prefilled
from daskserve.errors import DaskserveError, InstanceLost, RequestCancelled
from daskserve.observe import Finished, Place
from daskserve.service.names import FIGURES

if TYPE_CHECKING:
    from daskserve.workers.instance import Instance

REPORT_INTERVAL_S = 1.0
_MOST_UNTOLD = 10_000
"""Finished requests that are kept while the scheduler cannot be reached."""


class Reporter:
    """Tells the scheduler of one instance, from its load on until `close`.

    Parameters
    ----------
    worker
        Has the stream to the scheduler.
    rank
        Says which instance this is, and its shape.
    device
        That the engine runs on, as in `EngineConfig`.
    """

    def __init__(self, worker: Worker, rank: RankSettings, device: str) -> None:
        self._worker = worker
        self._place = Place(
            name=rank.instance or str(worker.name),
            host=rank.host or socket.gethostname(),
            device=_device_text(device),
            tp=rank.tensor_parallel,
            pp=rank.pipeline_parallel,
        )
        self._instance: Instance | None = None
        self._finished: deque[Finished] = deque(maxlen=_MOST_UNTOLD)
        self._num_failed = 0
        self._task = asyncio.create_task(self._tell_regularly())

    def watch(self, instance: Instance) -> None:
        """The instance is loaded."""
        self._instance = instance
        instance.on_outcome = self._note

    def close(self) -> None:
        """Tell no more, and let go of the instance and its memory."""
        self._task.cancel()
        if self._instance is not None:
            self._instance.on_outcome = lambda outcome: None
            self._instance = None

    def _note(self, outcome: Completion | Prefilled | DaskserveError) -> None:
        if isinstance(outcome, Prefilled):
            if outcome.completion is None:
                return  # its decode will tell
            outcome = outcome.completion
        if isinstance(outcome, Completion):
            self._finished.append(Finished.of(outcome, self._instance.engine.service_now()))
        elif not isinstance(outcome, RequestCancelled | InstanceLost):  # a lost one runs again
            self._num_failed += 1

    async def _tell_regularly(self) -> None:
        while True:
            self._tell()
            await asyncio.sleep(REPORT_INTERVAL_S)

    def _tell(self) -> None:
        stream = self._worker.batched_stream
        if stream is None or stream.closed():
            return
        told = [one.to_record() for one in self._finished]
        self._finished.clear()
        load = asdict(self._instance.load()) if self._instance is not None else None
        figures = {
            "place": asdict(self._place),
            "load": load,
            "finished": told,
            "num_failed": self._num_failed,
        }
        self._num_failed = 0
        self._worker.batched_send({"op": FIGURES, "figures": figures})


def _device_text(device: str) -> str:
    """``cuda 3``, or the cores of a CPU instance: ``cpu 0-3``."""
    if not device.startswith("cpu"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
        return f"{device.partition(':')[0]} {visible}".strip()
    if not hasattr(os, "sched_getaffinity"):
        return device
    cores = sorted(os.sched_getaffinity(0))
    first, last = cores[0], cores[-1]
    if len(cores) == 1:
        return f"cpu {first}"
    is_range = last - first == len(cores) - 1
    return f"cpu {first}-{last}" if is_range else f"cpu {','.join(map(str, cores))}"
