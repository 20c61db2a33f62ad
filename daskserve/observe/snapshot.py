"""A service at one moment, as its scheduler knows it: one message for whoever watches."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from daskserve.core.instance import InstanceLoad
from daskserve.core.slo import SLO
from daskserve.observe.finished import Finished
from daskserve.observe.jobs import JobProgress


@dataclass(frozen=True, slots=True)
class Place:
    """Where an instance runs and in how many parts."""

    name: str = ""
    host: str = ""
    device: str = "cpu"
    tp: int = 1
    pp: int = 1

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp


@dataclass(frozen=True, slots=True)
class InstanceFigures:
    """One instance.

    Parameters
    ----------
    state
        ``loading``, ``ready``, ``draining``, ``paused`` (Dask gives its worker nothing),
        ``failed`` or ``lost``.
    at
        When the load was told, on the scheduler's monotonic clock.
    can_flip
        Whether it can take the other one of the roles PREFILL and DECODE.
    """

    address: str
    role: str
    state: str
    place: Place = Place()
    load: InstanceLoad = InstanceLoad()
    at: float = 0.0
    error: str = ""
    can_flip: bool = False

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> InstanceFigures:
        """Inverse of `to_record`."""
        known = {"place": Place(**record["place"]), "load": InstanceLoad(**record["load"])}
        return cls(**{**record, **known})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is so now, and what has been finished since the last look.

    Parameters
    ----------
    now, at
        The same moment on the scheduler's monotonic clock, and in seconds since 1970.
    model
        What the instances run; empty when there are none.
    slo
        Of the service that came last with one.
    roles
        Counters of dispatch by role, see `daskserve.Service.status`.
    num_arrived, num_failed
        Requests since the scheduler's start: that came, and that ended without an answer.
    finished
        Answers since the look that ``cursor`` of the last snapshot stands for, as far as they are
        still known.
    jobs
        Batch jobs of late.
    decisions
        Of the replanner, as `daskserve.replanning.decision.Decision` writes them: noted since the
        look that ``num_decisions`` of the last snapshot stands for; one that is noted again, with
        its outcome, replaces the earlier one.
    cursor, num_decisions
        Ask for the next snapshot with both.
    """

    now: float
    at: float
    cursor: int = 0
    model: str = ""
    slo: SLO | None = None
    instances: tuple[InstanceFigures, ...] = ()
    roles: dict[str, dict[str, int]] | None = None
    num_arrived: int = 0
    num_failed: int = 0
    finished: tuple[Finished, ...] = ()
    jobs: tuple[JobProgress, ...] = ()
    decisions: tuple[dict[str, Any], ...] = ()
    num_decisions: int = 0

    def to_record(self) -> dict[str, Any]:
        """Plain values for JSON and msgpack."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        record["slo"] = asdict(self.slo) if self.slo else None
        for name in ("instances", "finished", "jobs"):
            record[name] = [one.to_record() for one in record[name]]
        record["decisions"] = list(self.decisions)
        return record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Snapshot:
        """Inverse of `to_record`."""
        slo = record["slo"]
        known = {
            "slo": SLO(**slo) if slo else None,
            "instances": tuple(map(InstanceFigures.from_record, record["instances"])),
            "finished": tuple(map(Finished.from_record, record["finished"])),
            "jobs": tuple(map(JobProgress.from_record, record["jobs"])),
            "decisions": tuple(record["decisions"]),
        }
        return cls(**{**record, **known})
