"""Servers to measure: our own with the mock model, and one that says what a test tells it to."""

from __future__ import annotations

import asyncio
import re
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from distributed import Scheduler, SpecCluster, Worker

from daskserve import EngineConfig, Service
from daskserve.server.app import ServerOptions
from daskserve.server.keys import KeyRing
from daskserve.server.run import listen, serve

LOOPBACK = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"}
SLOTS = 16
KEY = "a-key-of-sixteen-or-more"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@contextmanager
def mock_server(keys: tuple[str, ...] = (), **config: Any) -> Iterator[str]:
    """URL of a server in a thread: one prefill and one decode instance of the mock model."""
    worker = {**LOOPBACK, "nthreads": SLOTS, "memory_limit": 0}
    workers = {
        role: {"cls": Worker, "options": {**worker, "resources": {role: SLOTS}}}
        for role in ("PREFILL", "DECODE")
    }
    scheduler = {"cls": Scheduler, "options": {**LOOPBACK, "port": 0}}
    with SpecCluster(workers=workers, scheduler=scheduler, silence_logs=50) as cluster:
        given = EngineConfig(model="mock", num_kv_blocks=400, **config)
        service = Service.attach(cluster.scheduler_address, given, asynchronous=True)
        listener, servers = listen("127.0.0.1", 0), []
        options = ServerOptions("mock", keys=KeyRing(keys))
        main = serve(service, options, listener, on_start=servers.append)
        thread = threading.Thread(target=asyncio.run, args=(main,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            servers[0].should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Of a mock server with steps of 2 ms that wants the key `KEY`."""
    with mock_server((KEY,), mock_prefill_s=0.002, mock_decode_s=0.002) as url:
        yield url


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
def scripted() -> Callable[[Answer], Any]:
    """``async with scripted(answer) as url``: every request is given to ``answer``."""

    @asynccontextmanager
    async def start(answer: Answer, tls: ssl.SSLContext | None = None):
        async def on_connection(reader, writer):
            try:
                while head := await reader.readuntil(b"\r\n\r\n"):
                    length = re.search(rb"content-length: *(\d+)", head.lower())
                    await reader.readexactly(int(length[1]) if length else 0)
                    await answer(reader, writer)
            except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
                pass  # the client is gone, or the test is over
            finally:
                writer.close()

        server = await asyncio.start_server(on_connection, "127.0.0.1", 0, ssl=tls)
        scheme = "https" if tls else "http"
        try:
            yield f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    return start


@pytest.fixture(scope="session")
def as_chunk() -> Callable[[bytes], bytes]:
    """A piece of a body in HTTP's chunked encoding; nothing ends the body."""
    return lambda data: f"{len(data):x}\r\n".encode() + data + b"\r\n"


@pytest.fixture(scope="session")
def head() -> bytes:
    """Status line and headers of an event stream."""
    return HEAD


@pytest.fixture(scope="session")
def key() -> str:
    return KEY
