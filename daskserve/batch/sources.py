"""Where rows come from: JSONL files read as a stream, and tables turned into such a file.

Parquet files, Dask bags, Dask data frames and Python iterables are written row by row to one
JSONL file in the job's folder, a partition at a time. From there on every job reads a file:
twice with bounded memory, with row numbers that do not depend on partitions.
"""

from __future__ import annotations

import codecs
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson
from dask.utils import ensure_dict
from distributed import Future

from daskserve.batch.folder import is_url
from daskserve.batch.lines import Form, Row, read_row
from daskserve.core.params import SamplingParams
from daskserve.errors import BatchError

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet", ".pq")
TABLE_COLUMNS = ("custom_id", "prompt", "messages", "model", *SamplingParams.__dataclass_fields__)
_GZIP_MAGIC = b"\x1f\x8b"
_SKIP_BYTES = 2**20
_PARQUET_ROWS = 1024


class Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


@dataclass(frozen=True, slots=True)
class JsonlFile:
    """A JSONL file as rows; blank lines are no rows.

    Parameters
    ----------
    path
        A regular file.
    max_line_bytes
        A longer line becomes a row with a problem; it is skipped, not read into memory.
    spooled
        Written by `spool`: rows are named by row number, since lines mean nothing to the user.
    """

    path: Path
    max_line_bytes: int
    spooled: bool = False

    def rows(self, fallback: Form = Form.PLAIN, digest: Digest | None = None) -> Iterator[Row]:
        """All rows in order; ``digest`` is fed every byte of the file."""
        number = 0
        for line_number, line in enumerate(self._lines(digest), start=1):
            if line is not None and not line.strip():
                continue
            default_id = f"row-{number}" if self.spooled else f"line-{line_number}"
            if line is None:
                problem = f"longer than {self.max_line_bytes} bytes (setting batch.max-line-bytes)"
                yield Row(number, default_id, fallback, {}, problem)
            else:
                yield read_row(line, number, default_id, fallback)
            number += 1

    def name_of(self, number: int) -> str:
        """Where the row stands, for messages: its line in the file, or its row in the table."""
        if self.spooled:
            return f"row {number}"
        rows = (i for i, line in enumerate(self._lines(None), 1) if line is None or line.strip())
        return f"line {next(line for n, line in enumerate(rows) if n == number)}"

    def _lines(self, digest: Digest | None) -> Iterator[bytes | None]:
        """Lines without their newline; None for one that is too long."""
        with self.path.open("rb") as file:
            is_first = True
            while line := file.readline(self.max_line_bytes + 1):
                if digest is not None:
                    digest.update(line)
                too_long = len(line) > self.max_line_bytes and not line.endswith(b"\n")
                while too_long and (rest := file.readline(_SKIP_BYTES)):
                    if digest is not None:
                        digest.update(rest)
                    if rest.endswith(b"\n"):
                        break
                if is_first:
                    line = line.removeprefix(codecs.BOM_UTF8)  # some editors write a BOM
                    is_first = False
                yield None if too_long else line


def open_source(source: Any, spool_path: Path, max_line_bytes: int) -> JsonlFile:
    """The rows of any accepted source.

    Parameters
    ----------
    source
        Path of a JSONL or parquet file (or a folder of parquet files), a Dask bag of strings or
        mappings, a Dask data frame, or an iterable of strings or mappings. Tables have a column
        ``prompt`` or ``messages`` and may have ``custom_id`` and the sampling parameters;
        their other columns are left alone.
    spool_path
        Takes the rows of everything that is not a JSONL file.
    max_line_bytes
        See `JsonlFile`.

    Raises
    ------
    BatchError
        Nothing there, nothing readable, or no prompt column.
    """
    if isinstance(source, str | Path):
        path = checked_input(source)
        if path.suffix.lower() in JSONL_SUFFIXES:
            return JsonlFile(path, max_line_bytes)
        records: Iterable[Any] = _parquet_records(path)
    elif hasattr(source, "to_delayed") and hasattr(source, "columns"):
        _check_columns(source.columns, "the data frame")
        records = _frame_records(source)
    elif hasattr(source, "to_delayed"):
        records = _bag_records(source)
    elif isinstance(source, Iterable) and not isinstance(source, bytes | dict):
        records = source
    else:
        raise BatchError(
            f"cannot read rows from {type(source).__name__}; give a path, a Dask bag, "
            "a Dask data frame or an iterable of prompts"
        )
    return spool(records, spool_path, max_line_bytes)


def checked_input(source: str | Path) -> Path:
    """The input's path, once it is known to be a readable JSONL or parquet file."""
    text = os.fspath(source)
    if is_url(text):
        raise BatchError(f"input {text} is a URL; download it and give the file's path")
    path = Path(text)
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            if any(path.glob("*.parquet")):
                return path
            raise BatchError(f"input {path} is a folder without *.parquet files")
        if not stat.S_ISREG(mode):
            raise BatchError(f"input {path} is not a regular file; save it to one first")
        with path.open("rb") as file:
            head = file.read(2)
    except (OSError, ValueError) as error:
        raise BatchError(f"cannot read input {text!r}: {_reason(error)}") from None
    if head == _GZIP_MAGIC:
        raise BatchError(f"input {path} is gzip-compressed; unpack it first (gunzip -k)")
    if head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise BatchError(f"input {path} is UTF-16; convert it first (iconv -f UTF-16 -t UTF-8)")
    known = (*JSONL_SUFFIXES, *PARQUET_SUFFIXES)
    if path.suffix.lower() not in known:
        raise BatchError(f"input {path} must end in one of {', '.join(known)}")
    return path


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def spool(records: Iterable[Any], path: Path, max_line_bytes: int) -> JsonlFile:
    """Write records (strings or mappings) as JSONL, owner-readable only."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for record in records:
                file.write(_table_line(record) + b"\n")
    except OSError as error:
        raise BatchError(f"cannot copy the rows to {path}: {_reason(error)}") from None
    return JsonlFile(path, max_line_bytes, spooled=True)


def _table_line(record: Any) -> bytes:
    if isinstance(record, str):
        record = {"prompt": record}
    if isinstance(record, dict):
        record = {str(name): value for name, value in record.items() if not _is_absent(value)}
        custom_id = record.get("custom_id")
        if hasattr(custom_id, "item"):
            custom_id = custom_id.item()  # a numpy scalar of a data frame
        if isinstance(custom_id, int):
            record["custom_id"] = str(custom_id)
    try:
        return orjson.dumps(record, default=_unreadable, option=orjson.OPT_SERIALIZE_NUMPY)
    except (TypeError, ValueError):  # such as lone surrogates: the row's reader says what is wrong
        return json.dumps(record, default=_unreadable).encode()


def _is_absent(value: Any) -> bool:
    """None, NaN, NaT and pandas.NA mark an empty cell."""
    return value is None or (not hasattr(value, "__len__") and str(value) in ("nan", "NaT", "<NA>"))


def _unreadable(value: Any) -> Any:
    return {"type": type(value).__name__}


def _check_columns(columns: Iterable[Any], what: str) -> None:
    names = [str(name) for name in columns]
    if not {"prompt", "messages"} & set(names):
        raise BatchError(f"{what} needs a column prompt or messages; it has {', '.join(names)}")


def _projected(names: Iterable[Any]) -> list[Any]:
    return [name for name in names if name in TABLE_COLUMNS]


def _parquet_records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise BatchError("parquet needs pyarrow: pip install 'daskserve[parquet]'") from None
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    for file_path in files:
        try:
            with parquet.ParquetFile(file_path) as file:
                names = file.schema_arrow.names
                _check_columns(names, f"parquet file {file_path}")
                for batch in file.iter_batches(_PARQUET_ROWS, columns=_projected(names)):
                    yield from batch.to_pylist()
        except (arrow.ArrowException, OSError) as error:
            raise BatchError(f"cannot read parquet file {file_path}: {error}") from None


def _frame_records(frame: Any) -> Iterator[dict[str, Any]]:
    frame = frame[_projected(frame.columns)]
    scheduler = _scheduler_of(frame)
    for index in range(frame.npartitions):
        yield from frame.partitions[index].compute(scheduler=scheduler).to_dict("records")


def _bag_records(bag: Any) -> Iterator[Any]:
    scheduler = _scheduler_of(bag)
    for part in bag.to_delayed():
        yield from part.compute(scheduler=scheduler)


def _scheduler_of(collection: Any) -> Any:
    """Persisted data is read where it lies; anything else in threads here, not on the engines."""
    graph = ensure_dict(collection.__dask_graph__())
    held = next((value for value in graph.values() if isinstance(value, Future)), None)
    return "threads" if held is None else held.client.get
