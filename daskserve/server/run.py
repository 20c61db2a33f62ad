"""From an application to a listening socket, and to an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from daskserve.config import ServeSettings
from daskserve.errors import ConfigError
from daskserve.server.app import Frontend, ServerOptions
from daskserve.server.gate import LOOPBACK_NAMES
from daskserve.server.keys import KEYS_VARIABLE
from daskserve.server.protocol import MAX_HEADER_BYTES, bounded_protocol
from daskserve.service import Service

_SEND_BUFFER_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen, and with which certificate.

    Parameters
    ----------
    host, port
        Port 0 takes a free one.
    tls_cert, tls_key
        Paths of PEM files, both or neither.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    tls_cert: str | None = None
    tls_key: str | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key go together")
        for path in filter(None, (self.tls_cert, self.tls_key)):
            if not Path(path).is_file():
                raise ConfigError(f"no file {path}")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host in LOOPBACK_NAMES


Beside = Callable[[Service], contextlib.AbstractContextManager[object]]


def run_server(
    service: Service,
    options: ServerOptions,
    address: Address,
    beside: Beside = contextlib.nullcontext,
) -> None:
    """Serve until SIGINT or SIGTERM; answers in flight are given a moment to end.

    Raises
    ------
    ConfigError
        The address is open to others without TLS and keys, or cannot be listened on.
    """
    if not address.is_loopback and not (address.tls_cert and options.keys):
        raise ConfigError(
            f"host {address.host} can be reached from other machines: that needs --tls-cert and "
            f"--tls-key, and API keys (--api-key-file or {KEYS_VARIABLE})"
        )
    listener = listen(address.host, address.port)
    scheme = "https" if address.tls_cert else "http"
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"listening on {scheme}://{shown}:{port}/v1, loading {options.model}", file=sys.stderr)
    asyncio.run(serve(service, options, listener, address, beside=beside))


async def serve(
    service: Service,
    options: ServerOptions,
    listener: socket.socket,
    address: Address = Address(),
    on_start: Callable[[uvicorn.Server], None] = lambda server: None,
    beside: Beside = contextlib.nullcontext,
) -> None:
    """Answer at once, with 503 until the model is loaded, until a signal or ``should_exit``.

    Parameters
    ----------
    service
        Asynchronous, not yet open; closed at the end.
    listener
        A listening socket.
    on_start
        Told the server, whose ``should_exit`` ends it.
    beside
        Entered once the model is loaded, and left before the service closes.

    Raises
    ------
    DaskserveError
        The service cannot be opened.
    """
    frontend = Frontend(service, options)
    server = _Server(uvicorn_config(frontend.asgi, options.limits, address))
    on_start(server)
    opening = asyncio.create_task(frontend.open())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        with _stopped_by_signals(server):
            await asyncio.wait({opening, serving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done() or opening.exception():
                server.should_exit = True
                opening.cancel()
                await asyncio.wait({opening, serving})
            else:
                print(f"{options.model} is loaded and served", file=sys.stderr)
                with beside(service):
                    await asyncio.wait({opening, serving})
    finally:
        await frontend.close()
    for task in (opening, serving):
        if not task.cancelled():
            task.result()


class _Server(uvicorn.Server):
    """Leaves signals alone: uvicorn would raise them again before the service is closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.contextmanager
def _stopped_by_signals(server: uvicorn.Server) -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the server in order, the second at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True

    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def uvicorn_config(
    app: Starlette, limits: ServeSettings, address: Address = Address()
) -> uvicorn.Config:
    """How uvicorn serves the application; headers, idle connections and the like are bounded."""
    return uvicorn.Config(
        app,
        http=bounded_protocol(limits),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=limits.keep_alive_s,
        timeout_graceful_shutdown=limits.drain_timeout_s,
        ssl_certfile=address.tls_cert,
        ssl_keyfile=address.tls_key,
        proxy_headers=False,
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket (ConfigError)."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    # Connections inherit both. Asyncio itself would not set TCP_NODELAY here, and without it the
    # kernel holds back the end of every small answer for 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # What a slow reader may leave in the kernel.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return listener
