"""Instances that change their role while requests run: none is lost, and none waits for nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import dask
import pytest
from distributed import Client, Scheduler, SpecCluster, Worker

from daskserve import EngineConfig, SamplingParams, Service
from daskserve.core.instance import Role
from daskserve.errors import ClusterError, InvalidParameter

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
SLOTS = 16


def start(roles: list[Role], decode_slots: int) -> SpecCluster:
    """A cluster whose workers can have both roles and start with these."""
    common = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"}
    workers = {}
    for index, role in enumerate(roles):
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        slots = {"PREFILL": SLOTS, "DECODE": decode_slots}
        resources = {each.value: slots[each.value] for each in (role, other)}
        options = {"nthreads": SLOTS, "resources": resources, "memory_limit": 0}
        workers[index] = {"cls": Worker, "options": {**common, **options}}
    return SpecCluster(
        workers=workers,
        scheduler={"cls": Scheduler, "options": {**common, "port": 0}},
        silence_logs=50,
    )


@contextmanager
def serving(
    roles: list[Role], config: EngineConfig, decode_slots: int = SLOTS
) -> Iterator[Service]:
    with (
        dask.config.set({"daskserve.service.check-dispatch": True}),
        start(roles, decode_slots) as cluster,
        Client(cluster) as client,
        Service.attach(client, config) as service,
    ):
        yield service


@pytest.fixture(scope="module")
def three(mock):
    """2P1D, all of them flippable, with checked dispatch."""
    with serving([Role.PREFILL, Role.PREFILL, Role.DECODE], mock(num_kv_blocks=400)) as service:
        yield service


def split(service: Service) -> tuple[int, int]:
    roles = [instance.role for instance in service.info()]
    return roles.count(Role.PREFILL), roles.count(Role.DECODE)


def of_role(service: Service, role: Role) -> list[str]:
    return [instance.address for instance in service.info() if instance.role is role]


def test_flips_there_and_back_under_load_lose_nothing_and_change_no_answer(three: Service):
    expected = three.client.gather(three.map(["say something"], PARAMS))[0].token_ids
    stop, failed, done = threading.Event(), [], []

    def load() -> None:
        while not stop.is_set():
            try:
                done.append(
                    [i for delta in three.stream("say something", PARAMS) for i in delta.token_ids]
                )
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    pauses = []
    for number in range(4):
        futures = three.map(["say something"] * 6, PARAMS)
        role = Role.DECODE if number % 2 == 0 else Role.PREFILL
        old = Role.PREFILL if role is Role.DECODE else Role.DECODE
        pauses.append(three.flip(of_role(three, old)[0], role)["pause_s"])
        assert split(three) == ((1, 2) if role is Role.DECODE else (2, 1))
        done += [list(c.token_ids) for c in three.client.gather(futures)]
    stop.set()
    for thread in threads:
        thread.join(20)
    assert not failed
    assert len(done) > 30 and all(tuple(ids) == expected for ids in done)
    assert max(pauses) < 2
    dispatch = three.status()["dispatch"]
    assert dispatch["violations"] == 0, dispatch["notes"]


def test_kv_that_waits_on_a_flipped_instance_is_still_pulled(mock, eventually):
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    roles = [Role.PREFILL, Role.PREFILL, Role.DECODE]
    with serving(roles, mock(num_kv_blocks=400), decode_slots=1) as service:
        futures = service.map(["a queue before decode"] * 8, params)
        eventually(lambda: service.status()["dispatch"]["roles"]["PREFILL"]["held"] >= 6, 5)
        service.flip(of_role(service, Role.PREFILL)[0], Role.DECODE)
        assert service.status()["dispatch"]["roles"]["DECODE"]["held"] > 0
        answers = service.client.gather(futures)
        assert len({c.token_ids for c in answers}) == 1
        assert not any(c.timeline.num_recomputes for c in answers)


def test_what_cannot_flip_says_why(three: Service, eventually):
    decode = of_role(three, Role.DECODE)[0]
    prefill = of_role(three, Role.PREFILL)[0]
    for instance, role, why in (
        (decode, Role.PREFILL, "must leave another DECODE"),
        (prefill, Role.PREFILL, "works as PREFILL already"),
        (prefill, Role.COLOCATED, "needs a worker with the resource COLOCATED"),
        ("tcp://127.0.0.1:1", Role.DECODE, "must be one that is ready"),
    ):
        with pytest.raises(InvalidParameter, match=why):
            three.flip(instance, role)
    three.flip(prefill, Role.DECODE)
    running = three.map(["it takes its time"], SamplingParams(max_tokens=6000, ignore_eos=True))

    def decoding() -> list[str]:
        # The prompt, which a prefill instance computes before, runs as well.
        load = three.load()
        return [address for address in of_role(three, Role.DECODE) if load[address].num_running]

    eventually(decoding, 5)
    busy = decoding()[0]
    with pytest.raises(ClusterError, match="did not finish its work within 0.1 s"):
        three.flip(busy, Role.PREFILL, timeout_s=0.1)
    assert three.load()[busy].num_running == 1
    three.client.cancel(running)
    three.flip(prefill, Role.PREFILL)
    assert split(three) == (2, 1)


def test_workers_that_all_start_alike_are_refused(mock):
    with (
        pytest.raises(ClusterError, match="every instance starts as PREFILL"),
        serving([Role.PREFILL, Role.PREFILL], mock()),
    ):
        pass
