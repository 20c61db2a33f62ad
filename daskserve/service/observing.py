"""The scheduler's side of watching a service: what instances told last, and what was finished."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from distributed import Scheduler

from daskserve.core.instance import InstanceLoad, Role
from daskserve.core.slo import SLO
from daskserve.observe import Finished, InstanceFigures, JobProgress, Place, Snapshot
from daskserve.service.dask_link import DaskLink
from daskserve.service.dispatch_state import DispatchState
from daskserve.service.names import FIGURES, NOTE_DECISION, NOTE_JOB, OBSERVE, roles_of

if TYPE_CHECKING:
    from daskserve.service.members import Report

_MOST_FINISHED = 50_000
"""Finished requests that are remembered for whoever looks late."""
_MOST_JOBS = 20
_MOST_DECISIONS = 500
_JOB_SILENCE_S = 30.0
"""A running job that says nothing for so long is shown as stopped."""


class Observations:
    """Answers `OBSERVE`; everybody who watches looks here.

    Parameters
    ----------
    scheduler
        Gets the handlers.
    state
        Gives the books of dispatch.
    reports
        Gives what workers report of their instances, by address.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        state: Callable[[], DispatchState],
        reports: Callable[[], dict[str, Report]],
    ) -> None:
        self._scheduler, self._state, self._reports = scheduler, state, reports
        self._told: dict[str, tuple[float, Place, InstanceLoad]] = {}
        self._finished: deque[Finished] = deque(maxlen=_MOST_FINISHED)
        self._num_finished = self._num_failed = 0
        self._jobs: dict[str, tuple[float, JobProgress]] = {}
        self._slos: dict[str, SLO] = {}
        self._link = DaskLink(scheduler)
        self._decisions: deque[dict[str, Any]] = deque(maxlen=_MOST_DECISIONS)
        self._num_decisions = 0

    def start(self) -> None:
        self._scheduler.handlers |= {
            OBSERVE: self._observe,
            NOTE_JOB: self._note_job,
            NOTE_DECISION: self._note_decision,
        }
        self._scheduler.stream_handlers[FIGURES] = self._on_figures
        self._link.start()

    def stop(self) -> None:
        # The stream handler stays: a late message would otherwise cut a worker off.
        for name in (OBSERVE, NOTE_JOB, NOTE_DECISION):
            self._scheduler.handlers.pop(name, None)
        self._link.stop()

    def attached(self, service: str, slo: dict[str, float] | None) -> None:
        """A service has come; the SLO of the last one that has any is shown."""
        if slo is not None:
            self._slos[service] = SLO(**slo)

    def detached(self, service: str) -> None:
        self._slos.pop(service, None)

    def forget(self, address: str) -> None:
        self._told.pop(address, None)

    # Handlers.

    def _on_figures(self, figures: dict[str, Any], worker: str, **kwargs: Any) -> None:
        if worker not in self._scheduler.workers:
            return
        load = InstanceLoad(**(figures["load"] or {}))
        self._told[worker] = (time.monotonic(), Place(**figures["place"]), load)
        self._finished.extend(Finished.from_record(one) for one in figures["finished"])
        self._num_finished += len(figures["finished"])
        self._num_failed += figures["num_failed"]

    async def _note_job(self, job: dict[str, Any]) -> None:
        progress = JobProgress.from_record(job)
        self._jobs.pop(progress.job_id, None)
        self._jobs[progress.job_id] = (time.monotonic(), progress)
        while len(self._jobs) > _MOST_JOBS:
            del self._jobs[next(iter(self._jobs))]

    async def _note_decision(self, decision: dict[str, Any]) -> None:
        self._decisions.append(decision)
        self._num_decisions += 1

    async def _observe(self, cursor: int = 0, num_decisions: int = 0) -> dict[str, Any]:
        return self.snapshot(cursor, num_decisions).to_record()

    def snapshot(self, cursor: int = 0, num_decisions: int = 0) -> Snapshot:
        """What is so now; see `daskserve.observe.Snapshot`."""
        state, now = self._state(), time.monotonic()
        reports = self._reports()
        models = [report.info["model"] for report in reports.values() if report.info]
        return Snapshot(
            now=now,
            at=time.time(),
            cursor=self._num_finished,
            model=models[-1] if models else "",
            slo=next(reversed(self._slos.values()), None),
            instances=tuple(self._figures(address, one) for address, one in reports.items()),
            roles={role.value: state.counters(role) for role in Role},
            num_arrived=state.num_arrived,
            num_failed=self._num_failed + state.num_refused,
            finished=_last(self._finished, self._num_finished - cursor),
            jobs=tuple(_as_of(now, told_at, job) for told_at, job in self._jobs.values()),
            decisions=_last(self._decisions, self._num_decisions - num_decisions),
            num_decisions=self._num_decisions,
        )

    def _figures(self, address: str, report: Report) -> InstanceFigures:
        at, place, load = self._told.get(address, (0.0, Place(), InstanceLoad()))
        known = self._state().instances.get(address)
        state = report.status
        if known is not None and known.is_draining:
            state = "draining"
        elif known is not None and not known.is_accepting:
            state = "paused"
        role = report.role if known is None else known.role.value  # it may have been changed
        worker = self._scheduler.workers.get(address)
        can_flip = worker is not None and {Role.PREFILL, Role.DECODE} <= {
            *roles_of(worker.resources)
        }
        return InstanceFigures(address, role, state, place, load, at, report.error, can_flip)


def _last(kept: deque[Any], count: int) -> tuple[Any, ...]:
    """The last ``count``, as far as they are kept."""
    return tuple(islice(kept, max(len(kept) - max(count, 0), 0), None))


def _as_of(now: float, told_at: float, job: JobProgress) -> JobProgress:
    is_silent = job.state == "running" and now - told_at > _JOB_SILENCE_S
    return replace(job, state="stopped") if is_silent else job
