"""What prefill does to decode: DistServe's Figure 2, and what is left of it when they are apart.

First the time of one engine step: a decode batch of 1 to 32 requests, alone, and with the prefill
of one prompt of 128 or 1,024 tokens in the same step.

Then a service: 8 streams that always run, while prompts of 1,024 tokens arrive at random (a fixed
seed). TPOT of the streams with one prefill and one decode instance on a core each, against one
colocated instance that has the whole machine, whole prompts first or in chunks; without the long
prompts as well. Each setting has processes of its own and is asked in this process, without HTTP.

The last line is a JSON list of {"name", "value", "unit", "target", "ok"}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

MODEL = "smollm2-135m"
CORES = 2
BATCHES = (1, 2, 4, 8, 16, 32)
PREFILLS = (0, 128, 1024)
CONTEXT_TOKENS = 256
BLOCK_SIZE = 16
STREAMS, STREAM_PROMPT, STREAM_TOKENS = 8, 64, 64
LONG_PROMPT, LONG_TOKENS = 1024, 8
CHUNK_TOKENS = 128
SETTINGS = {
    "disaggregated": {"prefill": 1, "decode": 1, "colocated": 0},
    "colocated": {"prefill": 0, "decode": 0, "colocated": 1},
    "chunked": {"prefill": 0, "decode": 0, "colocated": 1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, < 60 s")
    parser.add_argument("--part", choices=("all", "steps", "service"), default="all")
    parser.add_argument("--long-rate", type=float, default=0.75, help="long prompts per second")
    given = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    figures = []
    if given.part != "service":
        figures += show_steps(in_process("steps", 1 if given.quick else 9))
    if given.part != "steps":
        seconds = 3.5 if given.quick else 25.0
        sides = {name: in_process(name, seconds, given.long_rate) for name in SETTINGS}
        # A tail needs more streams than a quick run has.
        figures += show_service(sides, given.long_rate, None if given.quick else 1.0)
    print(json.dumps(figures))


def in_process(side: str, *arguments: float) -> dict:
    """Each side in a process of its own, so that neither inherits threads or memory."""
    command = [sys.executable, __file__, "--side", side, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=900, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def figure(name: str, value: float, unit: str, target: float | None = None) -> dict:
    ok = target is None or value >= target
    return {"name": name, "value": round(value, 3), "unit": unit, "target": target, "ok": ok}


def show_steps(steps: dict) -> list[dict]:
    print(f"step of the engine in ms, {MODEL}, bfloat16, {CORES} threads, context {CONTEXT_TOKENS}")
    print(
        f"{'decode batch':>13}{'alone':>9}{'with 128':>10}{'ratio':>7}{'with 1024':>11}{'ratio':>7}"
    )
    figures = []
    for batch in BATCHES:
        alone, *mixed = (steps[f"{batch}+{prefill}"] for prefill in PREFILLS)
        ratios = [value / alone for value in mixed]
        row = "".join(
            f"{v:{w}.1f}{r:7.1f}" for v, w, r in zip(mixed, (10, 11), ratios, strict=True)
        )
        print(f"{batch:13d}{alone:9.1f}{row}")
        figures.append(figure(f"decode_step_{batch}", alone, "ms"))
        for prefill, ratio in zip(PREFILLS[1:], ratios, strict=True):
            figures.append(figure(f"decode_step_{batch}_with_{prefill}", ratio, "x alone"))
    return figures


def show_service(sides: dict[str, dict], long_rate: float, target: float | None) -> list[dict]:
    print(f"\n{STREAMS} streams of {STREAM_TOKENS} tokens; {LONG_PROMPT}-token prompts, ", end="")
    print(f"{long_rate:g} per second; ms")
    titles = ("TPOT p50", "TPOT p99", "ITL p99", "quiet p99", "long TTFT", "streams")
    print(f"{'':14}" + "".join(f"{title:>10}" for title in titles))
    for name, side in sides.items():
        busy, quiet = side["busy"], side["quiet"]
        row = (busy["tpot_p50"], busy["tpot_p99"], busy["itl_p99"], quiet["tpot_p99"])
        row += (busy["long_ttft_p50"],)
        print(f"{name:14}" + "".join(f"{v:10.1f}" for v in row) + f"{busy['streams']:10d}")
    ours = sides["disaggregated"]["busy"]
    figures = []
    for name, side in sides.items():
        figures.append(figure(f"{name}_tpot_p99", side["busy"]["tpot_p99"], "ms"))
        figures.append(figure(f"{name}_itl_p99", side["busy"]["itl_p99"], "ms"))
        slower = side["busy"]["tpot_p99"] / side["quiet"]["tpot_p99"]
        figures.append(figure(f"{name}_tpot_p99_over_quiet", slower, "x without long prompts"))
    for name in ("colocated", "chunked"):
        for metric in ("tpot_p99", "itl_p99"):
            ratio = sides[name]["busy"][metric] / ours[metric]
            print(f"{metric} {name} / disaggregated: {ratio:.2f}")
            figures.append(figure(f"{name}_{metric}_ratio", ratio, "x disaggregated", target))
    return figures


# The sides, each in its own process.


def run_steps(rounds: str) -> dict[str, float]:
    """Milliseconds of a step by ``<decode batch>+<prefill tokens>``."""
    from daskserve.core.instance import EngineConfig
    from daskserve.models import resolve
    from daskserve.workers.loader import load_runner

    config = EngineConfig(model=MODEL, num_threads=CORES, block_size=BLOCK_SIZE)
    times_s = step_times_s(load_runner(resolve(MODEL), config), BATCHES, PREFILLS, int(rounds))
    return {f"{batch}+{prefill}": 1e3 * step_s for (batch, prefill), step_s in times_s.items()}


def step_times_s(
    runner, batches: Sequence[int], prefills: Sequence[int], rounds: int
) -> dict[tuple[int, int], float]:
    """Median seconds of a step by decode batch and prefill tokens; pages of `BLOCK_SIZE` tokens."""
    from daskserve.workers.kv_pool import KVPool

    num_blocks = (max(batches) * CONTEXT_TOKENS + max(prefills)) // BLOCK_SIZE
    pool = KVPool(runner.shape, runner.dtype, num_blocks, BLOCK_SIZE)
    runner.bind(pool.pages)
    vocabulary = runner.shape.vocab_size
    steps = {(b, p): mixed_step(b, p, vocabulary) for b in batches for p in prefills}
    # In rounds, so that what the machine does for a while slows one try of every step.
    times_s: dict[tuple[int, int], list[float]] = {key: [] for key in steps}
    for _ in range(rounds + 1):
        for key, step in steps.items():
            started_at = time.perf_counter()
            runner.forward(step)
            times_s[key].append(time.perf_counter() - started_at)
    return {key: statistics.median(values[1:]) for key, values in times_s.items()}


def mixed_step(batch: int, prefill: int, vocabulary: int):
    """Rows of one token at a context of 256, and one whole prompt behind them."""
    import numpy as np

    from daskserve.workers.forward import ForwardBatch

    lengths = [1] * batch + ([prefill] if prefill else [])
    contexts = [CONTEXT_TOKENS] * batch + ([prefill] if prefill else [])
    pages = [context // BLOCK_SIZE for context in contexts]
    table = np.zeros((len(lengths), max(pages)), np.int32)
    starts = np.cumsum([1, *pages])
    for row, (start, count) in enumerate(zip(starts[:-1], pages, strict=True)):
        table[row, :count] = np.arange(start, start + count)
    return ForwardBatch(
        token_ids=np.random.default_rng(0).integers(0, vocabulary, sum(lengths)),
        positions=np.concatenate(
            [np.arange(c - n, c) for c, n in zip(contexts, lengths, strict=True)]
        ),
        query_start=np.cumsum([0, *lengths], dtype=np.int32),
        context_tokens=np.array(contexts, np.int32),
        page_table=table,
    )


@dataclass
class Seen:
    """What clients saw of one load."""

    tpot_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    long_ttft_ms: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        return {
            "tpot_p50": statistics.median(self.tpot_ms),
            "tpot_p99": quantile(self.tpot_ms, 0.99),
            "itl_p99": quantile(self.gaps_ms, 0.99),
            "long_ttft_p50": statistics.median(self.long_ttft_ms or [0.0]),
            "streams": len(self.tpot_ms),
        }


def quantile(values: list[float], share: float) -> float:
    import numpy as np

    return float(np.quantile(values, share))


def run_service(setting: str, seconds: str, long_rate: str) -> dict[str, dict]:
    return asyncio.run(measure(setting, float(seconds), float(long_rate)))


async def measure(setting: str, seconds: float, long_rate: float) -> dict[str, dict]:
    from daskserve import EngineConfig, Service

    chunk = CHUNK_TOKENS if setting == "chunked" else None
    config = EngineConfig(model=MODEL, chunk_tokens=chunk)
    async with Service.local(**SETTINGS[setting], config=config, asynchronous=True) as service:
        await token_times(service, random.Random(1), LONG_PROMPT, 4)  # compiled and warm
        quiet = await load(service, seconds / 3, 0.0)
        busy = await load(service, seconds, long_rate)
    return {"quiet": quiet.figures(), "busy": busy.figures()}


async def load(service, seconds: float, long_rate: float) -> Seen:
    """Streams for so many seconds, those begun to their end; long prompts as long as they run."""
    seen, rng = Seen(), random.Random(0)
    stop_at = time.monotonic() + seconds
    streams = [asyncio.create_task(stream_on(service, seen, rng, stop_at)) for _ in range(STREAMS)]
    disturbing = asyncio.create_task(disturb(service, seen, rng, long_rate))
    await asyncio.gather(*streams)
    disturbing.cancel()
    await asyncio.gather(disturbing, return_exceptions=True)
    return seen


async def stream_on(service, seen: Seen, rng: random.Random, stop_at: float) -> None:
    """One stream after another."""
    while time.monotonic() < stop_at:
        times = await token_times(service, rng, STREAM_PROMPT, STREAM_TOKENS)
        seen.tpot_ms.append((times[-1] - times[0]) * 1e3 / (len(times) - 1))
        seen.gaps_ms += [(b - a) * 1e3 for a, b in zip(times, times[1:], strict=False)]


async def disturb(service, seen: Seen, rng: random.Random, rate: float) -> None:
    """Long prompts, Poisson: they arrive whether the earlier ones are done or not."""
    arrivals = random.Random(1)  # of their own, so that every setting has the same ones
    arrives_at = time.monotonic()
    async with asyncio.TaskGroup() as group:
        while rate > 0:
            arrives_at += arrivals.expovariate(rate)
            await asyncio.sleep(arrives_at - time.monotonic())
            group.create_task(one_long_prompt(service, seen, rng))


async def one_long_prompt(service, seen: Seen, rng: random.Random) -> None:
    asked_at = time.monotonic()
    times = await token_times(service, rng, LONG_PROMPT, LONG_TOKENS)
    seen.long_ttft_ms.append((times[0] - asked_at) * 1e3)


async def token_times(service, rng: random.Random, prompt: int, tokens: int) -> list[float]:
    """When each token of a random prompt's answer came."""
    from daskserve import SamplingParams

    token_ids = [rng.randrange(100, 40_000) for _ in range(prompt)]
    stream = service.stream(token_ids, SamplingParams(max_tokens=tokens, ignore_eos=True))
    times = []
    async for delta in stream:
        times += [time.monotonic()] * len(delta.token_ids)
    assert len(times) == tokens
    return times


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        side, *arguments = sys.argv[2:]
        done = run_steps(*arguments) if side == "steps" else run_service(side, *arguments)
        print(json.dumps(done))
    else:
        main()
