"""The caller's end of token streams: one listener per service, one stream per request."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future as ThreadFuture
from contextlib import suppress
from dataclasses import replace
from functools import partial
from ssl import SSLContext

from distributed.comm import Comm, get_address_host
from distributed.utils import get_ip
from tornado.ioloop import IOLoop

from daskserve.core.request import Completion, TokenDelta
from daskserve.errors import AnswerDiverged, RequestCancelled
from daskserve.service import token_wire
from daskserve.service.names import request_of_run
from daskserve.service.token_wire import SECRET_BYTES, Sink

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 5.0


class TokenStream(AsyncIterator[TokenDelta], Iterator[TokenDelta]):
    """Tokens of one request in order, each once; ``async for`` and ``for`` both work.

    A retry sends tokens again: what is known already is dropped. What was lost on the way is
    filled in from the result, so the texts joined are always the text of the completion.
    Dropping the stream, or `aclose`, cancels the request.

    Parameters
    ----------
    abandon
        Cancels the request; must not refer to the stream.
    """

    def __init__(self, abandon: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._early: dict[int, TokenDelta] = {}
        self._ready: deque[TokenDelta | BaseException] = deque()
        self._wake: Callable[[], object] | None = None  # of a reader that waits
        self._outcome: ThreadFuture[Completion] = ThreadFuture()
        self._next_index = 0
        self._num_chars = 0
        self._emitted: list[TokenDelta] = []  # while it may have to go on elsewhere
        self._is_over = False
        self._abandon = weakref.finalize(self, abandon)
        self._abandon.atexit = False

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenDelta:
        while True:
            with self._lock:
                if self._ready:
                    item = self._pop()
                    break
                arrival = asyncio.get_running_loop().create_future()
                self._wake = partial(_settle, arrival)
            await arrival
        if isinstance(item, StopIteration):
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            raise item
        return item

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> TokenDelta:
        while True:
            with self._lock:
                if self._ready:
                    item = self._pop()
                    break
                arrival = threading.Event()
                self._wake = arrival.set
            arrival.wait()
        if isinstance(item, BaseException):
            raise item
        return item

    async def completion(self) -> Completion:
        """The whole answer, once the request has ended; raises what iterating would raise.

        RequestCancelled when the stream was closed before. Nobody needs to have read the tokens.
        """
        return await asyncio.shield(asyncio.wrap_future(self._outcome))

    async def aclose(self) -> None:
        """Stop listening; cancels the request if it is not done."""
        self.close()

    def close(self) -> None:
        """The same from synchronous code."""
        with self._lock:
            if not self._is_over:
                self._outcome.set_exception(RequestCancelled("the stream was closed"))
            self._end(StopIteration())
        self._abandon()

    # The service's side, on the client's event loop.

    def put(self, delta: TokenDelta) -> None:
        """A delta has come, perhaps out of order or for the second time."""
        with self._lock:
            if delta.first_index >= self._next_index and not self._is_over:
                self._early.setdefault(delta.first_index, delta)
                while (following := self._early.pop(self._next_index, None)) is not None:
                    self._emit(following)

    def so_far(self) -> TokenDelta | None:
        """All that was emitted, as one delta; None when nothing was.

        For between two runs of a request: what came ahead of its turn is of the earlier one, and
        is forgotten.
        """
        with self._lock:
            self._early.clear()
            deltas = self._emitted
            if not deltas:
                return None
            merged = _merged(deltas)
            self._emitted = [merged]
            return merged

    def finish(self, completion: Completion) -> None:
        """The result is there: emit what has not come, and end."""
        with self._lock:
            if self._is_over:
                return
            if not self._agrees_with(completion):
                self._fail(AnswerDiverged("after a fault the tokens came out differently"))
                return
            rest = completion.token_ids[self._next_index :]
            if rest:
                self._emit(
                    TokenDelta(
                        completion.request_id,
                        self._next_index,
                        rest,
                        completion.text[self._num_chars :],
                        completion.finish_reason,
                        completion.logprobs and completion.logprobs[self._next_index :],
                    )
                )
            self._outcome.set_result(completion)
            self._end(StopIteration())
        self._abandon.detach()

    def fail(self, error: BaseException) -> None:
        """The request failed: the reader gets the error after the tokens that did come."""
        with self._lock:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._is_over:
            self._outcome.set_exception(error)
        self._end(error)
        self._abandon.detach()

    def _agrees_with(self, completion: Completion) -> bool:
        ids = [i for delta in self._emitted for i in delta.token_ids]
        return tuple(ids) == completion.token_ids[: len(ids)]

    def _emit(self, delta: TokenDelta) -> None:
        self._next_index = delta.first_index + len(delta.token_ids)
        self._num_chars += len(delta.text)
        self._emitted.append(delta)
        self._hand_out(delta)

    def _end(self, reason: BaseException) -> None:
        if not self._is_over:
            self._is_over = True
            self._emitted.clear()
            self._hand_out(reason)

    def _hand_out(self, item: TokenDelta | BaseException) -> None:
        self._ready.append(item)
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def _pop(self) -> TokenDelta | BaseException:
        # The end stays, for whoever asks again.
        return self._ready.popleft() if isinstance(self._ready[0], TokenDelta) else self._ready[0]


def _settle(arrival: asyncio.Future[None]) -> None:
    """From any thread; without a detour when the reader is on this very event loop."""
    loop = arrival.get_loop()
    try:
        is_here = asyncio.get_running_loop() is loop
    except RuntimeError:
        is_here = False
    if not is_here:
        with suppress(RuntimeError):  # the reader's loop is closed
            loop.call_soon_threadsafe(_settle, arrival)
    elif not arrival.done():
        arrival.set_result(None)


def _merged(deltas: list[TokenDelta]) -> TokenDelta:
    first, last = deltas[0], deltas[-1]
    has_logprobs = first.logprobs is not None
    return TokenDelta(
        first.request_id,
        first.first_index,
        tuple(i for delta in deltas for i in delta.token_ids),
        "".join(delta.text for delta in deltas),
        last.finish_reason,
        tuple(e for delta in deltas for e in delta.logprobs or ()) if has_logprobs else None,
    )


def own_host(comm: Comm) -> str:
    """The interface by which the peer of a connection reaches this process."""
    if comm.local_address:
        return get_address_host(comm.local_address)
    return get_ip(get_address_host(comm.peer_address))  # UCX does not say


class TokenListener:
    """Takes connections from instances and hands their deltas to the streams.

    Parameters
    ----------
    loop
        The client's event loop.
    host
        Interface to listen on, from the first stream on.
    ssl
        With TLS, the caller's context.
    """

    def __init__(self, loop: IOLoop, host: str, ssl: SSLContext | None) -> None:
        self._loop = loop
        self._host = host
        self._ssl = ssl
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._streams: weakref.WeakValueDictionary[str, TokenStream] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    def address(self) -> str:
        """The address for requests. Any thread; the first call opens the socket."""
        with self._lock:
            if self._socket is None:
                self._socket = socket.create_server((self._host, 0))
                self._loop.add_callback(self._start)
        return str(Sink(self._host, self._socket.getsockname()[1], self._secret))

    def add(self, request_id: str, stream: TokenStream) -> None:
        """Deltas of this request go to the stream, as long as somebody keeps it."""
        self._streams[request_id] = stream

    def remove(self, request_id: str) -> None:
        """Whatever still comes of this request goes nowhere."""
        self._streams.pop(request_id, None)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        elif self._socket is not None:
            self._socket.close()
        for task in list(self._connections):
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, sock=self._socket, ssl=self._ssl)

    def _deliver(self, delta: TokenDelta) -> None:
        # A function of its own: a loop's variable would keep the stream alive between deltas.
        stream = self._streams.get(delta.request_id)
        if stream is not None:
            request_id = request_of_run(delta.request_id)
            if request_id != delta.request_id:
                delta = replace(delta, request_id=request_id)
            stream.put(delta)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._connections.add(task)
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                shown = await reader.readexactly(SECRET_BYTES)
            if not hmac.compare_digest(shown, self._secret):
                logger.warning("a token sender showed a wrong secret")
                return
            while True:
                self._deliver(await token_wire.read(reader))
        except (OSError, asyncio.IncompleteReadError):
            pass  # the instance left; what is missing comes with the result
        except token_wire.MalformedFrame as error:
            logger.warning("a token sender is dropped: %s", error)
        except asyncio.CancelledError:
            pass  # closing
        finally:
            self._connections.discard(task)
            writer.close()
