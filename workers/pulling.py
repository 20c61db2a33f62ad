"""Fills reserved pages with the KV that another instance holds, in bounded time, verified."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from daskserve.core.kv import KVHandle
from daskserve.errors import KVUnavailable
from daskserve.workers.kv_digest import kv_digest
from daskserve.workers.kv_pool import KVPool

Pull = Callable[[KVHandle, list[memoryview]], Awaitable[None]]
"""Fills the destination pages, or raises ``KVUnavailable``. Once it has returned, raised or been
cancelled, nothing may write to the views any more: the pages may belong to someone else."""

_INLINE_DIGEST_BYTES = 2**24  # 1-2 ms: a hop to another thread and back can take longer


async def pull_verified(
    pool: KVPool, pages: tuple[int, ...], handle: KVHandle, pull: Pull, timeout_s: float
) -> None:
    """Have ``pull`` fill the pages, then check them against the handle's digest.

    Raises
    ------
    KVUnavailable
        By ``pull``, or because other bytes arrived than were computed.
    TimeoutError
        Not done after ``timeout_s`` seconds.
    """
    views = pool.page_views(pages)
    async with asyncio.timeout(timeout_s):
        await pull(handle, views)
    check = partial(kv_digest, pool, pages)
    is_small = sum(view.nbytes for view in views) < _INLINE_DIGEST_BYTES
    digest = check() if is_small else await asyncio.to_thread(check)
    if digest != handle.digest:
        raise KVUnavailable(f"the pulled KV of {handle.request_id} is not what was computed")
