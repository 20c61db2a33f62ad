"""What a watcher sees once a second, and the file that keeps it.

A recording holds JSON lines. The first is ``{"recording": "daskserve", "version": 1}``; each
further one an `Observation`: a ``sample`` (see `daskserve.observe.sample.Sample`), and where there
are any ``jobs`` (`daskserve.observe.jobs.JobProgress`) and ``decisions`` (of the replanner, as in
its journal) that are new or have changed since the line before, and a ``plan``
(`daskserve.planner.plan_record.PlanRecord`) that somebody has made meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from daskserve.errors import ConfigError
from daskserve.observe.jobs import JobProgress
from daskserve.observe.sample import Sample

_HEADER = {"recording": "daskserve", "version": 1}


@dataclass(frozen=True, slots=True)
class Observation:
    """One row, and what is new of jobs, decisions and plans."""

    sample: Sample
    jobs: tuple[JobProgress, ...] = ()
    decisions: tuple[dict[str, Any], ...] = ()
    plan: dict[str, Any] | None = None

    def to_record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        record: dict[str, Any] = {"sample": self.sample.to_record()}
        if self.jobs:
            record["jobs"] = [job.to_record() for job in self.jobs]
        if self.decisions:
            record["decisions"] = list(self.decisions)
        if self.plan is not None:
            record["plan"] = self.plan
        return record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Observation:
        """Inverse of `to_record`; KeyError or TypeError for anything else."""
        return cls(
            Sample.from_record(record["sample"]),
            tuple(map(JobProgress.from_record, record.get("jobs", ()))),
            tuple(record.get("decisions", ())),
            record.get("plan"),
        )


class Recorder:
    """Writes observations to a file of the owner's alone, anew (ConfigError)."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._file = os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)
        except OSError as error:
            raise ConfigError(f"cannot record to {path}: {error.strerror}") from None
        self._write(_HEADER)

    def add(self, observation: Observation) -> None:
        self._write(observation.to_record())

    def close(self) -> None:
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(orjson.dumps(record) + b"\n")


class RecordingReader:
    """Reads a recording, and again what is added to it.

    Parameters
    ----------
    path
        A file that `Recorder` writes (ConfigError for any other).
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        self._path, self._line_number = path, 0
        self._rest = b""
        first = next(self._lines(), b"")
        if _parsed(first) != _HEADER:
            self._file.close()
            raise ConfigError(
                f"{path} is no recording: its first line must be {orjson.dumps(_HEADER).decode()}"
            )

    def __enter__(self) -> RecordingReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def new(self) -> Iterator[Observation]:
        """What stands in the file beyond the last call; half a line is left for the next one."""
        for line in self._lines():
            try:
                yield Observation.from_record(orjson.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                where = f"{self._path}, line {self._line_number}"
                raise ConfigError(f"{where} is no observation: {error!r}") from None

    def close(self) -> None:
        self._file.close()

    def _lines(self) -> Iterator[bytes]:
        for piece in self._file:
            self._rest += piece
            if self._rest.endswith(b"\n"):
                line, self._rest = self._rest, b""
                self._line_number += 1
                yield line


def _parsed(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except ValueError:
        return None
