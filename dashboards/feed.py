"""The one watcher of a dashboard process: its thread samples, all sessions read."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import aclosing

from daskserve.dashboards.sources import Source
from daskserve.errors import DaskserveError
from daskserve.observe import JobProgress, Observation, Sample
from daskserve.observe.observation import Recorder
from daskserve.planner.plan_record import PlanRecord
from daskserve.replanning.decision import Decision

_MOST_SAMPLES = 4 * 3600
_MOST_DECISIONS = 500
_RETRY_S = 2.0
_JOIN_S = 5.0


class Feed:
    """History of what a source tells. Read from any thread.

    Parameters
    ----------
    source
        What is watched.
    recorder
        Gets everything too, if there is one.
    """

    def __init__(self, source: Source, recorder: Recorder | None = None) -> None:
        self.source = source
        self._recorder = recorder
        self._lock = threading.Lock()
        self._samples: deque[Sample] = deque(maxlen=_MOST_SAMPLES)
        self._num_samples = 0
        self._jobs: dict[str, JobProgress] = {}
        self._decisions: dict[int, Decision] = {}
        self._plan: PlanRecord | None = None
        self._untold_plan: PlanRecord | None = None
        self._listeners: set[Callable[[], None]] = set()
        self.trouble = "" if not source.is_live else f"connecting to {source.name}"
        """Why nothing comes; empty while it does."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="dashboard feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(_JOIN_S)
        if self._recorder is not None:
            self._recorder.close()

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` on the feed's thread for everything new; returns what ends that."""
        with self._lock:
            self._listeners.add(listener)

        def leave() -> None:
            with self._lock:
                self._listeners.discard(listener)

        return leave

    def since(self, seen: int) -> tuple[list[Sample], int]:
        """Rows after the ``seen`` first ones, as far as they are kept; and how many there were."""
        with self._lock:
            count = min(max(self._num_samples - seen, 0), len(self._samples))
            first = len(self._samples) - count
            return [self._samples[i] for i in range(first, len(self._samples))], self._num_samples

    @property
    def newest(self) -> Sample | None:
        with self._lock:
            return self._samples[-1] if self._samples else None

    @property
    def jobs(self) -> list[JobProgress]:
        """The latest first."""
        with self._lock:
            return list(reversed(self._jobs.values()))

    @property
    def decisions(self) -> list[Decision]:
        """The latest first."""
        with self._lock:
            return sorted(self._decisions.values(), key=lambda one: one.at_unix_s, reverse=True)

    @property
    def plan(self) -> PlanRecord | None:
        """The last one that was made, or recorded."""
        with self._lock:
            return self._plan

    def note_plan(self, plan: PlanRecord) -> None:
        """Somebody has made a plan: every session shows it. Any thread."""
        with self._lock:
            self._plan = self._untold_plan = plan
        self._tell()

    # On the feed's thread.

    def _run(self) -> None:
        asyncio.run(self._watch())

    async def _watch(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        while True:
            try:
                async with aclosing(self.source.observations()) as observations:
                    async for observation in observations:
                        self.trouble = ""
                        self._take(observation)
                        self._tell()
            except asyncio.CancelledError:
                return
            except (
                DaskserveError,
                OSError,
                TimeoutError,
                ValueError,
                KeyError,
                TypeError,
            ) as error:
                self.trouble = f"{self.source.name}: {error or type(error).__name__}"
                self._tell()
            if not self.source.is_live:
                return  # what is wrong in a file stays wrong
            await asyncio.sleep(_RETRY_S)

    def _take(self, observation: Observation) -> None:
        known = [Decision.from_json(record) for record in observation.decisions]
        changed = tuple(job for job in observation.jobs if self._jobs.get(job.job_id) != job)
        with self._lock:
            self._samples.append(observation.sample)
            self._num_samples += 1
            self._jobs.update((job.job_id, job) for job in changed)
            for decision in known:
                self._decisions[decision.decision_id] = decision
            while len(self._decisions) > _MOST_DECISIONS:
                del self._decisions[min(self._decisions)]
            if observation.plan is not None:
                self._plan = PlanRecord.from_record(observation.plan)
            plan, self._untold_plan = self._untold_plan, None
        if self._recorder is not None:
            record = plan.to_record() if plan is not None else None
            told = Observation(observation.sample, changed, observation.decisions, record)
            self._recorder.add(told)

    def _tell(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()
