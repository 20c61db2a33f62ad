"""The one place that writes results: exactly one line per row, and when it reaches the disk.

A row is *written* once `commit` returns: a crash of the process loses none of those. Results and
journal are fsynced together every ``sync_interval_s`` and at the end, results first, so a power
cut costs at most the rows of the last interval, which are computed again. In order of rows and as
parquet, results gather in the job's folder and the output appears whole when the job is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np

from daskserve.batch.folder import JobFolder, replacing
from daskserve.batch.journal import Journal
from daskserve.batch.outcome import Outcome
from daskserve.batch.results import flat_record
from daskserve.errors import BatchError

FORMATS = ("jsonl", "ordered jsonl", "parquet")
_PARQUET_ROWS = 4096


def format_of(output: Path, ordered: bool) -> str:
    """One of ``FORMATS``, by the output's suffix; parquet is always in the order of the rows."""
    suffix = output.suffix.lower()
    if suffix in (".parquet", ".pq"):
        return "parquet"
    if suffix not in (".jsonl", ".ndjson", ".json"):
        raise BatchError(f"output {output} must end in .jsonl, .ndjson, .json, .parquet or .pq")
    return "ordered jsonl" if ordered else "jsonl"


class ResultWriter:
    """Commits rows by their number; a row that comes twice is dropped.

    Parameters
    ----------
    folder, output_format
        The job, and one of ``FORMATS``.
    num_rows
        Rows of the job.
    sync_interval_s
        Seconds between two fsyncs; 0 syncs every row.
    on_outcome
        Called with every row that an earlier run wrote.

    Raises
    ------
    BatchError
        Output or journal cannot be written; everything committed before stands.
    """

    def __init__(
        self,
        folder: JobFolder,
        output_format: str,
        num_rows: int,
        sync_interval_s: float,
        on_outcome: Callable[[Outcome], None],
    ) -> None:
        self._folder, self._format = folder, output_format
        is_direct = output_format == "jsonl"
        results = folder.output if is_direct else folder.results
        self._journal = Journal(folder.journal, results, num_rows, on_outcome)
        self._sync_interval_s = sync_interval_s
        self._synced_at = time.monotonic()
        self._num_unsynced = 0
        self.num_duplicates = 0

    def __contains__(self, row: int) -> bool:
        return row in self._journal.written

    def __len__(self) -> int:
        return len(self._journal.written)

    def commit(self, outcome: Outcome, line: bytes) -> bool:
        """Write a finished row; False when it was written before."""
        if outcome.row in self:
            self.num_duplicates += 1
            return False
        try:
            self._journal.append(outcome, line)
            self._num_unsynced += 1
            if time.monotonic() - self._synced_at >= self._sync_interval_s:
                self._sync()
        except OSError as error:
            raise self._stopped(error) from None
        return True

    def _sync(self) -> None:
        if self._num_unsynced:
            self._journal.sync()
            self._num_unsynced = 0
        self._synced_at = time.monotonic()

    def finish(self) -> None:
        """All rows are written: bring the output into its place."""
        if len(self) != self._journal.written.num_rows:
            raise RuntimeError(f"{len(self)} of {self._journal.written.num_rows} rows are written")
        try:
            self._sync()
            if self._format != "jsonl":
                self._assemble()
        except OSError as error:
            raise self._stopped(error) from None

    def _assemble(self) -> None:
        extents = self._journal.extents()
        with replacing(self._folder.output, self._folder.path) as temporary:
            if self._format == "parquet":
                _write_parquet(self._journal.results, extents, temporary)
            else:
                _write_ordered(self._journal.results, extents, temporary)

    def _stopped(self, error: OSError) -> BatchError:
        return BatchError(
            f"cannot write output {self._folder.output} or its journal: {error.strerror}; "
            f"{len(self)} rows are safe, run the same command again to go on"
        )

    def close(self) -> None:
        """Sync what can be synced and close the files; the job can be resumed."""
        try:
            self._sync()
        except OSError:
            pass  # what was written and not synced is checked against its checksum on resume
        self._journal.close()


def _lines(results: Path, extents: np.ndarray):
    with results.open("rb") as file:
        for start, end in extents.tolist():
            file.seek(start)
            yield file.read(end - start)


def _write_ordered(results: Path, extents: np.ndarray, path: Path) -> None:
    with path.open("wb") as file:
        file.writelines(_lines(results, extents))


def _write_parquet(results: Path, extents: np.ndarray, path: Path) -> None:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise BatchError("parquet needs pyarrow: pip install 'daskserve[parquet]'") from None
    # Written out, so that a job without errors has the same columns as one with.
    text, count = arrow.string(), arrow.int32()
    schema = arrow.schema(
        {
            "custom_id": text,
            "text": text,
            "finish_reason": text,
            "prompt_tokens": count,
            "completion_tokens": count,
            "error_code": text,
            "error_message": text,
        }
    )
    records = map(flat_record, _lines(results, extents))
    with parquet.ParquetWriter(path, schema) as file:
        while group := list(islice(records, _PARQUET_ROWS)):
            file.write_table(arrow.Table.from_pylist(group, schema=schema))
