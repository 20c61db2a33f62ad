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
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from statistics import median

import numpy as np
import torch
from distributed.core import ConnectionPool, Server

from daskserve.core.instance import EngineConfig, Role
from daskserve.core.kv import KVHandle
from daskserve.core.params import SamplingParams
from daskserve.core.placement import Parallelism
from daskserve.core.request import Prefilled, Request
from daskserve.core.shards import Shard
from daskserve.models.catalog import resolve
from daskserve.service.kv_parts import Limits, export_part, pull_parts
from daskserve.service.kv_pull import OPERATION, KVServer, pull
from daskserve.text.tokenizer import Tokenizer
from daskserve.workers.engine import Engine
from daskserve.workers.forward import ModelShape
from daskserve.workers.kv_digest import slice_digests, summed
from daskserve.workers.kv_pool import KVPool
from daskserve.workers.loading import build_engine
from daskserve.workers.parallel.follower import Follower
from daskserve.workers.parallel.group import Meeting, join_group, open_group
from daskserve.workers.parallel.runner import ParallelRunner
from daskserve.workers.parallel.start import start_rank
from daskserve.workers.sequence import Sequence as EngineSequence

HOST, BLOCK = "127.0.0.1", 16
PROMPTS, PROMPT_TOKENS = 4, 256  # of one step
ROWS, CONTEXT, MOST_TOKENS = 64, 200, 1800
PIPELINE_TARGET, RESHARD_TARGET = 1.5, 0.8
LIMITS = Limits(5, 5, 30)
KV_SHAPE = ModelShape(30, 4, 64, 49152, 8192, frozenset())
# The second ranks come from a process that has imported the engine once.
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["daskserve.workers.parallel.start"])
KV_PAGES = 512  # of half of the heads: 126 MB in bfloat16


def follow(config: EngineConfig, shape: Parallelism, meeting: Meeting, core: int) -> None:
    os.sched_setaffinity(0, [core])
    store = join_group(meeting, 1, 60)
    Follower(start_rank(config, shape, 1, store, host=HOST, address="", load_timeout_s=60)).serve()


def requests(
    engine: Engine, name: str, count: int, length: int, max_tokens: int
) -> list[EngineSequence]:
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompts = rng.integers(3, engine.runner.shape.vocab_size, (count, length))
    return [
        EngineSequence(Request(f"{name}-{number}", tuple(prompt.tolist()), params, 0.0, 0))
        for number, prompt in enumerate(prompts)
    ]


def advance(engine: Engine) -> int:
    """What the engine's thread does between two looks at its inbox; rows of a step that ended."""
    step = engine.schedule()
    if step is not None:
        engine.begin(step)
    num_rows = 0
    if engine.open_steps.is_full or (step is None and len(engine.open_steps)):
        step, computed = engine.finish()
        engine.conclude(step, computed)
        num_rows = len(computed.sequences)
    for sequence, payload in engine.events:
        if isinstance(payload, Prefilled):
            engine.release(sequence.request.request_id, None)
    engine.events.clear()
    return num_rows


def prefill(engine: Engine) -> Iterator[int]:
    """Prompt tokens of step after step; the queue is never empty, KV is taken at once."""
    for number in itertools.count():
        if len(engine.scheduler.waiting) < 2 * PROMPTS:
            for sequence in requests(engine, f"p{number}", PROMPTS, PROMPT_TOKENS, 2):
                engine.add(sequence)
        yield advance(engine) * PROMPT_TOKENS


def decode(engine: Engine) -> Iterator[int]:
    """Tokens of step after step of as many requests as the engine takes at once.

    Their prompts have ``CONTEXT`` tokens.
    """
    rows = engine.config.max_batch_size
    for sequence in requests(engine, "d", rows, CONTEXT, MOST_TOKENS):
        engine.add(sequence)
    while engine.scheduler.num_running < rows:
        advance(engine)
    while True:
        yield advance(engine)


# Prompts of requests to decode are computed here, where there is no KV to be pulled.
WORK = {"prefill": (Role.PREFILL, prefill), "decode": (Role.COLOCATED, decode)}
BALANCED_FOR = {"prefill": Role.PREFILL, "decode": Role.DECODE}


def rate(engine: Engine, steps: Iterator[int], seconds: float) -> tuple[float, np.ndarray]:
    """Tokens/s, and the share of the time in which each stage waited."""
    runner = engine.runner
    for _ in range(6 * runner.max_open):
        next(steps)
    runner.beat()
    busy_s, elapsed_s = runner.busy_s, runner.elapsed_s
    num_tokens, started_at = 0, time.perf_counter()
    while time.perf_counter() < started_at + seconds:
        num_tokens += next(steps)
    tokens_per_s = num_tokens / (time.perf_counter() - started_at)
    runner.beat()
    spent_s = np.subtract(runner.busy_s, busy_s)
    while len(engine.open_steps):
        engine.conclude(*engine.finish())
    return tokens_per_s, 1 - spent_s / (runner.elapsed_s - elapsed_s)


def measured(config: EngineConfig, shape: Parallelism, work: str, seconds: float) -> tuple:
    """What `rate` gives for an instance of this shape, a core for each of two ranks."""
    cores = sorted(os.sched_getaffinity(0))
    meeting, store = open_group(shape, HOST, 60)
    followers = [
        FORKING.Process(target=follow, args=(config, shape, meeting, cores[-1]))
        for _ in range(shape.num_gpus - 1)
    ]
    for process in followers:
        process.start()
    os.sched_setaffinity(0, [cores[0]])
    stage = start_rank(
        config, shape, 0, store, host=HOST, address="", load_timeout_s=60, role=BALANCED_FOR[work]
    )
    runner, tokenizer = ParallelRunner(stage), Tokenizer.load(resolve(config.model))
    role, steps = WORK[work]
    engine = build_engine(role, config, lambda _: (runner, tokenizer))
    found = rate(engine, steps(engine), seconds)
    runner.close()
    for process in followers:
        process.join()
    os.sched_setaffinity(0, cores)
    return found


def compare(config: EngineConfig, shape: Parallelism, work: str, seconds: float) -> float:
    """How many times faster the ranks of ``shape`` are together than one."""
    one, _ = measured(config, Parallelism(), work, seconds)
    several, waits = measured(config, shape, work, seconds)
    shares = ", ".join(f"{share:.0%}" for share in waits)
    print(
        f"{work}: one rank on one core {one:.0f} tokens/s, {shape} on two cores {several:.0f}:"
        f" x {several / one:.2f}; stages wait {shares}"
    )
    return several / one


def pipeline(config: EngineConfig, seconds: float) -> list[dict]:
    return [
        figure(
            f"pipeline_{work}",
            compare(config, Parallelism(1, 2), work, seconds),
            "x one stage",
            PIPELINE_TARGET,
        )
        for work in WORK
    ]


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
    config = EngineConfig(
        model=given.model,
        dtype=given.dtype,
        num_threads=1,
        rank_timeout_s=60,
        prefill_budget_tokens=PROMPTS * PROMPT_TOKENS,
        num_kv_blocks=1600,
        max_batch_size=ROWS,
    )
    figures = pipeline(config, seconds)
    figures += asyncio.run(reshard(seconds))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
