"""What orchestration adds to a request: the mock engine against a bare chain of two Dask tasks.

One prefill and two decode instances with fixed step times. A request of two output tokens is one
prefill step and one decode step; the bare chain is two tasks on the same workers that wait the
same two times and do nothing else. Both take turns in one run, one request at a time.

Then a load with unequal durations (2 to 80 output tokens, prompts of 1 to 400 tokens): requests
per second, and every routing choice checked against the true minimum of Dask's own state.

The last line is a JSON list of {"name", "value", "unit", "target", "ok"}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable
from itertools import count
from statistics import median

import dask
from distributed import Client

from daskserve import EngineConfig, SamplingParams, Service

STEP_S = 0.01
TARGET_RATIO = 1.25
_numbers = count()


async def bare_prefill() -> int:
    await asyncio.sleep(STEP_S)
    return 1


async def bare_decode(first: int) -> int:
    await asyncio.sleep(STEP_S)
    return first + 1


def bare_chain(client: Client) -> None:
    number = next(_numbers)
    first = client.submit(
        bare_prefill, key=f"bare-prefill-{number}", resources={"PREFILL": 1}, pure=False
    )
    second = client.submit(
        bare_decode, first, key=f"bare-decode-{number}", resources={"DECODE": 1}, pure=False
    )
    second.result()


def request(service: Service) -> None:
    service.submit("0123456789" * 20, SamplingParams(max_tokens=2)).result()


def timed(call: Callable[[], None]) -> float:
    started_at = time.perf_counter()
    call()
    return time.perf_counter() - started_at


def latencies(service: Service, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of bare chains and of requests, taking turns."""
    bare, ours = [], []
    for _ in range(repeats + 5):
        bare.append(timed(lambda: bare_chain(service.client)))
        ours.append(timed(lambda: request(service)))
    return bare[5:], ours[5:]


def throughput(service: Service, num_requests: int) -> float:
    """Requests per second of a job with unequal durations."""
    rng = random.Random(0)
    requests = [
        service.validate([5] * rng.randint(1, 400), SamplingParams(max_tokens=rng.randint(2, 80)))
        for _ in range(num_requests)
    ]
    started_at = time.perf_counter()
    completions = service.client.gather(service.submit_requests(requests))
    seconds = time.perf_counter() - started_at
    wanted = [r.params.max_tokens for r in requests]
    assert [c.num_output_tokens for c in completions] == wanted
    return num_requests / seconds


def local(check: bool, **config: float) -> Service:
    with dask.config.set({"daskserve.service.check-dispatch": check}):
        return Service.local(prefill=1, decode=2, config=EngineConfig(model="mock", **config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests, < 60 s")
    quick = parser.parse_args().quick
    with local(False, mock_prefill_s=STEP_S, mock_decode_s=STEP_S) as service:
        bare, ours = latencies(service, 60 if quick else 300)
    with local(False, mock_prefill_s=0.001, mock_decode_s=0.001) as service:
        rate = throughput(service, 300 if quick else 2000)
    # A small pool, so that late binding has something to decide.
    with local(True, mock_prefill_s=0.001, mock_decode_s=0.001, num_kv_blocks=300) as service:
        throughput(service, 300 if quick else 1000)
        dispatch = service.status()["dispatch"]
    bare_p50, p50 = median(bare), median(ours)
    ratio = p50 / bare_p50
    print(f"{'':28}{'p50 ms':>9}{'p90 ms':>9}")
    for name, times in (("bare chain of two tasks", bare), ("request", ours)):
        p90 = sorted(times)[int(0.9 * len(times))]
        print(f"{name:28}{median(times) * 1e3:9.2f}{p90 * 1e3:9.2f}")
    print(f"ratio {ratio:.3f}; {rate:.0f} requests/s; ", end="")
    print(f"{dispatch['choices']} choices checked, {dispatch['violations']} violations")
    for note in dispatch["notes"]:
        print(note)
    figures = [
        ("dispatch_p50_ratio", ratio, "x bare chain", TARGET_RATIO, ratio <= TARGET_RATIO),
        ("dispatch_p50", p50 * 1e3, "ms", None, True),
        ("dispatch_violations", dispatch["violations"], "choices", 0, not dispatch["violations"]),
        ("dispatch_rate", rate, "requests/s", None, True),
    ]
    keys = ("name", "value", "unit", "target", "ok")
    print(
        json.dumps(
            [dict(zip(keys, (n, round(v, 3), *rest), strict=True)) for n, v, *rest in figures]
        )
    )


if __name__ == "__main__":
    main()
