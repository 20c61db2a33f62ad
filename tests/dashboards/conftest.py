"""A recording of a made-up service, whose names try to be HTML; dashboards of it and a live one.

Servers and browser are started once for all tests: that is what takes the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from distributed import Client, Scheduler, SpecCluster, Worker

from daskserve import EngineConfig, Service
from daskserve.core.instance import Role
from daskserve.core.slo import SLO
from daskserve.dashboards.question import Question
from daskserve.observe import (
    FailedRow,
    InstanceSample,
    JobProgress,
    Observation,
    Percentiles,
    Sample,
)
from daskserve.observe.observation import Recorder
from daskserve.planner.plan_record import Curve, FrontPoint, PlanRecord, estimated
from daskserve.replanning.decision import Action, Decision, Evidence, Kind, Prediction, Trigger
from daskserve.replanning.split import Split

from .browser import Tab, browser, dashboard

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


def decision(number: int, **changes) -> Decision:
    given = {
        "trigger": Trigger.DRIFT,
        "reason": f"prompts grew, decision {number}",
        "evidence": (Evidence(f"figure {number}", 512, 940, 9.1, 5.0),),
        "actions": (Action(Kind.FLIP, Role.PREFILL, "tcp://10.0.0.3:4000"),),
        "before": Prediction(Split.parse("4P4D"), 17.2, 0.81),
        "after": Prediction(Split.parse("5P3D"), 22.9, 0.94),
        "gain_rps": 5.7,
    }
    at = changes.pop("at", None) or time.time()
    return Decision(number, at, **{**given, **changes})


def simulated(question: Question) -> PlanRecord:
    """As if: its ranking is estimated, curves and front are made up."""
    first = estimated(question.request(), question.to_record())
    rates = (10.0, 20.0, 30.0)
    curves = (
        Curve("Algorithm 1: x", rates, (1.0, 0.95, 0.5)),
        Curve("colocated: y", rates, (1.0, 0.9, 0.2)),
    )
    front = tuple(FrontPoint("colocated", rate, int(rate / 10), 1.8, "1C") for rate in rates)
    return replace(
        first, status="found", explanation=("because",), curves=curves, front=front
    )  # fmt: skip


def write(path: Path, *observations: Observation) -> Path:
    recorder = Recorder(path)
    for one in observations:
        recorder.add(one)
    recorder.close()
    return path


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Path]:
    """Writes observations to a file."""
    return lambda *observations: write(tmp_path / "day.jsonl", *observations)


# Not of the session: an event loop runs on this thread while Playwright does, and other tests
# may need one of their own.
@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    with browser() as chromium:
        yield chromium


@pytest.fixture
def tab(chromium: object) -> Iterator[Tab]:
    """In which nothing may go wrong."""
    tab = Tab(chromium)
    yield tab
    assert tab.troubles == []
    tab.close()


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a dashboard over a recording in which every page has something to show."""
    looks = [
        decision(1, at=STARTED_AT + 100),
        decision(2, at=STARTED_AT + 200, reason="would not pay", actions=()),
    ]
    rows = [Observation(sample_at(second, model=HOSTILE)) for second in range(400)]
    told = tuple(look.to_json() for look in looks)
    plan = simulated(Question()).to_record()
    last = Observation(sample_at(400, model=HOSTILE), (hostile_job(),), told, plan)
    path = write(tmp_path_factory.mktemp("recorded") / "day.jsonl", *rows, last)
    with dashboard(path) as address:
        yield address


@contextmanager
def mock_service(prefill: int = 1, decode: int = 1) -> Iterator[Service]:
    """The mock model on so many instances, threads of this process."""
    common = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"}
    options = {**common, "nthreads": 16, "memory_limit": 0}
    workers = {
        f"{role}-{i}": {"cls": Worker, "options": {**options, "resources": {role: 16}}}
        for role, count in (("PREFILL", prefill), ("DECODE", decode))
        for i in range(count)
    }
    scheduler = {"cls": Scheduler, "options": {**common, "port": 0}}
    config = EngineConfig(
        model="mock", mock_prefill_s=0.004, mock_decode_s=0.004, num_kv_blocks=200
    )
    with (
        SpecCluster(workers=workers, scheduler=scheduler, silence_logs=50) as cluster,
        Client(cluster, set_as_default=False) as client,
        Service.attach(client, config, slo=SLO(0.5, 0.1)) as service,
    ):
        yield service


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    with mock_service() as service:
        yield service


@pytest.fixture(scope="session")
def live(service: Service) -> Iterator[str]:
    """The address of a dashboard of that service."""
    with dashboard("--scheduler", service.client.scheduler.address, "--window", "5") as address:
        yield address
