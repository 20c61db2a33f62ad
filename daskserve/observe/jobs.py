"""How far a batch job is, as it says itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

MAX_FAILED_ROWS = 50
"""So many failed rows, the latest, are told with their reasons."""


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row without an answer, and why."""

    row: int
    custom_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class JobProgress:
    """A batch job at one moment.

    Parameters
    ----------
    job_id
        Tells runs apart; another run of the same job has another one.
    name
        What people call it: the output's file name.
    num_done
        Rows that are written, failed ones and those of earlier runs included.
    state
        ``running``, ``done``, or ``stopped`` when it has not been heard of for long.
    """

    job_id: str
    name: str
    num_rows: int
    num_done: int = 0
    num_failed: int = 0
    num_earlier: int = 0
    output_tokens: int = 0
    elapsed_s: float = 0.0
    state: str = "running"
    failed_rows: tuple[FailedRow, ...] = ()

    @property
    def share(self) -> float:
        return self.num_done / self.num_rows if self.num_rows else 1.0

    @property
    def rows_per_s(self) -> float:
        """Of this run."""
        return (self.num_done - self.num_earlier) / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds to the end at the pace so far; None before there is one."""
        if self.state != "running" or self.rows_per_s == 0:
            return None
        return (self.num_rows - self.num_done) / self.rows_per_s

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> JobProgress:
        """Inverse of `to_record`."""
        rows = tuple(FailedRow(**row) for row in record["failed_rows"])
        return cls(**{**record, "failed_rows": rows})
