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
        """Closes a connection beyond ``max_connections``, or whose next request does not come."""

        _patience: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.max_connections:
                transport.abort()
            else:
                self._be_patient()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_between_requests():
                if self._patience is None:  # the head of a request has begun
                    self._be_patient()
            else:
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _is_between_requests(self) -> bool:
            return self.conn.their_state is h11.IDLE

        def _be_patient(self) -> None:
            self._patience = self.loop.call_later(limits.read_timeout_s, self._lose_patience)

        def _stop_waiting(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

        def _lose_patience(self) -> None:
            if not self.transport.is_closing():
                self.transport.abort()

    return BoundedProtocol
