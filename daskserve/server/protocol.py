"""uvicorn's HTTP protocol with bounds that it leaves to proxies: connections and slow senders."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from daskserve.config import ServeSettings

MAX_HEADER_BYTES = 32 * 1024
"""Request line and headers together; more is answered with 400 by the parser."""
_MAX_AHEAD_BYTES = 64 * 1024
"""Of further requests, read while one is answered."""


class BoundedProtocol(H11Protocol):
    """Cuts connections: beyond ``max_connections``, when the head of a request, or the rest of
    one that is answered already, does not come whole within ``read_timeout_s``, or nothing is
    taken for ``write_timeout_s``.
    """

    limits: ServeSettings
    _num_ahead_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # What the kernel does not take starts the timer, also before the end of a connection.
        transport.set_write_buffer_limits(high=1)
        if len(self.connections) > self.limits.max_connections:
            transport.abort()
        else:
            self._head_timer = self._cut_after(self.limits.read_timeout_s)

    def data_received(self, data: bytes) -> None:
        is_ahead = self.conn.their_state is h11.DONE
        super().data_received(data)
        self._read_ahead(len(data) if is_ahead else 0)
        if self.conn.their_state is not h11.IDLE and not self._is_answered_early():
            self._head_timer = _cancelled(self._head_timer)
        elif self._head_timer is None:
            self._head_timer = self._cut_after(self.limits.read_timeout_s)

    def on_response_complete(self) -> None:
        self._num_ahead_bytes = 0
        super().on_response_complete()
        if self._is_answered_early() and not self.transport.is_closing():
            self._head_timer = self._cut_after(self.limits.read_timeout_s)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # what cannot be read belongs to a request that is answered
            self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing is upgraded, and a line in the log per request helps nobody."""

    def eof_received(self) -> None:
        # The transport closes now, but tells of it only once all that it has is taken.
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self._cut_after(self.limits.write_timeout_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timer = _cancelled(self._write_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer = _cancelled(self._head_timer)
        self._write_timer = _cancelled(self._write_timer)
        super().connection_lost(exc)

    def _is_answered_early(self) -> bool:
        """Whether the body of a request still comes that was refused without it."""
        is_answered = self.cycle is not None and self.cycle.response_complete
        return is_answered and self.conn.their_state is h11.SEND_BODY

    def _read_ahead(self, num_bytes: int) -> None:
        # Uvicorn stops reading at a second request, and would not see the client leave.
        if self.conn.their_state is h11.DONE:
            self._num_ahead_bytes += num_bytes
            if self._num_ahead_bytes <= _MAX_AHEAD_BYTES:
                self.flow.resume_reading()

    def _cut_after(self, timeout_s: float) -> asyncio.TimerHandle:
        # Not close(), which would wait until all that is buffered is taken.
        return self.loop.call_later(timeout_s, self.transport.abort)


def bounded_protocol(limits: ServeSettings) -> type[BoundedProtocol]:
    """The protocol class with these limits built in, since uvicorn makes the instances."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits})


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    if timer is not None:
        timer.cancel()
    return None
