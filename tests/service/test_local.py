"""A cluster of our own: processes, cores, and nothing that listens beyond loopback."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import dask
import psutil
import pytest

from daskserve import EngineConfig, SamplingParams, Service
from daskserve.core.instance import Role
from daskserve.errors import ConfigError, ModelError

PARAMS = SamplingParams(max_tokens=40)


@pytest.fixture(scope="module")
def local(mock) -> Iterator[Service]:
    with dask.config.set({"daskserve.service.check-dispatch": True}):
        service = Service.local(config=mock(mock_decode_s=0.005, max_batch_size=8))
    with service:
        yield service


def pid_of(service: Service, role: Role) -> int:
    pids = service.client.run(os.getpid)
    return next(pids[i.address] for i in service.info() if i.role is role)


def test_every_socket_is_on_loopback(local: Service):
    stream = local.stream("hello", PARAMS)
    next(stream)
    this = psutil.Process()
    listeners = {
        connection.laddr.ip
        for process in (this, *this.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listeners <= {"127.0.0.1", "::1"} and listeners
    stream.close()


def test_an_instance_keeps_to_its_cores(local: Service):
    def cores(dask_worker) -> list[list[int]]:
        return [sorted(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task")]

    allowed = os.sched_getaffinity(0)
    for own in local.client.run(cores).values():
        assert len({tuple(c) for c in own}) == 1
        assert len(allowed) < 2 or len(own[0]) <= len(allowed) // 2


def test_stealing_and_memory_manager_are_off(local: Service):
    def look(dask_scheduler) -> tuple[bool, bool]:
        return (
            dask_scheduler.extensions["amm"].running,
            "stealing" in dask_scheduler.periodic_callbacks,
        )

    assert local.client.run_on_scheduler(look) == (False, False)


@pytest.mark.parametrize("role", [pytest.param(Role.DECODE, marks=pytest.mark.slow), Role.PREFILL])
def test_a_killed_worker_loses_and_repeats_nothing(local: Service, is_idle, eventually, role):
    prompts = [f"prompt {i} " * (1 + i % 5) for i in range(40)]
    expected = [c.text for c in local.client.gather(local.map(prompts, PARAMS))]
    futures = local.map(prompts, PARAMS)
    time.sleep(0.3)
    os.kill(pid_of(local, role), signal.SIGKILL)
    completions = local.client.gather(futures)
    assert [c.text for c in completions] == expected
    eventually(lambda: len(local.info()) == 2 and is_idle(local), timeout_s=60)
    dispatch = local.status()["dispatch"]
    assert dispatch["violations"] == 0, dispatch["notes"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefill": 0, "decode": 0},
        {"prefill": 1, "decode": 0},
        {"cores": [[0]]},
        {"cores": [[0], [99_999]]},
        {"cores": "some"},
        {"protocol": "carrier-pigeon"},
    ],
)
def test_wrong_layouts_are_refused(mock, wrong: dict):
    with pytest.raises(ConfigError):
        Service.local(config=mock(), **wrong)


def test_a_protocol_that_is_not_installed_is_named(mock):
    with pytest.raises(ConfigError, match="protocol=ucx-y: unknown address scheme.*tcp.*pip"):
        Service.local(config=mock(), protocol="ucx-y")


def test_a_wrong_model_fails_before_anything_starts():
    started_at = time.monotonic()
    with pytest.raises(ModelError, match="no-such-model"):
        Service.local(config=EngineConfig(model="no-such-model"))
    assert time.monotonic() - started_at < 2
