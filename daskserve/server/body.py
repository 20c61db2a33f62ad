"""Reading a request's body: never more bytes, levels or seconds than allowed."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from daskserve.server.errors import Refusal


async def read_body(scope: Scope, receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """The body of a request that says it is JSON.

    Raises
    ------
    Refusal
        Of another type, too large, or too slow.
    ClientDisconnect
        The client left before the body was complete.
    """
    headers = Headers(scope=scope)
    check_length(headers, max_bytes)
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        message = "the content type must be application/json"
        raise Refusal(415, message, code="unsupported_media_type")
    if headers.get("content-encoding", "identity") != "identity":
        raise Refusal(415, "a compressed body is not read", code="unsupported_media_type")
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, max_bytes)
    except TimeoutError:
        message = f"the body was not complete within {timeout_s:g} s"
        raise Refusal(408, message, code="request_timeout") from None


def parsed(data: bytes) -> Any:
    """JSON (Refusal); orjson takes no NaN and no more than about a thousand levels."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        message = f"the body is not JSON: {error.msg} at character {error.pos + 1}"
        raise Refusal(400, message, code="invalid_json") from None


def check_length(headers: Headers, max_bytes: int) -> None:
    """Refuse by what the client announces, before reading any of it."""
    announced = headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large(max_bytes)


def too_large(max_bytes: int) -> Refusal:
    return Refusal(413, f"the body may have at most {max_bytes} bytes", code="body_too_large")


async def _read(receive: Receive, max_bytes: int) -> bytes:
    chunks, num_bytes = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        chunks.append(chunk)
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise too_large(max_bytes)
        if not message.get("more_body", False):
            return b"".join(chunks)
