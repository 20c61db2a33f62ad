"""What planning costs, in CPU seconds of one thread.

Each section of SECTIONS measures one part of the planner on fixed inputs and returns its figures;
each entry of COMPILED is the smallest call that compiles one event loop. Compilation is timed
apart, in fresh processes: once with an empty cache, once with the cache it left.

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
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from daskserve.core.placement import Parallelism
from daskserve.core.slo import SLO
from daskserve.planner import simulator
from daskserve.planner.applications import application
from daskserve.planner.distserve import (
    Disaggregated,
    JointSearch,
    joint_configurations,
    joint_search,
    model_profile,
    simulate,
    synthetic_lengths,
)
from daskserve.planner.goodput import Goodput, goodput
from daskserve.planner.hardware import Cluster, gpu_named
from daskserve.planner.latency import (
    DistServeA100,
    Roofline,
    fit_efficiencies,
    median_error,
    read_profile,
)
from daskserve.planner.latency.fit import Measured
from daskserve.planner.model_spec import ModelSpec
from daskserve.planner.options import evaluator_for
from daskserve.planner.plan_request import PlanRequest
from daskserve.planner.planning import plan
from daskserve.planner.search.algorithms import Solution, algorithm_1
from daskserve.planner.simulator import Deployment
from daskserve.planner.simulator.driving import CHUNK_REQUESTS, Chunk, Simulation
from daskserve.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number; without a target it is there to be read."""

    name: str
    value: float
    unit: str
    target: float | None = None
    at_least: bool = False

    def row(self) -> dict:
        ok = True
        if self.target is not None:
            ok = self.value >= self.target if self.at_least else self.value <= self.target
        row = asdict(self) | {"value": float(f"{self.value:.6g}"), "ok": ok}
        del row["at_least"]
        return row


def cpu_s(call: Callable[[], object], repeats: int = 3) -> float:
    """CPU seconds of a call, the best of a few."""
    times = []
    for _ in range(repeats):
        started_at = time.process_time()
        call()
        times.append(time.process_time() - started_at)
    return min(times)


def highest(passes: Callable[[float], bool], low: float, high: float, resolution: float) -> float:
    """Bisects for the highest rate that passes."""
    while high - low > resolution:
        middle = (low + high) / 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


# DistServe's simulator --------------------------------------------------------------------------

OPT_13B = model_profile("facebook/opt-13b")
PUBLISHED_BEST = Disaggregated(1, 2, 1, 1, 1)


def compile_distserve() -> None:
    simulate(OPT_13B, PUBLISHED_BEST, Workload.from_arrays([0.0], [512], [2]))


def distserve_speed(quick: bool) -> list[Figure]:
    chat = application("chatbot-opt-13b")
    trace = chat.workload(20_000 if quick else 200_000, rate=1.0)

    def passes(rate: float) -> bool:
        latencies = simulate(OPT_13B, PUBLISHED_BEST, trace.scaled_to(rate))
        return latencies.attained(chat.slo) >= chat.slo.attainment

    goodput = highest(passes, 0.0, 8.0, 0.05)
    loaded = trace.scaled_to(0.8 * goodput)
    seconds = cpu_s(lambda: simulate(OPT_13B, PUBLISHED_BEST, loaded))
    print(f"DistServe semantics: goodput {goodput:.2f} req/s, {len(trace)} requests at 0.8x of it")
    return [
        Figure("distserve_goodput", goodput, "requests/s"),
        Figure("distserve_speed", len(trace) / seconds, "requests/CPU-s", 100_000, at_least=True),
    ]


def distserve_joint_search(quick: bool) -> list[Figure]:
    candidates = joint_configurations(OPT_13B, num_nodes=4, gpus_per_node=8, high_affinity=True)
    lengths = synthetic_lengths("sharegpt")
    found: list[JointSearch] = []

    def search() -> None:
        found.append(joint_search(OPT_13B, candidates, lengths, SLO(ttft_s=0.2, tpot_s=0.1)))

    seconds = cpu_s(search, repeats=1 if quick else 3)
    runnable = found[0].goodput_per_gpu
    print(f"joint search: {len(runnable)} of {len(candidates)} run; best {found[0].best}")
    return [
        Figure("distserve_joint_search", seconds, "CPU-s", 10.0),
        Figure("distserve_joint_search_pairs", len(runnable), "pairs"),
    ]


# The simulator with full semantics ------------------------------------------------------------

LIMITS = SLO(ttft_s=0.25, tpot_s=0.03)
DAY_RATE, DAY_S = 100.0, 86_400.0


def llama_on_h100(num_prefill: int, num_decode: int) -> Deployment:
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


def two_and_two(num_requests: int, rate: float = 1.0) -> Workload:
    return Workload.uniform(num_requests, rate, prompt_tokens=1024, output_tokens=256)


def compile_simulator() -> None:
    simulator.simulate(two_and_two(5), llama_on_h100(1, 1))


def simulator_speed(quick: bool) -> list[Figure]:
    plant = llama_on_h100(2, 2)
    found: list[Goodput] = []
    search_s = cpu_s(lambda: found.append(goodput(two_and_two(2000), plant, LIMITS)), repeats=1)
    rate = found[0].rate
    loaded = two_and_two(50_000 if quick else 200_000, 0.8 * rate)
    seconds = cpu_s(lambda: simulator.simulate(loaded, plant))
    print(f"full semantics: 2 prefill + 2 decode, {len(loaded)} requests at 0.8x of {rate:.1f}")
    return [
        Figure("simulator_goodput", rate, "requests/s"),
        Figure("simulator_goodput_search", search_s, "CPU-s"),
        Figure("simulator_speed", len(loaded) / seconds, "requests/CPU-s", 36_000, at_least=True),
    ]


def simulator_day(quick: bool) -> list[Figure]:
    """In a process of its own, whose memory is then that of the day."""
    num_requests = int(DAY_RATE * DAY_S) // (24 if quick else 1)
    command = [sys.executable, __file__, "--day", str(num_requests)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    ratio, seconds, mebibytes = json.loads(run.stdout)
    print(f"full semantics: {num_requests} requests at {DAY_RATE:g} req/s, streaming statistics")
    return [
        Figure("simulator_day", seconds, "CPU-s"),
        Figure("simulator_day_against_bare_loop", ratio, "x", 1.3),
        Figure("simulator_day_memory", mebibytes, "MiB", 1024.0),
    ]


def measure_day(num_requests: int) -> tuple[float, float, float]:
    """Against the bare event loop; CPU seconds; most memory of this process in MiB."""
    compile_simulator()
    plant = llama_on_h100(4, 4)  # 100 req/s are about 0.65x of its goodput
    bare = list(poisson_chunks(500_000, seed=0))
    bare_s = cpu_s(lambda: sum(len(rows) for rows in Simulation(plant, bare).ended()))
    stream = poisson_chunks(num_requests, seed=1)
    seconds = cpu_s(lambda: simulator.simulate_stream(stream, plant, LIMITS), repeats=1)
    mebibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (seconds / num_requests) / (bare_s / 500_000), seconds, mebibytes


def poisson_chunks(num_requests: int, seed: int) -> Iterator[Chunk]:
    """Arrivals at the day's rate, drawn as they are needed."""
    random = np.random.default_rng(seed)
    last_s = 0.0
    for start in range(0, num_requests, CHUNK_REQUESTS):
        count = min(CHUNK_REQUESTS, num_requests - start)
        arrival_s = last_s + np.cumsum(random.exponential(1 / DAY_RATE, count))
        last_s = float(arrival_s[-1])
        yield arrival_s, np.full(count, 1024), np.full(count, 256)


# Placement search ---------------------------------------------------------------------------------


def algorithm_1_search(quick: bool) -> list[Figure]:
    """Algorithm 1 on 4 nodes of 8 A100, simulated with the stationarity test and intervals."""
    chat = application("chatbot-opt-13b")
    request = PlanRequest(
        ModelSpec.load(chat.model),
        Cluster.of("A100", 4, network_gbps=800),
        chat.all_lengths(),
        chat.slo,
        rate=40.0,
        latency=DistServeA100(),
        seeds=(0,) if quick else (0, 1, 2),
    )
    found: list[Solution] = []

    def search() -> None:
        found.append(algorithm_1(evaluator_for(request), request.spaces, request.asked_rate))

    search_s = cpu_s(search, repeats=1)
    plan_s = cpu_s(lambda: plan(request), repeats=1)
    print(f"{found[0]}; {len(found[0].considered)} candidates simulated")
    return [
        Figure("algorithm_1_search", search_s, "CPU-s", 60.0),
        Figure("plan_all_alternatives", plan_s, "CPU-s"),
    ]


# Step latency on measured GPUs ------------------------------------------------------------------

MEASURED = {"H100": ("h100_sxm", "vllm"), "H200": ("h200_sxm", "trtllm")}
LABELS = {"llama-3.1-8b": "Meta-Llama-3.1-8B", "llama-3.1-70b": "Meta-Llama-3.1-70B"}


def step_latency(quick: bool) -> list[Figure]:
    """Median errors: fitted on one system and backend, judged on the other; and the defaults."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data" / "silicon"
    path = Path(os.environ.get("DASKSERVE_STEP_LATENCY", beside / "step_latency.csv"))
    if not path.is_file():
        print(f"no measured step times at {path}: set DASKSERVE_STEP_LATENCY to a copy")
        return []
    rows = {gpu: _measured(path, gpu) for gpu in MEASURED}
    figures = []
    for seen, unseen in (("H100", "H200"), ("H200", "H100")):
        fitted = Roofline(fit_efficiencies(rows[seen]))
        for phase in ("prefill", "decode"):
            error = 100 * median_error(fitted, rows[unseen], phase)
            figures.append(Figure(f"fitted_on_{seen}_{phase}_of_{unseen}", error, "%", 10.0))
            error = 100 * median_error(Roofline(), rows[unseen], phase)
            figures.append(Figure(f"defaults_{phase}_of_{unseen}", error, "%", 15.0))
    return figures


def _measured(path: Path, gpu: str) -> list[Measured]:
    system, backend = MEASURED[gpu]
    return [
        (
            ModelSpec.load(name),
            gpu_named(gpu),
            read_profile(path, system=system, backend=backend, model=label),
        )
        for name, label in LABELS.items()
    ]


# ------------------------------------------------------------------------------------------------

COMPILED: dict[str, Callable[[], None]] = {
    "distserve": compile_distserve,
    "simulator": compile_simulator,
}
SECTIONS: list[Callable[[bool], list[Figure]]] = [
    distserve_speed,
    distserve_joint_search,
    simulator_speed,
    simulator_day,
    algorithm_1_search,
    step_latency,
]


def compile_times() -> list[Figure]:
    """First call of every compiled loop in a new process, without and with a filled cache."""
    figures = []
    for name in COMPILED:
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("compile", "load"):
                run = subprocess.run(
                    [sys.executable, __file__, "--first-call", name],
                    env=os.environ | {"NUMBA_CACHE_DIR": cache},
                    capture_output=True,
                    text=True,
                    check=True,
                    timeout=300,
                )
                figures.append(Figure(f"{name}_{kind}", float(run.stdout), "CPU-s"))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter traces, < 60 s")
    parser.add_argument("--first-call", choices=sorted(COMPILED), help=argparse.SUPPRESS)
    parser.add_argument("--day", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.day:
        print(json.dumps(measure_day(options.day)))
        return
    if options.first_call:
        print(cpu_s(COMPILED[options.first_call], repeats=1))
        return
    figures = compile_times()
    for compiled in COMPILED.values():
        compiled()
    for section in SECTIONS:
        figures += section(options.quick)
    for figure in figures:
        row = figure.row()
        limit = (
            "" if row["target"] is None else f"  ({'at least' if figure.at_least else 'at most'}"
        )
        limit += f" {row['target']:,.6g}: {'ok' if row['ok'] else 'MISSED'})" if limit else ""
        print(f"{row['name']:32}{row['value']:>14,.6g} {row['unit']}{limit}")
    print(json.dumps([figure.row() for figure in figures]))


if __name__ == "__main__":
    main()
