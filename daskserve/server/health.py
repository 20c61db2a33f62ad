"""Whether the server lives, whether every role behind it does, and what Prometheus reads."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from daskserve.core.instance import InstanceLoad, Role
from daskserve.observe import Snapshot
from daskserve.server.admission import Admission
from daskserve.server.errors import Refusal
from daskserve.server.metrics import Metrics
from daskserve.server.shapes import JSON
from daskserve.service import Service
from daskserve.service.kv_counters import Pulled

logger = logging.getLogger(__name__)

_LOOK_TIMEOUT_S = 2.0
"""A scheduler that says nothing for so long is taken for gone."""


class Health:
    """The routes ``/health``, ``/ready`` and ``/metrics``."""

    def __init__(self, service: Service, admission: Admission, metrics: Metrics) -> None:
        self._service, self._admission, self._metrics = service, admission, metrics
        self._needed: tuple[Role, ...] = ()

    async def learn_roles(self) -> None:
        """Call once the service is open: the roles that work then are the ones needed."""
        roles = {instance.role for instance in await self._service.info()}
        is_apart = Role.PREFILL in roles or Role.DECODE in roles
        self._needed = (Role.PREFILL, Role.DECODE) if is_apart else (Role.COLOCATED,)

    async def health(self, request: Request) -> Response:
        """Whether a restart would do no good: 503 once the scheduler is lost, for good."""
        client = self._service.client
        if client is not None and client.status == "closed":
            return JSON({"status": "the scheduler is gone"}, 503)
        return JSON({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 when every role has an instance that takes requests, else 503; with the numbers."""
        status = await self._status() if self._admission.is_open else None
        roles = {}
        for role in self._needed:
            counters = status["dispatch"]["roles"][role.value] if status else {}
            of_role = [i for i in status["instances"] if i["role"] == role.value] if status else []
            roles[role.value.lower()] = {
                "ready": counters.get("accepting", 0),
                "loading": sum(i["status"] == "loading" for i in of_role),
                "failed": sum(i["status"] == "failed" for i in of_role),
            }
        is_ready = status is not None and all(counts["ready"] for counts in roles.values())
        body = {"ready": is_ready, "loading": not self._admission.is_open, "roles": roles}
        return JSON(body, 200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Prometheus's text format."""
        status = await self._status() if self._admission.is_open else None
        load, kv_pulled = await self._counters() if status else ({}, {})
        self._metrics.observe(self._admission.num_in_flight, status, load, kv_pulled)
        text = generate_latest(self._metrics.registry)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def snapshot(self, request: Request) -> Response:
        """What `daskserve dashboard` reads, see `daskserve.observe.Snapshot`."""
        if not self._admission.is_open:
            raise Refusal(503, "the model is being loaded", code="not_ready")
        cursors = [_count(request, name) for name in ("cursor", "num_decisions")]
        try:
            async with asyncio.timeout(_LOOK_TIMEOUT_S):
                snapshot: Snapshot = await self._service.observe(*cursors)
        except Exception as error:
            logger.warning("no snapshot from the scheduler: %s", type(error).__name__)
            raise Refusal(503, "the scheduler does not answer", code="not_ready") from None
        return JSON(snapshot.to_record())

    async def _status(self) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(_LOOK_TIMEOUT_S):
                status: dict[str, Any] = await self._service.status()
                return status
        except Exception as error:  # however the scheduler is lost: the answer says so
            logger.warning("no status from the scheduler: %s", type(error).__name__)
            return None

    async def _counters(self) -> tuple[dict[str, InstanceLoad], dict[str, dict[str, Pulled]]]:
        try:
            async with asyncio.timeout(_LOOK_TIMEOUT_S):
                return await self._service.load(), await self._service.kv_pulled()
        except Exception as error:
            logger.warning("no counters from the instances: %s", type(error).__name__)
            return {}, {}


def _count(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 18):
        raise Refusal(400, f"{name} must be a whole number of at least 0", name, "invalid_value")
    return int(text)
