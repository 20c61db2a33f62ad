"""Whatever goes wrong becomes OpenAI's error object; nothing of the inside gets out."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from daskserve.server.errors import Refusal, refusal_of, report
from daskserve.server.events import ClientGone

access = logging.getLogger("daskserve.access")
"""One line per request: id, method, path, status (0: the client left before) and seconds."""

# Nothing else of what a caller writes gets into a log.
_KNOWN_PATH = re.compile(r"/(health|ready|metrics|v1/[a-z/]{1,30}([/A-Za-z0-9_-]{1,60})?)")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_MESSAGES = {404: "no such path", 405: "this path does not take the method"}


class Shield:
    """ASGI middleware: answers errors, and names every response with ``X-Request-Id``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        status, arrived_at = 0, time.monotonic()

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._guarded(scope, receive, named_send, lambda: status > 0)
        finally:
            path = scope["path"] if _KNOWN_PATH.fullmatch(scope["path"]) else "-"
            lasted_s = time.monotonic() - arrived_at
            access.info("%s %s %s %d %.3fs", request_id, scope["method"], path, status, lasted_s)

    async def _guarded(
        self, scope: Scope, receive: Receive, send: Send, is_started: Callable[[], bool]
    ) -> None:
        try:
            await self._app(scope, receive, send)
        except (ClientGone, ClientDisconnect):
            return  # nobody is left to be told, and the server cuts what is not complete
        except Exception as error:
            report(scope["state"]["request_id"], error)
            if is_started():
                raise ConnectionAbortedError from None  # the server cuts the connection
            await refusal_of(error).response()(scope, receive, send)


async def answer_http_exception(request: Request, error: Any) -> Response:
    """Starlette's own refusals (HTTPException), such as of unknown paths, in OpenAI's shape."""
    message = _MESSAGES.get(error.status_code, "the request cannot be read")
    return Refusal(error.status_code, message, headers=dict(error.headers or {})).response()
