"""Workers, engines and schedulers that die: what is lost, what is repeated, how long it takes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import cloudpickle
import dask
import psutil
import pytest
from distributed import CancelledError, Client
from distributed.diagnostics.plugin import WorkerPlugin

from daskserve import EngineConfig, SamplingParams, Service
from daskserve.core.instance import Role
from daskserve.errors import ClusterError, KilledInstance

# Workers cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PARAMS = SamplingParams(max_tokens=40)
POISON = [66] * 7


class Trap(WorkerPlugin):
    """Makes every instance of a role die when it gets the poisonous prompt."""

    name = "trap"

    def __init__(self, role: Role, delay_s: float = 0.0) -> None:
        self.role, self.delay_s = role, delay_s

    def setup(self, worker) -> None:
        from daskserve.workers.instance import Instance

        method = {Role.PREFILL: "prefill", Role.DECODE: "decode"}[self.role]
        original, delay_s = getattr(Instance, method), self.delay_s

        def trapped(instance, request, *args):
            if list(request.prompt_token_ids) == POISON:
                if not delay_s:
                    os.kill(os.getpid(), signal.SIGKILL)
                worker.loop.call_later(delay_s, os.kill, os.getpid(), signal.SIGKILL)
            return original(instance, request, *args)

        setattr(Instance, method, trapped)


@pytest.fixture
def local(mock) -> Iterator[Service]:
    settings = {"check-dispatch": True, "probation-s": 0.5}
    with dask.config.set({f"daskserve.service.{key}": value for key, value in settings.items()}):
        config = mock(mock_decode_s=0.005, max_batch_size=8, num_kv_blocks=400)
        service = Service.local(prefill=1, decode=2, config=config)
    with service:
        yield service


def pids(service: Service, role: Role) -> list[int]:
    by_address = service.client.run(os.getpid)
    return [by_address[i.address] for i in service.info() if i.role is role]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_poisonous_request_dies_and_its_neighbours_live(
    local: Service, is_idle, eventually, role: Role
):
    prompts: list = [f"prompt {i} " * (1 + i % 5) for i in range(60)]
    expected = [c.text for c in local.client.gather(local.map(prompts, PARAMS))]
    local.client.register_plugin(Trap(role))
    first = set(pids(local, role))
    futures = local.map([*prompts[:20], POISON, *prompts[20:]], PARAMS)
    poisonous = futures.pop(20)
    with pytest.raises(KilledInstance, match="2 instances died"):
        poisonous.result(timeout=200)
    assert [c.text for c in local.client.gather(futures)] == expected
    eventually(lambda: len(local.info()) == 3 and is_idle(local), timeout_s=120)
    assert len(set(pids(local, role)) - first) <= 2
    assert local.status()["dispatch"]["violations"] == 0


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_poisonous_stream_dies_and_its_neighbours_live(
    local: Service, is_idle, eventually, role: Role
):
    prompts: list = [f"prompt {i} " * (1 + i % 5) for i in range(20)]
    expected = [c.text for c in local.client.gather(local.map(prompts, PARAMS))]
    local.client.register_plugin(Trap(role))
    poisonous = local.stream(POISON, PARAMS)
    streams = [local.stream(prompt, PARAMS) for prompt in prompts]
    assert ["".join(delta.text for delta in stream) for stream in streams] == expected
    with pytest.raises(KilledInstance, match="2 instances died"):
        list(poisonous)
    eventually(lambda: len(local.info()) == 3 and is_idle(local), timeout_s=120)
    assert local.status()["dispatch"]["violations"] == 0


def test_a_killed_client_process_leaves_nothing_behind(local: Service, is_idle, eventually):
    code = textwrap.dedent("""
        import sys, time
        from daskserve import EngineConfig, SamplingParams, Service
        service = Service.attach(sys.argv[1], eval(sys.argv[2]))
        long = SamplingParams(max_tokens=1500)
        streams = [service.stream(f"prompt {i} " * 20, long) for i in range(30)]
        next(streams[0])
        print("streaming", flush=True)
        time.sleep(60)
    """)
    command = [sys.executable, "-c", code, local.client.scheduler.address, repr(local.config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "streaming\n"
        assert local.status()["dispatch"]["online"] == 30
        process.kill()
        eventually(lambda: is_idle(local), timeout_s=2)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_late_poison_dies_after_three_instances(local: Service, is_idle, eventually):
    prompts = [f"prompt {i}" for i in range(20)]
    local.client.register_plugin(Trap(Role.DECODE, delay_s=1.0))
    long = SamplingParams(max_tokens=1000)
    poisonous = local.submit(POISON, long)
    futures = local.map(prompts, PARAMS)
    with pytest.raises(KilledInstance, match="3 instances died"):
        poisonous.result(timeout=200)
    assert all(c.num_output_tokens == 40 for c in local.client.gather(futures))
    eventually(lambda: len(local.info()) == 3 and is_idle(local), timeout_s=120)


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
def test_streams_go_on_exactly_when_their_instance_dies(local: Service, role: Role):
    params = SamplingParams(max_tokens=150)
    prompts = [f"prompt {i}" for i in range(8)]
    expected = [c.text for c in local.client.gather(local.map(prompts, params))]
    streams = [local.stream(prompt, params) for prompt in prompts]
    texts = [next(stream).text for stream in streams]
    os.kill(pids(local, role)[0], signal.SIGKILL)
    texts = [t + "".join(d.text for d in s) for t, s in zip(texts, streams, strict=True)]
    assert texts == expected


def test_all_workers_killed_come_back_and_finish(local: Service, is_idle, eventually):
    prompts = [f"prompt {i}" for i in range(30)]
    expected = [c.text for c in local.client.gather(local.map(prompts, PARAMS))]
    futures = local.map(prompts, PARAMS)
    time.sleep(0.2)
    for pid in local.client.run(os.getpid).values():
        os.kill(pid, signal.SIGKILL)
    completions = local.client.gather(futures)
    assert [c.text for c in completions] == expected
    eventually(lambda: len(local.info()) == 3 and is_idle(local), timeout_s=120)


def test_killed_again_and_again_nothing_is_stuck(local: Service, is_idle, eventually):
    for cycle in range(4):
        futures = local.map([f"prompt {i}" for i in range(20)], PARAMS)
        time.sleep(0.1 * cycle)
        os.kill(pids(local, Role.DECODE)[0], signal.SIGKILL)
        assert len(local.client.gather(futures)) == 20
        eventually(lambda: len(local.info()) == 3, timeout_s=120)
    eventually(lambda: is_idle(local))


def test_an_engine_that_dies_takes_its_worker_with_it(local: Service, is_idle, eventually):
    """The process lives on, the engine's thread is gone: R5."""

    def break_engine(dask_worker) -> None:
        instance = dask_worker.plugins["daskserve-instance"]._instance
        instance._thread.post(lambda: sys.exit("broken"))

    futures = local.map([f"prompt {i}" for i in range(20)], PARAMS)
    decode = next(i.address for i in local.info() if i.role is Role.DECODE)
    local.client.run(break_engine, workers=[decode])
    assert len(local.client.gather(futures)) == 20
    eventually(lambda: len(local.info()) == 3 and is_idle(local), timeout_s=120)
    assert decode not in {i.address for i in local.info()}


def test_a_stopped_worker_is_given_up(mock, monkeypatch):
    """SIGSTOP: no connection breaks, only the heartbeat stops (R4)."""
    monkeypatch.setattr("daskserve.service.local.WORKER_TTL", "3s")
    with Service.local(prefill=1, decode=2, config=mock(mock_decode_s=0.005)) as service:
        futures = service.map([f"prompt {i}" for i in range(20)], PARAMS)
        os.kill(pids(service, Role.DECODE)[0], signal.SIGSTOP)
        assert len(service.client.gather(futures)) == 20


def test_closed_in_the_middle_and_started_again_nothing_stays(mock):
    this = psutil.Process()
    before = set(this.children(recursive=True))
    for _ in range(3):
        service = Service.local(config=mock(mock_decode_s=0.02))
        future = service.map(["hello"] * 20, SamplingParams(max_tokens=1000))[-1]
        started_at = time.monotonic()
        service.close()
        assert time.monotonic() - started_at < 10
        assert future.cancelled()
    left = set(this.children(recursive=True)) - before
    assert all("resource_tracker" in " ".join(child.cmdline()) for child in left)
    listening = [c for c in this.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert not listening


def test_without_any_instance_left_requests_fail_with_the_reason(cluster, mock):
    with (
        dask.config.set({"daskserve.service.no-instance-timeout-s": 1}),
        cluster(prefill=1, decode=1) as own,
        Client(own) as client,
        Service.attach(client, mock(mock_decode_s=0.02)) as service,
    ):
        future = service.submit("hello", SamplingParams(max_tokens=500))
        time.sleep(0.3)
        address = next(i.address for i in service.info() if i.role is Role.DECODE)
        client.retire_workers([address], close_workers=True, remove=True)
        with pytest.raises(ClusterError, match="no DECODE instance for 1 s"):
            future.result(timeout=10)


def test_a_dead_scheduler_is_a_clear_error(tmp_path):
    code = textwrap.dedent("""
        import time
        from distributed import Scheduler, Worker
        import asyncio, sys
        async def main():
            common = dict(host="127.0.0.1", dashboard=False, dashboard_address="127.0.0.1:0")
            async with Scheduler(port=0, **common) as scheduler:
                async with Worker(scheduler.address, nthreads=8, resources={"COLOCATED": 8},
                                  memory_limit=0, **common):
                    print(scheduler.address, flush=True)
                    await scheduler.finished()
        asyncio.run(main())
    """)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().strip()
        client = Client(address, timeout=5)
        service = Service.attach(client, EngineConfig(model="mock"))
        future = service.submit("hello", SamplingParams(max_tokens=5000))
        time.sleep(0.2)
        process.kill()
        with pytest.raises(CancelledError, match="scheduler"):
            future.result(timeout=10)
        service.close()
        client.close()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
