"""A link from Dask's own dashboard to ours, once ours has said where it is."""

from __future__ import annotations

import logging
from typing import Any

from distributed import Scheduler
from tornado.web import RequestHandler

from daskserve.service.names import NOTE_DASHBOARD

logger = logging.getLogger(__name__)

_PAGE = "daskserve"


class DaskLink:
    """Adds a page to Dask's dashboard that leads to ours; none when Dask's is off.

    Parameters
    ----------
    scheduler
        Gets a handler for whoever serves our dashboard.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.url = ""

    def start(self) -> None:
        self._scheduler.handlers[NOTE_DASHBOARD] = self._note

    def stop(self) -> None:
        self._scheduler.handlers.pop(NOTE_DASHBOARD, None)

    async def _note(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url={url!r} must begin with http:// or https://")
        application = getattr(self._scheduler, "http_application", None)
        if application is None or not application.applications:
            return
        is_new = not self.url
        self.url = url
        if is_new:
            application.add_handlers(".*$", [(f"/{_PAGE}", _Redirect, {"link": self})])
            self._add_to_menu()

    def _add_to_menu(self) -> None:
        from distributed.dashboard.scheduler import template_variables

        # Dask makes these once per scheduler, and its pages read this very list.
        pages = template_variables(self._scheduler)["pages"]
        if _PAGE not in pages:
            pages.append(_PAGE)


class _Redirect(RequestHandler):
    def initialize(self, link: DaskLink) -> None:
        self._link = link

    def get(self, *args: Any) -> None:
        self.redirect(self._link.url)
