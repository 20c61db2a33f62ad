"""Bodies of ``/v1/completions`` and ``/v1/chat/completions`` become an `Ask`, or a refusal.

What online requests have beyond batch rows is read here, everything else by the rows' own
reader, so that one body means the same on both ways.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from daskserve.batch.prompts import Prompt, checked_conversation, checked_prompt, read_body
from daskserve.config import ServeSettings
from daskserve.core.params import MAX_LOGPROBS, MAX_SEED, SamplingParams
from daskserve.errors import InvalidParameter
from daskserve.server.errors import Refusal

_COMPLETION_TOKENS = 16  # OpenAI's default
_LIMITS = ("max_tokens", "max_completion_tokens")
_STREAM_OPTIONS = (
    "include_usage", "continuous_usage_stats", "include_timeline", "include_obfuscation",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ask:
    """What one HTTP request wants.

    Parameters
    ----------
    prompts
        One for chats, one or more for completions, as the service takes them.
    params
        For every answer; ``is_limited`` when the caller set ``max_tokens`` itself.
    num_choices
        Answers per prompt, ``n``.
    echo
        Begin the text with the prompt.
    include_usage, usage_on_every_chunk
        Of ``stream_options``.
    include_timeline
        Of ``stream_options``, an extension: the chunk with the usage tells the stages too.
    """

    is_chat: bool
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    is_limited: bool = True
    num_choices: int = 1
    is_stream: bool = False
    include_usage: bool = False
    usage_on_every_chunk: bool = False
    include_timeline: bool = False
    echo: bool = False

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.num_choices


def default_params(is_chat: bool, limits: ServeSettings) -> SamplingParams:
    """What a request that says nothing gets: OpenAI's defaults, where it has any."""
    max_tokens = limits.default_max_tokens if is_chat else _COMPLETION_TOKENS
    return SamplingParams(max_tokens=max_tokens, temperature=1.0)


def read_ask(body: Any, is_chat: bool, model: str, limits: ServeSettings) -> Ask:
    """Read a parsed body.

    Parameters
    ----------
    body
        As JSON gave it, of any type.
    model
        The name that is served; a body may name no other.
    limits
        Caps on counts and lengths.

    Raises
    ------
    RequestError, Refusal
        Names the field, the value and what is allowed.
    """
    if not isinstance(body, dict):
        raise Refusal(400, "the body must be a JSON object")
    rest = dict(body)
    _check_model(rest.pop("model", None), model)
    is_stream = _flag(rest, "stream")
    options = _stream_options(rest.pop("stream_options", None), is_stream)
    num_choices = _count(rest, "n", 1, 1, limits.max_sequences)
    _check_best_of(rest, num_choices)
    logprobs = _chat_logprobs(rest) if is_chat else _completion_logprobs(rest)
    is_limited = any(rest.get(name) is not None for name in _LIMITS)
    echo = False if is_chat else _flag(rest, "echo")
    if echo and logprobs is not None:
        raise InvalidParameter("logprobs", logprobs, "cannot be given for an echoed prompt")
    given, params = read_body(rest, is_chat, default_params(is_chat, limits), model)
    params = replace(params, logprobs=logprobs)
    if is_chat:
        prompts: tuple[Prompt, ...] = (checked_conversation(given),)
    else:
        prompts = _several(given, limits.max_sequences)
    _check_size(prompts, is_chat, limits.max_prompt_chars)
    ask = Ask(is_chat, prompts, params, is_limited, num_choices, is_stream, *options, echo)
    if ask.num_sequences > limits.max_sequences:
        limit = f"times {len(prompts)} prompts must be at most {limits.max_sequences}"
        raise InvalidParameter("n", num_choices, limit)
    return ask


def seed_of_choice(seed: int, choice: int) -> int:
    """Choices of one prompt differ, and with the request's seed are the same ones again."""
    return (seed + choice) % (MAX_SEED + 1)


def _check_model(given: Any, model: str) -> None:
    if given is not None and given != model:
        shown = given[:80] if isinstance(given, str) else type(given).__name__
        message = f"model {shown!r} is not served; {model} is"
        raise Refusal(404, message, "model", "model_not_found")


def _flag(rest: dict[str, Any], name: str) -> bool:
    value = rest.pop(name, None)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidParameter(name, value, "must be true or false")
    return value


def _count(rest: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = rest.pop(name, None)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidParameter(name, value, f"must be an integer of {low}..{high}")
    return value


def _check_best_of(rest: dict[str, Any], num_choices: int) -> None:
    best_of = rest.pop("best_of", None)
    if best_of is not None and (isinstance(best_of, bool) or best_of != num_choices):
        raise InvalidParameter("best_of", best_of, "is not supported beyond n; leave it out")


def _chat_logprobs(rest: dict[str, Any]) -> int | None:
    is_wanted = _flag(rest, "logprobs")
    num_top = _count(rest, "top_logprobs", -1, 0, MAX_LOGPROBS)
    if num_top > 0 and not is_wanted:
        raise InvalidParameter("top_logprobs", num_top, "needs logprobs: true")
    return max(num_top, 0) if is_wanted else None


def _completion_logprobs(rest: dict[str, Any]) -> int | None:
    if rest.get("logprobs") is False:
        del rest["logprobs"]
    num_top = _count(rest, "logprobs", -1, 0, MAX_LOGPROBS)
    return num_top if num_top >= 0 else None


def _stream_options(given: Any, is_stream: bool) -> tuple[bool, bool, bool]:
    """``include_usage``, ``continuous_usage_stats`` and ``include_timeline``."""
    if given is None:
        return False, False, False
    if not is_stream:
        raise InvalidParameter("stream_options", given, "needs stream: true")
    if not isinstance(given, dict):
        raise InvalidParameter("stream_options", given, "must be an object")
    options = dict(given)
    include, everywhere, timeline, padded = (_flag(options, name) for name in _STREAM_OPTIONS)
    if options:
        name = next(iter(options))
        limit = f"is not known; known are {', '.join(_STREAM_OPTIONS)}"
        raise InvalidParameter(f"stream_options.{name}", options[name], limit)
    if padded:
        raise InvalidParameter("stream_options.include_obfuscation", True, "is not supported")
    return include or everywhere or timeline, everywhere, timeline


def _several(prompt: Any, most: int) -> tuple[Prompt, ...]:
    """One prompt, or a list of texts or of lists of token ids."""
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], str | list):
        return (checked_prompt(prompt),)
    if len(prompt) > most:
        raise InvalidParameter("prompt", f"list of {len(prompt)}", f"may hold at most {most}")
    return tuple(checked_prompt(one) for one in prompt)


def _check_size(prompts: tuple[Prompt, ...], is_chat: bool, most: int) -> None:
    # A token id stands for a character at the least.
    num_chars = sum(_num_chars(prompt) for prompt in prompts)
    if num_chars > most:
        field = "messages" if is_chat else "prompt"
        limit = f"may hold at most {most} (setting serve.max-prompt-chars)"
        raise InvalidParameter(field, f"{num_chars} characters", limit)


def _num_chars(prompt: Prompt) -> int:
    if isinstance(prompt, list) and isinstance(prompt[0], dict):
        return sum(len(message["content"]) for message in prompt)
    return len(prompt)
