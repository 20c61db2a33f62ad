"""Server-sent events to one client, and the watch for its going."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import orjson
from starlette.types import Receive, Send

from daskserve.server.errors import Refusal, refusal_of

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must pass tokens on as they come
]


class ClientGone(Exception):
    """The client closed the connection, or takes nothing any more."""


class EventSender:
    """Writes events; starts the response with the first one.

    Parameters
    ----------
    send
        Of ASGI; it waits while the connection's buffer is full.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._wrote_at = time.monotonic()
        self.is_started = False

    async def keep_alive(self, interval_s: float) -> None:
        """Comments while nothing else comes, for proxies that cut silent connections; for ever."""
        while True:
            silent_s = time.monotonic() - self._wrote_at
            if silent_s >= interval_s:
                await self._write(b": ping\n\n", more=True)
            else:
                await asyncio.sleep(interval_s - silent_s)

    async def event(self, record: dict[str, Any]) -> None:
        await self._write(b"data: " + orjson.dumps(record) + b"\n\n", more=True)

    async def fail(self, error: Exception) -> None:
        """An explicit error and no [DONE] says that there is no more; what was sent stands."""
        await self.event(refusal_of(error).body())
        await self.finish(b"")

    async def finish(self, last: bytes) -> None:
        await self._write(last, more=False)

    async def _write(self, data: bytes, more: bool) -> None:
        self._wrote_at = time.monotonic()
        if not self.is_started:
            self.is_started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client leaves (ClientGone).

    When the server stops it cancels what still runs: that becomes a Refusal with 503 here.

    ``work`` must not wait for anything after it has sent the end of the response: the server
    reports the end of a response in the same way as a client that left.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGone
        return worker.result()
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None:
            task.uncancel()  # there is an answer left to give
        raise Refusal(503, "the server stops", code="stopping", retry_after_s=5) from None
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
