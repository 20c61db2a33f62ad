from __future__ import annotations

import json

import pytest

from daskserve.batch.lines import read_row
from daskserve.batch.results import error_line, flat_record, success_line
from daskserve.core.request import Completion, FinishReason

COMPLETION = Completion("r1", "héllo", (1, 2, 3), FinishReason.LENGTH, 5)
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def row_of(url=None):
    line = {"custom_id": "a", "prompt": "x"}
    if url is not None:
        line = {"custom_id": "a", "method": "POST", "url": url, "body": {}}
    return read_row(json.dumps(line).encode(), 0, "line-1")


def test_plain_line():
    assert json.loads(success_line(row_of(), COMPLETION, "tiny")) == {
        "custom_id": "a",
        "text": "héllo",
        "finish_reason": "length",
        "usage": USAGE,
        "error": None,
    }


@pytest.mark.parametrize(
    ("url", "kind", "content"),
    [
        ("/v1/chat/completions", "chat.completion", {"message": {"role": "assistant"}}),
        ("/v1/completions", "text_completion", {"text": "héllo"}),
    ],
)
def test_openai_lines(url, kind, content):
    line = json.loads(success_line(row_of(url), COMPLETION, "tiny"))
    assert line.keys() == {"id", "custom_id", "response", "error"}
    assert line["error"] is None and line["response"]["status_code"] == 200
    assert line["response"]["request_id"] == "r1"
    body = line["response"]["body"]
    assert (body["object"], body["model"], body["usage"]) == (kind, "tiny", USAGE)
    choice = body["choices"][0]
    assert choice["finish_reason"] == "length" and choice["index"] == 0
    assert choice.keys() >= content.keys()
    assert choice.get("text", choice.get("message", {}).get("content")) == "héllo"


@pytest.mark.parametrize(
    ("code", "status"), [("context_length_exceeded", 400), ("engine_step_failed", 500)]
)
def test_openai_error_line_says_so_in_response_and_error(code, status):
    line = json.loads(error_line(row_of("/v1/completions"), code, "too long"))
    assert line["error"] == {"code": code, "message": "too long"}
    assert line["response"]["status_code"] == status
    assert line["response"]["body"]["error"]["code"] == code


@pytest.mark.parametrize("url", [None, "/v1/chat/completions", "/v1/completions"])
def test_every_line_has_the_same_flat_record(url):
    answered = flat_record(success_line(row_of(url), COMPLETION, "tiny"))
    failed = flat_record(error_line(row_of(url), "invalid_row", "why"))
    assert answered.keys() == failed.keys()
    assert answered["text"] == "héllo" and answered["completion_tokens"] == 3
    assert failed["error_message"] == "why" and failed["text"] is None


def test_one_row_has_one_name_however_often_it_is_computed():
    names = {json.loads(error_line(row_of("/v1/completions"), "c", m))["id"] for m in "ab"}
    assert len(names) == 1
