"""uvicorn's HTTP protocol with bounds that it leaves to proxies: connections and slow senders."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from daskserve.config import ServeSettings

MAX_HEADER_BYTES = 32 * 1024
"""Request line and headers together; more is answered with 400 by the parser."""


def bounded_protocol(limits: ServeSettings) -> type[H11Protocol]:
    """The protocol class with these limits built in, since uvicorn makes the instances."""

    class BoundedProtocol(H11Protocol):
        """Cuts connections: beyond ``max_connections``, when the head of a request does not come
        whole within ``read_timeout_s``, or nothing is taken for ``write_timeout_s``."""

        _head_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.max_connections:
                transport.abort()
            else:
                self._head_timer = self._cut_after(limits.read_timeout_s)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._head_timer = _cancelled(self._head_timer)
            elif self._head_timer is None:
                self._head_timer = self._cut_after(limits.read_timeout_s)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._write_timer = self._cut_after(limits.write_timeout_s)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._write_timer = _cancelled(self._write_timer)

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_timer = _cancelled(self._head_timer)
            self._write_timer = _cancelled(self._write_timer)
            super().connection_lost(exc)

        def _cut_after(self, timeout_s: float) -> asyncio.TimerHandle:
            # Not close(), which would wait until all that is buffered is taken.
            return self.loop.call_later(timeout_s, self.transport.abort)

    return BoundedProtocol


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    if timer is not None:
        timer.cancel()
    return None
