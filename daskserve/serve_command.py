"""``daskserve serve``: the HTTP server on the command line."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import click

from daskserve.command_options import (
    check_placement,
    device_option,
    engine_config,
    open_service,
    placed_engine_options,
    placement_options,
    replan_of,
    replan_options,
    slo_of,
    slo_options,
)
from daskserve.config import settings


@click.command("serve", short_help="Serve the OpenAI API over HTTP.")
@placed_engine_options
@device_option
@click.option("--served-model-name", help="What clients call the model  [default: its own name]")
@placement_options
@slo_options
@replan_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Interface to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="0 takes a free one.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="On this machine alone, a name that a proxy in front is addressed by; may be repeated.",
)
@click.option(
    "--api-key-file",
    metavar="PATH",
    help="API keys, one a line; any one is needed on every route but /health. The environment "
    "variable DASKSERVE_API_KEYS holds further ones, separated by commas.",
)
@click.option("--tls-cert", metavar="PATH", help="Certificate chain in PEM: serve https.")
@click.option("--tls-key", metavar="PATH", help="Its private key in PEM.")
@click.option(
    "--state-dir",
    metavar="PATH",
    help="Where files and batches are kept, for this user alone  "
    "[default: $XDG_STATE_HOME/daskserve or ~/.local/state/daskserve]",
)
@click.option(
    "--access-log",
    is_flag=True,
    help="A line on standard error per request: id, method, path, status, seconds.",
)
@click.option(
    "--max-in-flight",
    type=click.IntRange(1),
    help="Answers at work, more are told to come again (429)  [default: 2 per decode slot]",
)
@click.option(
    "--request-timeout",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="An answer that takes longer is given up  [default: 600]",
)
@click.option("--dashboard", is_flag=True, help="Live views on 127.0.0.1, see daskserve dashboard.")
@click.option(
    "--dashboard-port",
    type=click.IntRange(0, 65535),
    default=5006,
    show_default=True,
    help="With --dashboard; 0 takes a free one.",
)
def serve_command(host: str, port: int, **given: Any) -> None:
    """Serve OpenAI's API over HTTP: completions, chat completions, batches.

    Any OpenAI client works with base_url http://HOST:PORT/v1. /health tells that the server
    lives, /ready whether every role has an instance, /metrics is for Prometheus. Further limits
    are settings: DASK_DASKSERVE__SERVE__MAX_BODY_BYTES and others of daskserve.serve.

    Only this machine can connect unless --host says otherwise, which needs TLS and API keys.
    """
    from daskserve.dashboard_process import check_installed, dashboard_beside
    from daskserve.server.app import ServerOptions
    from daskserve.server.gate import LOOPBACK_NAMES
    from daskserve.server.keys import load_keys
    from daskserve.server.run import Address, run_server

    check_placement(given)
    if given["dashboard"]:
        check_installed()
    replan = replan_of(given)
    config = engine_config(given)
    address = Address(host, port, given["tls_cert"], given["tls_key"])
    limits = {
        "max_in_flight": given["max_in_flight"],
        "request_timeout_s": given["request_timeout"],
    }
    changed = {name: value for name, value in limits.items() if value is not None}
    names = {name.lower() for name in given["allowed_hosts"]}
    options = ServerOptions(
        model=given["served_model_name"] or served_name(config.model),
        limits=settings().serve.model_copy(update=changed),
        keys=load_keys(given["api_key_file"]),
        state_folder=Path(given["state_dir"] or default_state_folder()),
        hosts=LOOPBACK_NAMES | names if address.is_loopback else None,
        replan=replan,
    )
    if given["access_log"]:
        access = logging.getLogger("daskserve.access")
        access.setLevel(logging.INFO)
        access.addHandler(logging.StreamHandler())
    service = open_service(
        config, given, slo_of(given), asynchronous=True, flippable=replan is not None
    )
    if given["dashboard"]:
        run_server(service, options, address, partial(dashboard_beside, given["dashboard_port"]))
    else:
        run_server(service, options, address)


def served_name(model: str) -> str:
    """What clients call the model: a folder by its last part, since paths are nobody's business."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model


def default_state_folder() -> Path:
    """Beside what other programs of this user keep."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "daskserve"
