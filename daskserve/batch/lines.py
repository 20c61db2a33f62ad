"""One input line becomes a row: its id, its form and its fields, as far as it can be read.

Two forms are read: OpenAI Batch lines (``custom_id, method, url, body``) for chat completions
and completions, and plain ``{"prompt": ...}`` or ``{"messages": ...}`` objects.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from daskserve.errors import InvalidParameter

MAX_ID_CHARS = 512
COMPLETION_URL = "/v1/completions"


class Form(StrEnum):
    """How a row came in, and so how its answer goes out."""

    PLAIN = "plain"
    CHAT = "chat"
    COMPLETION = "completion"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the input, before its content is judged.

    Parameters
    ----------
    number
        Position among the rows from 0, whatever the partitions.
    custom_id
        The row's own id, or one made of its line or row number.
    form
        Decides the form of the output line.
    body
        The fields that hold prompt and parameters.
    problem
        What makes the row unreadable, or None.
    """

    number: int
    custom_id: str
    form: Form
    body: dict[str, Any]
    problem: str | None = None


class _OpenAILine(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    custom_id: Any
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


def read_row(line: bytes, number: int, default_id: str, fallback: Form = Form.PLAIN) -> Row:
    """Read a line as far as it can be read; the id survives when anything does.

    ``fallback`` is the form in which a line that says nothing of its form is answered.
    """
    try:
        record, problem = _loads(line)
    except ValueError as error:
        return Row(number, default_id, fallback, {}, f"not JSON: {error}")
    if not isinstance(record, dict):
        problem = f"must be a JSON object, not {_kind_of(record)}"
        return Row(number, default_id, fallback, {}, problem)
    custom_id, id_problem = _read_id(record.get("custom_id"), default_id)
    problem = problem or id_problem
    if not record.keys() & {"method", "url", "body"}:
        body = {name: value for name, value in record.items() if name != "custom_id"}
        return Row(number, custom_id, Form.PLAIN, body, problem)
    form = Form.COMPLETION if record.get("url") == COMPLETION_URL else Form.CHAT
    if problem is None:
        problem = _line_problem(record)
    body = record["body"] if problem is None else {}
    return Row(number, custom_id, form, body, problem)


def _loads(line: bytes) -> tuple[Any, str | None]:
    """Strict JSON; what is not, is read leniently so that the id and the bad field are known."""
    try:
        return orjson.loads(line), None
    except orjson.JSONDecodeError as error:
        reason = error
    try:
        line.decode()
        problem = None
    except UnicodeDecodeError as error:
        problem = f"not UTF-8: byte {error.start + 1} of the line"
    try:
        return json.loads(line.decode("utf-8", "surrogateescape")), problem
    except (ValueError, RecursionError):
        raise ValueError(f"{reason.msg} at character {reason.pos + 1}") from None


def _kind_of(value: Any) -> str:
    kinds = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _read_id(given: Any, default_id: str) -> tuple[str, str | None]:
    if given is None:
        return default_id, None
    limit = f"must be a string of 1..{MAX_ID_CHARS} characters without lone surrogates"
    if isinstance(given, str) and 1 <= len(given) <= MAX_ID_CHARS and not _has_surrogates(given):
        return given, None
    return default_id, str(InvalidParameter("custom_id", given, limit))


def _line_problem(record: dict[str, Any]) -> str | None:
    try:
        _OpenAILine.model_validate(record)
    except ValidationError as error:
        return explain(error, _OpenAILine)
    return None


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= c <= "\udfff" for c in text)


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first three problems in one line, each with field, value and limit."""
    problems = []
    for detail in error.errors()[:3]:
        name = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "missing":
            problems.append(f"{name} is missing")
        elif detail["type"] == "extra_forbidden":
            valid = list(model.model_fields)
            near = difflib.get_close_matches(name, valid, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(valid)}"
            problems.append(f"{name} is not known; {hint}")
        else:
            limit = detail["msg"].removeprefix("Input ")
            problems.append(str(InvalidParameter(name, detail["input"], limit)))
    return "; ".join(problems)
