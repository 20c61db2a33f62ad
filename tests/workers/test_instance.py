"""Instances as their callers see them: threads, pulls, cancellation, loss."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
import time
from collections.abc import Callable

import pytest

from daskserve.core.instance import Role
from daskserve.core.kv import KVHandle
from daskserve.errors import (
    InstanceLost,
    KVUnavailable,
    RequestCancelled,
)
from daskserve.workers.instance import Instance
from daskserve.workers.pulling import Destination


class Pair:
    """A prefill and a decode instance in one process, and how KV gets from one to the other."""

    def __init__(self, prefill: Instance, decode: Instance) -> None:
        self.prefill, self.decode = prefill, decode
        self.before_copy: Callable[[KVHandle], object] = lambda handle: asyncio.sleep(0)

    async def pull(self, handle: KVHandle, destination: Destination) -> None:
        await self.before_copy(handle)
        data = b"".join(self.prefill.export(handle))
        for view in destination.views:
            view[:], data = data[: view.nbytes], data[view.nbytes :]
        self.prefill.release(handle.request_id, handle.secret)

    async def answer(self, request, on_token=None):
        prefilled = await self.prefill.prefill(request, "here", on_token)
        try:
            return await self.decode.decode(request, prefilled, self.pull, on_token)
        finally:
            self.prefill.abort(request.request_id)

    async def baseline(self, within_s: float = 5.0) -> None:
        await wait_until(lambda: is_idle(self.prefill) and is_idle(self.decode), within_s)


def is_idle(instance: Instance) -> bool:
    load = instance.load()
    busy = load.num_waiting + load.num_running + load.num_holding
    return busy == 0 and load.used_kv_blocks == 0 and load.waiting_tokens == 0


async def wait_until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.002)


@pytest.fixture
def pair(start) -> Pair:
    return Pair(start(Role.PREFILL), start(Role.DECODE))


@pytest.fixture
def solo(start):
    """What an idle colocated instance answers."""
    instance = start(Role.COLOCATED, num_kv_blocks=512)
    return instance.generate


async def test_pairs_answer_as_colocated_does(pair, solo, make_request) -> None:
    requests = [make_request(f"r{i}", 1 + i, max_tokens=1 + i % 9) for i in range(40)]
    answers = await asyncio.gather(*map(pair.answer, requests))
    expected = await asyncio.gather(*map(solo, requests))
    assert [a.token_ids for a in answers] == [e.token_ids for e in expected]
    assert [a.text for a in answers] == [e.text for e in expected]
    assert pair.decode.load().num_finished == sum(r.params.max_tokens > 1 for r in requests)
    await pair.baseline()


async def test_tokens_arrive_in_order_on_the_event_loop(pair, make_request) -> None:
    deltas = []
    answer = await pair.answer(make_request("r", 10, max_tokens=12), deltas.append)
    assert [delta.first_index for delta in deltas] == list(range(12))
    assert "".join(delta.text for delta in deltas) == answer.text


async def test_a_receiver_that_raises_costs_only_its_tokens(pair, make_request) -> None:
    def broken(delta) -> None:
        raise ValueError("receiver")

    answer = await pair.answer(make_request("r", 10, max_tokens=12), broken)
    assert answer.num_output_tokens == 12


async def raising(handle: KVHandle) -> None:
    raise OSError("connection lost")


async def refusing(handle: KVHandle) -> None:
    raise KVUnavailable("gone")


async def never(handle: KVHandle) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("fault", [raising, refusing, never])
async def test_a_pull_that_fails_is_computed_again(fault, start, solo, make_request) -> None:
    pair = Pair(start(Role.PREFILL), start(Role.DECODE, kv_pull_timeout_s=0.1))
    pair.before_copy = fault
    request = make_request("r", 20, max_tokens=10)
    answer = await pair.answer(request)
    assert answer.token_ids == (await solo(request)).token_ids
    assert answer.timeline.num_recomputes == 1
    await pair.baseline()


@pytest.mark.parametrize("piece", [0, -1])
async def test_damaged_or_incomplete_kv_is_not_believed(piece, pair, solo, make_request) -> None:
    copy = pair.pull

    async def damaged(handle: KVHandle, destination: Destination) -> None:
        await copy(handle, destination)
        destination.views[piece][piece] ^= 1

    pair.pull = damaged
    request = make_request("r", 20, max_tokens=10)
    answer = await pair.answer(request)
    assert answer.token_ids == (await solo(request)).token_ids
    assert answer.timeline.num_recomputes == 1


async def test_a_slow_pull_does_not_stop_steps(pair, make_request) -> None:
    release = asyncio.Event()

    async def slow_one(handle: KVHandle) -> None:
        if handle.request_id == "slow":
            await release.wait()

    pair.before_copy = slow_one
    slow = asyncio.create_task(pair.answer(make_request("slow", 10, max_tokens=5)))
    await wait_until(lambda: pair.decode.load().num_running == 1)
    others = [make_request(f"r{i}", 10, max_tokens=5) for i in range(8)]
    await asyncio.wait_for(asyncio.gather(*map(pair.answer, others)), 5)
    assert not slow.done()
    release.set()
    assert (await slow).timeline.num_recomputes == 0


async def test_a_pull_runs_beside_the_step_that_follows_its_admission(pair, make_request) -> None:
    engine = pair.decode.engine
    forward, has_begun, seen = engine.runner.forward, threading.Event(), []

    def waits_for_the_pull(batch):
        if engine.scheduler.num_active == 2 and batch.num_rows == 1:
            seen.append(has_begun.wait(2))
        return forward(batch)

    async def note(handle: KVHandle) -> None:
        if handle.request_id == "second":
            has_begun.set()

    engine.runner.forward = waits_for_the_pull
    pair.before_copy = note
    pair.decode._thread.try_now = lambda *_: None  # as if it came between two steps
    first = asyncio.create_task(pair.answer(make_request("first", 5, max_tokens=180)))
    await wait_until(lambda: pair.decode.load().num_steps > 2)
    await pair.answer(make_request("second", 5, max_tokens=3))
    await first
    assert seen and all(seen)


async def test_a_request_that_comes_during_a_step_is_pulled_beside_it(pair, make_request) -> None:
    engine, loop = pair.decode.engine, asyncio.get_running_loop()
    forward, computing, pulled, rows = (
        engine.runner.forward,
        threading.Event(),
        threading.Event(),
        [],
    )

    def waits_for_the_pull(batch):
        rows.append(batch.num_rows)
        if len(rows) == 3:
            computing.set()
            assert pulled.wait(5)
        return forward(batch)

    async def note(handle: KVHandle) -> None:
        if handle.request_id == "second":
            loop.call_later(0.05, pulled.set)

    engine.runner.forward = waits_for_the_pull
    pair.before_copy = note
    first = asyncio.create_task(pair.answer(make_request("first", 5, max_tokens=180)))
    await wait_until(computing.is_set)
    await asyncio.gather(first, pair.answer(make_request("second", 5, max_tokens=3)))
    assert rows[:4] == [1, 1, 1, 2], "it joins the very next step"
    await pair.baseline()


async def test_kv_freed_before_it_is_read_never_becomes_text(start, solo, make_request) -> None:
    pair = Pair(start(Role.PREFILL, num_kv_blocks=24, kv_lease_s=0.02), start(Role.DECODE))
    pair.before_copy = lambda handle: asyncio.sleep(0.1)
    requests = [make_request(f"r{i}", 20, max_tokens=6) for i in range(50)]
    answers = await asyncio.gather(*map(pair.answer, requests))
    expected = await asyncio.gather(*map(solo, requests))
    assert [a.token_ids for a in answers] == [e.token_ids for e in expected]
    assert sum(a.timeline.num_recomputes for a in answers) > 0
    await pair.baseline()


async def test_pages_read_after_their_pin_ran_out_are_not_believed(
    start, solo, make_request
) -> None:
    """The sender is slower than its pin: other requests have the pages when they are copied."""
    pair = Pair(
        start(Role.PREFILL, num_kv_blocks=5, kv_lease_s=0.02, kv_pull_timeout_s=0.02),
        start(Role.DECODE),
    )

    async def slow_sender(handle: KVHandle, destination: Destination) -> None:
        sources = pair.prefill.export(handle)
        await pair.prefill.prefill(make_request("churn1", 20, max_tokens=2), "here")
        await asyncio.sleep(0.05)
        data = b"".join(sources)
        for view in destination.views:
            view[:], data = data[: view.nbytes], data[view.nbytes :]

    pair.pull = slow_sender
    request = make_request("r", 20, max_tokens=6)
    answer = await pair.answer(request)
    assert answer.timeline.num_recomputes == 1
    assert answer.token_ids == (await solo(request)).token_ids


async def test_a_pull_must_show_the_secret_of_what_is_held(pair, make_request) -> None:
    prefilled = await pair.prefill.prefill(make_request("r", 10, max_tokens=5), "here")
    handle = prefilled.handle
    assert handle.instance_address == "here"
    assert repr(handle.secret) not in repr(handle)
    for change in [
        dict(secret=b"x" * 16),
        dict(secret=None),
        dict(request_id="other"),
        dict(num_tokens=9),
        dict(kv_layout="other"),
    ]:
        with pytest.raises(KVUnavailable):
            pair.prefill.export(dataclasses.replace(handle, **change))
    pair.prefill.release("r", b"x" * 16)
    await asyncio.sleep(0.02)
    assert sum(view.nbytes for view in pair.prefill.export(handle)) == 3 * 4 * 2 * 8
    for _ in range(2):
        pair.prefill.release("r", handle.secret)
    await pair.baseline()
    with pytest.raises(KVUnavailable):
        pair.prefill.export(handle)


async def test_abort_while_queued_held_and_after_the_end(start, make_request) -> None:
    prefill = start(Role.PREFILL, num_kv_blocks=5)
    held = await prefill.prefill(make_request("held", 20, max_tokens=5), "here")
    queued = asyncio.create_task(prefill.prefill(make_request("queued", 20, max_tokens=5), "here"))
    await wait_until(lambda: prefill.load().num_waiting == 1)
    prefill.abort("queued")
    with pytest.raises(RequestCancelled):
        await queued
    prefill.abort("held")
    await wait_until(lambda: is_idle(prefill))
    with pytest.raises(KVUnavailable):
        prefill.export(held.handle)
    prefill.abort("held")
    prefill.abort("never seen")


async def test_abort_while_waiting_for_room_pulling_and_decoding(start, make_request) -> None:
    pair = Pair(start(Role.PREFILL), start(Role.DECODE, num_kv_blocks=12, mock_decode_s=0.05))
    gate = asyncio.Event()

    async def hold_pulling(handle: KVHandle) -> None:
        if handle.request_id == "pulling":
            await gate.wait()

    pair.before_copy = hold_pulling
    load = pair.decode.load
    tasks = {}
    for name, running in [("decoding", 1), ("pulling", 2)]:
        tasks[name] = asyncio.create_task(pair.answer(make_request(name, 19, max_tokens=20)))
        await wait_until(lambda running=running: load().num_running == running)
    tasks["waiting"] = asyncio.create_task(pair.answer(make_request("waiting", 19, max_tokens=20)))
    await wait_until(lambda: load().num_waiting == 1)
    for name in ("waiting", "pulling", "decoding"):
        pair.decode.abort(name)
        with pytest.raises(RequestCancelled):
            await tasks[name]
    await pair.baseline()


async def test_callers_that_leave_at_random_moments_leak_nothing(start, make_request, solo) -> None:
    pair = Pair(start(Role.PREFILL, num_kv_blocks=30), start(Role.DECODE, num_kv_blocks=16))
    rng = random.Random(0)
    pair.before_copy = lambda handle: asyncio.sleep(rng.random() * 0.004)
    tasks = []
    for index in range(200):
        request = make_request(f"r{index}", rng.randrange(1, 30), max_tokens=rng.randrange(1, 20))
        tasks.append(asyncio.create_task(pair.answer(request)))
        await asyncio.sleep(rng.random() * 0.002)
        if rng.random() < 0.7:
            rng.choice(tasks).cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await pair.baseline()
    last = make_request("last", 20, max_tokens=5)
    assert (await pair.answer(last)).token_ids == (await solo(last)).token_ids


async def test_a_caller_that_leaves_stops_the_work(start, make_request) -> None:
    instance = start(Role.COLOCATED, mock_decode_s=0.05)
    task = asyncio.create_task(instance.generate(make_request("r", 5, max_tokens=200)))
    await wait_until(lambda: instance.load().num_running == 1)
    task.cancel()
    await wait_until(lambda: is_idle(instance), within_s=2)


async def test_a_caller_that_leaves_during_its_prefill_leaves_no_kv(start, make_request) -> None:
    prefill = start(Role.PREFILL, mock_prefill_s=0.1)
    forward, has_begun = prefill.engine.runner.forward, threading.Event()

    def noting(batch):
        has_begun.set()
        return forward(batch)

    prefill.engine.runner.forward = noting
    task = asyncio.create_task(prefill.prefill(make_request("r", 5, max_tokens=9), "here"))
    await wait_until(has_begun.is_set)
    task.cancel()
    await wait_until(lambda: prefill.load().num_finished == 1)
    await wait_until(lambda: is_idle(prefill))


async def test_closing_while_a_pull_hangs_ends(start, make_request) -> None:
    pair = Pair(start(Role.PREFILL), start(Role.DECODE))
    pair.before_copy = never
    task = asyncio.create_task(pair.answer(make_request("r", 5, max_tokens=5)))
    await wait_until(lambda: pair.decode.load().num_running == 1)
    await asyncio.wait_for(pair.decode.close(), 5)
    with pytest.raises(InstanceLost):
        await task


async def test_info_says_what_routing_needs(start) -> None:
    info = start(Role.DECODE).info
    assert (info.role, info.model, info.context_tokens) == (Role.DECODE, "mock", 8192)
    assert (info.num_kv_blocks, info.block_size) == (64, 4)
    assert info.kv_layout == start(Role.PREFILL).info.kv_layout
    assert info.kv_layout != start(Role.PREFILL, block_size=8).info.kv_layout


async def test_the_queue_stage_starts_at_submission_on_the_service_clock(
    start, make_request
) -> None:
    instance = start(Role.COLOCATED)
    instance.clock_offset_s = 100.0
    submitted_at = time.monotonic() + 100.0 - 0.25
    request = dataclasses.replace(make_request("r", 5, max_tokens=3), submitted_at=submitted_at)
    timeline = (await instance.generate(request)).timeline
    assert 0.25 <= timeline.prefill_queue_s < 1.0
    assert timeline.prefill_s < 1.0
