"""The instance's end of a token stream: one connection per caller, nothing waits for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from ssl import SSLContext

from distributed.security import Security

from daskserve.core.request import TokenDelta
from daskserve.service.token_wire import Sink, pack

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_WRITE_TIMEOUT_S = 10.0
_IDLE_S = 60.0
_RETRY_AFTER_S = 5.0
_MAX_PENDING = 10_000


class TokenSenders:
    """Sends token deltas to callers by the address in their requests.

    A caller that cannot be reached, or reads too slowly, loses deltas, never the answer: the
    result of the request holds every token.

    Parameters
    ----------
    security
        Of the worker; with TLS its certificates are used here too.
    """

    def __init__(self, security: Security) -> None:
        self._ssl = security.get_connection_args("worker").get("ssl_context")
        self._senders: dict[str, _Sender] = {}

    def to(self, token_sink: str) -> Callable[[TokenDelta], None]:
        """Send deltas to this caller; never blocks. Call on the event loop."""
        return partial(self._send, token_sink)

    async def close(self) -> None:
        senders = list(self._senders.values())
        self._senders.clear()
        for sender in senders:
            await sender.close()

    def _send(self, token_sink: str, delta: TokenDelta) -> None:
        sender = self._senders.get(token_sink)
        if sender is None or sender.is_spent:
            sender = self._senders[token_sink] = _Sender(token_sink, self._ssl, self._forget)
        sender.send(delta)

    def _forget(self, token_sink: str, sender: _Sender) -> None:
        if self._senders.get(token_sink) is sender:
            del self._senders[token_sink]


class _Sender:
    """Queues deltas and writes all that is pending at once."""

    def __init__(
        self,
        token_sink: str,
        ssl: SSLContext | None,
        forget: Callable[[str, _Sender], None],
    ) -> None:
        self._token_sink = token_sink
        self._ssl = ssl
        self._forget = forget
        self._pending: deque[bytes] = deque()
        self._has_pending = asyncio.Event()
        self._failed_at: float | None = None
        self._task = asyncio.create_task(self._run())

    @property
    def is_spent(self) -> bool:
        """It failed long enough ago to try again."""
        return self._failed_at is not None and (time.monotonic() - self._failed_at > _RETRY_AFTER_S)

    def send(self, delta: TokenDelta) -> None:
        if self._failed_at is not None:
            return
        if len(self._pending) >= _MAX_PENDING:
            self._fail("it reads too slowly")
            self._task.cancel()
            return
        self._pending.append(pack(delta))
        self._has_pending.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    def _fail(self, reason: object) -> None:
        host = self._token_sink.rpartition("/")[0]
        logger.warning("tokens to %s stop: %s", host, reason)
        self._failed_at = time.monotonic()
        self._pending.clear()

    async def _run(self) -> None:
        writer = None
        try:
            sink = Sink.parse(self._token_sink)
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                _, writer = await asyncio.open_connection(sink.host, sink.port, ssl=self._ssl)
            writer.write(sink.secret)
            await self._write_pending(writer)
        except (OSError, ValueError) as error:
            self._fail(error)
        finally:
            if writer is not None:
                writer.close()
            if self._failed_at is None:
                self._forget(self._token_sink, self)

    async def _write_pending(self, writer: asyncio.StreamWriter) -> None:
        """Until nothing comes for a while."""
        while True:
            try:
                async with asyncio.timeout(_IDLE_S):
                    await self._has_pending.wait()
            except TimeoutError:
                if not self._pending:
                    return
            self._has_pending.clear()
            frames = b"".join(self._pending)
            self._pending.clear()
            writer.write(frames)
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await writer.drain()
