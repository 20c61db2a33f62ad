"""OpenAI's response objects, whole and in chunks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import orjson
from starlette.responses import Response

from daskserve.core.request import FinishReason


class JSON(Response):
    """A response whose content is JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a response, all its prompts and choices together."""

    num_prompt_tokens: int
    num_output_tokens: int

    def shape(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
        }


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one choice: some of it in a chunk, or all of it.

    Parameters
    ----------
    index
        Of the choice.
    is_first
        Nothing of this choice was sent before.
    logprobs
        In the shape of the endpoint, or None.
    """

    index: int
    text: str
    finish_reason: FinishReason | None
    is_first: bool = False
    logprobs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is the same in every chunk of one response."""

    is_chat: bool
    model: str
    response_id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        object.__setattr__(self, "response_id", self.response_id or f"{prefix}-{uuid4().hex}")

    def whole(self, pieces: list[Piece], usage: Usage) -> dict[str, Any]:
        """The response of a request that does not stream."""
        choices = [self._choice(piece) for piece in pieces]
        if self.is_chat:
            for choice, piece in zip(choices, pieces, strict=True):
                choice["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
        else:
            for choice, piece in zip(choices, pieces, strict=True):
                choice["text"] = piece.text
        return self._wrapped("chat.completion", choices) | {"usage": usage.shape()}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """One event of a stream."""
        choice = self._choice(piece)
        if self.is_chat:
            role = {"role": "assistant"} if piece.is_first else {}
            choice["delta"] = role | {"content": piece.text}
        else:
            choice["text"] = piece.text
        return self._wrapped("chat.completion.chunk", [choice])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last event, when usage is asked for."""
        return self._wrapped("chat.completion.chunk", []) | {"usage": usage.shape()}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        reason = piece.finish_reason.value if piece.finish_reason else None
        return {"index": piece.index, "logprobs": piece.logprobs, "finish_reason": reason}

    def _wrapped(self, chat_object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": chat_object if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
