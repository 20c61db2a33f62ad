"""The fields of a row, or of an HTTP request's body, become a prompt and sampling parameters.

Whatever they ask for and this engine cannot do is refused, never left out in silence.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from daskserve.batch.lines import Form, Row, explain
from daskserve.core.params import SamplingParams
from daskserve.errors import InvalidParameter, RequestError
from daskserve.text.messages import checked_messages, checked_text

Prompt = str | list[int] | list[dict[str, str]]


class RowError(RequestError):
    """The row itself cannot be read; ``field`` is what is wrong with it, when it is one field."""

    code = "invalid_row"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


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
    messages: Any


class _Completion(_Sampling):
    prompt: Any


# Log-probabilities are for online answers only; their server reads the field itself.
_PARAMS = tuple(n for n in SamplingParams.__dataclass_fields__ if n != "logprobs")
_MESSAGE_FIELDS = {"role", "content"}


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
    is_chat = row.form is Form.CHAT or (row.form is Form.PLAIN and "messages" in row.body)
    given, params = read_body(row.body, is_chat, defaults, model)
    return (checked_conversation(given) if is_chat else checked_prompt(given)), params


def read_body(
    body: dict[str, Any], is_chat: bool, defaults: SamplingParams, model: str
) -> tuple[Any, SamplingParams]:
    """``messages`` or ``prompt`` as given, not yet checked, and the parameters.

    Parameters
    ----------
    body
        Fields of an OpenAI body for chat completions, or else for completions.
    defaults, model
        As for `prompt_of`.

    Raises
    ------
    RequestError
        An unknown, unsupported or wrong field.
    """
    body = _without_neutral(body)
    if "prompt" in body and "messages" in body:
        raise RowError("prompt and messages are both given; a row has one of them", "messages")
    form = _Chat if is_chat else _Completion
    try:
        fields = form.model_validate(body)
    except ValidationError as error:
        field = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise RowError(explain(error, form), field) from None
    if fields.model is not None and fields.model != model:
        raise InvalidParameter("model", fields.model, f"is not served: this job runs {model}")
    given = fields.messages if isinstance(fields, _Chat) else fields.prompt
    return given, _params_of(fields, defaults)


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


def checked_conversation(messages: Any) -> list[dict[str, str]]:
    """Messages with role and content alone (InvalidParameter)."""
    checked = checked_messages(messages)
    for index, message in enumerate(messages):
        # tool_calls, name and the like change what the model should say.
        for name, value in message.items():
            if name not in _MESSAGE_FIELDS and value is not None:
                raise InvalidParameter(f"messages[{index}].{name}", value, "is not supported")
    return checked


def checked_prompt(prompt: Any) -> str | list[int]:
    """One prompt, text or token ids (InvalidParameter)."""
    limit = "must be a string or a list of token ids, not empty"
    if isinstance(prompt, str) and prompt:
        return checked_text("prompt", prompt)
    if not isinstance(prompt, list) or not prompt:
        raise InvalidParameter("prompt", prompt, limit)
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in prompt):
        raise InvalidParameter("prompt", prompt, f"{limit}; several prompts need several rows")
    return prompt


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
