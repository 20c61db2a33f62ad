"""The bytes of tokens on their way from an instance straight to the caller.

A connection opens with the caller's secret; then come frames: a length, and a msgpack array.
Nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from daskserve.core.request import FinishReason, TokenDelta, TokenLogprob

SECRET_BYTES = 16
_LENGTH = struct.Struct("<I")
_MAX_FRAME_BYTES = 2**20


class MalformedFrame(ValueError):
    """The peer does not speak this protocol."""


@dataclass(frozen=True, slots=True)
class Sink:
    """Where a caller takes tokens, and the secret that a sender must show."""

    host: str
    port: int
    secret: bytes

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/{self.secret.hex()}"

    @classmethod
    def parse(cls, text: str) -> Sink:
        address, _, secret = text.rpartition("/")
        host, _, port = address.rpartition(":")
        return cls(host, int(port), bytes.fromhex(secret))


def pack(delta: TokenDelta) -> bytes:
    """One frame."""
    body = msgpack.packb(body_of(delta))
    return _LENGTH.pack(len(body)) + body


def body_of(delta: TokenDelta) -> list[Any]:
    """Plain values."""
    reason = delta.finish_reason.value if delta.finish_reason else None
    head = (delta.request_id, delta.first_index, delta.token_ids, delta.text)
    return [*head, reason, delta.logprobs]


def delta_of(body: Sequence[Any]) -> TokenDelta:
    """The opposite of `body_of` (TypeError, ValueError)."""
    request_id, first_index, token_ids, text, reason, logprobs = body
    if not (isinstance(request_id, str) and isinstance(text, str)):
        raise TypeError("a name or text that is not text")
    return TokenDelta(
        request_id,
        int(first_index),
        tuple(int(token_id) for token_id in token_ids),
        text,
        FinishReason(reason) if reason is not None else None,
        tuple(map(_logprob, logprobs)) if logprobs is not None else None,
    )


def _logprob(entry: Sequence[Any]) -> TokenLogprob:
    value, top = entry
    return TokenLogprob(float(value), tuple((int(i), float(v)) for i, v in top))


async def read(reader: asyncio.StreamReader) -> TokenDelta:
    """The next frame.

    Raises
    ------
    MalformedFrame
        Too long, or not a token delta.
    asyncio.IncompleteReadError
        The connection ended.
    """
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > _MAX_FRAME_BYTES:
        raise MalformedFrame(f"a frame of {size} bytes")
    body = await reader.readexactly(size)
    try:
        return delta_of(msgpack.unpackb(body))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedFrame(f"not a token delta: {error}") from None
