"""A day in the simulator, with the split as it is or with the replanner at work.

The policy is the one that runs in production; here it sees simulated queues and its flips are
carried out on simulated instances, one after the other, each drained first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from daskserve.core.instance import Role
from daskserve.core.slo import SLO
from daskserve.planner.simulator.compiled import records as r
from daskserve.planner.simulator.flipping import FlippingSimulation
from daskserve.planner.simulator.result import STAGES, is_met, tpot_s, ttft_s
from daskserve.planner.step_times import StepTimes
from daskserve.planner.workload import Workload
from daskserve.replanning.decision import Action, Decision, Kind, Outcome, Status
from daskserve.replanning.observation import InstanceView, Observation, RoleLoad
from daskserve.replanning.policy import Policy
from daskserve.replanning.profile import Served
from daskserve.replanning.split import Split

TICK_S = 1.0


@dataclass(eq=False)
class SimulatedDay:
    """What came of it.

    Parameters
    ----------
    arrival_s, met
        Of every request: when it came, and whether it met both limits.
    decisions
        All of them, "no change" included, with the outcome of those that changed something.
    splits
        ``(seconds, split)`` from the beginning on, instances that drain counted as before.
    """

    arrival_s: np.ndarray
    met: np.ndarray
    decisions: list[Decision] = field(default_factory=list)
    splits: list[tuple[float, Split]] = field(default_factory=list)

    @property
    def attainment(self) -> float | None:
        """Share of all requests; None without any."""
        return float(self.met.mean()) if len(self.met) else None

    @property
    def goodput_rps(self) -> float:
        """Requests per second that met both limits, over the whole day."""
        span_s = float(self.arrival_s[-1] - self.arrival_s[0]) if len(self.met) > 1 else 0.0
        return float(self.met.sum()) / span_s if span_s > 0 else 0.0

    def over_time(self, window_s: float) -> list[tuple[float, int, float]]:
        """``(start, requests, attainment)`` of every window that has requests."""
        window = (self.arrival_s // window_s).astype(np.int64)
        rows = []
        for number in np.unique(window).tolist():
            met = self.met[window == number]
            rows.append((number * window_s, len(met), float(met.mean())))
        return rows


@dataclass(slots=True)
class _Change:
    decision: Decision
    left: list[Action]
    started_s: float
    draining: int | None = None


class SimulatedFleet:
    """Instances of one shape and what is being changed about them."""

    def __init__(self, times: StepTimes, split: Split) -> None:
        roles = [Role.PREFILL] * split.num_prefill + [Role.DECODE] * split.num_decode
        self.simulation = FlippingSimulation(times, roles)
        self._change: _Change | None = None

    def observe(self) -> Observation:
        """As the production service would."""
        simulation = self.simulation
        views = []
        running = {Role.PREFILL: 0, Role.DECODE: 0}
        for index, role in enumerate(simulation.roles):
            count = simulation.num_running(index)
            running[role] += count
            views.append(InstanceView(str(index), role, count, simulation.is_open(index)))
        slots = simulation.roles.count(Role.DECODE) * simulation.num_decode_slots
        return Observation(
            instances=tuple(views),
            prefill=RoleLoad(0, running[Role.PREFILL], 0),
            decode=RoleLoad(simulation.num_waiting(), running[Role.DECODE], slots),
            is_busy=self._change is not None,
        )

    def begin(self, decision: Decision, now_s: float) -> None:
        flips = [action for action in decision.actions if action.kind is Kind.FLIP]
        self._change = _Change(decision, flips, now_s)

    def go_on(self, now_s: float) -> tuple[Decision, Outcome] | None:
        """Flip the next instance once it is drained; the outcome when that was the last one."""
        change = self._change
        if change is None:
            return None
        if change.draining is not None and self.simulation.is_drained(change.draining):
            self.simulation.resume(change.draining, change.left.pop(0).role)
            change.draining = None
        if change.draining is None and change.left:
            change.draining = int(change.left[0].instance)
            self.simulation.drain(change.draining)
        if change.left:
            return None
        self._change = None
        return change.decision, Outcome(Status.DONE, took_s=now_s - change.started_s)


def simulate_day(
    workload: Workload,
    times: StepTimes,
    slo: SLO,
    split: Split,
    policy: Policy | None = None,
    tick_s: float = TICK_S,
) -> SimulatedDay:
    """Play a workload against simulated instances.

    Parameters
    ----------
    times
        Of one instance.
    split
        At the beginning.
    policy
        Replans; None leaves the split as it is.
    tick_s
        So often the queues are looked at and decisions are made.
    """
    arrival_s, prompt, output = workload.arrays()
    fleet = SimulatedFleet(times, split)
    day = SimulatedDay(arrival_s, np.zeros(len(arrival_s), bool), splits=[(0.0, split)])
    num_ticks = int(arrival_s[-1] // tick_s) + 1 if len(arrival_s) else 0
    ends = np.searchsorted(arrival_s, tick_s * np.arange(1, num_ticks + 1))
    start = 0
    for tick, end in enumerate(ends.tolist()):
        now_s = (tick + 1) * tick_s
        here = slice(start, end)
        rows = fleet.simulation.advance(arrival_s[here], prompt[here], output[here])
        day.met[rows["request_id"]] = _met(slo, rows)
        if policy is not None:
            policy.saw(now_s, end, 0, _served(rows, prompt, slo))
            _replan(policy, fleet, day, now_s)
        start = end
    rows = fleet.simulation.finish()
    day.met[rows["request_id"]] = _met(slo, rows)
    return day


def _met(slo: SLO, rows: np.ndarray) -> np.ndarray:
    met: np.ndarray = is_met(slo, ttft_s(rows), tpot_s(rows)) & (rows["status"] == r.FINISHED)
    return met


def _served(rows: np.ndarray, prompt: np.ndarray, slo: SLO) -> list[Served]:
    """What has ended, in that order."""
    if not len(rows):
        return []
    ends_s = rows["arrival_s"] + sum(rows[stage] for stage in STAGES)
    rows, ends_s = rows[order := np.argsort(ends_s, kind="stable")], ends_s[order]
    ttft, tpot = ttft_s(rows), tpot_s(rows)
    columns = (
        rows["arrival_s"],
        ends_s,
        prompt[rows["request_id"]],
        rows["output_tokens"],
        ttft,
        tpot,
        _met(slo, rows),
    )
    return [
        Served(arrived_s, ended_s, num_prompt, num_output, first_s, _known(per_token_s), is_met)
        for arrived_s, ended_s, num_prompt, num_output, first_s, per_token_s, is_met in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


def _known(seconds: float) -> float | None:
    return None if seconds != seconds else seconds


def _replan(policy: Policy, fleet: SimulatedFleet, day: SimulatedDay, now_s: float) -> None:
    ended = fleet.go_on(now_s)
    if ended is not None:
        decision, outcome = ended
        policy.ended(now_s, decision, outcome)
        place = next(
            i for i, d in enumerate(day.decisions) if d.decision_id == decision.decision_id
        )
        day.decisions[place] = decision.with_outcome(outcome)
        split = fleet.observe().split
        if split is not None:
            day.splits.append((now_s, split))
    decision_or_none = policy.decide(now_s, now_s, fleet.observe())
    if decision_or_none is not None:
        day.decisions.append(decision_or_none)
        if decision_or_none.is_change and not decision_or_none.is_dry_run:
            fleet.begin(decision_or_none, now_s)
