"""The ASGI application: routes, and what every request passes on its way to them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from daskserve.config import ServeSettings
from daskserve.server.admission import Admission
from daskserve.server.generation import Generation
from daskserve.server.shield import Shield, answer_http_exception
from daskserve.service import Service


def make_app(service: Service, model: str, limits: ServeSettings) -> Starlette:
    """The server's application over a service.

    Parameters
    ----------
    service
        Made with ``asynchronous=True``; opened and closed with the application.
    model
        The name that clients use.
    limits
        What is taken in.
    """
    admission = Admission(limits.max_in_flight or 2 * service.config.max_batch_size)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with service:
            yield

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": model, "object": "model"}]})

    def generation(is_chat: bool) -> Generation:
        return Generation(service, model, limits, admission, is_chat)

    return Starlette(
        routes=[
            Route("/health", health, methods=["GET"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/completions", generation(is_chat=False), methods=["POST"]),
            Route("/v1/chat/completions", generation(is_chat=True), methods=["POST"]),
        ],
        middleware=[Middleware(Shield)],
        exception_handlers={HTTPException: answer_http_exception},
        lifespan=lifespan,
    )
