"""Which rows are written: an append-only log that any crash leaves usable.

Each line is ``[end, crc32, record]``: where the row's line ends in the results file, the checksum
of that line, and the `Outcome`. ``["synced", end]`` says that all before it reached the disk.
A row counts as written when its journal line is whole and the results file bears it out.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from daskserve.batch.folder import open_private
from daskserve.batch.outcome import Outcome
from daskserve.errors import BatchError


class RowSet:
    """A set of row numbers; one bit per row."""

    def __init__(self, num_rows: int) -> None:
        self._bits = bytearray(num_rows // 8 + 1)
        self.num_rows = num_rows
        self._len = 0

    def __contains__(self, row: int) -> bool:
        return 0 <= row < self.num_rows and bool(self._bits[row >> 3] & (1 << (row & 7)))

    def __len__(self) -> int:
        return self._len

    def add(self, row: int) -> None:
        if not 0 <= row < self.num_rows:
            raise ValueError(f"row {row} is not one of {self.num_rows}")
        if row not in self:
            self._bits[row >> 3] |= 1 << (row & 7)
            self._len += 1


class Journal:
    """The journal and its results file, brought to agree when opened.

    Parameters
    ----------
    path
        The journal's file.
    results
        The file that holds one line per written row.
    num_rows
        Rows of the job.
    on_outcome
        Called with every row that stands written, in the order of writing.

    Raises
    ------
    BatchError
        Rows that had safely reached the disk were changed since.
    """

    def __init__(
        self, path: Path, results: Path, num_rows: int, on_outcome: Callable[[Outcome], None]
    ) -> None:
        self.path, self.results = path, results
        self.written = RowSet(num_rows)
        self.results_bytes = 0
        try:
            self._journal, self._results = open_private(path), open_private(results)
            self._size = self._recover(on_outcome)
            os.ftruncate(self._journal, self._size)
            os.ftruncate(self._results, self.results_bytes)
        except OSError as error:
            raise BatchError(f"cannot write {error.filename or path}: {error.strerror}") from None

    def _recover(self, on_outcome: Callable[[Outcome], None]) -> int:
        """Accept the longest prefix that the results bear out; its size in bytes."""
        size, held = 0, os.fstat(self._results).st_size
        with self.path.open("rb") as journal, self.results.open("rb") as results:
            for line in journal:
                try:
                    outcome = self._check(line, results, held)
                except ValueError:
                    self._check_not_synced(chain([line], journal), held)
                    break
                if outcome is not None:
                    self.written.add(outcome.row)
                    on_outcome(outcome)
                size += len(line)
        return size

    def _check(self, line: bytes, results: BinaryIO, held: int) -> Outcome | None:
        """The outcome that the line records, None for a synced mark; ValueError if untrue."""
        match orjson.loads(line) if line.endswith(b"\n") else None:
            case ["synced", int(end)] if end == self.results_bytes:
                return None
            case [int(end), int(crc), list(record)] if self.results_bytes < end <= held:
                outcome = Outcome.from_record(record)
                content = results.read(end - self.results_bytes)
                if outcome.row not in self.written and zlib.crc32(content) == crc:
                    self.results_bytes = end
                    return outcome
        raise ValueError("the journal ends here")

    def _check_not_synced(self, lines: Iterator[bytes], held: int) -> None:
        """A crash shortens files or spoils what was not synced; anything else is a change."""
        for rest in lines:
            try:
                match orjson.loads(rest):
                    case ["synced", int(end)] if self.results_bytes < end <= held:
                        raise BatchError(
                            f"{self.results} was changed after byte {self.results_bytes} since "
                            f"{self.path} recorded it; restore it, or --restart to begin anew"
                        )
            except ValueError:
                continue

    def append(self, outcome: Outcome, line: bytes) -> None:
        """Write the row's line, then its record; after an OSError neither is there."""
        end = self.results_bytes + len(line)
        record = orjson.dumps([end, zlib.crc32(line), outcome.to_record()]) + b"\n"
        try:
            _write_at(self._results, line, self.results_bytes)
            _write_at(self._journal, record, self._size)
        except OSError:
            os.ftruncate(self._results, self.results_bytes)
            os.ftruncate(self._journal, self._size)
            raise
        self.results_bytes = end
        self._size += len(record)
        self.written.add(outcome.row)

    def sync(self) -> None:
        """Bring results, then journal to the disk, and note it."""
        os.fsync(self._results)
        mark = orjson.dumps(["synced", self.results_bytes]) + b"\n"
        try:
            _write_at(self._journal, mark, self._size)
        except OSError:
            os.ftruncate(self._journal, self._size)
            raise
        self._size += len(mark)
        os.fsync(self._journal)

    def extents(self) -> np.ndarray:
        """Start and end of every written row's line in the results file, by row number."""
        extents = np.zeros((self.written.num_rows, 2), dtype=np.int64)
        start = 0
        for end, row in self._records():
            extents[row] = start, end
            start = end
        return extents

    def _records(self) -> Iterator[tuple[int, int]]:
        with self.path.open("rb") as journal:
            for line in journal:
                record: list[Any] = orjson.loads(line)
                if record[0] != "synced":
                    yield record[0], record[2][0]

    def close(self) -> None:
        os.close(self._journal)
        os.close(self._results)


def _write_at(descriptor: int, content: bytes, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
