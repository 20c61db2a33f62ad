"""Instances of several ranks: two pipeline stages against one, and KV between unlike shapes.

- `pipeline`: the same steps by one stage on one core and by two stages on two cores; the ratio of
  their rates, and the share of time in which each stage waits for the other (its bubbles).
- `reshard`: the bytes of a request's KV from one process to another, whole pages as they are, and
  half of every layer's heads of twice as many pages, which is copied in strides at both ends.

The last line is a JSON list of {"name", "value", "unit", "target", "ok"}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from statistics import median

import numpy as np
import torch
from distributed.core import ConnectionPool, Server

from daskserve.core.instance import EngineConfig
from daskserve.core.kv import KVHandle
from daskserve.core.placement import Parallelism
from daskserve.core.shards import Shard
from daskserve.service.kv_parts import Limits, export_part, pull_parts
from daskserve.service.kv_pull import OPERATION, KVServer, pull
from daskserve.workers.forward import ForwardBatch, ModelShape
from daskserve.workers.kv_digest import slice_digests, summed
from daskserve.workers.kv_pool import KVPool
from daskserve.workers.parallel.follower import Follower
from daskserve.workers.parallel.group import Meeting, join_group, open_group
from daskserve.workers.parallel.runner import ParallelRunner
from daskserve.workers.parallel.start import start_rank

HOST, BLOCK = "127.0.0.1", 16
PIPELINE_TARGET, RESHARD_TARGET = 1.5, 0.8
LIMITS = Limits(5, 5, 30)
KV_SHAPE = ModelShape(30, 4, 64, 49152, 8192, frozenset())
KV_PAGES = 512  # of half of the heads: 126 MB in bfloat16


def follow(config: EngineConfig, shape: Parallelism, meeting: Meeting, core: int) -> None:
    os.sched_setaffinity(0, [core])
    store = join_group(meeting, 1, 60)
    Follower(start_rank(config, shape, 1, store, host=HOST, address="", load_timeout_s=60)).serve()


def steps(vocab_size: int) -> dict[str, ForwardBatch]:
    """A prefill step of four prompts, and a decode step of 32 requests."""
    rng = np.random.default_rng(0)
    prompts, length, rows, context = 4, 256, 32, 200
    pages = -(-length // BLOCK)
    return {
        "prefill": ForwardBatch(
            token_ids=rng.integers(0, vocab_size, prompts * length),
            positions=np.tile(np.arange(length), prompts),
            query_start=np.arange(prompts + 1, dtype=np.int32) * np.int32(length),
            context_tokens=np.full(prompts, length, np.int32),
            page_table=1 + np.arange(prompts * pages, dtype=np.int32).reshape(prompts, pages),
        ),
        "decode": ForwardBatch(
            token_ids=rng.integers(0, vocab_size, rows),
            positions=np.full(rows, context - 1),
            query_start=np.arange(rows + 1, dtype=np.int32),
            context_tokens=np.full(rows, context, np.int32),
            page_table=1 + np.arange(rows * pages, dtype=np.int32).reshape(rows, pages),
        ),
    }


def rates(config: EngineConfig, shape: Parallelism, seconds: float) -> dict[str, tuple]:
    """Tokens/s and bubble shares of every kind of step."""
    cores = sorted(os.sched_getaffinity(0))
    meeting, store = open_group(shape, HOST, 60)
    followers = [
        multiprocessing.get_context("spawn").Process(
            target=follow, args=(config, shape, meeting, cores[-1])
        )
        for _ in range(shape.num_gpus - 1)
    ]
    for process in followers:
        process.start()
    os.sched_setaffinity(0, [cores[0]])
    stage = start_rank(config, shape, 0, store, host=HOST, address="", load_timeout_s=60)
    runner = ParallelRunner(stage)
    runner.bind(runner.new_pool(1024, BLOCK).pages)
    measured = {}
    for name, batch in steps(runner.shape.vocab_size).items():
        runner.forward(batch)
        runner.beat()
        busy_s, elapsed_s = runner.busy_s, runner.elapsed_s
        times = []
        while sum(times) < seconds:
            started_at = time.perf_counter()
            runner.forward(batch)
            times.append(time.perf_counter() - started_at)
        runner.beat()
        spent_s = np.subtract(runner.busy_s, busy_s)
        bubbles = 1 - spent_s / (runner.elapsed_s - elapsed_s)
        measured[name] = (batch.num_tokens / median(times), bubbles)
    runner.close()
    for process in followers:
        process.join()
    os.sched_setaffinity(0, cores)
    return measured


def pipeline(config: EngineConfig, seconds: float) -> list[dict]:
    shapes = {"one": Parallelism(), "PP2": Parallelism(1, 2)}
    found = {name: rates(config, shape, seconds) for name, shape in shapes.items()}
    figures = []
    for step in ("prefill", "decode"):
        one, _ = found["one"][step]
        two, bubbles = found["PP2"][step]
        shares = ", ".join(f"{share:.0%}" for share in bubbles)
        print(
            f"{step}: one stage on one core {one:.0f} tokens/s, two on two {two:.0f}:"
            f" x {two / one:.2f}; stages wait {shares}"
        )
        figures.append(figure(f"pipeline_{step}", two / one, "x one stage", PIPELINE_TARGET))
    return figures


def figure(name: str, value: float, unit: str, target: float) -> dict:
    return dict(name=name, value=round(value, 3), unit=unit, target=target, ok=value >= target)


def hold(port, core: int) -> None:
    """A prefill rank that serves its pages whole and in parts."""
    os.sched_setaffinity(0, [core])

    async def main() -> None:
        pool = KVPool(KV_SHAPE, torch.bfloat16, KV_PAGES, BLOCK)
        pool.pages.normal_()
        pages = range(1, KV_PAGES + 1)
        half = Shard(0, 30, 0, 2)
        digest = summed(slice_digests(pool, pages, half))

        async def part(handle: KVHandle, shard: Shard):
            return export_part(pool, pages, shard), digest

        def whole(handle: KVHandle):
            return pool.page_views(range(1, KV_PAGES // 2 + 1))

        server = Server({})
        await server.listen(f"tcp://{HOST}:0")
        serving = KVServer(server.address, whole, lambda *released: None, 30, part)
        server.handlers[OPERATION] = serving.handle
        port.send(server.address)
        await asyncio.to_thread(port.recv)
        await server.close()

    asyncio.run(main())


async def reshard(seconds: float) -> list[dict]:
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    port, other = context.Pipe()
    process = context.Process(target=hold, args=(other, cores[-1]))
    process.start()
    os.sched_setaffinity(0, [cores[0]])
    address = await asyncio.to_thread(port.recv)
    handle = KVHandle("1", address, b"s" * 16, KV_PAGES * BLOCK, "layout", 0)
    half = KVPool(KV_SHAPE, torch.bfloat16, KV_PAGES, BLOCK, Shard(0, 30, 0, 2))
    whole = KVPool(KV_SHAPE, torch.bfloat16, KV_PAGES // 2, BLOCK)
    half.pages.zero_(), whole.pages.zero_()
    connections = await ConnectionPool()
    pages = range(1, KV_PAGES + 1)

    async def plain() -> None:
        views = whole.page_views(range(1, KV_PAGES // 2 + 1))
        await pull(connections, handle, views, connect_timeout_s=5, stall_timeout_s=5)
        slice_digests(whole, range(1, KV_PAGES // 2 + 1))

    async def parts() -> None:
        await pull_parts(connections, handle, half, KV_SHAPE, KV_PAGES, LIMITS, pages)

    times: dict[str, list[float]] = {"plain": [], "parts": []}
    while len(times["parts"]) < 3 or sum(times["parts"]) < seconds:
        for name, way in (("plain", plain), ("parts", parts)):
            started_at = time.perf_counter()
            await way()
            times[name].append(time.perf_counter() - started_at)
    await connections.close()
    port.send("done")
    process.join()
    num_bytes = half.pages[1:].nbytes
    speeds = {name: num_bytes / median(taken[1:]) / 1e9 for name, taken in times.items()}
    print(
        f"reshard: {num_bytes / 1e6:.0f} MB in whole pages {speeds['plain']:.2f} GB/s, half of the"
        f" heads {speeds['parts']:.2f} GB/s; both verified"
    )
    ratio = speeds["parts"] / speeds["plain"]
    return [figure("reshard", ratio, "x whole pages", RESHARD_TARGET)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=8.0, help="per figure")
    parser.add_argument("--quick", action="store_true", help="3 seconds per figure: < 60 s")
    given = parser.parse_args()
    seconds = 3.0 if given.quick else given.seconds
    config = EngineConfig(model=given.model, dtype=given.dtype, num_threads=1, rank_timeout_s=60)
    figures = pipeline(config, seconds)
    figures += asyncio.run(reshard(seconds))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
