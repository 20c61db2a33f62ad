"""Who may come in: the key, and against web pages the host that a browser was led to."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from daskserve.server.errors import Refusal
from daskserve.server.keys import KeyRing

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_OPEN_PATH = "/health"


class Gate:
    """ASGI middleware in front of every route; only ``/health`` needs no key.

    Parameters
    ----------
    keys
        Any of them opens; an empty ring lets everybody in.
    hosts
        Names under which the server may be addressed: a page whose name was pointed at this
        machine (DNS rebinding) shows another one. None: not checked.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, hosts: frozenset[str] | None) -> None:
        self._app, self._keys, self._hosts = app, keys, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            self._check_host(headers)
            if scope["path"] != _OPEN_PATH:
                scope["state"]["key"] = self._key_of(headers)
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        if self._hosts is not None and _name(headers.get("host", "")) not in self._hosts:
            raise Refusal(403, "this host name is not served", code="wrong_host")
        origin = headers.get("origin")
        # Pages of other sites have no business here: there are no CORS headers either.
        if origin is not None and origin.partition("://")[2] != headers.get("host", ""):
            raise Refusal(403, "requests of other origins are refused", code="wrong_origin")

    def _key_of(self, headers: Headers) -> int | None:
        if not self._keys:
            return None
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        number = self._keys.number_of(shown.strip()) if scheme.lower() == "bearer" else None
        if number is None:
            challenge = {"www-authenticate": "Bearer"}
            message = "a valid API key is needed: Authorization: Bearer <key>"
            raise Refusal(401, message, code="invalid_api_key", headers=challenge)
        return number


def _name(host: str) -> str:
    """``[::1]:8000`` or ``localhost:8000`` without brackets and port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
