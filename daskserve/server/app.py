"""The ASGI application: routes, and what every request passes on its way to them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from daskserve.config import ServeSettings, settings
from daskserve.core.instance import Role
from daskserve.server.admission import Admission
from daskserve.server.batch_worker import BatchWorker
from daskserve.server.batches import Batches
from daskserve.server.errors import Refusal
from daskserve.server.files import Files
from daskserve.server.gate import Gate
from daskserve.server.generation import Generation
from daskserve.server.health import Health
from daskserve.server.keys import KeyRing
from daskserve.server.metrics import Metrics
from daskserve.server.shapes import JSON
from daskserve.server.shield import Shield, answer_http_exception
from daskserve.server.slo_bound import SloBound
from daskserve.server.store import Store
from daskserve.service import Service

if TYPE_CHECKING:
    from daskserve.service.replan_options import ReplanOptions


@dataclass(frozen=True)
class ServerOptions:
    """How one server answers.

    Parameters
    ----------
    model
        The name that clients use.
    limits
        What is taken in.
    keys
        Needed on every route but ``/health``, if there are any.
    hosts
        Names under which it may be addressed, None for any.
    state_folder
        Where files and batches are kept; None serves none.
    replan
        How the split of the instances follows the traffic; None leaves it.
    """

    model: str
    limits: ServeSettings = field(default_factory=lambda: settings().serve)
    keys: KeyRing = field(default_factory=KeyRing)
    hosts: frozenset[str] | None = None
    state_folder: Path | None = None
    replan: ReplanOptions | None = None


class Frontend:
    """The ASGI application over a service; both belong to the running event loop.

    Parameters
    ----------
    service
        Made with ``asynchronous=True``, not yet open. Its SLO is what attainment and goodput
        are counted by.
    """

    def __init__(self, service: Service, options: ServerOptions) -> None:
        limits = options.limits
        self._service, self._max_in_flight = service, limits.max_in_flight
        self._replan = options.replan
        self._admission = Admission(limits.max_in_flight_per_key)
        self.metrics = Metrics(service.slo)
        self._health = health = Health(service, self._admission, self.metrics)
        models = Models(options.model, service, self._admission)
        completions, chats = (
            Generation(service, options.model, limits, self._admission, self.metrics, is_chat)
            for is_chat in (False, True)
        )
        self._worker: BatchWorker | None = None
        self.asgi = Starlette(
            routes=[
                *(
                    self._batch_routes(options, options.state_folder)
                    if options.state_folder
                    else ()
                ),
                Route("/health", health.health, methods=["GET"]),
                Route("/ready", health.ready, methods=["GET"]),
                Route("/metrics", health.metrics, methods=["GET"]),
                Route("/snapshot", health.snapshot, methods=["GET"]),
                Route("/v1/models", models.list, methods=["GET"]),
                Route("/v1/models/{model:path}", models.retrieve, methods=["GET"]),
                Route("/v1/completions", completions, methods=["POST"]),
                Route("/v1/chat/completions", chats, methods=["POST"]),
            ],
            middleware=[
                Middleware(Shield),
                Middleware(Gate, keys=options.keys, hosts=options.hosts),
            ],
            exception_handlers={HTTPException: answer_http_exception},
        )
        self.asgi.router.redirect_slashes = False  # to an address that the caller writes in Host

    def _batch_routes(self, options: ServerOptions, folder: Path) -> list[Route]:
        limits = options.limits
        store = Store(folder, limits.keep_files_s)
        self._worker = BatchWorker(
            store, limits, self._service.config, options.model, self._second_service
        )
        files, batches = Files(store, limits), Batches(store, self._worker, limits)
        return [
            Route("/v1/files", files.create, methods=["POST"]),
            Route("/v1/files", files.list, methods=["GET"]),
            Route("/v1/files/{file_id}", files.retrieve, methods=["GET"]),
            Route("/v1/files/{file_id}", files.delete, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", files.content, methods=["GET"]),
            Route("/v1/batches", batches.create, methods=["POST"]),
            Route("/v1/batches", batches.list, methods=["GET"]),
            Route("/v1/batches/{batch_id}", batches.retrieve, methods=["GET"]),
            Route("/v1/batches/{batch_id}/cancel", batches.cancel, methods=["POST"]),
        ]

    def _second_service(self) -> Service:
        """For batches: synchronous, with a client of its own on the same scheduler."""
        client: Any = self._service.client
        return Service.attach(client.scheduler.address, self._service.config)

    async def open(self) -> None:
        """Load the model, then let requests in (DaskserveError)."""
        await self._service
        if self._replan is not None:
            await self._service.replan(self._replan)
        await self._health.learn_roles()
        num_slots = await _num_decode_slots(self._service)
        slo = self._service.slo
        bound = SloBound(slo, num_slots) if slo is not None else None
        self._admission.open(self._max_in_flight or 2 * num_slots, bound)
        if self._worker is not None:
            self._worker.start()

    async def close(self) -> None:
        """Let nobody in any more, and leave the cluster; an own one stops."""
        self._admission.open(0)
        if self._worker is not None:
            await asyncio.to_thread(self._worker.stop)
        await self._service.close()


async def _num_decode_slots(service: Service) -> int:
    """Answers that all instances decode at once."""
    instances = await service.info()
    num_slots: int = sum(i.max_batch_size for i in instances if i.role is not Role.PREFILL)
    return max(1, num_slots)


class Models:
    """The routes below ``/v1/models``: one model is served."""

    def __init__(self, model: str, service: Service, admission: Admission) -> None:
        self._model, self._service, self._admission = model, service, admission
        self._created = int(time.time())

    async def list(self, request: Request) -> Response:
        return JSON({"object": "list", "data": [self._record()]})

    async def retrieve(self, request: Request) -> Response:
        if request.path_params["model"] != self._model:
            raise Refusal(404, f"only {self._model} is served", "model", "model_not_found")
        return JSON(self._record())

    def _record(self) -> dict[str, object]:
        record: dict[str, object] = {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "daskserve",
        }
        if self._admission.is_open:  # as vLLM calls it
            record["max_model_len"] = self._service.tokenizer.context_tokens
        return record
