"""Serves the pages: one feed for all sessions, on loopback unless told otherwise."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import panel as pn
from bokeh.document import Document
from bokeh.server.server import Server
from panel.io.resources import LOCAL_DIST
from panel.io.state import set_curdoc
from tornado.websocket import WebSocketClosedError

from daskserve.dashboards.feed import Feed
from daskserve.dashboards.frame import COOKIE, framed
from daskserve.dashboards.instances import InstancesPage
from daskserve.dashboards.jobs import JobsPage
from daskserve.dashboards.live import LivePage
from daskserve.dashboards.page import Html, Page, html_pane
from daskserve.dashboards.plan import PlanPage
from daskserve.dashboards.refining import Refiner
from daskserve.dashboards.replans import ReplansPage
from daskserve.dashboards.theme import THEMES, Theme, escape
from daskserve.dashboards.whatif import WhatIfPage
from daskserve.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True, slots=True)
class DashboardOptions:
    """How the pages are served and what they assume.

    Parameters
    ----------
    origins
        ``host:port`` that browsers may show the pages under, besides loopback names.
    price_per_gpu_hour
        Dollars, for the cost per token.
    """

    host: str = "127.0.0.1"
    port: int = 5006
    origins: tuple[str, ...] = ()
    price_per_gpu_hour: float = 1.0

    def __post_init__(self) -> None:
        for origin in self.origins:
            host, _, port = origin.partition(":")
            if "*" in origin or not host or (port and not port.isdigit()):
                raise ConfigError(f"--allow-origin {origin} must be HOST:PORT, without patterns")
        if self.host not in LOOPBACK and not self.origins:
            raise ConfigError(
                f"host {self.host} can be reached from other machines, and whoever reaches it sees"
                " everything: give --allow-origin with the host:port of its address bar"
            )


@dataclass(eq=False)
class Dashboard:
    """The pages over a feed; `serve` until stopped, or `start` in a test."""

    feed: Feed
    options: DashboardOptions = field(default_factory=DashboardOptions)
    refiner: Refiner = field(default_factory=Refiner)

    @property
    def pages(self) -> tuple[tuple[type[Page], Callable[[Theme], Page]], ...]:
        """Every page and what makes one for a session, in the order of the links."""
        price = self.options.price_per_gpu_hour
        return (
            (LivePage, lambda theme: LivePage(self.feed, theme, price)),
            (InstancesPage, lambda theme: InstancesPage(self.feed, theme)),
            (ReplansPage, lambda theme: ReplansPage(self.feed, theme)),
            (PlanPage, lambda theme: PlanPage(self.feed, theme)),
            (WhatIfPage, lambda theme: WhatIfPage(self.feed, theme, self.refiner)),
            (JobsPage, lambda theme: JobsPage(self.feed, theme)),
        )

    def start(self) -> Server:
        """A running server; its port is ``server.port`` (ConfigError)."""
        pn.extension("tabulator")
        options = self.options
        apps = {kind.path: self._app(kind, make) for kind, make in self.pages}
        apps["/"] = apps[LivePage.path]
        try:
            port = options.port or _free_port(options.host)
            server = pn.io.server.get_server(
                apps,
                port=port,
                address=options.host,
                websocket_origin=[*(f"{name}:{port}" for name in LOOPBACK), *options.origins],
                title="daskserve",
                show=False,
                start=False,
                check_unused_sessions_milliseconds=5000,
                unused_session_lifetime_milliseconds=10000,
            )
        except OSError as error:
            where = f"{options.host}:{options.port}"
            raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from None
        gc.collect()
        gc.freeze()  # modules stay anyway: no collection need look through them
        server.start()
        server.io_loop.asyncio_loop.set_exception_handler(_on_exception)
        return server

    def _app(
        self, kind: type[Page], make: Callable[[Theme], Page]
    ) -> Callable[[], pn.viewable.Viewable]:
        links = [(one.path, one.title) for one, _ in self.pages]

        def app() -> Any:
            # Panel sets it only when it writes the HTML: what changes before would be looked for
            # on the internet.
            pn.state.curdoc.template_variables["dist_url"] = LOCAL_DIST
            pn.extension(*kind.extensions)  # of this session: no scripts of other pages
            theme = THEMES.get(pn.state.cookies.get(COOKIE, ""), THEMES["light"])
            page = make(theme)
            status = html_pane(theme, _STATUS_CSS.format(theme=theme))
            session = _Session(page, status, pn.state.curdoc)
            leave = self.feed.listen(session.wake)
            pn.state.on_session_destroyed(lambda context: (leave(), page.close()))
            return framed(page, status, links)

        return app


def _on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A tab that closes while something is sent to it is no fault; the rest is reported."""
    if not isinstance(context.get("exception"), WebSocketClosedError):
        loop.default_exception_handler(context)


def _free_port(host: str) -> int:
    """Origins are told to the server before it listens, so the port must be known."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


_STATUS_CSS = """
p {{ margin: 14px 0 0; padding: 8px 14px; border-radius: 8px; border: 1px solid {theme.bad};
     color: {theme.text}; }}
"""


class _Session:
    """Brings what is new into one browser session, on its own thread."""

    def __init__(self, page: Page, status: Html, document: Document) -> None:
        self._page, self._status, self._document = page, status, document
        self._is_woken = False
        self._show_trouble()

    def wake(self) -> None:
        """From the feed's thread; several calls before the session gets its turn are one."""
        if not self._is_woken:
            self._is_woken = True
            self._document.add_next_tick_callback(self._update)

    def _update(self) -> None:
        self._is_woken = False
        with set_curdoc(self._document):
            self._page.update()
            self._show_trouble()

    def _show_trouble(self) -> None:
        trouble = self._page.feed.trouble
        text = f"<p>{escape(trouble)}</p>" if trouble else ""
        if self._status.object != text:
            self._status.object = text


@contextmanager
def _feeding(feed: Feed) -> Any:
    feed.start()
    try:
        yield
    finally:
        feed.stop()


def serve(dashboard: Dashboard, on_start: Callable[[Server], None]) -> None:
    """Serve until the event loop is stopped (Ctrl-C).

    Parameters
    ----------
    on_start
        Told the server once it listens.
    """
    with _feeding(dashboard.feed):
        server = dashboard.start()
        on_start(server)
        try:
            server.io_loop.start()
        finally:
            server.stop(wait=False)
            dashboard.refiner.close()
