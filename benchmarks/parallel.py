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


def follow(
    config: EngineConfig, shape: Parallelism, meeting: Meeting, rank: int, core: int
) -> None:
    os.sched_setaffinity(0, [core])
    store = join_group(meeting, rank, 60)
    stage = start_rank(config, shape, rank, store, host=HOST, address="", load_timeout_s=60)
    Follower(stage).serve()


def requests(name: str, count: int, length: int, max_tokens: int) -> list[EngineSequence]:
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompts = rng.integers(3, 40_000, (count, length))
    return [
        EngineSequence(Request(f"{name}-{number}", tuple(prompt.tolist()), params, 0.0, 0))
        for number, prompt in enumerate(prompts)
    ]


def advance(engine: Engine) -> int:
    """What the engine's thread does between two looks at its inbox; rows of a step that ended."""
    step = engine.schedule()
    if step is not None:
        engine.begin(step)
    if not (engine.open_steps.is_full or (step is None and len(engine.open_steps))):
        return 0
    step, computed = engine.finish()
    engine.conclude(step, computed)
    return len(computed.sequences)


def prefill_rate(engine: Engine, seconds: float) -> float:
    """Prompt tokens/s of an instance whose queue is never empty and whose KV is pulled at once."""
    numbers = itertools.count()
    started_at = num_tokens = 0.0
    deadline = None
    while deadline is None or time.perf_counter() < deadline:
        while len(engine.scheduler.waiting) < 2 * PROMPTS:
            for sequence in requests(f"p{next(numbers)}", PROMPTS, PROMPT_TOKENS, 2):
                engine.add(sequence)
        num_tokens += advance(engine) * PROMPT_TOKENS
        for sequence, _ in engine.events:
            engine.release(sequence.request.request_id, None)
        engine.events.clear()
        if deadline is None and num_tokens > 2 * PROMPTS * PROMPT_TOKENS:
            engine.runner.beat()
            started_at, num_tokens = time.perf_counter(), 0
            deadline = started_at + seconds
    return num_tokens / (time.perf_counter() - started_at)


def decode_rate(engine: Engine, seconds: float) -> float:
    """Tokens/s of ``ROWS`` requests from a context of ``CONTEXT`` tokens on."""
    for sequence in requests("d", ROWS, CONTEXT, engine.runner.shape.context_tokens - CONTEXT):
        engine.add(sequence)
    while engine.scheduler.num_running < ROWS:
        advance(engine)
    for _ in range(4 * engine.runner.max_open):
        advance(engine)
    engine.events.clear()
    engine.runner.beat()
    num_tokens, started_at = 0, time.perf_counter()
    while time.perf_counter() < started_at + seconds:
        num_tokens += advance(engine)
    return num_tokens / (time.perf_counter() - started_at)


MEASURES = {Role.PREFILL: prefill_rate, Role.DECODE: decode_rate}


def rates(config: EngineConfig, shape: Parallelism, role: Role, seconds: float) -> tuple:
    """Tokens/s of an instance, and of its stages the share of time that they waited."""
    cores = sorted(os.sched_getaffinity(0))
    meeting, store = open_group(shape, HOST, 60)
    followers = [
        multiprocessing.get_context("spawn").Process(
            target=follow, args=(config, shape, meeting, rank, cores[-1])
        )
        for rank in range(1, shape.num_gpus)
    ]
    for process in followers:
        process.start()
    os.sched_setaffinity(0, [cores[0]])
    stage = start_rank(config, shape, 0, store, host=HOST, address="", load_timeout_s=60)
    runner = ParallelRunner(stage)
    tokenizer = Tokenizer.load(resolve(config.model))
    # Decoding begins with prompts, which a decode instance computes where no KV can be pulled.
    engine = build_engine(
        Role.COLOCATED if role is Role.DECODE else role, config, lambda _: (runner, tokenizer)
    )
    before_s, since_s = list(runner.busy_s), runner.elapsed_s
    rate = MEASURES[role](engine, seconds)
    runner.beat()
    spent_s, elapsed_s = np.subtract(runner.busy_s, before_s), runner.elapsed_s - since_s
    for sequence in engine.sequences():
        engine.abort(sequence.request.request_id)
    while len(engine.open_steps):
        engine.conclude(*engine.finish())
    runner.close()
    for process in followers:
        process.join()
    os.sched_setaffinity(0, cores)
    return rate, 1 - spent_s / elapsed_s


def pipeline(config: EngineConfig, seconds: float) -> list[dict]:
    figures = []
    for role in MEASURES:
        one, _ = rates(config, Parallelism(), role, seconds)
        for shape, target in ((Parallelism(1, 2), PIPELINE_TARGET), (Parallelism(3, 1), None)):
            if role is Role.PREFILL and target is None:
                continue
            several, waits = rates(config, shape, role, seconds)
            shares = ", ".join(f"{share:.0%}" for share in waits)
            name = role.value.lower()
            print(
                f"{name}: one stage on one core {one:.0f} tokens/s, {shape} on two cores"
                f" {several:.0f}: x {several / one:.2f}; stages wait {shares}"
            )
            figures.append(figure(f"pipeline_{name}", several / one, "x one stage", target or 0))
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
