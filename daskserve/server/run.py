"""From an application to a listening socket, and to an orderly end."""

from __future__ import annotations

import socket

import uvicorn
from starlette.applications import Starlette

from daskserve.config import ServeSettings
from daskserve.errors import ConfigError
from daskserve.server.app import make_app
from daskserve.server.protocol import MAX_HEADER_BYTES, bounded_protocol
from daskserve.service import Service


def run_server(service: Service, model: str, limits: ServeSettings, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM; requests in flight are given a moment to end.

    Raises
    ------
    ConfigError
        The address cannot be listened on.
    """
    listener = listen(host, port)
    app = make_app(service, model, limits)
    uvicorn.Server(uvicorn_config(app, limits)).run(sockets=[listener])


def uvicorn_config(app: Starlette, limits: ServeSettings) -> uvicorn.Config:
    """How uvicorn serves the application; headers, idle connections and the like are bounded."""
    return uvicorn.Config(
        app,
        http=bounded_protocol(limits),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=limits.keep_alive_s,
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket (ConfigError)."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
