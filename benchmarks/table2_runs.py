"""The real side of Table 2: one run of the service is one file, so that runs can be made in pieces.

Every run knows how much of the machine others used meanwhile, and how far the machine's pace was
from that of the calibration: lone engine steps are timed before and after it, since virtual
machines change their pace by a tenth without a trace in CPU times. The simulator is told that
pace. A run in which it changed, or others disturbed, is made again; the least disturbed of several
tries counts, and says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from daskserve.calibrate.grid import FULL, Point
from daskserve.calibrate.pace import Pace
from daskserve.calibrate.steps import StepRig
from daskserve.core.instance import EngineConfig
from daskserve.core.params import SamplingParams
from daskserve.core.request import Completion
from daskserve.planner.simulator.result import STAGES
from daskserve.planner.workload import Workload
from daskserve.service import Service

REQUEST_TIMEOUT_S = 300.0
MOST_OTHERS = 0.05
"""Share of the machine that may go to others in a run that counts as quiet."""

MOST_CHANGE = 0.05
"""Share by which the machine's pace may change during a run."""

MOST_TRIES = 3
_WARM_UP_REQUESTS, _WARM_UP_RATE = 12, 2.0
_COUNTED = ("user", "nice", "system", "irq", "softirq", "steal")


@dataclass(frozen=True)
class Key:
    """Which run: a mode, a rate in requests/s and the number of the repeat."""

    mode: str
    rate: float
    repeat: int

    def path(self, folder: Path) -> Path:
        return folder / f"{self.mode}-{self.rate:g}-{self.repeat}.json"


@dataclass(frozen=True)
class Run:
    """What was sent and when, and what came of it.

    Parameters
    ----------
    arrival_s
        When every request really left, from the first one on.
    stages
        Seconds of every stage; NaN for a request that failed.
    others
        Share of the machine that others used meanwhile.
    off_before, off_after
        How much longer lone steps took before and after the run than in the calibration, as a
        share; negative: shorter.
    """

    arrival_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    stages: dict[str, np.ndarray]
    others: float
    off_before: float = 0.0
    off_after: float = 0.0

    @property
    def off_pace(self) -> float:
        """Around the run, as a share."""
        return (self.off_before + self.off_after) / 2

    @property
    def disturbance(self) -> float:
        """Of what is allowed: above 1 the run says little."""
        change = abs(self.off_after - self.off_before)
        return max(self.others / MOST_OTHERS, change / MOST_CHANGE)

    @property
    def workload(self) -> Workload:
        return Workload.from_arrays(self.arrival_s, self.prompt_tokens, self.output_tokens)

    @property
    def ttft_s(self) -> np.ndarray:
        """Infinite for a request that failed: it has missed every limit."""
        ttft = self.stages["prefill_queue_s"] + self.stages["prefill_s"]
        return np.where(np.isnan(ttft), np.inf, ttft)

    @property
    def tpot_s(self) -> np.ndarray:
        """NaN for a single token."""
        names = ("kv_transfer_s", "decode_queue_s", "decode_s")
        after_s = np.sum([self.stages[name] for name in names], axis=0)
        gaps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return after_s / gaps

    def write(self, path: Path) -> None:
        columns = {name: values.tolist() for name, values in self.stages.items()}
        given = {
            "arrival_s": self.arrival_s.tolist(),
            "prompt_tokens": self.prompt_tokens.tolist(),
            "output_tokens": self.output_tokens.tolist(),
            "stages": columns,
            "others": self.others,
            "off_before": self.off_before,
            "off_after": self.off_after,
        }
        half = path.with_suffix(".part")
        half.write_text(json.dumps(given), encoding="utf-8")
        half.replace(path)

    @classmethod
    def read(cls, path: Path) -> Run:
        given = json.loads(path.read_text(encoding="utf-8"))
        stages = {name: np.array(values, float) for name, values in given["stages"].items()}
        arrays = (np.array(given[k]) for k in ("arrival_s", "prompt_tokens", "output_tokens"))
        numbers = (given[name] for name in ("others", "off_before", "off_after"))
        return cls(*arrays, stages, *numbers)


class RunFolder:
    """Runs that exist, and the facts that they share: a folder holds one experiment only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def has(self, key: Key) -> bool:
        return key.path(self.path).exists()

    def read(self, key: Key) -> Run:
        return Run.read(key.path(self.path))

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """What was made when the experiment began."""
        file = self.path / f"{name}.json"
        if not file.exists():
            file.write_text(json.dumps(make()), encoding="utf-8")
        return json.loads(file.read_text(encoding="utf-8"))

    def check(self, name: str, fact: Any) -> None:
        """Ends the program when the runs that exist were made with something else."""
        kept = self.kept(name, lambda: fact)
        if kept != fact:
            raise SystemExit(f"{self.path} has {name}={kept}, not {fact}: give another --folder")


def make_runs(
    folder: RunFolder,
    keys: list[Key],
    config: EngineConfig,
    calibrated_s: Mapping[Point, float],
    workload_at: Callable[[float], Workload],
    until: float,
) -> None:
    """Make the runs of one mode that are missing, none that would end after ``until``.

    Every repeat sends the same requests at the same times. ``calibrated_s`` are the medians of
    lone steps in the calibration, ``until`` is monotonic seconds.
    """
    missing = [key for key in keys if not folder.has(key)]
    if not missing:
        return
    pace = Pace(StepRig(config, FULL), calibrated_s)
    counts = {"prefill": 0, "decode": 0, "colocated": 1} if keys[0].mode == "colocated" else {}
    with Service.local(**counts, config=config) as service:
        warm_up = workload_at(_WARM_UP_RATE).dataset.isel(request=slice(_WARM_UP_REQUESTS))
        served(service, Workload(warm_up), 99)
        for key in missing:
            workload = workload_at(key.rate)
            if time.monotonic() + float(workload.arrays()[0][-1]) > until:
                print(f"no time left for {key}", flush=True)
                return
            best = _quietest(service, workload, key, pace, until)
            best.write(key.path(folder.path))


def _quietest(service: Service, workload: Workload, key: Key, pace: Pace, until: float) -> Run:
    best: Run | None = None
    span_s = float(workload.arrays()[0][-1])
    for number in range(1, MOST_TRIES + 1):
        before = pace.off()
        run = served(service, workload, key.repeat)
        after = pace.off()
        run = replace(run, off_before=before, off_after=after)
        print(
            f"{key}: others used {run.others:.1%} of the machine, steps took {before:+.1%} before"
            f" and {after:+.1%} after, try {number}",
            flush=True,
        )
        if best is None or run.disturbance < best.disturbance:
            best = run
        if best.disturbance <= 1.0 or time.monotonic() + span_s > until:
            break
    return best


def served(service: Service, workload: Workload, seed: int) -> Run:
    """An open loop: every request leaves at its time, whatever became of those before."""
    rng = np.random.default_rng(seed)
    due_s, prompts, outputs = workload.arrays()
    ids = [rng.integers(0, service.tokenizer.vocab_size, int(n)).tolist() for n in prompts]
    streams, left_at = [], []
    use = _Use()
    started_at = time.monotonic()
    for due, prompt, output in zip(due_s, ids, outputs, strict=True):
        time.sleep(max(started_at + due - time.monotonic(), 0.0))
        params = SamplingParams(max_tokens=int(output), ignore_eos=True)
        request = service.validate(prompt, params)
        left_at.append(request.submitted_at)
        streams.append(service.stream_request(request, timeout_s=REQUEST_TIMEOUT_S))

    async def answers() -> list:
        ends = (stream.completion() for stream in streams)
        return await asyncio.gather(*ends, return_exceptions=True)

    # A failed request has no times.
    timelines = [
        asdict(answer.timeline) if isinstance(answer, Completion) else dict.fromkeys(STAGES, np.nan)
        for answer in asyncio.run(answers())
    ]
    others = use.of_others()
    stages = {name: np.array([one[name] for one in timelines], float) for name in STAGES}
    return Run(np.array(left_at) - left_at[0], prompts, outputs, stages, others)


class _Use:
    """CPU time from now on: all of the machine's, and that of this process and its workers."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self._all_s, self._own_s = _all_cpu_s(), _own_cpu_s()

    def of_others(self) -> float:
        """Share of the machine that others used since then."""
        elapsed_s = (time.monotonic() - self._began_at) * (os.cpu_count() or 1)
        others_s = (_all_cpu_s() - self._all_s) - (_own_cpu_s() - self._own_s)
        return max(others_s, 0.0) / elapsed_s


def _all_cpu_s() -> float:
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in _COUNTED))


def _own_cpu_s() -> float:
    own = psutil.Process()
    total_s = 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s
