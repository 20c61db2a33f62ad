"""Answers that another instance has begun, and requests that come in the middle of a step."""

from __future__ import annotations

import asyncio
import threading

import pytest

from daskserve.core.instance import Role
from daskserve.core.request import TokenDelta
from daskserve.errors import EngineStepFailed


async def never(handle, views) -> None:
    raise AssertionError("there is nothing to pull")


@pytest.mark.parametrize("num_emitted", [1, 2, 7, 19])
@pytest.mark.parametrize("role", [Role.DECODE, Role.COLOCATED])
async def test_a_begun_answer_is_continued_exactly(role, num_emitted, start, make_request) -> None:
    request = make_request("r", 10, max_tokens=20, temperature=1.0, seed=3, logprobs=2)
    deltas: list[TokenDelta] = []
    whole = await start(Role.COLOCATED).generate(request, deltas.append)
    text = "".join(delta.text for delta in deltas[:num_emitted])
    ids, logprobs = whole.token_ids[:num_emitted], whole.logprobs[:num_emitted]
    emitted = TokenDelta("r", 0, ids, text, None, logprobs)
    instance = start(role)
    more: list[TokenDelta] = []
    if role is Role.DECODE:
        prefilled = await start(Role.PREFILL).prefill(request, "here")
        answer = await instance.decode(request, prefilled, never, more.append, emitted)
    else:
        answer = await instance.generate(request, more.append, emitted)
    assert (answer.token_ids, answer.text) == (whole.token_ids, whole.text)
    assert answer.logprobs == whole.logprobs
    assert more[0].first_index == num_emitted
    assert text + "".join(delta.text for delta in more) == whole.text
    assert answer.timeline.num_recomputes == 1
    assert instance.load().used_kv_blocks == 0


async def test_what_was_emitted_stands_though_this_instance_would_say_otherwise(
    start, make_request
) -> None:
    """As in bfloat16, where another batch can give another token."""
    instance = start(Role.COLOCATED)
    request = make_request("r", 10, max_tokens=8)
    honest = await instance.generate(request)
    other = next(i for i in range(70, 90) if i != honest.token_ids[0])
    answer = await instance.generate(request, None, TokenDelta("r", 0, (other,), "?"))
    assert answer.token_ids[0] == other and answer.num_output_tokens == 8


async def test_a_failure_beside_a_step_fails_what_is_under_way_only(start, make_request) -> None:
    prefill, decode = start(Role.PREFILL), start(Role.DECODE)
    engine, loop = decode.engine, asyncio.get_running_loop()
    forward, computing, go_on = engine.runner.forward, threading.Event(), threading.Event()

    def slow(batch):
        computing.set()
        go_on.wait(5)
        return forward(batch)

    def broken(sequence) -> bool:
        loop.call_later(0.05, go_on.set)
        raise ValueError("broken books")

    async def answer(request_id: str):
        request = make_request(request_id, 5, max_tokens=100)
        prefilled = await prefill.prefill(request, "here")
        return await decode.decode(request, prefilled, unreachable)

    async def unreachable(handle, views) -> None:
        raise OSError("computed again instead")

    engine.runner.forward = slow
    first = asyncio.create_task(answer("first"))
    while not computing.is_set():
        await asyncio.sleep(0.002)
    engine.add_early = broken
    with pytest.raises(ValueError, match="broken books"):
        await answer("second")
    with pytest.raises(EngineStepFailed, match="broken books"):
        await first
    del engine.add_early
    assert (await answer("third")).num_output_tokens == 100
