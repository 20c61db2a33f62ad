"""A worker that is to go in good time: its instance drains, what is left runs elsewhere.

Its time may end (``daskserve.drain.ends-at``), or a signal may tell it to go: to this process, or
to its nanny, which then asks here (`daskserve.service.nanny_preload`). Every rank of an instance
may be the first to know; the scheduler drains the instance as a whole.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable

from distributed import Worker
from distributed.core import Status

from daskserve.config import DrainSettings
from daskserve.service.names import DRAIN, FIND_GROUP, LEAVE

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Leaving:
    """Takes one worker out of service.

    Parameters
    ----------
    worker
        Whose process it is.
    instance
        Name of its instance, or the worker's own address where it has no name.
    is_head
        Whether it is the one that gets the requests; the other ranks go after it.
    settings
        When, and how long it may take.
    """

    def __init__(
        self, worker: Worker, instance: str, is_head: bool, settings: DrainSettings
    ) -> None:
        self._worker = worker
        self._instance = instance
        self._is_head = is_head
        self._settings = settings
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._give_back: list[Callable[[], object]] = []

    @property
    def has_begun(self) -> bool:
        return self._task is not None

    def start(self) -> None:
        """Watch the clock and, if the settings say so, the signals."""
        self._worker.handlers[LEAVE] = self.leave
        loop, ends_at = asyncio.get_running_loop(), self._settings.ends_at
        if ends_at is not None:
            left_s = ends_at - time.time() - self._settings.margin_s
            self._timer = loop.call_later(max(left_s, 0.0), self._go, "its time is nearly over")
        if self._settings.on_signals and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                loop.add_signal_handler(number, self._go, f"signal {number.name}")
                self._give_back.append(lambda number=number: loop.remove_signal_handler(number))

    def close(self) -> None:
        """The worker is closing, or its plugin goes."""
        self._worker.handlers.pop(LEAVE, None)
        if self._timer is not None:
            self._timer.cancel()
        for undo in self._give_back:
            undo()
        self._give_back.clear()

    async def leave(self) -> None:
        """Drain and retire; returns when nothing is lost with the worker's end. Handler."""
        if self._task is None:
            self._task = asyncio.create_task(self._leave())
        await asyncio.shield(self._task)

    def _go(self, why: str) -> None:
        if self._task is None and self._worker.status is Status.running:
            logger.warning("%s drains: %s", self._worker.address, why)
            asyncio.create_task(self._leave_and_close())

    async def _leave_and_close(self) -> None:
        await self.leave()
        await self._worker.close(nanny=True, reason="daskserve-drained")

    async def _leave(self) -> None:
        deadline = time.monotonic() + self._settings.margin_s - self._settings.hand_over_s
        scheduler = self._worker.scheduler
        try:
            while not await self._is_drained() and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_S)
            if not self._is_head:
                # While the head is there it would take our end for a loss.
                deadline += self._settings.hand_over_s / 2
                while await self._has_head() and time.monotonic() < deadline:
                    await asyncio.sleep(_POLL_S)
            # Results move to other workers, tasks run elsewhere: nobody is under suspicion.
            await scheduler.retire_workers(
                workers=[self._worker.address],
                close_workers=False,
                remove=True,
                stimulus_id=f"daskserve-leave-{time.time()}",
            )
        except OSError as error:  # without a scheduler there is nobody to leave
            logger.warning("%s leaves without the scheduler: %r", self._worker.address, error)

    async def _is_drained(self) -> bool:
        drained = await getattr(self._worker.scheduler, DRAIN)(instances=[self._instance])
        return drained[self._instance]

    async def _has_head(self) -> bool:
        return (
            await getattr(self._worker.scheduler, FIND_GROUP)(instance=self._instance) is not None
        )
