"""KV from rank to rank over real connections, between instances of any shapes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from distributed.core import ConnectionPool, Server

from daskserve.config import settings
from daskserve.core.kv import KVHandle
from daskserve.core.placement import Parallelism
from daskserve.core.shards import ShardMap
from daskserve.errors import KVUnavailable
from daskserve.service.kv_parts import (
    Limits,
    PinServer,
    ask_to_pin,
    ask_to_pull,
    export_part,
    pull_parts,
    release_kv,
)
from daskserve.service.kv_pull import OPERATION, KVServer
from daskserve.service.names import PIN_KV, PULL_KV, RELEASE_KV
from daskserve.workers.forward import ModelShape
from daskserve.workers.holding import BurstBuffer
from daskserve.workers.kv_digest import slice_digests, summed
from daskserve.workers.kv_pieces import write_piece
from daskserve.workers.kv_pool import KVPool

SHAPE = ModelShape(4, 4, 8, 100, 256, frozenset())
LIMITS = Limits(1, 1, 2)
HELD, TARGET = [5, 2, 3], [1, 4, 6]


def map_of(tp: int, pp: int, *stage_layers: int) -> ShardMap:
    return ShardMap(Parallelism(tp, pp), 4, 4, 4, stage_layers)


def pool_of(shards: ShardMap, rank: int, fill: bool) -> KVPool:
    pool = KVPool(SHAPE, torch.float32, 6, 4, shards.of_rank(rank))
    if fill:
        torch.manual_seed(0)
        layers, heads = pool.shard.within(SHAPE.whole)
        pool.pages[:] = torch.randn(7, 4, 2, 4, 4, 8)[:, layers, :, heads]
    return pool


@dataclass
class Holder:
    """A prefill instance without an engine: ranks with pools, and the head's burst buffer."""

    shards: ShardMap
    pools: list[KVPool] = field(default_factory=list)
    servers: list[Server] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    handle: KVHandle | None = None
    num_pulls: int = 0

    def pin_part(self, handle, shard):
        return self.buffer.pin_piece(handle, shard, 0.0)

    def release(self, request_id, secret):
        self.released.append(request_id)


@asynccontextmanager
async def holder(*shape: int) -> AsyncIterator[tuple[Holder, ConnectionPool]]:
    held = Holder(map_of(*shape))
    connections = await ConnectionPool()
    for rank in range(held.shards.num_ranks):
        pool = pool_of(held.shards, rank, fill=True)
        server = Server({})
        await server.listen(f"{settings().service.protocol}://127.0.0.1:0")
        held.pools.append(pool)
        held.servers.append(server)

        async def export(handle, shard, pool=pool):
            held.num_pulls += 1
            head = held.servers[0].address
            pages, digest = await ask_to_pin(connections, head, handle, shard, LIMITS)
            return export_part(pool, pages, shard), digest

        # The handle names the head, whichever rank is asked.
        serving = KVServer(held.servers[0].address, None, None, 0.5, export)
        server.handlers[OPERATION] = serving.handle
    pins = PinServer(held.servers[0].address, held)
    held.servers[0].handlers |= {PIN_KV: pins.pin, RELEASE_KV: pins.release}
    ranks = tuple(server.address for server in held.servers)
    layers = held.shards.stage_layers
    home = {"tp": shape[0], "pp": shape[1], "ranks": ranks, "stage_layers": layers}
    held.buffer = BurstBuffer("layout", 60, 30, home)
    digests = slice_digests(pool_of(map_of(1, 1), 0, fill=True), HELD)
    held.handle = held.buffer.hold("7", ranks[0], 10, 1, HELD, digests, 0.0)
    try:
        yield held, connections
    finally:
        await connections.close()
        for server in held.servers:
            await server.close()


UNEVEN = (1, 2, 3, 1)


@pytest.mark.parametrize("target", [(1, 1), (2, 2), UNEVEN, (1, 3)], ids=lambda s: f"to{s}")
@pytest.mark.parametrize("source", [(1, 1), UNEVEN, (4, 1), (1, 3)], ids=lambda s: f"from{s}")
async def test_every_rank_gets_its_layers_and_heads_in_one_piece_per_holder(source, target):
    async with holder(*source) as (held, connections):
        total, num_pieces = 0, 0
        for rank in range(map_of(*target).num_ranks):
            pool = pool_of(map_of(*target), rank, fill=False)
            pages = () if rank else TARGET  # the head writes at once, the others when it says so
            pieces, digest = await pull_parts(
                connections, held.handle, pool, SHAPE, 3, LIMITS, pages
            )
            for shard, data in pieces:
                write_piece(pool, TARGET, shard, data)
            full = pool_of(map_of(*target), rank, fill=True)
            assert torch.equal(pool.pages[TARGET], full.pages[HELD])
            assert digest == summed(slice_digests(pool, TARGET))
            total += digest
            num_pieces += len(held.shards.pieces_for(pool.shard))
        assert total % 2**64 == held.handle.digest
        assert held.num_pulls == num_pieces
        assert held.released == []  # only once all ranks have theirs
        await release_kv(connections, held.handle, 1)
        assert held.released == ["7"]


async def pull_of(connections, handle: KVHandle) -> None:
    pool = pool_of(map_of(2, 1), 1, fill=False)
    await pull_parts(connections, handle, pool, SHAPE, 3, LIMITS)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"secret": b"x" * 16}, "wrong secret"),
        ({"request_id": "8"}, "no KV is held"),
        ({"num_tokens": 11}, "does not match what is held"),
        ({"digest": 1}, "does not match what is held"),
    ],
)
async def test_a_handle_that_differs_is_refused_by_every_rank(change: dict, part: str):
    async with holder(1, 2) as (held, connections):
        with pytest.raises(KVUnavailable, match=part):
            await pull_of(connections, replace(held.handle, **change))
        assert connections.active == 0


async def test_a_piece_with_other_bytes_than_were_computed_is_not_believed():
    async with holder(1, 2) as (held, connections):
        held.pools[1].pages[HELD[1], 0, 0, 3, 0, 0] += 1
        with pytest.raises(KVUnavailable, match=r"layers range\(2, 4\) .* is not what was"):
            await pull_of(connections, held.handle)


async def test_a_rank_that_is_gone_is_an_error_in_time():
    async with holder(1, 2) as (held, connections):
        await held.servers[1].close()
        with pytest.raises(KVUnavailable, match="cannot reach"):
            await pull_of(connections, held.handle)


async def test_layers_that_a_rank_does_not_have_are_refused():
    async with holder(1, 2) as (held, connections):
        swapped = replace(held.handle, ranks=held.handle.ranks[::-1])
        with pytest.raises(KVUnavailable, match="this rank has layers"):
            await pull_of(connections, swapped)


@pytest.mark.parametrize("ask", [None, b"", b"garbage" * 20, 7])
async def test_garbage_is_refused_by_the_head(ask: object):
    async with holder(1, 1) as (held, _):
        assert "refused" in await PinServer("here", held).pin(ask)


async def test_a_follower_that_refuses_or_is_silent_fails_the_pull():
    async with holder(1, 1) as (held, connections):
        address = held.servers[0].address

        async def refuse(**given):
            return {"refused": "no room"}

        for answer, part in ((refuse, "no room"), (None, "does not answer")):
            held.servers[0].handlers[PULL_KV] = answer
            if answer is None:
                await held.servers[0].close()
            with pytest.raises(KVUnavailable, match=part):
                await ask_to_pull(connections, address, held.handle, 1, 3, LIMITS)
