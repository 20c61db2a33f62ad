"""A whole bench: the server is looked at and warmed up, loaded, and what came of it is told."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

from daskserve.bench.exchange import Connections, exchange
from daskserve.bench.look import NoServer, looked_at
from daskserve.bench.prompts import Prompts
from daskserve.bench.record import Record
from daskserve.bench.run import OpenLoop, Progress
from daskserve.bench.target import Target

_PROGRESS_S = 5.0
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Session:
    """An open-loop client on a server that is known to answer.

    Parameters
    ----------
    num_instances
        What the server says, if it is ours.
    stop
        Set by the first Ctrl-C.
    """

    target: Target
    num_instances: int | None
    loop: OpenLoop
    stop: asyncio.Event


@contextlib.asynccontextmanager
async def opened(
    target: Target, prompts: Prompts, *, timeout_s: float, ready_timeout_s: float, is_quiet: bool
) -> AsyncIterator[Session]:
    """Look at the server and send it one request before any is measured (NoServer)."""
    _allow_sockets()
    target, num_instances = await looked_at(target, ready_timeout_s)
    connections, stop = Connections(target), asyncio.Event()
    progress = ProgressLines(is_quiet)
    try:
        await _warm_up(connections, target, prompts, timeout_s)
        with _stopped_by_signals(stop):
            loop = OpenLoop(target, connections, prompts, timeout_s, stop, progress.show)
            yield Session(target, num_instances, loop, stop)
    finally:
        await connections.aclose()


def _allow_sockets() -> None:
    """Every request at work has one: as many open files as this user may have at all."""
    if resource is not None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):  # some systems cap it lower than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _warm_up(
    connections: Connections, target: Target, prompts: Prompts, timeout_s: float
) -> None:
    record = Record(-1, 0.0, _WARM_UP_TOKENS, _WARM_UP_TOKENS)
    body = target.body(prompts.prompt(0, _WARM_UP_TOKENS), _WARM_UP_TOKENS)
    await exchange(connections, target, body, record, time.monotonic(), timeout_s)
    if not record.is_ok:
        said = f"{record.status}: {record.message}"
        raise NoServer(f"{target.url} does not answer a first request: {said}")


class ProgressLines:
    """A line on standard error every few seconds."""

    def __init__(self, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._shown_at = time.monotonic()

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if self._is_quiet or now - self._shown_at < _PROGRESS_S:
            return
        self._shown_at = now
        at_work = progress.num_sent - progress.num_ended
        print(
            f"{progress.num_sent}/{progress.num_requests} sent, {at_work} at work, "
            f"{progress.num_failed} failed",
            file=sys.stderr,
        )


@contextlib.contextmanager
def _stopped_by_signals(stop: asyncio.Event) -> Iterator[None]:
    """The first SIGINT or SIGTERM sets ``stop``, the second has its usual effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)

    def restore() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)

    def on_signal() -> None:
        stop.set()
        restore()

    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        restore()
