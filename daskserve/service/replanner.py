"""The replanner at work: watches a service, carries out what its policy decides, measures it.

One look after the other on the service's event loop; the planner runs on a thread, so that no
token waits for it. At most one change at a time; whatever goes wrong with one is written down.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.core.slo import SLO
from daskserve.errors import DaskserveError
from daskserve.observe import Finished, InstanceFigures, Snapshot
from daskserve.replanning.decision import Action, Decision, Kind, Outcome, Status
from daskserve.replanning.observation import InstanceView, Observation, RoleLoad
from daskserve.replanning.policy import Policy
from daskserve.replanning.profile import Served
from daskserve.replanning.record import Journal
from daskserve.replanning.split import Split

logger = logging.getLogger(__name__)

_FLIP_TIMEOUT_S = 120.0
_WAIT_AFTER_ERROR_S = 5.0
_UNSETTLED = ("loading", "draining")


class Instances(Protocol):
    """Starts and stops instances; a cluster that cannot says why in `why_not`."""

    why_not: str
    can_remove: bool

    def room(self, num_running: int) -> int:
        """Instances that could be started beside those that run."""

    async def add(self, role: Role, shape: Parallelism) -> None:
        """Start one and wait until it is ready (ClusterError)."""

    async def remove(self, address: str) -> None:
        """Drain one and stop it (ClusterError)."""


@dataclass(frozen=True, slots=True)
class FixedInstances:
    """Of a cluster that is somebody else's."""

    why_not: str = "this cluster cannot add instances"
    can_remove: bool = False

    def room(self, num_running: int) -> int:
        return 0

    async def add(self, role: Role, shape: Parallelism) -> None:
        raise DaskserveError(self.why_not)

    async def remove(self, address: str) -> None:
        raise DaskserveError(self.why_not)


@dataclass(frozen=True, slots=True)
class Hands:
    """What the replanner needs of its service.

    Parameters
    ----------
    observe
        The snapshot after a cursor.
    flip
        Give an instance a role within so many seconds: ``pause_s`` among others.
    note
        Tell whoever watches the service of a decision, in JSON.
    instances
        Starts and stops them.
    """

    observe: Callable[[int], Awaitable[Snapshot]]
    flip: Callable[[str, Role, float], Awaitable[dict[str, float]]]
    note: Callable[[dict[str, Any]], Awaitable[None]]
    instances: Instances


@dataclass(slots=True)
class _Measuring:
    """A change whose effect is being measured, since ``started_s``."""

    decision: Decision
    outcome: Outcome
    started_s: float


class Replanner:
    """Parameters
    ----------
    policy
        Decides.
    slo
        By which answers are judged.
    measure_s
        So long the effect of a change is measured.
    interval_s
        Between two looks.
    """

    def __init__(
        self,
        hands: Hands,
        policy: Policy,
        journal: Journal,
        slo: SLO,
        measure_s: float = 30.0,
        interval_s: float = 0.5,
    ) -> None:
        self.journal = journal
        self._hands, self._policy, self._slo = hands, policy, slo
        self._measure_s, self._interval_s = measure_s, interval_s
        self._cursor: int | None = None
        self._now_s = 0.0
        self._measuring: _Measuring | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch, on the running event loop."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop; a flip that has begun ends by itself."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def ask(self, split: Split) -> None:
        """Manual override: the split to have, whatever the planner thinks. Any thread."""
        self._policy.ask(split)

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
                await asyncio.sleep(self._interval_s)
            except Exception as error:  # a look that fails must not be the last one
                logger.warning("a look of the replanner failed: %r", error)
                await asyncio.sleep(_WAIT_AFTER_ERROR_S)

    async def look(self) -> Decision | None:
        """See what is new, decide, and carry it out to its end."""
        snapshot = await self._hands.observe(self._cursor or 0)
        is_first, self._cursor = self._cursor is None, snapshot.cursor
        ended = () if is_first else snapshot.finished
        policy = self._policy
        policy.saw(
            snapshot.now,
            snapshot.num_arrived,
            snapshot.num_failed,
            [_served(one, self._slo) for one in ended],
        )
        self._now_s = snapshot.now
        await self._measure(snapshot.now)
        observation = observed(snapshot, self._hands.instances)
        decision = await asyncio.to_thread(policy.decide, snapshot.now, snapshot.at, observation)
        if decision is None:
            return None
        await self._write(decision)
        logger.info("decision %d: %s", decision.decision_id, decision.reason)
        if decision.is_change and not decision.is_dry_run:
            await self._carry_out(decision)
        return decision

    async def _carry_out(self, decision: Decision) -> None:
        started_s, before_s = time.monotonic(), self._now_s
        await self._conclude(before_s)
        pause_s = 0.0
        outcome = Outcome(Status.DONE)
        try:
            for action in decision.actions:
                pause_s = max(pause_s, await self._act(action))
        except DaskserveError as error:
            outcome = Outcome(Status.FAILED, error=str(error))
        except OSError as error:
            outcome = Outcome(Status.FAILED, error=f"the scheduler is gone: {error}")
        outcome = replace(outcome, took_s=time.monotonic() - started_s, pause_s=pause_s)
        decision = decision.with_outcome(outcome)
        await self._write(decision)
        now_s = before_s + outcome.took_s
        self._policy.ended(now_s, decision, outcome)
        self._measuring = _Measuring(decision, outcome, now_s)

    async def _act(self, action: Action) -> float:
        """Returns for how long requests had to wait for it."""
        if action.kind is Kind.FLIP:
            told = await self._hands.flip(action.instance, action.role, _FLIP_TIMEOUT_S)
            return told["pause_s"]
        if action.kind is Kind.ADD:
            await self._hands.instances.add(action.role, action.shape)
        else:
            await self._hands.instances.remove(action.instance)
        return 0.0

    async def _measure(self, now_s: float) -> None:
        if self._measuring is not None and now_s >= self._measuring.started_s + self._measure_s:
            await self._conclude(now_s)

    async def _conclude(self, now_s: float) -> None:
        """Write down what came of the last change, as far as it can be told by now."""
        measuring, self._measuring = self._measuring, None
        if measuring is None:
            return
        window_s = now_s - measuring.started_s
        seen = self._policy.profile.statistics(now_s, window_s)
        outcome = replace(
            measuring.outcome,
            num_failed=seen.num_failed,
            attainment=seen.attainment,
            goodput_rps=seen.goodput_rps,
            measured_s=seen.window_s,
        )
        await self._write(measuring.decision.with_outcome(outcome))

    async def _write(self, decision: Decision) -> None:
        self.journal.write(decision)
        await self._hands.note(decision.to_json())


def observed(snapshot: Snapshot, instances: Instances) -> Observation:
    """What the policy looks at."""
    apart = [one for one in snapshot.instances if one.role != Role.COLOCATED.value]
    ready = [one for one in apart if one.state == "ready"]
    roles = snapshot.roles or {}
    return Observation(
        instances=tuple(_view(one) for one in ready),
        prefill=_load(roles.get(Role.PREFILL.value, {})),
        decode=_load(roles.get(Role.DECODE.value, {})),
        is_busy=any(one.state in _UNSETTLED for one in apart),
        can_add=instances.room(len(apart)),
        why_not_add=instances.why_not,
        can_remove=instances.can_remove,
    )


def _view(one: InstanceFigures) -> InstanceView:
    return InstanceView(
        address=one.address,
        role=Role(one.role),
        num_running=one.load.num_running + one.load.num_waiting,
        can_flip=one.can_flip,
        shape=Parallelism(one.place.tp, one.place.pp),
    )


def _load(counters: dict[str, int]) -> RoleLoad:
    return RoleLoad(
        counters.get("waiting", 0), counters.get("running", 0), counters.get("slots", 0)
    )


def _served(one: Finished, slo: SLO) -> Served:
    return Served(
        arrived_s=one.arrived_at,
        ended_s=one.finished_at,
        prompt_tokens=one.prompt_tokens,
        output_tokens=one.output_tokens,
        ttft_s=one.ttft_s,
        tpot_s=one.tpot_s,
        is_met=slo.is_met(one.ttft_s, one.tpot_s),
    )
