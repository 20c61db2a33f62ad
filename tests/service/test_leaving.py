"""Workers that are told to go: they drain, hand over what is left, and lose nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from distributed import LocalCluster

from daskserve import SamplingParams, Service
from daskserve.core.instance import Role

PARAMS = SamplingParams(max_tokens=150, ignore_eos=True)
SETTINGS = {
    "DASK_DASKSERVE__DRAIN__ON_SIGNALS": "True",
    "DASK_DASKSERVE__DRAIN__MARGIN_S": "60",
    "DASK_DASKSERVE__DRAIN__HAND_OVER_S": "10",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def workers(scheduler: str, **settings: dict[str, str]) -> Iterator[dict[str, subprocess.Popen]]:
    """Real `dask worker` commands by name, with the role that their name begins with."""
    started = {}
    for name, own in settings.items():
        role = name.partition("_")[0].upper()
        words = ["--nworkers", "1", "--nthreads", "8", "--resources", f"{role}=8", "--host"]
        words += ["127.0.0.1", "--memory-limit", "0", "--no-dashboard", "--name", name]
        words += ["--preload-nanny", "daskserve.service.nanny_preload"]
        started[name] = subprocess.Popen(
            [sys.executable, "-m", "dask", "worker", scheduler, *words],
            env={**os.environ, **SETTINGS, "DASK_DASKSERVE__RANK__INSTANCE": name, **own},
            stderr=subprocess.DEVNULL,
        )
    try:
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.wait()


@pytest.fixture
def scheduler() -> Iterator[str]:
    with LocalCluster(
        n_workers=0, host="127.0.0.1", dashboard_address="127.0.0.1:0", silence_logs=50
    ) as cluster:
        yield cluster.scheduler_address


def is_there(service: Service, name: str) -> bool:
    return name in {i["instance"] for i in service.status()["instances"]}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_told_to_end_twice_drains_and_loses_nothing(scheduler, mock, eventually):
    names = {"prefill_0": {}, "decode_1": {}, "decode_2": {}}
    with workers(scheduler, **names) as started:
        wait_for(scheduler, 3)
        with Service.attach(scheduler, mock(mock_decode_s=0.02, num_kv_blocks=400)) as service:
            futures = service.map([f"row {i}" for i in range(24)], PARAMS)
            eventually(lambda: service.status()["dispatch"]["running"] > 8, timeout_s=30)
            started["decode_1"].send_signal(signal.SIGTERM)
            time.sleep(0.3)
            started["decode_1"].send_signal(signal.SIGTERM)
            completions = service.client.gather(futures)
            assert started["decode_1"].wait(timeout=60) == 0
            assert [len(c.token_ids) for c in completions] == [150] * 24
            assert sum(c.timeline.num_recomputes for c in completions) == 0
            assert not is_there(service, "decode_1") and is_there(service, "decode_2")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_whose_time_ends_hands_over_what_is_not_done(scheduler, mock, eventually):
    ends = {
        "DASK_DASKSERVE__DRAIN__ENDS_AT": str(time.time() + 75),
        "DASK_DASKSERVE__DRAIN__MARGIN_S": "25",
        "DASK_DASKSERVE__DRAIN__HAND_OVER_S": "20",
    }
    names = {"prefill_0": {}, "decode_1": ends, "decode_2": {}}
    long = SamplingParams(max_tokens=1000, ignore_eos=True)
    with workers(scheduler, **names) as started:
        wait_for(scheduler, 3)
        with Service.attach(scheduler, mock(mock_decode_s=0.05, num_kv_blocks=2000)) as service:
            futures = service.map([f"row {i}" for i in range(8)], long)
            assert started["decode_1"].wait(timeout=120) == 0
            completions = service.client.gather(futures)
            assert [len(c.token_ids) for c in completions] == [1000] * 8
            roles = {i.role for i in service.info()}
            assert roles == {Role.PREFILL, Role.DECODE}


def wait_for(scheduler: str, count: int) -> None:
    from distributed import Client

    with Client(scheduler, timeout=60) as client:
        client.wait_for_workers(count, timeout=100)
