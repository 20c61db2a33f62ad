"""The routes below ``/v1/batches``: OpenAI's Batch API over the batch jobs of this package."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from daskserve.config import ServeSettings
from daskserve.errors import InvalidParameter
from daskserve.server.batch_worker import OPEN_STATES, BatchWorker
from daskserve.server.body import parsed, read_body
from daskserve.server.errors import Refusal
from daskserve.server.pages import page
from daskserve.server.shapes import JSON
from daskserve.server.store import Record, Store

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_WINDOW_S = 30 * 86400
_MAX_PAIRS, _MAX_NAME_CHARS, _MAX_VALUE_CHARS = 16, 64, 512
_FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata")


class Batches:
    """Create, look at, list and cancel; `BatchWorker` does the work."""

    def __init__(self, store: Store, worker: BatchWorker, limits: ServeSettings) -> None:
        self._store, self._worker, self._limits = store, worker, limits

    async def create(self, request: Request) -> Response:
        limits = self._limits
        data = await read_body(
            request.scope, request.receive, limits.max_body_bytes, limits.read_timeout_s
        )
        fields = _checked(parsed(data))
        record = await asyncio.to_thread(self._add, fields)
        self._worker.wake()
        return JSON(_shown(record, None))

    def _add(self, fields: Record) -> Record:
        file_id = fields["input_file_id"]
        known = self._store.file(file_id) if isinstance(file_id, str) else None
        if known is None or known["purpose"] != "batch":
            message = "input_file_id must name an uploaded file of purpose batch"
            raise Refusal(400, message, "input_file_id", "file_not_found")
        num_open = sum(batch["status"] in OPEN_STATES for batch in self._store.batches())
        if num_open >= self._limits.max_open_batches:
            message = f"{num_open} batches wait or run already; try again when one is done"
            raise Refusal(429, message, code="overloaded", retry_after_s=60)
        now = int(time.time())
        window = fields["completion_window"]
        record = {
            "object": "batch",
            "endpoint": fields["endpoint"],
            "errors": None,
            "input_file_id": file_id,
            "completion_window": window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "in_progress_at": None,
            "expires_at": now + _window_s(window),
            "finalizing_at": None,
            "completed_at": None,
            "failed_at": None,
            "expired_at": None,
            "cancelling_at": None,
            "cancelled_at": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": fields.get("metadata"),
        }
        try:
            return self._store.add_batch(record, file_id)
        except FileNotFoundError:  # deleted this moment
            raise Refusal(400, "the input file is gone", "input_file_id") from None

    async def list(self, request: Request) -> Response:
        records = await asyncio.to_thread(self._store.batches)
        shown = [_shown(r, self._store.asked_to_cancel_at(r["id"])) for r in records]
        return page(request, shown, default=20, most=100)

    async def retrieve(self, request: Request) -> Response:
        record = await self._known(request)
        return JSON(_shown(record, self._store.asked_to_cancel_at(record["id"])))

    async def cancel(self, request: Request) -> Response:
        record = await self._known(request)
        if record["status"] not in OPEN_STATES:
            message = f"the batch is {record['status']}; it cannot be cancelled"
            raise Refusal(409, message, "batch_id", "batch_not_cancellable")
        await asyncio.to_thread(self._store.ask_to_cancel, record["id"])
        self._worker.wake()
        return JSON(_shown(record, int(time.time())))

    async def _known(self, request: Request) -> Record:
        record = await asyncio.to_thread(self._store.batch, request.path_params["batch_id"])
        if record is None:
            raise Refusal(404, "no such batch", "batch_id", "batch_not_found")
        return record


def _shown(record: Record, asked_to_cancel_at: int | None) -> Record:
    """The record as a client sees it: cancelling from the moment it asked."""
    if asked_to_cancel_at is None or record["status"] not in OPEN_STATES:
        return record
    return record | {"status": "cancelling", "cancelling_at": asked_to_cancel_at}


def _checked(body: Any) -> Record:
    if not isinstance(body, dict):
        raise Refusal(400, "the body must be a JSON object")
    for name in body:
        if name not in _FIELDS and body[name] is not None:
            limit = f"is not supported; known are {', '.join(_FIELDS)}"
            raise InvalidParameter(name, body[name], limit)
    if body.get("endpoint") not in ENDPOINTS:
        limit = f"must be one of {', '.join(ENDPOINTS)}"
        raise InvalidParameter("endpoint", body.get("endpoint"), limit)
    _window_s(body.get("completion_window"))
    _check_metadata(body.get("metadata"))
    return body | {"input_file_id": body.get("input_file_id")}


def _window_s(window: Any) -> int:
    match = _WINDOW.fullmatch(window) if isinstance(window, str) else None
    seconds = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 1 <= seconds <= _MAX_WINDOW_S:
        raise InvalidParameter("completion_window", window, "must be like 24h, at most 30d")
    return seconds


def _check_metadata(metadata: Any) -> None:
    if metadata is None:
        return
    is_fine = isinstance(metadata, dict) and len(metadata) <= _MAX_PAIRS
    if not is_fine or not all(
        len(name) <= _MAX_NAME_CHARS and isinstance(value, str) and len(value) <= _MAX_VALUE_CHARS
        for name, value in metadata.items()
    ):
        limit = (
            f"must be an object of at most {_MAX_PAIRS} strings of {_MAX_VALUE_CHARS} characters"
        )
        raise InvalidParameter("metadata", metadata, limit)
