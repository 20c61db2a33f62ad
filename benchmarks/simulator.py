"""Speed of the simulator with full semantics, in CPU seconds; compilation is reported beside.

Two prefill and two decode instances (an 8B model on H100s), 1,024 tokens in and 256 out, at 0.8
times their goodput; and a day at 100 requests/s, 8.64 million requests, with streaming
statistics against the bare event loop.

The last line is a JSON list of {"name", "value", "unit", "target", "ok"}.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np

from daskserve.core.placement import Parallelism
from daskserve.core.slo import SLO
from daskserve.planner.goodput import goodput
from daskserve.planner.hardware import gpu_named
from daskserve.planner.latency import Roofline
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.simulator import Deployment, simulate, simulate_stream
from daskserve.planner.simulator.driving import CHUNK_REQUESTS, Chunk, Simulation
from daskserve.planner.workload import Workload

PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 256
LIMITS = SLO(ttft_s=0.25, tpot_s=0.03)
DAY_RATE, DAY_REQUESTS = 100.0, 8_640_000
TARGET_RATE, TARGET_RATIO, TARGET_MIB = 36_000, 1.3, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", choices=MEASURES, help="one measurement of this process")
    chosen = parser.parse_args().measure
    if chosen:
        print(json.dumps(MEASURES[chosen]()))
    else:
        print(json.dumps(all_rows()))


def all_rows() -> list[dict]:
    with tempfile.TemporaryDirectory() as cache:
        cold_s, warm_s = (in_a_process("first-run", cache) for _ in range(2))
    rows = [
        row("first simulation, compiling", cold_s, "CPU s"),
        row("first simulation, compiled before", warm_s, "CPU s"),
    ]
    rate, search_s = in_a_process("goodput")
    rows.append(row("goodput of 2 prefill + 2 decode", rate, "req/s"))
    rows.append(row("  found in", search_s, "CPU s"))
    speed = in_a_process("speed")
    rows.append(row("simulated at 0.8 x goodput", speed, "req per CPU s", TARGET_RATE))
    bare_s, day_s, peak_mib = in_a_process("day")
    rows.append(row("bare event loop, per million requests", bare_s * 1e6, "CPU s"))
    rows.append(row("a day at 100 req/s, 8.64 M requests", day_s, "CPU s"))
    ratio = day_s / (bare_s * DAY_REQUESTS)
    rows.append(row("  against the bare event loop", ratio, "x", TARGET_RATIO, least=False))
    rows.append(row("  most memory of the process", peak_mib, "MiB", TARGET_MIB, least=False))
    return rows


def first_run() -> float:
    trace = Workload.uniform(5, 1.0, 10, 10)
    return cpu_s(lambda: simulate(trace, deployment(1, 1)))[0]


def search() -> tuple[float, float]:
    first_run()
    seconds, found = cpu_s(lambda: goodput(trace_of(2000, 10.0), deployment(2, 2), LIMITS))
    return found.rate, seconds


def speed() -> float:
    """Requests per CPU second with every timeline kept; the median of five."""
    rate = 0.8 * search()[0]
    trace = trace_of(200_000, rate)
    seconds = [cpu_s(lambda: simulate(trace, deployment(2, 2)))[0] for _ in range(5)]
    return len(trace) / median(seconds)


def day() -> tuple[float, float, float]:
    """CPU seconds per request of the bare loop, of the day, and the peak memory in MiB."""
    first_run()
    # The same load per instance as above: 0.8 times the goodput.
    pairs = int(np.ceil(2 * DAY_RATE / (0.8 * search()[0])))
    plant = deployment(pairs, pairs)
    chunks = list(arrivals(1_000_000, 0))
    bare_s, _ = cpu_s(lambda: sum(len(rows) for rows in Simulation(plant, chunks).ended()))
    del chunks
    day_s, summary = cpu_s(lambda: simulate_stream(arrivals(DAY_REQUESTS, 1), plant, LIMITS))
    assert summary.num_requests == DAY_REQUESTS
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return bare_s / 1_000_000, day_s, peak_mib


MEASURES: dict[str, Callable[[], object]] = {
    "first-run": first_run,
    "goodput": search,
    "speed": speed,
    "day": day,
}


def deployment(num_prefill: int, num_decode: int) -> Deployment:
    model = ModelSpec.load("llama-3.1-8b")
    times = Roofline().step_times(model, gpu_named("H100"), Parallelism())
    return Deployment.disaggregated(
        times,
        num_prefill,
        times,
        num_decode,
        kv_bytes_per_token=model.kv_bytes_per_token,
        link_bandwidth=50e9,
    )


def trace_of(num_requests: int, rate: float) -> Workload:
    return Workload.uniform(num_requests, rate, PROMPT_TOKENS, OUTPUT_TOKENS)


def arrivals(num_requests: int, seed: int) -> Iterator[Chunk]:
    """Poisson arrivals at the day's rate, drawn as they are needed."""
    random = np.random.default_rng(seed)
    last_s = 0.0
    for start in range(0, num_requests, CHUNK_REQUESTS):
        count = min(CHUNK_REQUESTS, num_requests - start)
        arrival_s = last_s + np.cumsum(random.exponential(1 / DAY_RATE, count))
        last_s = arrival_s[-1]
        yield arrival_s, np.full(count, PROMPT_TOKENS), np.full(count, OUTPUT_TOKENS)


def cpu_s(call: Callable) -> tuple[float, object]:
    started_s = time.process_time()
    answer = call()
    return time.process_time() - started_s, answer


def in_a_process(measure: str, cache: str | None = None):
    """A measurement in a process of its own: nothing compiled, no memory used before."""
    environment = os.environ | ({"NUMBA_CACHE_DIR": cache} if cache else {})
    command = [sys.executable, str(Path(__file__)), "--measure", measure]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def row(
    name: str, value: float, unit: str, target: float | None = None, least: bool = True
) -> dict:
    bound = "" if target is None else f"   target {'>=' if least else '<='} {target:g}"
    print(f"{name:<44}{value:>14,.4g} {unit}{bound}", flush=True)
    ok = target is None or (value >= target if least else value <= target)
    return {"name": name.strip(), "value": value, "unit": unit, "target": target, "ok": ok}


if __name__ == "__main__":
    main()
