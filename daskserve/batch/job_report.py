"""Tells whoever watches the service how far a job is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from uuid import uuid4

from daskserve.batch.summary import Tally
from daskserve.observe import FailedRow, JobProgress

if TYPE_CHECKING:
    from daskserve.service import Service

_INTERVAL_S = 1.0


class JobReport:
    """One run of a job.

    Parameters
    ----------
    name
        What people call the job.
    tally
        Its counters; read, never changed.
    """

    def __init__(self, service: Service, name: str, tally: Tally, num_rows: int) -> None:
        self._service, self._name, self._tally = service, name, tally
        self._num_rows = num_rows
        self._job_id = uuid4().hex
        self._started_at = time.monotonic()
        self._told_at = -_INTERVAL_S

    def update(self, state: str = "running") -> None:
        """Tell where the job is, at most once a second while it runs."""
        now = time.monotonic()
        if state == "running" and now - self._told_at < _INTERVAL_S:
            return
        self._told_at = now
        tally = self._tally
        failed = tuple(
            FailedRow(one.row, one.custom_id, one.error_code, one.message)
            for one in tally.latest_failures
        )
        self._service.note_job(
            JobProgress(
                job_id=self._job_id,
                name=self._name,
                num_rows=self._num_rows,
                num_done=tally.num_rows,
                num_failed=tally.num_failed,
                num_earlier=tally.num_earlier,
                output_tokens=tally.output_tokens,
                elapsed_s=now - self._started_at,
                state=state,
                failed_rows=failed,
            )
        )
