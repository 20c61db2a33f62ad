"""DistServe's Table 2 here: SLO attainment of the real service beside the simulator's.

A trace's lengths divided by 8, Poisson arrivals, the same requests at the same times on both
sides: one prefill and one decode process of a thread each, then one colocated process of two.
The simulator knows nothing of these runs, only the profiles of `daskserve calibrate`, one with
`--threads 1` and one with `--threads 2`; that the two processes share memory bandwidth and the
cores of the client is not in them. TTFT and TPOT are those of the requests' timelines.

    python benchmarks/table2.py --trace conv.csv --profile one.json --colocated-profile two.json

The last line is a JSON list of {"name", "value", "unit", "target", "ok"}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass

import numpy as np

from daskserve.core.instance import EngineConfig
from daskserve.core.params import SamplingParams
from daskserve.core.placement import Parallelism
from daskserve.core.request import Completion
from daskserve.core.slo import SLO
from daskserve.planner.latency import Calibration, read_calibration
from daskserve.planner.simulator import Deployment, simulate
from daskserve.planner.traces import read_workload
from daskserve.planner.workload import Workload
from daskserve.service import Service

DIVISOR = 8
KV_MEMORY_BYTES = 2**30
REQUEST_TIMEOUT_S = 120.0
POINTS, TTFT_TPOT_MEDIAN = 0.02, 0.10
"""Targets: difference of attainment, and of median TTFT and TPOT, real against simulated."""


@dataclass(frozen=True)
class Seen:
    """TTFT and TPOT of every request; NaN for no TPOT."""

    ttft_s: np.ndarray
    tpot_s: np.ndarray

    def attainment(self, slo: SLO) -> float:
        return float(np.mean((self.ttft_s <= slo.ttft_s) & ~(self.tpot_s > slo.tpot_s)))

    def medians_s(self) -> tuple[float, float]:
        return float(np.median(self.ttft_s)), float(np.nanmedian(self.tpot_s))


def short_lengths(path: str) -> Workload:
    """Lengths of the trace divided by 8, at least 1."""
    arrival_s, prompt, output = read_workload(path).arrays()
    shorter = (np.maximum(tokens // DIVISOR, 1) for tokens in (prompt, output))
    return Workload.from_arrays(arrival_s, *shorter)


def engine_of(profile: Calibration) -> EngineConfig:
    facts = profile.engine
    return EngineConfig(
        model=facts.model,
        dtype=facts.dtype,
        num_threads=facts.num_threads,
        block_size=facts.block_size,
        prefill_budget_tokens=facts.prefill_budget_tokens,
        max_batch_size=facts.max_batch_size,
        kv_memory_bytes=KV_MEMORY_BYTES,
    )


def simulated(profile: Calibration, is_colocated: bool, workload: Workload) -> Seen:
    latency = profile.latency()
    model, hardware = latency.model, latency.hardware
    capacity = int(KV_MEMORY_BYTES / model.kv_bytes_per_token)
    step = latency.step_times(model, hardware, Parallelism())
    step = step.limited_to(kv_capacity_tokens=min(capacity, step.kv_capacity_tokens))
    if is_colocated:
        deployment = Deployment.colocated(step, 1)
    else:
        deployment = Deployment.disaggregated(
            step,
            1,
            step,
            1,
            kv_bytes_per_token=model.kv_bytes_per_token,
            link_bandwidth=hardware.link_bandwidth,
            link_latency_s=latency.hand_over_s,
        )
    timelines = simulate(workload, deployment).timelines
    return Seen(timelines["ttft_s"].values + latency.dispatch_s, timelines["tpot_s"].values)


def served(service: Service, workload: Workload, seed: int) -> Seen:
    """An open loop: every request leaves at its time, whatever became of those before."""
    rng = np.random.default_rng(seed)
    vocab_size = service.tokenizer.vocab_size
    streams, started_at = [], time.monotonic()
    for arrival_s, prompt, output in zip(*workload.arrays(), strict=True):
        ids = rng.integers(0, vocab_size, int(prompt)).tolist()
        params = SamplingParams(max_tokens=int(output), ignore_eos=True)
        time.sleep(max(started_at + arrival_s - time.monotonic(), 0.0))
        request = service.validate(ids, params)
        streams.append(service.stream_request(request, timeout_s=REQUEST_TIMEOUT_S))

    async def answers() -> list:
        ends = (stream.completion() for stream in streams)
        return await asyncio.gather(*ends, return_exceptions=True)

    # A request that failed has missed every limit.
    done = [answer for answer in asyncio.run(answers()) if isinstance(answer, Completion)]
    missed = [np.inf] * (len(streams) - len(done))
    tpot = [np.nan if answer.tpot_s is None else answer.tpot_s for answer in done]
    ttft = [answer.ttft_s for answer in done]
    return Seen(np.array(ttft + missed), np.array(tpot + missed))


def compare(name: str, profile: Calibration, given: argparse.Namespace, slo: SLO) -> list[dict]:
    """One mode at all rates: the table, and the figures with their targets."""
    is_colocated = name == "colocated"
    lengths = short_lengths(given.trace)
    counts = {"prefill": 0, "decode": 0, "colocated": 1} if is_colocated else {}
    print(f"{name}, TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s: real | simulated", flush=True)
    print(f"{'req/s':>6}{'attainment':>20}{'TTFT p50 ms':>18}{'TPOT p50 ms':>18}")
    figures = []
    with Service.local(**counts, config=engine_of(profile)) as service:
        served(service, lengths.resample(10, 2.0, 99), 99)  # warms up
        for rate in given.rates:
            pairs = []
            for seed in range(given.repeats):
                count = max(int(rate * given.seconds), 20)
                workload = lengths.resample(count, rate, seed)
                pairs.append(
                    (served(service, workload, seed), simulated(profile, is_colocated, workload))
                )
            figures += _row(f"{name}_{rate:g}", rate, pairs, slo)
    return figures


def _row(name: str, rate: float, pairs: list[tuple[Seen, Seen]], slo: SLO) -> list[dict]:
    shares = np.array([[side.attainment(slo) for side in pair] for pair in pairs])
    medians = np.array([[side.medians_s() for side in pair] for pair in pairs]).mean(axis=0)
    (real, simulation), noise = shares.mean(axis=0), float(shares[:, 0].std())
    cells = f"{rate:6g}{real:10.1%} |{simulation:7.1%}"
    for index in range(2):
        cells += f"{medians[0, index] * 1e3:9.1f} |{medians[1, index] * 1e3:7.1f}"
    print(cells, flush=True)
    off = abs(simulation - real)
    target = max(POINTS, noise)
    figures = [_figure(f"{name}_attainment_off", off, "share", target)]
    for index, metric in enumerate(("ttft", "tpot")):
        ratio = abs(medians[1, index] / medians[0, index] - 1.0)
        figures.append(_figure(f"{name}_{metric}_p50_off", ratio, "share", TTFT_TPOT_MEDIAN))
    return figures


def _figure(name: str, value: float, unit: str, target: float) -> dict:
    ok = bool(value <= target)
    return {"name": name, "value": round(value, 4), "unit": unit, "target": target, "ok": ok}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", required=True, help="CSV or JSONL, as for daskserve plan")
    parser.add_argument("--profile", help="of daskserve calibrate --threads 1: disaggregated")
    parser.add_argument("--colocated-profile", help="of daskserve calibrate --threads 2: colocated")
    parser.add_argument("--rates", type=float, nargs="+", default=[2, 4, 6, 8, 10, 12])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of one run")
    parser.add_argument("--ttft", type=float, default=0.4)
    parser.add_argument("--tpot", type=float, default=0.05)
    given = parser.parse_args()
    slo = SLO(given.ttft, given.tpot)
    modes = {"disaggregated": given.profile, "colocated": given.colocated_profile}
    if not any(modes.values()):
        parser.error("give --profile, --colocated-profile or both")
    figures = []
    for name, path in modes.items():
        if path:
            figures += compare(name, read_calibration(path), given, slo)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
