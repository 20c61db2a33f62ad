"""What the HTTP server adds, and what it does under overload, on the mock engine.

The server is a process of its own with one prefill and one decode instance, each step of which
takes 100 ms; the client is a bare socket that notes when each event comes.

1. Light load, one request at a time: time to first token beyond the prefill step, and time per
   output token beyond the decode step.
2. 100 streams at once: the 99th percentile of the gaps between tokens, in steps. The first gap of
   each stream holds the KV transfer and the wait for a running step to end: it is one of the gaps,
   and its median stands beside.
3. A capacity of 20 requests/s, offered at rates around it and then at five times as much, Poisson
   arrivals: goodput (answers within the SLO per second) against its peak, and how long a refusal
   takes.

The last line is a JSON list of {"name", "value", "unit", "target", "ok"}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

STEP_S = 0.1
SLOTS = 20  # an answer holds one for 9 steps and about one more to join: 20 answers/s
NUM_TOKENS = 10
CAPACITY_PER_S = SLOTS / (STEP_S * NUM_TOKENS)
SLO_TTFT_S, SLO_TPOT_S = 1.0, 0.15
_FINISH = b'"finish_reason"'


@dataclass
class Exchange:
    """What a client saw of one request; times are of one monotonic clock."""

    sent_at: float
    status: int = 0
    token_times: list[float] = field(default_factory=list)
    ended_at: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.sent_at

    @property
    def tpot_s(self) -> float:
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)

    @property
    def is_good(self) -> bool:
        is_whole = self.status == 200 and len(self.token_times) == NUM_TOKENS
        return is_whole and self.ttft_s <= SLO_TTFT_S and self.tpot_s <= SLO_TPOT_S


async def ask(port: int, max_tokens: int, prompt: str = "hello there") -> Exchange:
    """One streamed completion over a connection of its own."""
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    exchange = Exchange(time.monotonic())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + body)
        while data := await reader.read(65536):
            now = time.monotonic()
            if not exchange.status:
                exchange.status = int(data.split(b" ", 2)[1])
            exchange.token_times += [now] * data.count(_FINISH)
        exchange.ended_at = time.monotonic()
    finally:
        writer.close()
    return exchange


async def offer(port: int, rate_per_s: float, seconds: float, seed: int) -> list[Exchange]:
    """Poisson arrivals, whatever becomes of the earlier ones."""
    chance = random.Random(seed)
    started_at = time.monotonic()
    tasks, due_s = [], chance.expovariate(rate_per_s)
    while due_s < seconds:
        await asyncio.sleep(started_at + due_s - time.monotonic())
        tasks.append(asyncio.create_task(ask(port, NUM_TOKENS)))
        due_s += chance.expovariate(rate_per_s)
    return await asyncio.gather(*tasks)


@contextmanager
def server(slots: int, *options: str) -> Iterator[int]:
    """The port of a server process that is ready."""
    command = [sys.executable, __file__, "--serve", str(slots), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        port = int(re.search(r":(\d+)/v1", line)[1])
        asyncio.run(_ready(port))
        yield port
    finally:
        process.terminate()
        process.communicate(timeout=60)


async def _ready(port: int) -> None:
    deadline = time.monotonic() + 120
    while (await ask(port, 1)).status != 200:
        if time.monotonic() > deadline:
            raise TimeoutError("the server did not become ready")
        await asyncio.sleep(0.2)
    await asyncio.gather(*(ask(port, 3) for _ in range(5)))


def serve(slots: int, has_slo: bool) -> None:
    """In the server's process."""
    from daskserve import SLO, EngineConfig, Service
    from daskserve.server.app import ServerOptions
    from daskserve.server.run import Address, run_server

    config = EngineConfig(
        model="mock", mock_prefill_s=STEP_S, mock_decode_s=STEP_S, max_batch_size=slots
    )
    slo = SLO(SLO_TTFT_S, SLO_TPOT_S) if has_slo else None
    service = Service.local(config=config, slo=slo, asynchronous=True)
    run_server(service, ServerOptions("mock"), Address(port=0))


async def light(port: int, count: int) -> dict[str, float]:
    exchanges = [await ask(port, 11) for _ in range(count)]
    ttft_s = [e.ttft_s for e in exchanges]
    gaps_s = [b - a for e in exchanges for a, b in list(pairwise(e.token_times))[1:]]
    return {
        "ttft_added": 1e3 * (np.median(ttft_s) - STEP_S),
        "token_added": 1e3 * (np.median(gaps_s) - STEP_S),
        "tpot_added": 1e3 * (np.median([e.tpot_s for e in exchanges]) - STEP_S),
    }


async def together(port: int, num_tokens: int) -> dict[str, float]:
    exchanges = await asyncio.gather(*(ask(port, num_tokens) for _ in range(100)))
    if any(len(e.token_times) != num_tokens for e in exchanges):
        raise RuntimeError("a stream was cut")
    gaps = [[b - a for a, b in pairwise(e.token_times)] for e in exchanges]
    return {
        "gap_p99": np.percentile(np.concatenate(gaps), 99) / STEP_S,
        "first_gap": np.median([own[0] for own in gaps]) / STEP_S,
    }


async def overload(port: int, factors: tuple[float, ...], seconds: float) -> dict[str, float]:
    goodputs = {}
    for factor in factors:
        exchanges = await offer(port, factor * CAPACITY_PER_S, seconds, seed=int(10 * factor))
        good = sum(exchange.is_good for exchange in exchanges)
        lasted_s = max(e.ended_at for e in exchanges) - min(e.sent_at for e in exchanges)
        refused = [e.ended_at - e.sent_at for e in exchanges if e.status == 429]
        goodputs[factor] = good / lasted_s
        print(
            f"offered {factor * CAPACITY_PER_S:5.1f}/s: {len(exchanges)} requests, "
            f"{len(refused)} refused, {good} within the SLO, goodput {good / lasted_s:.2f}/s"
        )
    peak = max(goodputs[factor] for factor in factors if factor <= 1)
    return {
        "peak": peak,
        "kept": goodputs[5.0] / peak,
        "refusal_p99": 1e3 * np.percentile(refused, 99),
        "refusal_p50": 1e3 * np.median(refused),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter loads, < 60 s")
    parser.add_argument("--serve", type=int, metavar="SLOTS", help=argparse.SUPPRESS)
    parser.add_argument("--slo", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve(given.serve, given.slo)
    with server(100) as port:
        alone = asyncio.run(light(port, 5 if given.quick else 30))
        many = asyncio.run(together(port, 120 if given.quick else 200))
    with server(SLOTS, "--slo") as port:
        factors = (1.0, 5.0) if given.quick else (0.7, 0.85, 1.0, 5.0)
        loaded = asyncio.run(overload(port, factors, 10 if given.quick else 20))
    figures = [
        ("http_ttft_added_p50", alone["ttft_added"], "ms", 5, "most"),
        ("http_token_added_p50", alone["token_added"], "ms", 2, "most"),
        ("http_tpot_added_p50", alone["tpot_added"], "ms", None, ""),
        ("http_100_streams_gap_p99", many["gap_p99"], "steps", 1.5, "most"),
        ("http_100_streams_first_gap_p50", many["first_gap"], "steps", None, ""),
        ("http_goodput_peak", loaded["peak"], "requests/s", None, ""),
        ("http_goodput_kept_at_5x", loaded["kept"], "of the peak", 0.9, "least"),
        ("http_refusal_p50", loaded["refusal_p50"], "ms", None, ""),
        ("http_refusal_p99", loaded["refusal_p99"], "ms", 50, "most"),
    ]
    rows = []
    for name, value, unit, target, bound in figures:
        is_met = target is None or (value <= target if bound == "most" else value >= target)
        print(f"{name:32}{value:9.2f} {unit}" + (f"  (at {bound} {target})" if bound else ""))
        row = {"name": name, "value": round(float(value), 3), "unit": unit}
        rows.append(row | {"target": target, "ok": bool(is_met)})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
