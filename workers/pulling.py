"""Fills reserved pages with the KV that another instance holds, in bounded time, verified."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from daskserve.core.kv import KVHandle, KVStream
from daskserve.errors import KVUnavailable
from daskserve.workers.kv_digest import kv_digest
from daskserve.workers.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class Destination:
    """Pages that wait for KV.

    Parameters
    ----------
    owner
        Whom they belong to; no other pull of this instance has the same.
    pages
        Their ids, in token order.
    pool
        Where they are.
    """

    owner: int
    pages: tuple[int, ...]
    pool: KVPool

    @property
    def views(self) -> list[memoryview] | KVStream:
        """Their bytes on this rank, to be written in the order of the holder's pages."""
        return self.pool.incoming(self.pages)


Pull = Callable[[KVHandle, Destination], Awaitable[int | None]]
"""Fills the destination, or raises ``KVUnavailable``; returns the digest of what all ranks have
pulled, or None where there is one rank and nobody has computed it. Once it has returned, raised or
been cancelled, nothing may write to the pages any more: they may belong to someone else."""

_INLINE_DIGEST_BYTES = 2**24  # 1-2 ms: a hop to another thread and back can take longer


async def pull_verified(
    destination: Destination, handle: KVHandle, pull: Pull, timeout_s: float
) -> None:
    """Have ``pull`` fill the pages, then check them against the handle's digest.

    Raises
    ------
    KVUnavailable
        By ``pull``, or because other bytes arrived than were computed.
    TimeoutError
        Not done after ``timeout_s`` seconds.
    """
    async with asyncio.timeout(timeout_s):
        digest = await pull(handle, destination)
    if digest is None:
        check = partial(kv_digest, destination.pool, destination.pages)
        num_bytes = len(destination.pages) * destination.pool.page_bytes
        is_small = num_bytes < _INLINE_DIGEST_BYTES
        digest = check() if is_small else await asyncio.to_thread(check)
    if digest != handle.digest:
        raise KVUnavailable(f"the pulled KV of {handle.request_id} is not what was computed")
