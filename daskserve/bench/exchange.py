"""One request over HTTP: sent, read to its end, and whatever goes wrong given a name."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import orjson

from daskserve.bench.events import BadAnswer, ErrorEvent, EventReader, error_of, read_chunk
from daskserve.bench.record import OK, STAGES, Record
from daskserve.bench.target import Target

_MAX_ERROR_BYTES = 64 * 1024
_MAX_MESSAGE_CHARS = 300
_DONE = b"[DONE]"


class Failure(Exception):
    """A request that failed: ``kind`` is what failures are counted by."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message[:_MAX_MESSAGE_CHARS])
        self.kind = kind


class Connections:
    """Connections to one server that are idle, the latest first.

    One client per connection: choosing among thousands takes no longer than among two.
    """

    def __init__(self, target: Target) -> None:
        self._target, self._verify = target, target.verify()
        self._idle: list[httpx.AsyncClient] = []

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[httpx.AsyncClient]:
        client = self._idle.pop() if self._idle else self._target.client(self._verify)
        try:
            yield client
        except asyncio.CancelledError:  # in the middle of anything
            await client.aclose()
            raise
        except BaseException:
            self._idle.append(client)  # a refusal, or the client connects again
            raise
        self._idle.append(client)

    async def aclose(self) -> None:
        while self._idle:
            await self._idle.pop().aclose()


async def exchange(
    connections: Connections,
    target: Target,
    body: bytes,
    record: Record,
    started_at: float,
    timeout_s: float,
) -> None:
    """Send a request and fill its record; every failure becomes the record's status.

    Parameters
    ----------
    started_at
        ``time.monotonic()`` at which the run's seconds begin.
    timeout_s
        For the whole answer.
    """
    record.sent_s = time.monotonic() - started_at
    try:
        async with asyncio.timeout(timeout_s), connections.lease() as client:
            await _answer(client, target, body, record, started_at)
        record.status = OK
    except Exception as error:
        failure = failure_of(error, timeout_s)
        record.status, record.message = failure.kind, str(failure)
    finally:
        record.end_s = time.monotonic() - started_at


async def _answer(
    client: httpx.AsyncClient, target: Target, body: bytes, record: Record, started_at: float
) -> None:
    async with client.stream("POST", target.path, content=body) as response:
        if response.status_code != 200:
            raise await refusal_of(response)
        is_over = await _read(response, record, started_at)
    if not is_over:
        raise Failure("broken off", "the stream ended without a finish reason")


async def _read(response: httpx.Response, record: Record, started_at: float) -> bool:
    """Read the events; whether the answer came to its end."""
    reader = EventReader()
    num_tokens, is_over, usage = 0, False, None
    async for data in response.aiter_raw():
        now_s = time.monotonic() - started_at
        for payload in reader.feed(data):
            if payload == _DONE:
                is_over = True
                continue
            chunk = read_chunk(payload, STAGES)
            usage = chunk.usage or usage
            record.stages_s = chunk.stages_s or record.stages_s
            is_over = is_over or chunk.is_end
            if not chunk.has_choice:
                continue
            if record.first_s != record.first_s:
                record.first_s = now_s
            if chunk.is_token and num_tokens:
                record.gaps_s.append(now_s - record.last_s)
            num_tokens += chunk.is_token
            record.last_s = now_s
    if usage is not None:
        record.prompt_tokens, record.output_tokens = usage
    else:
        record.output_tokens = num_tokens
    return is_over


async def refusal_of(response: httpx.Response) -> Failure:
    """An answer with an error status: named by it and by the code that it carries."""
    data = b""
    async for part in response.aiter_bytes():
        data += part
        if len(data) > _MAX_ERROR_BYTES:
            break
    try:
        code, message = error_of(orjson.loads(data))
    except orjson.JSONDecodeError:
        code, message = "", data[:_MAX_MESSAGE_CHARS].decode(errors="replace")
    status = str(response.status_code)
    return Failure(f"{status} {code}" if code not in ("", status) else status, message)


def failure_of(error: Exception, timeout_s: float) -> Failure:
    """The kind of an exception."""
    match error:
        case Failure():
            return error
        case TimeoutError():
            return Failure("timeout", f"no complete answer within {timeout_s:g} s")
        case ErrorEvent():
            return Failure(f"error event {error.code}".strip(), str(error))
        case BadAnswer():
            return Failure("bad answer", str(error))
        case httpx.ConnectError() if _errno(error) in (errno.EMFILE, errno.ENFILE):
            return Failure("no more sockets here", "raise the limit on open files (ulimit -n)")
        case httpx.ConnectError():
            return Failure("unreachable", str(error))
        case httpx.TransportError():
            return Failure("broken off", f"{type(error).__name__}: {error}")
    return Failure("client error", f"{type(error).__name__}: {error}")


def _errno(error: BaseException) -> int | None:
    """Of the first system error that caused it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause.errno
        cause = cause.__cause__ or cause.__context__
    return None
