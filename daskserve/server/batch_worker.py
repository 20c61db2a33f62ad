"""Works on batches, one after the other, in a thread of its own beside the server.

Rows go through `daskserve.batch` with its journal, so a batch goes on after a restart where it
was. Of several servers over one state folder one works; when it ends, another takes over.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
from dask.base import annotate

from daskserve.batch.lines import COMPLETION_URL, Form
from daskserve.batch.runner import BatchJob
from daskserve.batch.sources import JsonlFile
from daskserve.batch.summary import BatchSummary, Tally
from daskserve.config import ServeSettings, settings
from daskserve.core.instance import EngineConfig, Role
from daskserve.errors import BatchError, DaskserveError
from daskserve.server.fields import default_params
from daskserve.server.store import Record, Store
from daskserve.service import Service

logger = logging.getLogger(__name__)

OPEN_STATES = ("validating", "in_progress", "finalizing")
_POLL_S = 1.0
_RETRY_S = 5.0
_PROGRESS_S = 1.0
_SWEEP_S = 3600.0
_MAX_ERRORS = 100
_PRIORITY = -1
"""Of rows against online requests: what is free is theirs."""


_ENDS = {"cancelled": "was cancelled", "expired": "expired"}


class _Interrupted(Exception):
    """A batch must not run on: it is cancelled or expired, or the server stops."""


class BatchWorker:
    """Brings every batch of a store to its end.

    Parameters
    ----------
    store, limits
        Where batches are, and how many rows one may have.
    config, model
        The engine's configuration, and the name that rows use.
    connect
        A synchronous service of its own for this thread, opened for the first batch.
    """

    def __init__(
        self,
        store: Store,
        limits: ServeSettings,
        config: EngineConfig,
        model: str,
        connect: Callable[[], Service],
    ) -> None:
        self._store, self._limits = store, limits
        self._config, self._model, self._connect = config, model, connect
        self._service: Service | None = None
        self._is_stopped = False
        self._swept_at = -_SWEEP_S
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._main, name="batches", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There is a batch to begin or to cancel."""
        self._news.set()

    def stop(self) -> None:
        """Leave what runs for the next start. Blocks for a moment."""
        self._is_stopped = True
        self._news.set()
        if self._thread.is_alive():
            self._thread.join()

    def _main(self) -> None:
        lock = None
        try:
            while not self._is_stopped:
                lock = self._store.lock() if lock is None else lock
                if lock is None or not self._work():
                    self._news.wait(_POLL_S)
                    self._news.clear()
        finally:
            if self._service is not None:
                self._service.close()
            if lock is not None:
                os.close(lock)

    def _work(self) -> bool:
        """Bring the oldest open batch further; False when there is nothing to do now."""
        if time.monotonic() - self._swept_at >= _SWEEP_S:
            self._swept_at = time.monotonic()
            self._store.sweep(time.time(), OPEN_STATES)
        record = next((b for b in self._store.batches() if b["status"] in OPEN_STATES), None)
        if record is None:
            return False
        try:
            self._advance(record)
        except _Interrupted:
            return False
        except Exception as error:
            # Not the batch's fault, or it would have failed: its expiry bounds the tries.
            reason = str(error) if isinstance(error, DaskserveError) else type(error).__name__
            logger.warning("batch %s stopped and is tried again: %s", record["id"], reason)
            self._drop_service()
            self._news.wait(_RETRY_S)
            return False
        return True

    def _drop_service(self) -> None:
        service, self._service = self._service, None
        if service is not None:
            try:
                service.close()
            except Exception as error:  # the scheduler is gone, most likely
                logger.warning("a batch's service did not close: %s", type(error).__name__)

    def _advance(self, record: Record) -> None:
        folder = self._store.batch_folder(record["id"])
        try:
            if record["status"] == "validating" and (errors := self._mismatches(record, folder)):
                self._fail(record, errors)
                return
            is_chat = record["endpoint"] != COMPLETION_URL
            job = BatchJob(
                folder / "input.jsonl",
                folder / "output.jsonl",
                self._config,
                params=default_params(is_chat, self._limits),
                model_name=self._model,
            )
        except BatchError as error:
            message = str(error).replace(f"{folder}{os.sep}", "")  # paths are nobody's business
            self._fail(record, [{"code": "invalid_file", "message": message}])
            return
        with job:
            record["request_counts"]["total"] = job.num_rows
            if record["status"] == "validating":
                self._enter(record, "in_progress")
            summary = job.complete or self._run(job, record)
        self._finalize(record, folder, summary)

    def _mismatches(self, record: Record, folder: Path) -> list[Record]:
        """Rows for another endpoint; with any, the batch is refused as a whole."""
        expected = Form.COMPLETION if record["endpoint"] == COMPLETION_URL else Form.CHAT
        rows = JsonlFile(folder / "input.jsonl", settings().batch.max_line_bytes).rows()
        errors: list[Record] = []
        num_rows = 0
        for row in rows:
            num_rows += 1
            if row.problem is None and row.form is not expected and len(errors) < _MAX_ERRORS:
                message = f"the line must be a request for {record['endpoint']}"
                errors.append({"code": "mismatched_url", "line": num_rows, "message": message})
            if num_rows > self._limits.max_batch_rows:
                raise BatchError(f"a batch may have at most {self._limits.max_batch_rows} rows")
        if num_rows == 0:
            raise BatchError("the file has no rows")
        return errors

    def _run(self, job: BatchJob, record: Record) -> BatchSummary:
        reported_at = 0.0

        def on_tick(tally: Tally) -> None:
            nonlocal reported_at
            if time.monotonic() - reported_at >= _PROGRESS_S:
                reported_at = time.monotonic()
                self._report(record, tally.num_succeeded, tally.num_failed)
            if self._is_stopped or self._end_of(record) is not None:
                raise _Interrupted

        try:
            if self._end_of(record) is None:
                if self._service is None:
                    self._service = self._connect()
                with annotate(priority=_PRIORITY):
                    return job.run(self._service, self._window(), False, on_tick)
        except _Interrupted:
            if self._is_stopped:
                raise
        end = self._end_of(record) or "expired"
        return job.abandon(f"batch_{end}", f"the batch {_ENDS[end]} before this row was answered")

    def _window(self) -> int:
        """Rows in flight: half of the decode slots, so that online requests find room."""
        if self._limits.batch_max_in_flight is not None:
            return self._limits.batch_max_in_flight
        instances = self._service.info() if self._service is not None else []
        slots: int = sum(i.max_batch_size for i in instances if i.role is not Role.PREFILL)
        return max(1, slots // 2)

    def _end_of(self, record: Record) -> str | None:
        """``cancelled`` or ``expired`` when it is time for that."""
        if self._store.asked_to_cancel_at(record["id"]) is not None:
            return "cancelled"
        return "expired" if time.time() >= record["expires_at"] else None

    # Records.

    def _report(self, record: Record, num_completed: int, num_failed: int) -> None:
        counts = record["request_counts"]
        if (counts["completed"], counts["failed"]) != (num_completed, num_failed):
            counts.update(completed=num_completed, failed=num_failed)
            self._store.write_batch(record)

    def _enter(self, record: Record, status: str) -> None:
        record["status"] = status
        record[f"{status}_at"] = int(time.time())
        self._store.write_batch(record)

    def _fail(self, record: Record, errors: list[Record]) -> None:
        blank = {"line": None, "param": None}
        record["errors"] = {"object": "list", "data": [blank | error for error in errors]}
        self._enter(record, "failed")

    def _finalize(self, record: Record, folder: Path, summary: BatchSummary) -> None:
        self._enter(record, "finalizing")
        output, name = folder / "output.jsonl", record["id"]
        for field, is_error in (("output_file_id", False), ("error_file_id", True)):
            lines = _lines(output, is_error)
            if record[field] is None and (first := next(lines, None)) is not None:
                kind = "error" if is_error else "output"
                kept = self._store.add_file(
                    _writer_of(first, lines), f"{name}_{kind}.jsonl", "batch_output"
                )
                record[field] = kept["id"]
                self._store.write_batch(record)
        record["request_counts"] = {
            "total": summary.num_rows,
            "completed": summary.num_succeeded,
            "failed": summary.num_failed,
        }
        record["usage"] = {
            "input_tokens": summary.prompt_tokens,
            "output_tokens": summary.output_tokens,
            "total_tokens": summary.prompt_tokens + summary.output_tokens,
        }
        outcome = _outcome(output)
        if outcome == "cancelled":
            record["cancelling_at"] = self._store.asked_to_cancel_at(record["id"])
        self._enter(record, outcome)
        self._store.tidy_batch(record["id"])


def _writer_of(first: bytes, rest: Iterator[bytes]) -> Callable[[Any], None]:
    def write(target: Any) -> None:
        target.write(first)
        target.writelines(rest)

    return write


def _lines(output: Path, is_error: bool) -> Iterator[bytes]:
    """Lines of answers, or of errors."""
    with output.open("rb") as file:
        for line in file:
            if (orjson.loads(line)["error"] is not None) == is_error:
                yield line


def _outcome(output: Path) -> str:
    """What rows that were never tried say: cancelled or expired; else completed."""
    with output.open("rb") as file:
        for line in file:
            error = orjson.loads(line)["error"]
            if error is not None and error["code"] in ("batch_cancelled", "batch_expired"):
                return str(error["code"]).removeprefix("batch_")
    return "completed"
