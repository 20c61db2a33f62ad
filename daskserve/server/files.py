"""The routes below ``/v1/files``: inputs of batches come in, their outputs go out."""

from __future__ import annotations

import asyncio
import shutil
import time
from typing import Any

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Message, Receive

from daskserve.config import ServeSettings
from daskserve.server.body import check_length, too_large
from daskserve.server.errors import Refusal
from daskserve.server.pages import page
from daskserve.server.shapes import JSON
from daskserve.server.store import Record, Store

_MAX_NAME_CHARS = 255
_MAX_FIELD_BYTES = 4096
_FORM_BYTES = 64 * 1024
"""Boundaries, headers and fields beside the file."""
_MAX_UPLOADS = 8
"""At once: each may fill the disk with a file that is not yet counted."""
_LEAST_BYTES_PER_S = 16 * 1024
"""On average, of a sender that does not stall but never ends."""


class Files:
    """Files of purpose ``batch``, and those that batches wrote (``batch_output``)."""

    def __init__(self, store: Store, limits: ServeSettings) -> None:
        self._store, self._limits = store, limits
        self._num_uploads = 0

    async def create(self, request: Request) -> Response:
        """Take an upload; a file that is too large is refused before it is whole."""
        if self._num_uploads >= _MAX_UPLOADS:
            message = f"{_MAX_UPLOADS} files are being uploaded already; try again later"
            raise Refusal(429, message, code="overloaded", retry_after_s=1)
        self._num_uploads += 1
        try:
            return JSON(await self._taken(request))
        finally:
            self._num_uploads -= 1

    async def _taken(self, request: Request) -> Record:
        most = self._limits.max_file_bytes + _FORM_BYTES
        check_length(request.headers, most)
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "multipart/form-data":
            message = "the content type must be multipart/form-data"
            raise Refusal(415, message, code="unsupported_media_type")
        bounded = _bounded(request.receive, most, self._limits.read_timeout_s)
        form_request = Request(request.scope, bounded)
        try:
            async with form_request.form(
                max_files=1, max_fields=4, max_part_size=_MAX_FIELD_BYTES
            ) as form:
                upload = _checked(form)
                return await asyncio.to_thread(self._keep, upload)
        except HTTPException as error:
            raise Refusal(400, f"the form cannot be read: {error.detail}") from None

    def _keep(self, upload: UploadFile) -> Record:
        size = upload.size or 0
        if size > self._limits.max_file_bytes:
            raise too_large(self._limits.max_file_bytes)
        if self._store.stored_bytes() + size > self._limits.max_stored_bytes:
            limit = self._limits.max_stored_bytes
            message = f"the server keeps at most {limit} bytes of files; delete some"
            raise Refusal(507, message, "file", "storage_full")
        name = (upload.filename or "upload.jsonl")[:_MAX_NAME_CHARS]
        # Lone surrogates and the like must not make the record unreadable.
        name = name.encode(errors="replace").decode(errors="replace")
        return self._store.add_file(
            lambda target: shutil.copyfileobj(upload.file, target), name, "batch"
        )

    async def list(self, request: Request) -> Response:
        records = await asyncio.to_thread(self._store.files)
        purpose = request.query_params.get("purpose")
        if purpose is not None:
            records = [record for record in records if record["purpose"] == purpose]
        return page(request, records, default=1000, most=10_000)

    async def retrieve(self, request: Request) -> Response:
        return JSON(await self._known(request))

    async def content(self, request: Request) -> Response:
        record = await self._known(request)
        path = self._store.content(record["id"])
        return FileResponse(path, media_type="application/jsonl")

    async def delete(self, request: Request) -> Response:
        record = await self._known(request)
        await asyncio.to_thread(self._store.delete_file, record["id"])
        return JSON({"id": record["id"], "object": "file", "deleted": True})

    async def _known(self, request: Request) -> Record:
        record = await asyncio.to_thread(self._store.file, request.path_params["file_id"])
        if record is None:
            raise Refusal(404, "no such file", "file_id", "file_not_found")
        return record


def _checked(form: Any) -> UploadFile:
    for name in form:
        if name not in ("file", "purpose"):
            raise Refusal(400, f"{name[:80]} is not supported", name[:80], "unknown_parameter")
    if form.get("purpose") != "batch":
        raise Refusal(400, "purpose must be batch", "purpose", "invalid_parameter")
    upload = form.get("file")
    if not isinstance(upload, UploadFile) or not upload.size:
        raise Refusal(400, "file must be a file, not empty", "file", "invalid_parameter")
    return upload


def _bounded(receive: Receive, max_bytes: int, timeout_s: float) -> Receive:
    """Count what comes in, and give up on a sender that stalls or crawls."""
    num_bytes, began_at = 0, time.monotonic()

    async def bounded() -> Message:
        nonlocal num_bytes
        if time.monotonic() - began_at > timeout_s + num_bytes / _LEAST_BYTES_PER_S:
            reason = f"the body came with less than {_LEAST_BYTES_PER_S} bytes per second"
            raise Refusal(408, reason, code="request_timeout")
        try:
            async with asyncio.timeout(timeout_s):
                message = await receive()
        except TimeoutError:
            reason = f"nothing of the body came for {timeout_s:g} s"
            raise Refusal(408, reason, code="request_timeout") from None
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise too_large(max_bytes)
        return message

    return bounded
