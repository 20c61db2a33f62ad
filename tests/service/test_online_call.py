"""One stream's request as messages: what it says to whom, and what its reader gets."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from daskserve import SamplingParams
from daskserve.core.kv import KVHandle
from daskserve.core.request import (
    Completion,
    FinishReason,
    Prefilled,
    Request,
    TokenDelta,
    TokenLogprob,
)
from daskserve.errors import (
    AnswerDiverged,
    ClusterError,
    DeadlineExceeded,
    EngineStepFailed,
    InstanceLost,
    Overloaded,
    RequestCancelled,
)
from daskserve.service import online_call
from daskserve.service.online_call import OnlineCall
from daskserve.service.online_wire import (
    pack_completion,
    pack_error,
    pack_prefilled,
    unpack_emitted,
)
from daskserve.service.token_stream import TokenStream


class FakeLink:
    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


class Caller:
    """A call with its links, and the other ends in the test's hands."""

    def __init__(self, is_colocated: bool = False) -> None:
        self.listener = self
        self.is_colocated = is_colocated
        self.scheduler = FakeLink()
        self.instances: dict[str, FakeLink] = {}
        self.heard: set[str] = set()
        self.is_closed = False
        self.stream = TokenStream(lambda: None)
        request = Request("1-a", (1, 2), SamplingParams(logprobs=0), 0.0, 7, "sink")
        self.call = OnlineCall(request, weakref.ref(self.stream), self)

    def to_scheduler(self) -> FakeLink:
        return self.scheduler

    def to_instance(self, address: str) -> FakeLink:
        return self.instances.setdefault(address, FakeLink())

    def closed(self, request_id: str) -> None:
        self.is_closed = True

    def add(self, run_id: str, stream: TokenStream) -> None:
        self.heard.add(run_id)

    def remove(self, run_id: str) -> None:
        self.heard.discard(run_id)

    # The other ends.

    def bind(self, role: str, address: str, run_id: str = "1-a") -> dict[str, Any]:
        message = {"op": "bound", "role": role, "address": address, "run_id": run_id}
        self.call.on_scheduler(message)
        return self.instances[address].sent[-1]

    def lose(self, run_id: str = "1-a.1") -> None:
        self.call.on_scheduler({"op": "lost", "run_id": run_id})

    def answer(self, op: str, run_id: str = "1-a", **fields: Any) -> None:
        self.call.on_instance({"op": op, "run_id": run_id, **fields})

    def prefilled(self, run_id: str = "1-a", first: int = 10) -> None:
        handle = KVHandle(run_id, "tcp://p0", b"secret", 2, "layout", 1)
        value = Prefilled(run_id, first, 1.0, 0.5, 0.5, handle, None, TokenLogprob(-1.0))
        self.answer("prefilled", run_id, prefilled=pack_prefilled(value))

    def completed(self, ids: tuple[int, ...], run_id: str = "1-a") -> None:
        value = Completion(run_id, "abc"[: len(ids)], ids, FinishReason.LENGTH, 2)
        self.answer("completed", run_id, completion=pack_completion(value))

    def emit(self, index: int, token_id: int, reason: FinishReason | None = None) -> None:
        entry = (TokenLogprob(-0.5, ((token_id, -0.5),)),)
        self.stream.put(TokenDelta("1-a", index, (token_id,), "abc"[index], reason, entry))

    def ops(self) -> list[str]:
        return [message["op"] for message in self.scheduler.sent]


@pytest.fixture
def caller() -> Caller:
    caller = Caller()
    caller.call.open(None, None)
    return caller


def ids_of(stream: TokenStream) -> list[int]:
    return [i for delta in stream for i in delta.token_ids]


async def test_prefill_then_decode_then_the_answer(caller: Caller):
    run = caller.bind("PREFILL", "p0")
    assert run["op"] == "run" and run["emitted"] is None and caller.heard == {"1-a"}
    caller.emit(0, 10)
    caller.prefilled()
    run = caller.bind("DECODE", "d0")
    assert run["prefilled"]["first_token_id"] == 10 and run["emitted"] is None
    caller.completed((10, 11))
    assert caller.ops() == ["open", "prefilled", "close"]
    assert caller.scheduler.sent[-1]["is_done"] and caller.is_closed and not caller.heard
    assert ids_of(caller.stream) == [10, 11]
    assert (await caller.stream.completion()).request_id == "1-a"


def test_a_lost_decode_goes_on_from_what_was_sent(caller: Caller):
    caller.bind("PREFILL", "p0")
    caller.emit(0, 10)
    caller.prefilled()
    caller.bind("DECODE", "d0")
    caller.emit(1, 11)
    caller.lose()
    resume = {"op": "resume", "request_id": "1-a", "run_id": "1-a.1", "has_progress": True}
    assert caller.scheduler.sent[-1] == resume
    assert caller.heard == set()  # late tokens of d0 go nowhere
    assert caller.instances["d0"].sent[-1]["op"] == "abort"
    run = caller.bind("DECODE", "d1", run_id="1-a.1")
    emitted = unpack_emitted(run["emitted"])
    assert (emitted.token_ids, emitted.text, len(emitted.logprobs)) == ((10, 11), "ab", 2)
    assert run["request"]["request_id"] == "1-a.1"
    caller.completed((10, 11, 12), run_id="1-a")  # of the lost run
    assert not caller.is_closed
    caller.completed((10, 11, 12), run_id="1-a.1")
    assert ids_of(caller.stream) == [10, 11, 12]


@pytest.mark.parametrize("num_decoded", [0, 1])
def test_a_decode_has_got_on_only_with_a_token_of_its_own(caller: Caller, num_decoded: int):
    caller.bind("PREFILL", "p0")
    caller.prefilled()
    caller.bind("DECODE", "d0")
    caller.emit(0, 10)  # late: the prefill's
    for number in range(num_decoded):
        caller.emit(1 + number, 11)
    caller.lose()
    assert caller.scheduler.sent[-1]["has_progress"] is (num_decoded > 0)


def test_a_repeated_prefill_does_not_change_the_first_token(caller: Caller):
    caller.bind("PREFILL", "p0")
    caller.emit(0, 10)
    caller.lose()
    caller.bind("PREFILL", "p1", run_id="1-a.1")
    caller.prefilled(run_id="1-a.1", first=99)
    run = caller.bind("DECODE", "d0", run_id="1-a.1")
    assert run["prefilled"]["first_token_id"] == 10
    assert run["prefilled"]["first_logprob"] == (-0.5, ((10, -0.5),))
    assert run["emitted"] is None


def test_a_colocated_run_resumes_too():
    caller = Caller(is_colocated=True)
    caller.call.open(None, None)
    caller.bind("COLOCATED", "c0")
    caller.emit(0, 10)
    caller.lose()
    run = caller.bind("COLOCATED", "c1", run_id="1-a.1")
    assert unpack_emitted(run["emitted"]).token_ids == (10,)


def test_what_would_contradict_the_stream_ends_it(caller: Caller):
    caller.bind("PREFILL", "p0")
    caller.emit(0, 10)
    caller.completed((99,))
    assert next(caller.stream).token_ids == (10,)
    with pytest.raises(AnswerDiverged):
        next(caller.stream)


async def test_an_answer_that_was_lost_behind_its_last_token_is_complete(caller: Caller):
    caller.bind("PREFILL", "p0")
    caller.emit(0, 10)
    caller.prefilled()
    caller.bind("DECODE", "d0")
    caller.emit(1, 11, FinishReason.STOP)
    caller.lose()
    completion = await caller.stream.completion()
    assert (completion.text, completion.token_ids) == ("ab", (10, 11))
    assert completion.finish_reason == "stop" and completion.timeline.prefill_s == 0.5
    assert len(completion.logprobs) == 2


async def test_an_unreachable_instance_is_reported_after_a_while(caller: Caller, monkeypatch):
    calls: list = []
    monkeypatch.setattr(online_call, "_later", lambda delay_s, call: calls.append(call))
    caller.bind("PREFILL", "p0")
    caller.call.on_end_of(caller.instances["p0"])
    assert caller.ops() == ["open"]
    calls.pop()()
    assert caller.scheduler.sent[-1] == {"op": "again", "request_id": "1-a", "run_id": "1-a"}


async def test_nothing_is_reported_when_the_scheduler_saw_it_first(caller: Caller, monkeypatch):
    monkeypatch.setattr(online_call, "_GRACE_S", 0.0)
    caller.bind("PREFILL", "p0")
    caller.answer("failed", error=pack_error(InstanceLost("gone")))
    caller.lose()
    caller.bind("PREFILL", "p1", run_id="1-a.1")
    await online_call.asyncio.sleep(0.01)
    assert caller.ops() == ["open", "resume"]


@pytest.mark.parametrize(
    "error", [Overloaded("full", 2.5), EngineStepFailed("broke"), ClusterError("none")]
)
def test_a_refusal_is_raised_as_it_was_meant(caller: Caller, error: Exception):
    caller.call.on_scheduler({"op": "refused", "error": pack_error(error)})
    with pytest.raises(type(error), match=str(error)) as caught:
        next(caller.stream)
    assert getattr(caught.value, "retry_after_s", 2.5) == 2.5
    assert caller.is_closed


def test_a_failed_step_fails_the_request_and_frees_it(caller: Caller):
    caller.bind("PREFILL", "p0")
    caller.answer("failed", error=pack_error(EngineStepFailed("broke")))
    assert caller.scheduler.sent[-1]["is_done"] is False
    with pytest.raises(EngineStepFailed):
        next(caller.stream)


async def test_after_its_deadline_it_is_aborted():
    caller = Caller()
    caller.call.open(0.01, None)
    caller.bind("PREFILL", "p0")
    with pytest.raises(DeadlineExceeded, match="0.01 s"):
        await caller.stream.completion()
    assert caller.instances["p0"].sent[-1]["op"] == "abort" and caller.is_closed


async def test_a_closed_stream_has_no_completion(caller: Caller):
    await caller.stream.aclose()
    with pytest.raises(RequestCancelled):
        await caller.stream.completion()


def test_a_broken_link_to_the_scheduler_fails_it(caller: Caller):
    caller.call.on_end_of(caller.scheduler)
    with pytest.raises(ClusterError, match="scheduler"):
        next(caller.stream)
