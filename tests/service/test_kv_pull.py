"""KV pulls over real connections, and everything that can go wrong on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from distributed.core import ConnectionPool, Server

from daskserve.config import settings
from daskserve.core.kv import KVHandle
from daskserve.errors import KVUnavailable
from daskserve.service import kv_pull
from daskserve.service.kv_pull import KVServer, pull

PAGE = 1000
CONNECT_S = 0.5 if settings().service.protocol == "tcp" else 5  # the first of UCX takes a while
OWN = f"{settings().service.protocol}://127.0.0.1:0"
PROTOCOLS = [*{"tcp://127.0.0.1:0": 0, OWN: 0, "inproc://": 0}]


@dataclass
class Holder:
    """A prefill instance without an engine: some pages, one valid handle."""

    source: np.ndarray
    handle: KVHandle | None = None
    released: list[str] = field(default_factory=list)
    is_exported: asyncio.Event = field(default_factory=asyncio.Event)

    def export(self, handle: KVHandle) -> list[memoryview]:
        if handle != self.handle:
            raise KVUnavailable("no such KV")
        self.is_exported.set()
        half = self.source.size // 2
        return [memoryview(self.source[:half]), memoryview(self.source[half:])]

    def release(self, request_id: str, secret: bytes) -> None:
        assert secret == self.handle.secret
        self.released.append(request_id)


@asynccontextmanager
async def rig(
    num_bytes: int = 3 * PAGE, protocol: str = OWN
) -> AsyncIterator[tuple[Holder, ConnectionPool, Server]]:
    holder = Holder(np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8))
    server = Server({})
    await server.listen(protocol)
    holder.handle = KVHandle("7", server.address, b"s" * 16, 10, "layout", 1)
    serving = KVServer(server.address, holder.export, holder.release, stall_timeout_s=0.5)
    server.handlers[kv_pull.OPERATION] = serving.handle
    pool = await ConnectionPool()
    try:
        yield holder, pool, server
    finally:
        await pool.close()
        await server.close()


async def pull_into(pool: ConnectionPool, handle: KVHandle, num_bytes: int) -> np.ndarray:
    target = np.zeros(num_bytes, dtype=np.uint8)
    cut = num_bytes // 3
    views = [memoryview(target[:cut]), memoryview(target[cut:])]
    await pull(pool, handle, views, connect_timeout_s=CONNECT_S, stall_timeout_s=0.5)
    return target


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("num_bytes", [1, PAGE, 9 * 2**20 + 3])
async def test_bytes_arrive_and_the_holder_frees(protocol: str, num_bytes: int):
    async with rig(num_bytes, protocol) as (holder, pool, _):
        target = await pull_into(pool, holder.handle, num_bytes)
        assert np.array_equal(target, holder.source)
        while not holder.released:
            await asyncio.sleep(0.001)
        assert holder.released == ["7"]


async def test_a_connection_serves_again_after_pulls_and_refusals():
    async with rig() as (holder, pool, _):
        wrong = replace(holder.handle, secret=b"x" * 16)
        for _ in range(3):
            await pull_into(pool, holder.handle, 3 * PAGE)
            with pytest.raises(KVUnavailable, match="no such KV"):
                await pull_into(pool, wrong, 3 * PAGE)
        assert pool.open == 1
        assert pool.active == 0


@pytest.mark.parametrize(
    "change",
    [
        {"secret": b"x" * 16},
        {"request_id": "8"},
        {"kv_layout": "other"},
        {"num_tokens": 11},
        {"digest": 2},
    ],
)
async def test_a_handle_that_differs_is_refused(change: dict):
    async with rig() as (holder, pool, _):
        with pytest.raises(KVUnavailable, match="refused"):
            await pull_into(pool, replace(holder.handle, **change), 3 * PAGE)
        assert not holder.released


@pytest.mark.parametrize("num_bytes", [3 * PAGE - 1, 3 * PAGE + 1, 2**24])
async def test_a_wrong_length_is_refused(num_bytes: int):
    async with rig() as (holder, pool, _):
        with pytest.raises(KVUnavailable, match="bytes asked"):
            await pull_into(pool, holder.handle, num_bytes)
        assert not holder.released


@pytest.mark.parametrize("ask", [None, b"", b"garbage" * 20, "text", 7, [b"DSKV"], {"a": 1}])
async def test_garbage_is_answered_and_the_server_lives(ask: object):
    async with rig() as (holder, pool, server):
        comm = await pool.connect(server.address)
        await comm.write({"op": kv_pull.OPERATION, "ask": ask})
        assert b"not a KV request" in await comm.read()
        pool.reuse(server.address, comm)
        await pull_into(pool, holder.handle, 3 * PAGE)


async def test_a_dead_address_fails_within_the_deadline():
    async with rig() as (holder, pool, server):
        handle = replace(holder.handle, instance_address="tcp://127.0.0.1:1")
        async with asyncio.timeout(2):
            with pytest.raises(KVUnavailable, match="cannot reach"):
                await pull_into(pool, handle, 3 * PAGE)


async def test_a_worker_without_kv_is_unavailable():
    async with rig() as (holder, pool, server):
        del server.handlers[kv_pull.OPERATION]
        with pytest.raises(KVUnavailable, match="does not serve KV"):
            await pull_into(pool, holder.handle, 3 * PAGE)


async def test_a_holder_that_stalls_is_given_up():
    async with rig() as (holder, pool, server):

        async def stall(comm, ask):
            await asyncio.sleep(5)

        server.handlers[kv_pull.OPERATION] = stall
        async with asyncio.timeout(2):
            with pytest.raises(KVUnavailable, match="broke off"):
                await pull_into(pool, holder.handle, 3 * PAGE)
        assert pool.active == 0


async def test_a_holder_that_dies_in_between_is_noticed():
    async with rig(64 * 2**20) as (holder, pool, server):
        pulling = asyncio.create_task(pull_into(pool, holder.handle, 64 * 2**20))
        await holder.is_exported.wait()
        for comm in list(server._comms):
            comm.abort()
        with pytest.raises(KVUnavailable):
            await pulling
        assert not holder.released


async def test_a_cancelled_pull_writes_no_more():
    async with rig(64 * 2**20) as (holder, pool, _):
        target = np.zeros(64 * 2**20, dtype=np.uint8)
        views = [memoryview(target)]
        pulling = asyncio.create_task(
            pull(pool, holder.handle, views, connect_timeout_s=1, stall_timeout_s=1)
        )
        await holder.is_exported.wait()
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        target[:] = 0
        await asyncio.sleep(0.05)
        assert not target.any()
        assert not holder.released
        assert pool.active == 0
