"""A recording of a made-up service, with names that try to be HTML."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from daskserve.core.slo import SLO
from daskserve.observe import (
    FailedRow,
    InstanceSample,
    JobProgress,
    Observation,
    Percentiles,
    Sample,
)
from daskserve.observe.observation import Recorder

HOSTILE = "<img src=x onerror=\"window.hacked='yes'\">"
STARTED_AT = 1_790_000_000.0
LIMITS = SLO(ttft_s=0.25, tpot_s=0.05)


def sample_at(second: int, num_instances: int = 4, **changes) -> Sample:
    """A busy second; every minute the first half violates TTFT."""
    load = 1.5 if second % 60 < 30 else 1.0
    instances = tuple(
        InstanceSample(
            name=f"{'prefill' if i % 2 == 0 else 'decode'}-{i}",
            address=f"tcp://10.0.0.{i}:4000",
            role="PREFILL" if i % 2 == 0 else "DECODE",
            state="ready",
            host="node-1",
            device=f"cuda {i}",
            num_waiting=i,
            num_running=10 + second % 7,
            kv_share=min(0.2 * load + 0.1 * math.sin(second / 9 + i) + 0.2, 1.0),
            tokens_per_s=1000.0 * load + second,
        )
        for i in range(num_instances)
    )
    given = {
        "at": STARTED_AT + second,
        "window_s": 15.0,
        "model": "opt-13b",
        "slo": LIMITS,
        "arrived_per_s": 20.0 * load,
        "finished_per_s": 19.0,
        "attainment": 0.97 if load == 1 else 0.82,
        "goodput_per_gpu": 4.6,
        "prompt_tokens_per_s": 9000.0,
        "output_tokens_per_s": 3000.0 + second,
        "ttft_s": Percentiles(0.1, 0.19 * load, 0.3),
        "tpot_s": Percentiles(0.02, 0.03, 0.045),
        "waiting": {"prefill": second % 9, "decode": 1, "transfer": 2},
        "num_running": 40,
        "instances": instances,
    }
    return Sample(**{**given, **changes})


def hostile_job() -> JobProgress:
    rows = (FailedRow(7, HOSTILE, "bad_row", f"because {HOSTILE}"),)
    return JobProgress("job", f"{HOSTILE}.jsonl", 1000, 400, 1, 0, 5000, 20.0, failed_rows=rows)


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Path]:
    """Writes observations to a file."""

    def write(*observations: Observation) -> Path:
        path = tmp_path / "day.jsonl"
        recorder = Recorder(path)
        for one in observations:
            recorder.add(one)
        recorder.close()
        return path

    return write
