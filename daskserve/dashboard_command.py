"""``daskserve dashboard``: live views of a service in a browser, or of what was recorded of one."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from daskserve.command_options import slo_of, slo_options
from daskserve.errors import ConfigError

if TYPE_CHECKING:
    from daskserve.core.slo import SLO
    from daskserve.dashboards.sources import Source


@click.command("dashboard", short_help="Live views in a browser; also of a recording.")
@click.argument("recording", required=False, metavar="[FILE]")
@click.option("--scheduler", metavar="ADDRESS", help="Dask scheduler that a service runs on.")
@click.option(
    "--server", metavar="URL", help="daskserve serve; its API key, if any, in DASKSERVE_API_KEY."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Interface to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=5006,
    show_default=True,
    help="0 takes a free one.",
)
@click.option(
    "--allow-origin",
    "origins",
    multiple=True,
    metavar="HOST:PORT",
    help="Another address bar that browsers may show the pages under; may be repeated.",
)
@click.option(
    "--plan", metavar="FILE", help="For the Plan page: what daskserve plan --report wrote."
)
@click.option("--record", metavar="FILE", help="Write down all that is seen, to look at it later.")
@click.option(
    "--window",
    type=click.FloatRange(2, 3600),
    default=15.0,
    show_default=True,
    metavar="SECONDS",
    help="Rates, attainment and percentiles are of the last so many seconds.",
)
@click.option(
    "--gpu-price",
    type=click.FloatRange(0),
    default=1.0,
    show_default=True,
    metavar="DOLLARS",
    help="Of a GPU (or a CPU instance) for an hour, for the cost per token.",
)
@slo_options
@click.option("--until-eof", is_flag=True, hidden=True, help="End with standard input.")
def dashboard_command(recording: str | None, **given: Any) -> None:
    """Show a service in a browser: live numbers, instances, replanning, plans, what-if, jobs.

    \b
      daskserve dashboard --scheduler tcp://127.0.0.1:8786
      daskserve dashboard --server http://127.0.0.1:8000 --record day.jsonl
      daskserve dashboard day.jsonl
      daskserve dashboard --plan plan.json
      daskserve dashboard                 planning alone

    Only this machine can connect unless --host and --allow-origin say otherwise; there is no
    password, so put a proxy with one in front. --slo-ttft and --slo-tpot stand in for the
    service's own SLO.
    """
    try:
        from daskserve.dashboards.app import Dashboard, DashboardOptions, serve
        from daskserve.dashboards.feed import Feed
    except ImportError as error:
        raise ConfigError(f"{error}; pip install 'daskserve[dashboard]'") from None
    from daskserve.observe.observation import Recorder
    from daskserve.planner.plan_file import read_plan

    options = DashboardOptions(given["host"], given["port"], given["origins"], given["gpu_price"])
    source = _source(recording, given, slo_of(given))
    recorder = Recorder(Path(given["record"])) if given["record"] else None
    if given["until_eof"]:
        threading.Thread(target=_end_with_stdin, daemon=True).start()

    def started(server: Any) -> None:
        host = f"[{options.host}]" if ":" in options.host else options.host
        source.url = f"http://{host}:{server.port}/"
        click.echo(f"dashboard on {source.url}", err=True)

    feed = Feed(source, recorder)
    if given["plan"]:
        feed.note_plan(read_plan(Path(given["plan"])))
    serve(Dashboard(feed, options), started)


def _source(recording: str | None, given: dict[str, Any], slo: SLO | None) -> Source:
    from daskserve.dashboards.sources import (
        NoSource,
        RecordedSource,
        SchedulerSource,
        ServerSource,
    )

    ways = {"FILE": recording, "--scheduler": given["scheduler"], "--server": given["server"]}
    named = [name for name, value in ways.items() if value]
    if len(named) > 1:
        raise ConfigError(f"give one of {', '.join(ways)}, not {' and '.join(named)}")
    if not given["scheduler"] and not given["server"]:
        for name in ("record", "slo_ttft"):
            if given[name]:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} is for a live service: give --scheduler or --server")
        return RecordedSource(Path(recording)) if recording else NoSource()
    if given["scheduler"]:
        return SchedulerSource(given["scheduler"], slo, given["window"])
    return ServerSource(given["server"], slo, given["window"])


def _end_with_stdin() -> None:
    """Whoever started us holds the other end of the pipe: when it dies, so do we."""
    while os.read(0, 4096):
        pass
    os._exit(0)
