"""KV from rank to rank between instances of unlike shapes, against whole pages as they are.

One process holds the KV, one pulls it, with a core each. Two ways with copies in strides:

- `split`: half of every layer's heads of twice as many pages, as a rank of TP2 pulls from one of
  TP1; the holder gathers them;
- `joined`: whole pages put together from two ranks that have half of the heads each, as a rank of
  TP1 pulls from TP2; the puller scatters them.

Everything is checked against its digest. The last line is a JSON list of {"name", "value", "unit",
"target", "ok"}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from dataclasses import replace
from statistics import median

import torch
from distributed.core import ConnectionPool, Server

from daskserve.core.kv import KVHandle
from daskserve.core.shards import Shard
from daskserve.service.kv_parts import Limits, export_part, pull_parts
from daskserve.service.kv_pull import OPERATION, KVServer, Views, pull
from daskserve.workers.forward import ModelShape
from daskserve.workers.kv_digest import slice_digests, summed
from daskserve.workers.kv_pool import KVPool

HOST, BLOCK, TARGET = "127.0.0.1", 16, 0.8
LIMITS = Limits(5, 5, 30)
KV_SHAPE = ModelShape(30, 4, 64, 49152, 8192, frozenset())
KV_PAGES = 512  # of half of the heads: 126 MB in bfloat16


class Holding:
    """A prefill rank with ``num_pages`` pages of KV, that serves them whole and in parts."""

    def __init__(self, num_pages: int, shard: Shard | None = None) -> None:
        self.pool = KVPool(KV_SHAPE, torch.bfloat16, num_pages, BLOCK, shard)
        self.pool.pages.normal_()
        self.digests: dict[Shard, int] = {}

    async def part(self, handle: KVHandle, shard: Shard) -> tuple[Views, int]:
        pages = range(1, self.pool.num_blocks + 1)
        if shard not in self.digests:  # as in production: known before anybody asks
            self.digests[shard] = summed(slice_digests(self.pool, pages, shard))
        return export_part(self.pool, pages, shard), self.digests[shard]

    def whole(self, handle: KVHandle) -> list[memoryview]:
        return self.pool.page_views(range(1, KV_PAGES // 2 + 1))

    async def serve(self) -> Server:
        server = Server({})
        await server.listen(f"tcp://{HOST}:0")
        serving = KVServer(server.address, self.whole, lambda *released: None, 30, self.part)
        server.handlers[OPERATION] = serving.handle
        return server


def hold(port, core: int) -> None:
    """One rank with all heads, and two with half of them each and half as many pages."""
    os.sched_setaffinity(0, [core])

    async def main() -> None:
        halves = [Shard(0, 30, head, 2) for head in (0, 2)]
        ranks = [Holding(KV_PAGES), *(Holding(KV_PAGES // 2, half) for half in halves)]
        servers = [await rank.serve() for rank in ranks]
        port.send([server.address for server in servers])
        await asyncio.to_thread(port.recv)
        for server in servers:
            await server.close()

    asyncio.run(main())


async def ways(addresses: list[str], seconds: float) -> tuple[dict[str, float], int]:
    """Median seconds of each way, taking turns, and the bytes that each moves."""
    whole_address, *halves = addresses
    handle = KVHandle("1", whole_address, b"s" * 16, KV_PAGES * BLOCK, "layout", 0)
    shared = replace(handle, tp=2, ranks=tuple(halves), instance_address=halves[0])
    half = KVPool(KV_SHAPE, torch.bfloat16, KV_PAGES, BLOCK, Shard(0, 30, 0, 2))
    whole = KVPool(KV_SHAPE, torch.bfloat16, KV_PAGES // 2, BLOCK)
    half.pages.zero_(), whole.pages.zero_()
    connections = await ConnectionPool()
    many, few = range(1, KV_PAGES + 1), range(1, KV_PAGES // 2 + 1)

    async def plain() -> None:
        views = whole.page_views(few)
        await pull(connections, handle, views, connect_timeout_s=5, stall_timeout_s=5)
        slice_digests(whole, few)

    async def split() -> None:
        await pull_parts(connections, handle, half, KV_SHAPE, len(many), LIMITS, many)

    async def joined() -> None:
        await pull_parts(connections, shared, whole, KV_SHAPE, len(few), LIMITS, few)

    times: dict[str, list[float]] = {"plain": [], "split": [], "joined": []}
    while len(times["plain"]) < 4 or sum(times["plain"]) < seconds / 3:
        for name, way in (("plain", plain), ("split", split), ("joined", joined)):
            started_at = time.perf_counter()
            await way()
            times[name].append(time.perf_counter() - started_at)
    await connections.close()
    # The first of each opens connections and touches new memory.
    return {name: median(taken[1:]) for name, taken in times.items()}, half.pages[1:].nbytes


async def reshard(seconds: float) -> list[dict]:
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    port, other = context.Pipe()
    process = context.Process(target=hold, args=(other, cores[-1]))
    process.start()
    os.sched_setaffinity(0, [cores[0]])
    times, num_bytes = await ways(await asyncio.to_thread(port.recv), seconds)
    port.send("done")
    process.join()
    speeds = {name: num_bytes / taken / 1e9 for name, taken in times.items()}
    print(
        f"reshard: {num_bytes / 1e6:.0f} MB in whole pages {speeds['plain']:.2f} GB/s, half of the"
        f" heads {speeds['split']:.2f} GB/s, from two ranks {speeds['joined']:.2f} GB/s; all"
        " verified"
    )
    return [figure(name, speeds[name] / speeds["plain"]) for name in ("split", "joined")]


def figure(name: str, value: float) -> dict:
    ok = value >= TARGET
    return dict(name=name, value=round(value, 3), unit="x whole pages", target=TARGET, ok=ok)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="of measuring")
    parser.add_argument("--quick", action="store_true", help="3 seconds")
    given = parser.parse_args()
    print(json.dumps(asyncio.run(reshard(3.0 if given.quick else given.seconds))))


if __name__ == "__main__":
    main()
