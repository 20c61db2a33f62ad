"""An engine on its thread: what its failures cost, and how it ends."""

from __future__ import annotations

import asyncio

import pytest

from daskserve.core.instance import Role
from daskserve.errors import EngineStepFailed, InstanceLost


async def test_a_failed_step_fails_its_requests_and_the_next_succeeds(start, make_request) -> None:
    instance = start(Role.COLOCATED)
    forward = instance.engine.runner.forward

    def fails_once(batch):
        instance.engine.runner.forward = forward
        raise RuntimeError("boom")

    instance.engine.runner.forward = fails_once
    with pytest.raises(EngineStepFailed, match="boom"):
        await instance.generate(make_request("a", 10, max_tokens=5))
    answer = await instance.generate(make_request("b", 10, max_tokens=5))
    assert answer.num_output_tokens == 5
    assert instance.load().used_kv_blocks == 0


async def test_a_fault_between_steps_fails_what_is_under_way_only(start, make_request) -> None:
    instance = start(Role.COLOCATED)
    next_step = instance.engine.scheduler.next_step

    def fails_once():
        instance.engine.scheduler.next_step = next_step
        raise KeyError("bookkeeping")

    instance.engine.scheduler.next_step = fails_once
    with pytest.raises(EngineStepFailed, match="bookkeeping"):
        await instance.generate(make_request("a", 10, max_tokens=5))
    assert (await instance.generate(make_request("b", 10, max_tokens=5))).num_output_tokens == 5


async def test_a_dead_engine_loses_its_requests_at_once(start, make_request) -> None:
    instance = start(Role.COLOCATED)

    def dies(batch):
        raise SystemExit

    instance.engine.runner.forward = dies
    with pytest.raises(InstanceLost, match="lost"):
        await asyncio.wait_for(instance.generate(make_request("a", 10, max_tokens=5)), 5)
    with pytest.raises(InstanceLost):
        await instance.generate(make_request("b", 10, max_tokens=5))


async def test_closing_drains_then_loses_the_rest(start, make_request) -> None:
    instance = start(Role.COLOCATED, mock_decode_s=0.005)
    short = asyncio.create_task(instance.generate(make_request("short", 5, max_tokens=10)))
    long = asyncio.create_task(instance.generate(make_request("long", 5, max_tokens=200)))
    while instance.load().num_running < 2:
        await asyncio.sleep(0.002)
    await asyncio.wait_for(instance.close(drain_s=0.3), 5)
    assert (await short).num_output_tokens == 10
    with pytest.raises(InstanceLost):
        await long
    with pytest.raises(InstanceLost):
        await instance.generate(make_request("late", 5, max_tokens=2))
