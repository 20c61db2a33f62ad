"""DistServe's Table 2 here: SLO attainment of the real service beside the simulator's.

A trace's lengths divided by 8, its requests drawn anew with Poisson arrivals for every rate: one
prefill and one decode process with a share of the cores each, then one colocated process with all
of them. The simulator gets what was really sent and when, the profile of `daskserve
calibrate`, and how fast the machine was around a run (lone engine steps, beside those of the
calibration); it knows nothing else of these runs. Limits for TTFT and TPOT follow from the run at
the lowest rate, unless given. Runs are files in a folder: a run that is there is not made again,
so the table can be made in pieces.

    daskserve calibrate --threads 1 -o one.json      # as many threads as an instance will have
    daskserve calibrate --threads 2 -o two.json
    python benchmarks/table2.py --trace conv.csv --profile one.json --colocated-profile two.json

The last line is a JSON list of {"name", "value", "unit", "target", "ok"}.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from table2_runs import Key, Run, RunFolder, make_runs

from daskserve.calibrate.grid import Point
from daskserve.core.instance import EngineConfig
from daskserve.core.placement import Parallelism
from daskserve.core.slo import SLO
from daskserve.planner.arrivals import Poisson
from daskserve.planner.latency import Calibration, read_calibration
from daskserve.planner.simulator import Deployment, simulate
from daskserve.planner.simulator.result import STAGES, is_met
from daskserve.planner.traces import read_workload
from daskserve.planner.workload import Workload

DIVISOR = 8
KV_MEMORY_BYTES = 2**30
TTFT_FACTOR, TPOT_FACTOR = 2.0, 1.5
"""Limits over the 90th percentiles of the run at the lowest rate."""

LOADS = (0.4, 0.55, 0.65, 0.73, 0.82, 1.0, 1.15)
INFORMATIVE = (0.20, 0.95)
"""Attainments between which a rate tells something about the model."""

MOST_POINTS, MOST_MEDIAN, MOST_P90, MOST_GOODPUT = 0.02, 0.10, 0.15, 0.05
LEAST_RATES = 3
GOODPUT_SHARE = 0.9


@dataclass(frozen=True)
class Side:
    """TTFT, TPOT and stages of every request of one run, real or simulated."""

    ttft_s: np.ndarray
    tpot_s: np.ndarray
    stages: dict[str, np.ndarray]

    def attainment(self, slo: SLO) -> float:
        return float(is_met(slo, self.ttft_s, self.tpot_s).mean())

    def percentiles_s(self) -> np.ndarray:
        """TTFT p50 and p90, TPOT p50 and p90."""
        shares = (0.5, 0.9)
        return np.r_[np.quantile(self.ttft_s, shares), np.nanquantile(self.tpot_s, shares)]


@dataclass(frozen=True)
class Rate:
    """All repeats at one rate, each real and simulated."""

    rate: float
    pairs: list[tuple[Side, Side]]
    off_pace: float
    disturbance: float

    def attainments(self, slo: SLO) -> np.ndarray:
        """``[repeats, 2]``."""
        return np.array([[side.attainment(slo) for side in pair] for pair in self.pairs])

    def percentiles_s(self) -> np.ndarray:
        """``[2, 4]``, means over the repeats."""
        return np.array([[s.percentiles_s() for s in pair] for pair in self.pairs]).mean(axis=0)


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


def deployment_of(profile: Calibration, mode: str, off_pace: float = 0.0) -> Deployment:
    """What the profile says of the service that is run, where all takes so much longer."""
    latency = profile.latency()
    model, hardware = latency.model, latency.hardware
    capacity = int(KV_MEMORY_BYTES / model.kv_bytes_per_token)
    step = latency.step_times(model, hardware, Parallelism())
    step = step.limited_to(kv_capacity_tokens=min(capacity, step.kv_capacity_tokens))
    step = step.slowed(off_pace, off_pace)
    if mode == "colocated":
        return Deployment.colocated(step, 1)
    return Deployment.disaggregated(
        step,
        1,
        step,
        1,
        kv_bytes_per_token=model.kv_bytes_per_token,
        link_bandwidth=hardware.link_bandwidth / (1.0 + off_pace),
        link_latency_s=latency.hand_over_s * (1.0 + off_pace),
        **latency.beside,
    )


def simulated(profile: Calibration, mode: str, run: Run) -> Side:
    """The same arrivals in the simulator."""
    timelines = simulate(run.workload, deployment_of(profile, mode, run.off_pace)).timelines
    dispatch_s = profile.latency().dispatch_s * (1.0 + run.off_pace)
    stages = {name: timelines[name].values.copy() for name in STAGES}
    stages["prefill_queue_s"] += dispatch_s
    return Side(timelines["ttft_s"].values + dispatch_s, timelines["tpot_s"].values, stages)


def rates_to_run(profile: Calibration, mode: str, lengths: Workload) -> list[float]:
    """From light load to overload, as shares of what the simulator gets through without a pause."""
    _, prompt, output = lengths.arrays()
    at_once = Workload.from_arrays(np.zeros(len(prompt)), prompt, output)
    most = len(prompt) / simulate(at_once, deployment_of(profile, mode)).end_s
    return [float(f"{share * most:.2g}") for share in LOADS]


def limits_of(run: Run) -> SLO:
    """From the lightest load, rounded up to two digits."""
    limits = (
        TTFT_FACTOR * np.quantile(run.ttft_s, 0.9),
        TPOT_FACTOR * np.nanquantile(run.tpot_s, 0.9),
    )
    return SLO(*(_two_digits(float(value)) for value in limits))


def _two_digits(value: float) -> float:
    digit = 10.0 ** (np.floor(np.log10(value)) - 1)
    return float(f"{np.ceil(value / digit) * digit:.2g}")


def rates_run(profile: Calibration, mode: str, folder: RunFolder, keys: list[Key]) -> list[Rate]:
    """What has been run so far, with its simulation."""
    found = []
    for rate in sorted({key.rate for key in keys}):
        runs = [folder.read(key) for key in keys if key.rate == rate and folder.has(key)]
        pairs = [
            (Side(run.ttft_s, run.tpot_s, run.stages), simulated(profile, mode, run))
            for run in runs
        ]
        if pairs:
            off_pace = float(np.mean([run.off_pace for run in runs]))
            found.append(Rate(rate, pairs, off_pace, max(run.disturbance for run in runs)))
    return found


def show(mode: str, rates: list[Rate], slo: SLO) -> None:
    """Attainment and percentiles side by side, then the stages."""
    print(f"{mode}, TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s; real | simulated")
    heads = [f"{name} ms" for name in ("TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90")]
    print(f"{'req/s':>6}{'pace':>6}{'attainment':>24}" + "".join(f"{head:>18}" for head in heads))
    for one in rates:
        shares, values = one.attainments(slo), one.percentiles_s() * 1e3
        real, simulation = shares.mean(axis=0)
        cells = f"{one.rate:6g}{1 / (1 + one.off_pace):6.2f}"
        cells += f"{real:8.1%} +-{shares[:, 0].std():5.1%} |{simulation:6.1%}"
        cells += "".join(f"{values[0, i]:9.0f} |{values[1, i]:7.0f}" for i in range(4))
        print(cells + ("  disturbed" if one.disturbance > 1.0 else ""))
    print("mean ms of the stages" + "".join(f"{name[:-2]:>18}" for name in STAGES))
    for one in rates:
        cells = f"{one.rate:6g}{'':15}"
        for name in STAGES:
            means = [
                np.nanmean([pair[side].stages[name].mean() for pair in one.pairs])
                for side in (0, 1)
            ]
            cells += f"{means[0] * 1e3:9.1f} |{means[1] * 1e3:7.1f}"
        print(cells)


def goodput(rates: list[Rate], slo: SLO, side: int) -> float:
    """Where attainment falls below 90 %, on straight lines between the rates that were run.

    NaN when it does not happen there.
    """
    shares = [float(one.attainments(slo)[:, side].mean()) for one in rates]
    for index in range(1, len(rates)):
        high, low = shares[index - 1], shares[index]
        if high >= GOODPUT_SHARE > low:
            part = (high - GOODPUT_SHARE) / (high - low)
            return rates[index - 1].rate + part * (rates[index].rate - rates[index - 1].rate)
    return float("nan")


def figures_of(mode: str, rates: list[Rate], slo: SLO) -> list[dict]:
    """Differences at the rates that tell something, and of goodput, with their targets."""
    figures = []
    telling = [
        one
        for one in rates
        if INFORMATIVE[0] <= one.attainments(slo)[:, 0].mean() <= INFORMATIVE[1]
    ]
    figures.append(_figure(f"{mode}_rates", len(telling), "rates", LEAST_RATES, at_least=True))
    for one in telling:
        name = f"{mode}_{one.rate:g}"
        shares, values = one.attainments(slo), one.percentiles_s()
        # Just 2 points, as a difference of shares, may come out above by the last digit of a float.
        off = round(abs(float(np.diff(shares.mean(axis=0))[0])), 9)
        most = max(MOST_POINTS, float(shares[:, 0].std()))
        figures.append(_figure(f"{name}_attainment_off", off, "share", round(most, 4)))
        ratios = np.abs(values[1] / values[0] - 1.0)
        for index, metric in enumerate(("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90")):
            most = MOST_P90 if metric.endswith("p90") else MOST_MEDIAN
            figures.append(_figure(f"{name}_{metric}_off", ratios[index], "share", most))
    real, simulation = (goodput(rates, slo, side) for side in (0, 1))
    off = abs(simulation / real - 1.0)
    print(f"goodput at {GOODPUT_SHARE:.0%}: real {real:.3g}, simulated {simulation:.3g} requests/s")
    figures.append(_figure(f"{mode}_goodput_off", off, "share", MOST_GOODPUT))
    return figures


def _figure(name: str, value: float, unit: str, target: float, at_least: bool = False) -> dict:
    """NaN, for no answer, is not ok."""
    ok = bool(value >= target if at_least else value <= target)
    shown = round(float(value), 4) if np.isfinite(value) else None
    return {"name": name, "value": shown, "unit": unit, "target": target, "ok": ok}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", required=True, help="CSV or JSONL, as for daskserve plan")
    parser.add_argument("--profile", help="of daskserve calibrate: disaggregated")
    parser.add_argument("--colocated-profile", help="of daskserve calibrate with all cores")
    parser.add_argument("--rates", type=float, nargs="+", help="requests/s, rising; for both modes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=150, help="of one run")
    parser.add_argument("--folder", type=Path, default=Path("table2-runs"), help="of the runs")
    parser.add_argument("--enough", type=float, default=float("inf"), metavar="SECONDS",
                        help="no run that would end later is begun")  # fmt: skip
    parser.add_argument(
        "--ttft", type=float, help="limits in seconds, instead of those that follow"
    )
    parser.add_argument("--tpot", type=float)
    given = parser.parse_args()
    modes = {"disaggregated": given.profile, "colocated": given.colocated_profile}
    if not any(modes.values()):
        parser.error("give --profile, --colocated-profile or both")
    lengths = short_lengths(given.trace)

    def workload_at(rate: float) -> Workload:
        # The same requests at every rate, only closer together: rates differ in nothing else.
        return lengths.resample(given.requests, rate, seed=0, arrivals=Poisson())

    folder, until = RunFolder(given.folder), time.monotonic() + given.enough
    folder.check("trace", [Path(given.trace).name, given.requests])
    figures = []
    for mode, path in modes.items():
        if not path:
            continue
        profile = read_calibration(path)
        if profile.overheads.is_colocated is not (mode == "colocated"):
            parser.error(f"{path} is not of a {mode} service: --threads decides, see calibrate")
        folder.check(f"{mode}-engine", profile.engine.model_dump())
        rates = given.rates or folder.kept(
            f"{mode}-rates", partial(rates_to_run, profile, mode, lengths)
        )
        keys = [Key(mode, rate, n) for n in range(given.repeats) for rate in rates]
        calibrated_s = {Point(s.phase, s.batch, s.tokens): s.median_s for s in profile.steps}
        make_runs(folder, keys, engine_of(profile), calibrated_s, workload_at, until)
        found = rates_run(profile, mode, folder, keys)
        lightest = keys[0]
        if not folder.has(lightest):
            continue
        slo = limits_of(folder.read(lightest))
        slo = SLO(given.ttft or slo.ttft_s, given.tpot or slo.tpot_s)
        show(mode, found, slo)
        figures += figures_of(mode, found, slo)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
