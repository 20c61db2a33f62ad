"""Token streams: in order, each token once, the same text as the result."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from daskserve import SamplingParams, Service
from daskserve.core.request import Completion, FinishReason, TokenDelta
from daskserve.errors import ContextOverflow
from daskserve.service.token_stream import TokenStream

PARAMS = SamplingParams(max_tokens=30)


def text_of(deltas: list[TokenDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def ids_of(deltas: list[TokenDelta]) -> tuple[int, ...]:
    return tuple(i for delta in deltas for i in delta.token_ids)


async def test_a_stream_equals_the_result(service: Service):
    expected = await asyncio.to_thread(service.submit("hello", PARAMS).result)
    deltas = [delta async for delta in service.stream("hello", PARAMS)]
    assert ids_of(deltas) == expected.token_ids
    assert text_of(deltas) == expected.text
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert deltas[0].first_index == 0 and len(deltas) > 15


def test_synchronous_code_iterates_too(service: Service):
    assert len(ids_of(list(service.stream("hello", PARAMS)))) == 30


def test_many_streams_at_once(service: Service):
    streams = [service.stream(f"prompt {i}", PARAMS) for i in range(20)]
    texts = [text_of(list(stream)) for stream in streams]
    answers = service.client.gather(service.map([f"prompt {i}" for i in range(20)], PARAMS))
    assert texts == [a.text for a in answers]


def test_stop_strings_are_not_streamed(service: Service):
    text = service.submit("hello", PARAMS).result().text
    stop = text[10:13]
    params = SamplingParams(max_tokens=30, stop=(stop,))
    deltas = list(service.stream("hello", params))
    assert text_of(deltas) == text[: text.index(stop)]
    assert deltas[-1].finish_reason == "stop"


def test_the_first_token_comes_long_before_the_last(attach, mock):
    with attach(mock(mock_decode_s=0.02), prefill=1, decode=1) as service:
        started_at = time.monotonic()
        stream = service.stream("hello", PARAMS)
        next(stream)
        first_s = time.monotonic() - started_at
        list(stream)
        assert first_s < 0.5 * (time.monotonic() - started_at)


def test_a_dropped_stream_cancels_its_request(attach, mock, is_idle, eventually):
    with attach(mock(mock_decode_s=0.02), prefill=1, decode=1) as service:
        stream = service.stream("hello", SamplingParams(max_tokens=2000))
        next(stream)
        del stream
        gc.collect()
        eventually(lambda: is_idle(service))
        stream = service.stream("hello", SamplingParams(max_tokens=2000))
        next(stream)
        stream.close()
        with pytest.raises(StopIteration):
            next(stream)
        eventually(lambda: is_idle(service))


def test_a_wrong_prompt_raises_before_streaming(service: Service):
    with pytest.raises(ContextOverflow):
        service.stream([5] * 9000)


# The stream alone.


def delta(index: int, text: str, reason: FinishReason | None = None) -> TokenDelta:
    return TokenDelta("1", index, tuple(range(index, index + len(text))), text, reason)


def completion(text: str) -> Completion:
    return Completion("1", text, tuple(range(len(text))), FinishReason.LENGTH, 1)


@pytest.fixture
def stream() -> TokenStream:
    return TokenStream(lambda: None)


def test_late_and_repeated_deltas_come_in_order_and_once(stream: TokenStream):
    for index in (1, 0, 1, 3, 0, 2, 3):
        stream.put(delta(index, "abcd"[index]))
    stream.finish(completion("abcd"))
    assert text_of(list(stream)) == "abcd"


def test_what_was_lost_comes_from_the_result(stream: TokenStream):
    stream.put(delta(0, "ab"))
    stream.put(delta(4, "e"))
    stream.finish(completion("abcdef"))
    assert text_of(list(stream)) == "abcdef"
    assert list(stream) == []


def test_a_new_run_is_not_mixed_with_what_came_early_of_the_last(stream: TokenStream):
    stream.put(delta(0, "a"))
    stream.put(TokenDelta("1", 2, (99,), "?"))
    so_far = stream.so_far()
    assert (so_far.first_index, so_far.token_ids, so_far.text) == (0, (0,), "a")
    for index in (1, 2):
        stream.put(delta(index, "abc"[index]))
    stream.finish(completion("abc"))
    assert text_of(list(stream)) == "abc"


def test_an_error_comes_after_the_tokens(stream: TokenStream):
    stream.put(delta(0, "a"))
    stream.fail(ValueError("broken"))
    assert next(stream).text == "a"
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            next(stream)


async def test_a_reader_that_waits_is_woken(stream: TokenStream):
    reading = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.01)
    await asyncio.to_thread(stream.put, delta(0, "a"))
    assert (await reading).text == "a"


async def test_a_reader_that_was_cancelled_loses_nothing(stream: TokenStream):
    reading = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.wait([reading])
    stream.put(delta(0, "a"))
    assert (await anext(stream)).text == "a"
