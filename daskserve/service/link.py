"""One connection for many requests, messages both ways; each end soon knows that the other is gone.

Online requests use one per service to the scheduler and one to every instance, instead of a
Dask call each: a call ties a connection up for as long as it waits, and its server is not told
when the caller dies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from distributed.comm import Comm, connect

logger = logging.getLogger(__name__)

Message = dict[str, Any]
"""``op`` says what it is; the rest are values that msgpack knows, so nothing is pickled."""

_MAX_PENDING = 100_000
_PLAIN = ["msgpack"]


class Link:
    """One end of a connection.

    Parameters
    ----------
    silence_s
        Without a sign of life for so long the other end counts as gone; each end gives one four
        times as often.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._pending: list[Message] = []
        self._has_pending = asyncio.Event()
        self._comm: Comm | None = None
        self.is_over = False

    def send(self, message: Message) -> None:
        """Never blocks. What is sent before the link stands goes out then; after its end, never."""
        if self.is_over:
            return
        if len(self._pending) >= _MAX_PENDING:
            logger.warning("%s reads too slowly: the link is cut", self._comm)
            self.cut()
            return
        self._pending.append(message)
        self._has_pending.set()

    def cut(self) -> None:
        """End it now; what is still to be sent is lost."""
        self.is_over = True
        self._pending.clear()
        if self._comm is not None:
            self._comm.abort()

    async def dial(
        self,
        address: str,
        operation: str,
        on_message: Callable[[Message], None],
        timeout_s: float,
        connection_args: dict[str, Any],
    ) -> None:
        """Connect to a handler of a Dask server, which calls `talk`, and stay until the end.

        Returns also when the server cannot be reached; ``is_over`` then.
        """
        try:
            async with asyncio.timeout(timeout_s):
                comm = await connect(address, timeout=timeout_s, **connection_args)
                await comm.write({"op": operation, "reply": False})
        except (OSError, TimeoutError) as error:
            logger.info("no link to %s: %s", address, error)
            self.cut()
        else:
            await self.talk(comm, on_message)

    async def talk(self, comm: Comm, on_message: Callable[[Message], None]) -> None:
        """Send and receive until either end is closed or silent for too long."""
        self._comm = comm
        writing = asyncio.create_task(self._write(comm))
        try:
            while not self.is_over:
                async with asyncio.timeout(self._silence_s):
                    messages = await _read_plain(comm)
                for message in messages:
                    on_message(message)
        except (OSError, TimeoutError) as error:
            logger.info("the link to %s ended: %r", comm.peer_address, error)
        finally:
            self.cut()
            writing.cancel()

    async def _write(self, comm: Comm) -> None:
        try:
            while True:
                await self._wait_for_pending()
                messages, self._pending = self._pending, []
                async with asyncio.timeout(self._silence_s):
                    await comm.write(messages, serializers=_PLAIN)
        except (OSError, TimeoutError) as error:
            logger.info("the link to %s broke: %r", comm.peer_address, error)
            self.cut()

    async def _wait_for_pending(self) -> None:
        """Or for the time of a sign of life: no messages."""
        try:
            async with asyncio.timeout(self._silence_s / 4):
                await self._has_pending.wait()
        except TimeoutError:
            pass
        self._has_pending.clear()


async def _read_plain(comm: Comm) -> list[Message]:
    try:
        return await comm.read(deserializers=_PLAIN)
    except TypeError as error:
        raise OSError(f"what came is not plain: {error}") from error
