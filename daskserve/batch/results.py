"""A finished row becomes its output line, in the form in which the row came in."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import orjson

from daskserve.batch.lines import Form, Row
from daskserve.core.request import Completion

# The row was never tried, so there is no response: as OpenAI has it.
_UNTRIED_CODES = ("batch_expired", "batch_cancelled")
# Not the row's words are wrong: answering it failed.
_SERVER_CODES = ("engine_step_failed", "deadline_exceeded", "killed_instance", "internal_error")


def success_line(row: Row, completion: Completion, model: str) -> bytes:
    """The answer as one JSON line: OpenAI Batch output, or a flat plain object."""
    usage = {
        "prompt_tokens": completion.num_prompt_tokens,
        "completion_tokens": completion.num_output_tokens,
        "total_tokens": completion.num_prompt_tokens + completion.num_output_tokens,
    }
    finish_reason = completion.finish_reason.value
    if row.form is Form.PLAIN:
        return _dump(
            {
                "custom_id": row.custom_id,
                "text": completion.text,
                "finish_reason": finish_reason,
                "usage": usage,
                "error": None,
            }
        )
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
    if row.form is Form.CHAT:
        choice["message"] = {"role": "assistant", "content": completion.text}
    else:
        choice["text"] = completion.text
    is_chat = row.form is Form.CHAT
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{completion.request_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": usage,
    }
    return _openai_line(row, 200, completion.request_id, body, None)


def error_line(row: Row, code: str, message: str) -> bytes:
    """An error line; in OpenAI's form the error stands in ``response`` and in ``error``."""
    error = {"code": code, "message": message}
    if row.form is Form.PLAIN:
        blank = {"text": None, "finish_reason": None, "usage": None}
        return _dump({"custom_id": row.custom_id, **blank, "error": error})
    if code in _UNTRIED_CODES:
        name = _name_of(row)
        line = {"id": f"batch_req_{name}", "custom_id": row.custom_id, "response": None}
        return _dump({**line, "error": error})
    status = 500 if code in _SERVER_CODES else 400
    kind = "server_error" if status == 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return _openai_line(row, status, "", body, error)


def _openai_line(
    row: Row, status: int, request_id: str, body: dict[str, Any], error: dict[str, str] | None
) -> bytes:
    name = _name_of(row)
    response = {"status_code": status, "request_id": request_id or f"req_{name}", "body": body}
    line = {"id": f"batch_req_{name}", "custom_id": row.custom_id, "response": response}
    return _dump({**line, "error": error})


def _name_of(row: Row) -> str:
    """Derived from the id alone, so that a row computed twice has one name."""
    return hashlib.blake2b(row.custom_id.encode(), digest_size=12).hexdigest()


def _dump(record: dict[str, Any]) -> bytes:
    return orjson.dumps(record) + b"\n"


def flat_record(line: bytes) -> dict[str, Any]:
    """An output line of either form as one flat row of the parquet schema."""
    record = orjson.loads(line)
    text, finish_reason, usage = None, None, None
    if "response" in record:
        if record["error"] is None:
            body = record["response"]["body"]
            choice = body["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            finish_reason, usage = choice["finish_reason"], body["usage"]
    else:
        text, finish_reason, usage = record["text"], record["finish_reason"], record["usage"]
    error = record["error"] or {}
    return {
        "custom_id": record["custom_id"],
        "text": text,
        "finish_reason": finish_reason,
        "prompt_tokens": usage and usage["prompt_tokens"],
        "completion_tokens": usage and usage["completion_tokens"],
        "error_code": error.get("code"),
        "error_message": error.get("message"),
    }
