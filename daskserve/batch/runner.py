"""A batch job from the first row to the last: submit, await, write, with bounded rows in flight."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daskserve.batch.folder import JobFolder, is_same_file
from daskserve.batch.job_report import JobReport
from daskserve.batch.lines import Row
from daskserve.batch.manifest import Manifest
from daskserve.batch.outcome import Outcome
from daskserve.batch.progress import ProgressView
from daskserve.batch.prompts import prompt_of
from daskserve.batch.results import error_line, success_line
from daskserve.batch.scan import scan
from daskserve.batch.sources import open_source
from daskserve.batch.summary import BatchSummary, Tally
from daskserve.batch.window import Finished, Window, window_size
from daskserve.batch.writer import ResultWriter, format_of
from daskserve.config import settings
from daskserve.core.instance import EngineConfig
from daskserve.core.params import SamplingParams
from daskserve.core.request import Completion
from daskserve.core.slo import SLO
from daskserve.errors import BatchError, DaskserveError, RequestError
from daskserve.models import resolve
from daskserve.models.identity import fingerprint

if TYPE_CHECKING:
    from daskserve.service import Service


def run_batch(
    service: Service,
    source: Any,
    output: str | Path,
    *,
    params: SamplingParams | None = None,
    slo: SLO | None = None,
    max_in_flight: int | None = None,
    ordered: bool = False,
    restart: bool = False,
    show_progress: bool = True,
) -> BatchSummary:
    """Answer every row of ``source``; one line per row in ``output``, whatever happens.

    Run it again with the same arguments and it goes on where it stopped: the folder
    ``<output>.job`` remembers. Bad rows become error lines.

    Parameters
    ----------
    service
        Where the model runs.
    source
        A JSONL or parquet path, a Dask bag or data frame, or an iterable of prompts; see
        `daskserve.batch.sources.open_source`.
    output
        ``.jsonl``, or ``.parquet`` for a table.
    params
        Sampling parameters of rows that do not give their own.
    slo
        Limits to judge the rows by in the summary.
    max_in_flight
        Rows submitted and not yet written; None takes two per decode slot.
    ordered
        Write the rows in the order of the input: the output appears when the job is complete.
    restart
        Forget what an earlier run wrote.
    show_progress
        On standard error.

    Raises
    ------
    BatchError
        The job cannot start or go on; what was written stays and the job can be resumed.
    """
    with BatchJob(
        source, output, service.config, params=params, slo=slo, ordered=ordered, restart=restart
    ) as job:
        return job.complete or job.run(service, max_in_flight, show_progress)


class BatchJob:
    """A job whose input and output are checked; needs a service only to `run`.

    Parameters are those of `run_batch`; ``config`` names the model, ``model_name`` what rows call
    it if that is another name. ``complete`` is the summary of a job that an earlier run brought
    to its end, else None.
    """

    def __init__(
        self,
        source: Any,
        output: str | Path,
        config: EngineConfig,
        *,
        params: SamplingParams | None = None,
        slo: SLO | None = None,
        ordered: bool = False,
        restart: bool = False,
        model_name: str | None = None,
    ) -> None:
        self._limits = settings().batch
        self._model, self._params = model_name or config.model, params or SamplingParams()
        self._format = format_of(Path(output), ordered)
        self._slo = slo
        # Rows given up with their instances, until a success shows that others live.
        self._lost: list[Finished] = []
        if isinstance(source, str | Path) and is_same_file(source, output):
            raise BatchError(f"output {output} is the input; choose another name")
        self._folder = JobFolder(Path(output), restart)
        try:
            self._file = open_source(source, self._folder.spool, self._limits.max_line_bytes)
            self._found = scan(self._file)
            manifest = Manifest(
                input_sha256=self._found.sha256,
                num_rows=self._found.num_rows,
                model=config.model,
                model_sha256=fingerprint(resolve(config.model)),
                dtype=config.dtype,
                parameters=asdict(self._params),
                output_format=self._format,
            )
            self._folder.settle(manifest)
            record = self._folder.read_summary()
            self.complete = BatchSummary.from_record(record) if record else None
        except BaseException:
            self._folder.close()
            raise

    def __enter__(self) -> BatchJob:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._folder.close()

    def run(
        self,
        service: Service,
        max_in_flight: int | None = None,
        show_progress: bool = True,
        on_tick: Callable[[Tally], None] = lambda tally: None,
    ) -> BatchSummary:
        """Answer the rows that are not written yet.

        ``on_tick`` is called at least once a second with what is done so far. What it raises
        ends the run; what is written stays, and the job can be resumed.
        """
        limits = self._limits
        size = window_size(
            service,
            limits.max_in_flight if max_in_flight is None else max_in_flight,
            is_noted=show_progress,
        )
        self._writer = self._open_writer()
        self._window = Window(service, size, limits.max_attempts, limits.stall_timeout_s)
        view = ProgressView(self._tally, self.num_rows, limits.progress_interval_s, show_progress)
        started_at = time.monotonic()
        report = JobReport(service, self._folder.output.name, self._tally, self.num_rows)
        with contextlib.closing(self._writer), contextlib.closing(self._window), view:
            try:
                self._answer(service, view, report, on_tick)
                self._writer.finish()
            except BaseException:
                report.update("stopped")
                raise
        report.update("done")
        return self._complete(time.monotonic() - started_at, self._window.num_retries)

    def abandon(self, code: str, message: str) -> BatchSummary:
        """Complete the job without a service: rows that are not written get an error line."""
        self._writer = self._open_writer()
        with contextlib.closing(self._writer):
            for row in self._file.rows(self._found.form):
                if row.number not in self._writer:
                    self._write_failure(row, code, message)
            self._writer.finish()
        return self._complete(0.0, 0)

    @property
    def num_rows(self) -> int:
        return self._found.num_rows

    def _open_writer(self) -> ResultWriter:
        self._tally = Tally(self._slo)
        interval_s = self._limits.sync_interval_s
        return ResultWriter(
            self._folder, self._format, self.num_rows, interval_s, self._tally.add_earlier
        )

    def _complete(self, elapsed_s: float, num_retries: int) -> BatchSummary:
        summary = self._tally.summary(elapsed_s, num_retries, self._writer.num_duplicates)
        self._folder.write_summary(summary.to_record())
        return summary

    def _answer(
        self,
        service: Service,
        view: ProgressView,
        report: JobReport,
        on_tick: Callable[[Tally], None],
    ) -> None:
        digest = hashlib.sha256()
        rows = self._file.rows(self._found.form, digest)
        todo = (row for row in rows if row.number not in self._writer)
        self._fill(service, todo)
        while self._window:
            for finished in self._window.wait():
                self._settle(finished)
            self._fill(service, todo)
            view.update()
            report.update()
            on_tick(self._tally)
        self._write_lost()
        if digest.hexdigest() != self._found.sha256:
            raise BatchError(
                f"input {self._file.path} was changed while the job ran; --restart to answer it "
                "as it is now"
            )

    def _fill(self, service: Service, todo: Iterator[Row]) -> None:
        """Submit rows until the window is full, or there are no more."""
        batch = []
        while self._window.room > len(batch) and (row := next(todo, None)) is not None:
            try:
                prompt, params = prompt_of(row, self._params, self._model)
                request = service.validate(prompt, params)
            except Exception as error:  # not only RequestError: no row may stop the others
                if isinstance(error, DaskserveError) and not isinstance(error, RequestError):
                    raise  # not the row's fault
                self._write_error(row, error)
            else:
                batch.append((row, request))
        if batch:
            self._window.submit(batch)

    def _settle(self, finished: Finished) -> None:
        if finished.is_lost:
            self._lost.append(finished)
            if len(self._lost) > self._limits.max_lost_rows:
                raise BatchError(
                    f"{len(self._lost)} rows were given up with their instances and none finished "
                    f"in between, last: {finished.result}; see to the workers and run the same "
                    "command again to go on"
                )
        elif isinstance(finished.result, Completion):
            self._write_lost()  # the cluster lives, so those rows were at fault
            outcome = Outcome.of(finished.row.number, finished.result)
            self._write(outcome, success_line(finished.row, finished.result, self._model))
        else:
            self._write_error(finished.row, finished.result)

    def _write_lost(self) -> None:
        for finished in self._lost:
            self._write_error(finished.row, finished.result)
        self._lost.clear()

    def _write_error(self, row: Row, error: Exception) -> None:
        code, message = "internal_error", f"{type(error).__name__}: {error}"
        if isinstance(error, RequestError):
            code, message = error.code, str(error)
        self._write_failure(row, code, message)

    def _write_failure(self, row: Row, code: str, message: str) -> None:
        outcome = Outcome.failure(row.number, row.custom_id, code, message)
        self._write(outcome, error_line(row, code, outcome.message))

    def _write(self, outcome: Outcome, line: bytes) -> None:
        if self._writer.commit(outcome, line):
            self._tally.add(outcome)
