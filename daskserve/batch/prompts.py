"""A row's fields become a prompt and sampling parameters.

Whatever a row asks for and this engine cannot do is refused, never left out in silence.
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
    """The row itself cannot be read."""

    code = "invalid_row"


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


_PARAMS = tuple(SamplingParams.__dataclass_fields__)
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
    body = _without_neutral(row.body)
    if "prompt" in body and "messages" in body:
        raise RowError("prompt and messages are both given; a row has one of them")
    chat = row.form is Form.CHAT or (row.form is Form.PLAIN and "messages" in body)
    try:
        fields = (_Chat if chat else _Completion).model_validate(body)
    except ValidationError as error:
        raise RowError(explain(error, _Chat if chat else _Completion)) from None
    if fields.model is not None and fields.model != model:
        raise InvalidParameter("model", fields.model, f"is not served: this job runs {model}")
    if isinstance(fields, _Chat):
        prompt: Prompt = _checked_conversation(fields.messages)
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


def _checked_conversation(messages: Any) -> list[dict[str, str]]:
    checked = checked_messages(messages)
    for index, message in enumerate(messages):
        # tool_calls, name and the like change what the model should say.
        for name, value in message.items():
            if name not in _MESSAGE_FIELDS and value is not None:
                raise InvalidParameter(f"messages[{index}].{name}", value, "is not supported")
    return checked


def _checked_prompt(prompt: Any) -> Prompt:
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
