"""Server-sent events, from the bytes of a stream to the tokens, counts and ends in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

MAX_EVENT_BYTES = 4 * 2**20
_DATA = b"data:"


class BadAnswer(Exception):
    """The server's answer cannot be understood."""


class EventReader:
    """Cuts a stream of bytes into the payloads of its events; comments and other fields go."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise BadAnswer(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(_DATA):
                yield line[len(_DATA) :].strip()


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one event says.

    Parameters
    ----------
    has_choice
        It belongs to an answer, so the first such event is the first token.
    is_token
        It carries a token: not the mere role at the start, nor the mere reason at the end.
    is_end
        The answer has its finish reason.
    usage
        ``(prompt tokens, output tokens)``, where the event has it.
    stages_s
        Seconds in each of the stages, where the event has them.
    """

    has_choice: bool = False
    is_token: bool = False
    is_end: bool = False
    usage: tuple[int, int] | None = None
    stages_s: tuple[float, ...] | None = None


class ErrorEvent(Exception):
    """The server ends the stream with an error; ``code`` is its code or type."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def read_chunk(payload: bytes, stages: tuple[str, ...]) -> Chunk:
    """Read an event's JSON (BadAnswer, ErrorEvent)."""
    try:
        event = orjson.loads(payload)
        if "error" in event or event.get("object") == "error":  # two shapes are about
            raise ErrorEvent(*error_of(event))
        usage = event.get("usage")
        timeline = event["daskserve"]["timelines"][0] if "daskserve" in event else None
        return Chunk(
            *_choice(event["choices"]),
            usage=(usage["prompt_tokens"], usage["completion_tokens"]) if usage else None,
            stages_s=tuple(float(timeline[stage]) for stage in stages) if timeline else None,
        )
    except (ValueError, TypeError, KeyError, LookupError, AttributeError) as error:
        shown = payload[:60].decode(errors="replace")
        raise BadAnswer(f"not a chunk of an answer: {shown!r} ({type(error).__name__})") from None


def _choice(choices: list[dict[str, Any]]) -> tuple[bool, bool, bool]:
    if not choices:
        return False, False, False
    choice = choices[0]
    delta = choice.get("delta") or {}
    is_end = choice.get("finish_reason") is not None
    has_text = bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content"))
    # A token may have no text yet, half a character; then there is no role beside it either.
    return True, has_text or not (is_end or "role" in delta), is_end


def error_of(body: Any) -> tuple[str, str]:
    """``(code, message)`` of an OpenAI error object, or of what other servers send for one."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return "", str(error)
    code = error.get("code") or error.get("type") or ""
    return str(code), str(error.get("message", ""))
