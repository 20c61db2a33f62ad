"""An open-loop run: requests leave when they arrive, whatever the server does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from daskserve.bench.exchange import Connections, exchange
from daskserve.bench.prompts import Prompts
from daskserve.bench.record import GIVEN_UP, Record
from daskserve.bench.target import Target
from daskserve.bench.watch import INTERVAL_S, Watch
from daskserve.planner.workload import Workload

LATE_S = 0.01
"""A client that is later than this once in a hundred times measures itself."""

_BEAT_S = 0.02


@dataclass(slots=True)
class Lag:
    """How late this process was: with sending, and with waking up while it waits for tokens."""

    sending_s: list[float] = field(default_factory=list)
    waking_s: list[float] = field(default_factory=list)

    def p99_s(self) -> tuple[float, float]:
        sending, waking = (
            float(np.quantile(values, 0.99)) if values else 0.0
            for values in (self.sending_s, self.waking_s)
        )
        return sending, waking

    @property
    def is_late(self) -> bool:
        return max(self.p99_s()) > LATE_S

    def lines(self) -> list[str]:
        """For people; a warning when the figures are the client's own."""
        sending_s, waking_s = self.p99_s()
        lines = [
            f"client lag: p99 {sending_s * 1e3:.1f} ms late in sending, {waking_s * 1e3:.1f} ms in "
            "waking up for tokens"
        ]
        if self.is_late:
            lines.append(
                "warning: the client itself was late, so latencies are in part its own; use a "
                "faster or less busy machine, or a lower rate"
            )
        return lines


@dataclass(slots=True)
class Progress:
    """How far a run is."""

    num_requests: int
    num_sent: int = 0
    num_ended: int = 0
    num_failed: int = 0


class OpenLoop:
    """Sends workloads to one server.

    Parameters
    ----------
    timeout_s
        For one answer.
    stop
        Ends a run when it is set: what is at work then stays ``unfinished``.
    on_progress
        Told after every request that ends.
    """

    def __init__(
        self,
        target: Target,
        connections: Connections,
        prompts: Prompts,
        timeout_s: float,
        stop: asyncio.Event,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._target, self._connections, self._prompts = target, connections, prompts
        self._timeout_s, self._stop, self._on_progress = timeout_s, stop, on_progress
        self._started_at = time.monotonic()
        self.started_unix_s = time.time()
        """At which the seconds of records begin."""
        self._num_sent = 0

    async def run(self, workload: Workload, watch: Watch | None = None) -> tuple[list[Record], Lag]:
        """Send every request at its time; the records of those sent, once all have ended.

        Parameters
        ----------
        watch
            May end the run early, and gives up what has missed its limits once all are sent.
        """
        if not self._num_sent:
            self._started_at, self.started_unix_s = time.monotonic(), time.time()
        start_s = self._now_s()
        columns = (values.tolist() for values in workload.arrays())
        records = [
            Record(self._num_sent + number, start_s + arrival_s, prompt_tokens, max_tokens)
            for number, (arrival_s, prompt_tokens, max_tokens) in enumerate(
                zip(*columns, strict=True)
            )
        ]
        progress = Progress(len(records))
        tasks: dict[asyncio.Task[None], Record] = {}
        lag = Lag()
        beat = asyncio.create_task(_beat(lag))
        stop = asyncio.create_task(self._stop.wait())
        work = asyncio.create_task(self._send_all(records, tasks, progress, watch))
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancelled(beat, stop, work, *tasks)
        if not work.cancelled():
            work.result()
        sent = [record for record in records if record.sent_s == record.sent_s]
        self._num_sent += len(sent)
        lag.sending_s = [record.sent_s - record.arrival_s for record in sent]
        return sent, lag

    async def _send_all(
        self,
        records: list[Record],
        tasks: dict[asyncio.Task[None], Record],
        progress: Progress,
        watch: Watch | None,
    ) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            record = tasks.pop(task)
            progress.num_ended += 1
            progress.num_failed += not record.is_ok
            if watch is not None:
                watch.note(record)
            self._on_progress(progress)

        for record in records:
            body = self._body(record)  # made before it is time
            await asyncio.sleep(max(0.0, record.arrival_s - self._now_s()))
            if watch is not None and watch.is_hopeless(tasks.values(), self._now_s()):
                break
            task = asyncio.create_task(self._exchange(record, body))
            tasks[task] = record
            task.add_done_callback(ended)
            progress.num_sent += 1
        while tasks:
            if watch is not None:
                self._give_up(watch, tasks)
            await asyncio.wait(tasks, timeout=INTERVAL_S if watch else None)

    def _give_up(self, watch: Watch, tasks: dict[asyncio.Task[None], Record]) -> None:
        missed = {id(record) for record in watch.overdue(tasks.values(), self._now_s())}
        for task, record in tasks.items():
            if id(record) in missed:
                record.status = GIVEN_UP
                task.cancel()

    async def _exchange(self, record: Record, body: bytes) -> None:
        await exchange(
            self._connections, self._target, body, record, self._started_at, self._timeout_s
        )

    def _body(self, record: Record) -> bytes:
        prompt = self._prompts.prompt(record.index, record.prompt_tokens)
        if not self._prompts.has_lengths:
            record.prompt_tokens = 0  # until the server says
        return self._target.body(prompt, record.max_tokens)

    def _now_s(self) -> float:
        """Seconds of the whole bench."""
        return time.monotonic() - self._started_at


async def _beat(lag: Lag) -> None:
    """Sleeps, and notes how much longer than asked."""
    while True:
        slept_at = time.monotonic()
        await asyncio.sleep(_BEAT_S)
        lag.waking_s.append(time.monotonic() - slept_at - _BEAT_S)


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
