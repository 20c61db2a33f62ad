"""KV from rank to rank: every rank of a decode instance fetches its own layers and heads.

The head tells its followers whose KV to fetch; each asks those ranks of the prefill instance that
hold what it needs, one piece from each, and checks every piece against the digest that was
computed with the prompt. Ranks other than the head of the prefill instance ask their head whether
the handle is good and which pages to send.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from distributed.core import ConnectionPool

from daskserve.core.kv import KVHandle, KVStream
from daskserve.core.placement import Parallelism
from daskserve.core.shards import Shard, ShardMap
from daskserve.errors import KVUnavailable
from daskserve.service.kv_counters import KVCounters
from daskserve.service.kv_pull import Views, pull
from daskserve.service.kv_wire import pack_ask, unpack_ask
from daskserve.service.names import PIN_KV, PULL_KV, RELEASE_KV

if TYPE_CHECKING:
    from daskserve.workers.forward import ModelShape
    from daskserve.workers.instance import Instance
    from daskserve.workers.kv_pool import KVPool
    from daskserve.workers.parallel.follower import Pieces

logger = logging.getLogger(__name__)

_PLAIN = {"serializers": ["msgpack"], "deserializers": ["msgpack"]}


class Limits(NamedTuple):
    """Most seconds to reach a rank, without any progress, and for all of it."""

    connect_s: float
    stall_s: float
    total_s: float


async def pull_parts(
    connections: ConnectionPool,
    handle: KVHandle,
    pool: KVPool,
    shape: ModelShape,
    num_pages: int,
    limits: Limits,
    pages: Sequence[int] = (),
    counters: KVCounters | None = None,
) -> tuple[Pieces, int]:
    """Fetch what this rank needs of a prefill instance's KV, from all ranks that have it at once.

    Parameters
    ----------
    connections
        The worker's.
    pool, shape
        Says what this rank needs, and of what model.
    num_pages
        Pages that the KV takes.
    pages
        Write it into these pages as it comes; nothing does so any more once this has returned,
        raised or been cancelled. Without pages it is kept in memory.
    counters
        Told of every piece that came.

    Returns
    -------
    pieces, digest
        What was kept, to be written with `write_piece`, and the digest of all that came.

    Raises
    ------
    KVUnavailable
        A rank refused or was not reached, or other bytes arrived than were computed.
    """
    if not 0 < num_pages <= pool.num_blocks:
        raise KVUnavailable(f"{num_pages} pages are asked for, this rank has {pool.num_blocks}")
    heads = shape.num_kv_heads
    shape_there, layers = Parallelism(handle.tp, handle.pp), tuple(handle.stage_layers)
    held = ShardMap(shape_there, shape.num_layers, heads, heads, layers)

    async def fetch(rank: int, shard: Shard) -> tuple[Shard, memoryview, int]:
        address = handle.ranks[rank] if handle.ranks else handle.instance_address
        data, stated, digest = await _fetch(
            connections, address, handle, pool, shard, num_pages, limits, pages, counters
        )
        if digest != stated:
            raise KVUnavailable(
                f"what {address} sent of layers {shard.layers} and heads {shard.heads} of"
                f" {handle.request_id} is not what was computed"
            )
        return shard, data, digest

    fetched = await all_of([fetch(p.rank, p.shard) for p in held.pieces_for(pool.shard)])
    pieces = [] if pages else [(shard, data) for shard, data, _ in fetched]
    return pieces, sum(digest for _, _, digest in fetched) % 2**64


async def _fetch(
    connections: ConnectionPool,
    address: str,
    handle: KVHandle,
    pool: KVPool,
    shard: Shard,
    num_pages: int,
    limits: Limits,
    pages: Sequence[int],
    counters: KVCounters | None,
) -> tuple[memoryview, int, int]:
    """One piece: its bytes if they are kept, the digest that it should have, that it has."""
    from daskserve.workers.kv_digest import slice_digests, summed
    from daskserve.workers.kv_pieces import piece_bytes, piece_digest, write_chunks

    num_bytes = piece_bytes(pool, num_pages, shard)
    data = memoryview(bytearray(0 if pages else num_bytes))
    room: Views = [data]
    if pages and shard == pool.shard:
        room = pool.incoming(pages)  # all that this rank has: straight into its pages
    elif pages:
        room = KVStream(num_bytes, write_chunks(pool, pages, shard))
    stated = await pull(
        connections,
        handle,
        room,
        connect_timeout_s=limits.connect_s,
        stall_timeout_s=limits.stall_s,
        address=address,
        shard=shard,
        counters=counters,
    )
    if pages:
        digest = summed(await asyncio.to_thread(slice_digests, pool, pages, shard))
    else:
        digest = await asyncio.to_thread(piece_digest, pool, data, shard)
    return data, stated, digest


async def ask_to_pull(
    connections: ConnectionPool,
    address: str,
    handle: KVHandle,
    owner: int,
    num_pages: int,
    limits: Limits,
) -> int:
    """Have a follower fetch its part for the pages of ``owner``; the part's digest.

    Raises
    ------
    KVUnavailable
        It cannot, or does not answer in time.
    """
    shown = {f.name: getattr(handle, f.name) for f in fields(KVHandle)}
    answer = await _ask(
        connections, address, PULL_KV, limits, handle=shown, owner=owner, num_pages=num_pages
    )
    return answer["digest"]


def shown_handle(shown: dict[str, Any]) -> KVHandle:
    """The handle in a request of `ask_to_pull`."""
    tuples = {name: tuple(shown[name]) for name in ("ranks", "stage_layers")}
    return KVHandle(**{**shown, **tuples})


async def ask_to_pin(
    connections: ConnectionPool, head: str, handle: KVHandle, shard: Shard, limits: Limits
) -> tuple[tuple[int, ...], int]:
    """Ask our head for the pages of a handle and the digest of a part (KVUnavailable)."""
    answer = await _ask(connections, head, PIN_KV, limits, ask=pack_ask(handle, 1, shard))
    return tuple(answer["pages"]), answer["digest"]


async def release_kv(
    connections: ConnectionPool, handle: KVHandle, connect_timeout_s: float
) -> None:
    """Tell the prefill instance that all ranks have their parts; if it fails, the lease ends it."""
    try:
        async with asyncio.timeout(connect_timeout_s):
            rpc = getattr(connections(handle.instance_address), RELEASE_KV)
            await rpc(request_id=handle.request_id, secret=handle.secret, **_PLAIN)
    except OSError as error:
        logger.warning("the KV of %s was not released: %r", handle.request_id, error)


class PinServer:
    """The head's answers to its followers and to pullers. Handlers of its worker.

    Parameters
    ----------
    address
        Of this worker, as in the handles it gave out.
    instance
        Whose KV it is.
    """

    def __init__(self, address: str, instance: Instance) -> None:
        self._address = address
        self._instance: Instance | None = instance

    def close(self) -> None:
        """Let go of the instance: Dask never forgets a handler, and with it the weights."""
        self._instance = None

    async def pin(self, ask: object = None) -> dict[str, Any]:
        try:
            asked = unpack_ask(ask, self._address)
            if asked.shard is None:
                raise KVUnavailable("no layers and heads are asked for")
            if self._instance is None:
                raise KVUnavailable(f"the instance on {self._address} is closed")
            pages, digest = self._instance.pin_part(asked.handle, asked.shard)
        except KVUnavailable as refusal:
            return {"refused": str(refusal)}
        return {"pages": pages, "digest": digest}

    async def release(self, request_id: str, secret: bytes) -> None:
        if self._instance is not None:
            self._instance.release(request_id, secret)


def export_part(pool: KVPool, pages: Sequence[int], shard: Shard) -> Views:
    """Bytes of these layers and heads: the pages themselves where that is all this rank has.

    Raises
    ------
    KVUnavailable
        This rank has not all of them.
    """
    from daskserve.workers.kv_pieces import piece_bytes, read_chunks

    own = pool.shard
    if own.common(shard) != shard:
        raise KVUnavailable(
            f"this rank has layers {own.layers} and heads {own.heads}, not layers"
            f" {shard.layers} and heads {shard.heads}"
        )
    if shard == own:
        return pool.outgoing(pages)
    return KVStream(piece_bytes(pool, len(pages), shard), read_chunks(pool, pages, shard))


async def all_of(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Results of all; the first error ends the others before it is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ask(
    connections: ConnectionPool, address: str, operation: str, limits: Limits, **message: Any
) -> dict[str, Any]:
    try:
        async with asyncio.timeout(limits.total_s):
            answer = await getattr(connections(address), operation)(**message, **_PLAIN)
    except OSError as error:  # closed connections and timeouts too
        raise KVUnavailable(f"{address} does not answer: {error!r}") from error
    if not isinstance(answer, dict) or "refused" in answer:
        reason = answer["refused"] if isinstance(answer, dict) else "it is no rank any more"
        raise KVUnavailable(f"{address} refused: {reason}")
    return answer
