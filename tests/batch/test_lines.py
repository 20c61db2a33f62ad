from __future__ import annotations

import json

import orjson
import pytest

from daskserve.batch.lines import Form, read_row
from daskserve.batch.prompts import NEUTRAL, prompt_of
from daskserve.core.params import SamplingParams
from daskserve.errors import RequestError

DEFAULTS = SamplingParams(max_tokens=16, temperature=0.5)
DEEP = b"[" * 980 + b"]" * 980  # the parser still takes it
HELLO = [{"role": "user", "content": "hello"}]


def parse(record, defaults=DEFAULTS):
    line = record if isinstance(record, bytes) else json.dumps(record).encode()
    return prompt_of(read_row(line, 0, "line-1"), defaults, "tiny")


def chat(**body):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    return {**line, "body": {"messages": HELLO, **body}}


def refusal(record) -> str:
    with pytest.raises(RequestError) as refused:
        parse(record)
    message = str(refused.value)
    orjson.dumps(message)  # no lone surrogate gets into the output
    return message


def test_plain_prompt_takes_the_defaults():
    assert parse({"prompt": "hi"}) == ("hi", DEFAULTS)


def test_plain_line_overrides_parameters():
    _, params = parse({"prompt": "hi", "max_tokens": 3, "seed": 9, "stop": "END", "top_p": None})
    assert params == SamplingParams(max_tokens=3, temperature=0.5, seed=9, stop=("END",))


def test_plain_messages_and_text_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    prompt, _ = parse({"messages": [{"role": "user", "content": parts}]})
    assert prompt == [{"role": "user", "content": "a\nb"}]


def test_openai_chat_line():
    row = read_row(json.dumps(chat(model="tiny", max_completion_tokens=5)).encode(), 3, "line-4")
    assert (row.number, row.custom_id, row.form) == (3, "a", Form.CHAT)
    prompt, params = prompt_of(row, DEFAULTS, "tiny")
    assert prompt == HELLO and params.max_tokens == 5


@pytest.mark.parametrize("prompt", ["once", [1, 2, 3]])
def test_openai_completion_line(prompt):
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": prompt},
    }
    row = read_row(json.dumps(line).encode(), 0, "line-1")
    assert row.form is Form.COMPLETION
    assert prompt_of(row, DEFAULTS, "tiny")[0] == prompt


def test_neutral_values_of_unsupported_fields_are_accepted():
    neutral = {name: values[0] for name, values in NEUTRAL.items() if values}
    nulls = {name: None for name in NEUTRAL}
    assert parse(chat(**neutral)) == parse(chat(**nulls)) == parse(chat())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("best_of", 3),
        ("logprobs", True),
        ("logprobs", 0),
        ("top_logprobs", 5),
        ("stream", True),
        ("echo", True),
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("frequency_penalty", 0.5),
        ("logit_bias", {"50256": -100}),
    ],
)
def test_unsupported_fields_are_refused_by_name(field, value):
    assert f"{field}=" in refusal(chat(**{field: value}))
    assert "is not supported" in refusal(chat(**{field: value}))


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"max_tokens": 10**7}, "max_tokens=10000000 must be 1..1000000"),
        ({"max_tokens": 0}, "max_tokens=0 must be 1..1000000"),
        ({"max_tokens": -1}, "max_tokens=-1 must be"),
        ({"max_tokens": 1.5}, "max_tokens=1.5 must be an integer"),
        ({"max_tokens": "7"}, "max_tokens='7' must be an integer"),
        ({"max_tokens": True}, "max_tokens=True must be an integer"),
        ({"max_tokens": 10**30}, "max_tokens=1e+30 must be an integer"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "differs from max_tokens=3"),
        ({"seed": 2**63}, "seed=9223372036854775808 must be"),
        ({"seed": -1}, "seed=-1 must be"),
        ({"temperature": 3}, "temperature=3 must be 0..2"),
        ({"temperature": float("nan")}, "temperature=nan must be 0..2"),
        ({"temperature": float("inf")}, "temperature=inf must be 0..2"),
        ({"top_p": 0}, "top_p=0 must be greater than 0"),
        ({"top_k": 2**31}, "top_k=2147483648 must be"),
        ({"stop": [1]}, "stop=1 must be a string"),
        ({"stop": ""}, "stop='' must be a string of 1..256"),
        ({"ignore_eos": 1}, "ignore_eos=1 must be true or false"),
        ({"max_token": 3}, "max_token is not known; did you mean max_tokens?"),
        ({"model": "gpt-4"}, "model='gpt-4' is not served: this job runs tiny"),
        ({"model": 4}, "model=4 should be a valid string"),
        ({"messages": HELLO}, "prompt and messages are both given"),
        ({"temperature": 10**400}, "temperature=1000000000"),
    ],
)
def test_bad_fields_name_field_value_and_limit(fields, part):
    assert part in refusal({"prompt": "hi", **fields})


@pytest.mark.parametrize(
    ("record", "part"),
    [
        (b"{", "not JSON"),
        (b"[1]", "must be a JSON object, not an array"),
        (b"7", "not a number"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 3000, "not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 13 of the line"),
        (b'{"prompt": "\\ud800"}', "must not contain lone surrogates"),
        (b'{"prompt": "hi", "stop": "\\ud800"}', "must not contain lone surrogates"),
        ({}, "prompt is missing"),
        ({"prompt": ""}, "prompt='' must be a string or a list of token ids, not empty"),
        ({"prompt": []}, "prompt=[] must be"),
        ({"prompt": [1, -2]}, "prompt=[1, -2] must be"),
        ({"prompt": ["a", "b"]}, "several prompts need several rows"),
        ({"prompt": 7}, "prompt=7 must be"),
        ({"messages": []}, "must hold 1..10000 messages"),
        ({"messages": "hi"}, "messages='str' must be a list of messages"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "messages[0].role='robot' must be one of",
        ),
        (
            {"messages": [{"role": "user", "content": 1}]},
            "messages[0].content='int' must be a string",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]='image_url' must be",
        ),
        ({"messages": [{**HELLO[0], "name": "bob"}]}, "messages[0].name='bob' is not supported"),
        (chat(prompt="x"), "prompt and messages are both given"),
        ({**chat(), "body": {"prompt": "x"}}, "messages is missing; prompt is not known"),
        ({**chat(), "url": "/v1/embeddings"}, "url='/v1/embeddings' should be"),
        ({**chat(), "method": "GET"}, "method='GET' should be 'POST'"),
        ({**chat(), "body": "x"}, "body='x' should be a valid dictionary"),
        ({**chat(), "custom_id": 5}, "custom_id=5 must be a string of 1..512 characters"),
        ({"custom_id": "x" * 513, "prompt": "a"}, "custom_id='xxx"),
        ({"method": "POST", "body": {}}, "custom_id is missing; url is missing"),
        ({"messages": [{**HELLO[0], "\ud800": 1}]}, "messages[0].\\ud800=1 is not supported"),
        (b'{"prompt": "a", "stop": %s}' % DEEP, "stop=<list> must be a string of"),
        (b'{"prompt": "a", "n": %s}' % DEEP, "n=<list> is not supported"),
        (b'{"prompt": "a", "custom_id": %s}' % DEEP, "custom_id=<list> must be a string"),
        (b'{"prompt": %s}' % DEEP, "prompt=<list> must be"),
    ],
)
def test_bad_rows_are_explained(record, part):
    assert part in refusal(record)


@pytest.mark.parametrize(
    "line",
    [
        b'{"custom_id": "keep", "prompt": NaN}',
        b'{"custom_id": "keep", "prompt": "\\udfff"}',
        b'{"custom_id": "keep", "prompt": "\xc3("}',
        b'{"custom_id": "keep", "prompt": 1e999}',
        b'{"custom_id": "keep", "method": "POST"}',
    ],
)
def test_id_survives_a_bad_row(line):
    assert read_row(line, 0, "line-1").custom_id == "keep"
    refusal(line)


def test_row_without_a_form_is_answered_in_the_form_of_the_job():
    assert read_row(b"{", 0, "line-1", Form.CHAT).form is Form.CHAT
