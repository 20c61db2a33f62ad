"""One input line becomes a row: its id, its prompt and its sampling parameters.

Two forms are read: OpenAI Batch lines (``custom_id, method, url, body``) for chat completions
and completions, and plain ``{"prompt": ...}`` or ``{"messages": ...}`` objects. Whatever a line
asks for and this engine cannot do is refused, never left out in silence.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from daskserve.core.params import SamplingParams
from daskserve.errors import InvalidParameter, RequestError

MAX_ID_CHARS = 512
MAX_MESSAGES = 4096
CHAT_URL = "/v1/chat/completions"
COMPLETION_URL = "/v1/completions"

Prompt = str | list[int] | list[dict[str, str]]


class Form(StrEnum):
    """How a row came in, and so how its answer goes out."""

    PLAIN = "plain"
    CHAT = "chat"
    COMPLETION = "completion"


class RowError(RequestError):
    """The row itself cannot be read."""

    code = "invalid_row"


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


# Fields of the OpenAI bodies that this engine does not have, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "stream_options": (),
    "logprobs": (False,),
    "top_logprobs": (),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "reasoning_effort": (),
}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "user", "assistant"]
    content: Any
    name: None = None


class _Sampling(BaseModel):
    """Values are judged by SamplingParams, which names field, value and limit."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    seed: Any = None
    stop: Any = None
    ignore_eos: Any = None
    user: Any = None
    metadata: Any = None


class _Chat(_Sampling):
    messages: list[_Message] = Field(min_length=1, max_length=MAX_MESSAGES)


class _Completion(_Sampling):
    prompt: Any


class _OpenAILine(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    custom_id: Any
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


_PARAMS = tuple(SamplingParams.__dataclass_fields__)


def read_row(line: bytes, number: int, default_id: str, fallback: Form = Form.PLAIN) -> Row:
    """Read a line as far as it can be read; the id survives when anything does.

    ``fallback`` is the form in which a line that says nothing of its form is answered.
    """
    try:
        record = _loads(line)
    except ValueError as error:
        return Row(number, default_id, fallback, {}, f"not JSON: {error}")
    if not isinstance(record, dict):
        return Row(
            number, default_id, fallback, {}, f"must be a JSON object, not {_kind_of(record)}"
        )
    custom_id, problem = _read_id(record.get("custom_id"), default_id)
    if not record.keys() & {"method", "url", "body"}:
        body = {name: value for name, value in record.items() if name != "custom_id"}
        return Row(number, custom_id, Form.PLAIN, body, problem)
    form = Form.COMPLETION if record.get("url") == COMPLETION_URL else Form.CHAT
    if problem is None:
        problem = _line_problem(record)
    body = record["body"] if problem is None else {}
    return Row(number, custom_id, form, body, problem)


def _loads(line: bytes) -> Any:
    """Strict JSON; what is not, is read leniently so that the id and the bad field are known."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        reason = error
    try:
        return json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        raise ValueError(f"{reason.msg} at character {reason.pos}") from None


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
        return _explain(error, _OpenAILine)
    return None


def prompt_of(row: Row, defaults: SamplingParams, model: str) -> tuple[Prompt, SamplingParams]:
    """The prompt and parameters of a row, checked.

    Parameters
    ----------
    row
        As `read_row` gave it.
    defaults
        Parameters of the job; the row's own fields override them.
    model
        Name of the model that the job runs; a row may name no other.

    Raises
    ------
    RequestError
        Every message names the field, the value and what is allowed.
    """
    if row.problem is not None:
        raise RowError(row.problem)
    body = _without_neutral(row.body)
    chat = row.form is Form.CHAT or (row.form is Form.PLAIN and "messages" in body)
    if chat and "prompt" in body:
        raise RowError("prompt and messages are both given; a row has one of them")
    try:
        fields = (_Chat if chat else _Completion).model_validate(body)
    except ValidationError as error:
        raise RowError(_explain(error, _Chat if chat else _Completion)) from None
    if fields.model is not None and fields.model != model:
        raise InvalidParameter("model", fields.model, f"is not served: this job runs {model}")
    if isinstance(fields, _Chat):
        prompt: Prompt = [_message(i, m) for i, m in enumerate(fields.messages)]
    else:
        prompt = _checked_prompt(fields.prompt)
    return prompt, _params_of(fields, defaults)


def _without_neutral(body: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in body.items():
        if name not in NEUTRAL:
            kept[name] = value
        elif value is not None and not _is_any_of(value, NEUTRAL[name]):
            shown = " or ".join(json.dumps(v) for v in NEUTRAL[name])
            limit = f"leave it out or use {shown}" if shown else "leave it out"
            raise InvalidParameter(name, value, f"is not supported; {limit}")
    return kept


def _is_any_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    # True == 1 in Python, but `logprobs: 0` and `logprobs: false` are different requests.
    return any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed)


def _message(index: int, message: _Message) -> dict[str, str]:
    field = f"messages[{index}].content"
    content = message.content
    if isinstance(content, list):
        try:
            content = "".join(_Part.model_validate(part).text for part in content)
        except ValidationError as error:
            raise RowError(f"{field}: {_explain(error, _Part)}") from None
    if not isinstance(content, str):
        raise InvalidParameter(field, content, "must be a string or a list of text parts")
    return {"role": message.role, "content": _checked_text(field, content)}


def _checked_prompt(prompt: Any) -> Prompt:
    limit = "must be a string or a list of token ids, not empty"
    if isinstance(prompt, str) and prompt:
        return _checked_text("prompt", prompt)
    if not isinstance(prompt, list) or not prompt:
        raise InvalidParameter("prompt", prompt, limit)
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in prompt):
        raise InvalidParameter("prompt", prompt, f"{limit}; several prompts need several rows")
    return prompt


def _checked_text(field: str, text: str) -> str:
    if _has_surrogates(text):
        raise InvalidParameter(field, text, "must not hold lone surrogates or invalid UTF-8")
    return text


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= c <= "\udfff" for c in text)


def _params_of(fields: _Sampling, defaults: SamplingParams) -> SamplingParams:
    given = {name: getattr(fields, name) for name in _PARAMS}
    limit = fields.max_completion_tokens
    if limit is not None:
        if given["max_tokens"] is not None and given["max_tokens"] != limit:
            raise InvalidParameter(
                "max_completion_tokens", limit, f"differs from max_tokens={given['max_tokens']!r}"
            )
        given["max_tokens"] = limit
    return replace(defaults, **{k: v for k, v in given.items() if v is not None})


def _explain(error: ValidationError, model: type[BaseModel]) -> str:
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
