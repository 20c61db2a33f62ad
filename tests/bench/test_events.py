from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskserve.bench.events import MAX_EVENT_BYTES, BadAnswer, ErrorEvent, EventReader, read_chunk

STAGES = ("prefill_s", "decode_s")


def chunk(record):
    return read_chunk(json.dumps(record).encode(), STAGES)


@given(st.lists(st.integers(0, 200), max_size=12), st.sampled_from([b"\n", b"\r\n"]))
def test_events_are_the_same_however_the_bytes_are_cut(cuts, newline):
    lines = [b": ping", b"", b'data: {"a": 1}', b"", b"event: x", b"data:[DONE]", b"", b""]
    stream = newline.join(lines)
    edges = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})
    reader = EventReader()
    found = [
        payload
        for start, end in zip(edges, edges[1:], strict=False)
        for payload in reader.feed(stream[start:end])
    ]
    assert found == [b'{"a": 1}', b"[DONE]"]


def test_an_event_without_end_is_given_up():
    with pytest.raises(BadAnswer, match="longer than"):
        list(EventReader().feed(b"data: " + b"x" * MAX_EVENT_BYTES))


def test_a_role_alone_is_the_first_answer_but_no_token():
    first = chunk({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    assert (first.has_choice, first.is_token) == (True, False)
    both = chunk({"choices": [{"delta": {"role": "assistant", "content": "a"}}]})
    assert both.is_token


def test_half_a_character_is_a_token_and_a_bare_finish_reason_is_none():
    assert chunk({"choices": [{"text": "", "finish_reason": None}]}).is_token
    end = chunk({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    assert (end.is_end, end.is_token) == (True, False)


def test_usage_and_stages():
    last = chunk(
        {
            "choices": [],
            "usage": {"prompt_tokens": 3, "completion_tokens": 4},
            "daskserve": {"timelines": [{"prefill_s": 1, "decode_s": 2.5}]},
        }
    )
    assert (last.has_choice, last.usage, last.stages_s) == (False, (3, 4), (1.0, 2.5))


def test_an_error_event_has_its_code():
    with pytest.raises(ErrorEvent) as caught:
        chunk({"error": {"message": "too late", "code": "deadline_exceeded"}})
    assert (caught.value.code, str(caught.value)) == ("deadline_exceeded", "too late")
    with pytest.raises(ErrorEvent, match="bad"):
        chunk({"object": "error", "message": "bad", "type": "BadRequestError", "code": 400})


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(
                st.sampled_from(["choices", "usage", "error", "delta", "daskserve", "timelines"]),
                inner,
                max_size=3,
            )
        ),
        max_leaves=6,
    ).map(lambda value: json.dumps(value).encode())
)
def test_whatever_a_server_sends_is_read_or_named(payload):
    try:
        read_chunk(payload, STAGES)
    except (BadAnswer, ErrorEvent):
        pass
