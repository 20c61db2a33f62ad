"""``daskserve serve``: the HTTP server on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from daskserve.command_options import (
    check_placement,
    engine_options,
    open_service,
    placement_options,
    slo_of,
    slo_options,
)
from daskserve.config import settings
from daskserve.core.instance import EngineConfig

KEY_VARIABLE = "DASKSERVE_API_KEYS"


@click.command("serve")
@engine_options
@placement_options
@slo_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Interface to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 picks one."
)
def serve_command(host: str, port: int, **given: Any) -> None:
    """Serve OpenAI's API over HTTP.

    Any OpenAI client works with base_url http://HOST:PORT/v1.
    """
    from daskserve.server.run import run_server

    check_placement(given)
    config = EngineConfig(model=given["model"], dtype=given["dtype"])
    service = open_service(config, given, slo_of(given), asynchronous=True)
    run_server(service, served_name(config.model), settings().serve, host, port)


def served_name(model: str) -> str:
    """What clients call the model: a folder by its last part, since paths are nobody's business."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model
