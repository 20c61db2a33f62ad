"""Bursts of seconds: flips one instance on queue evidence alone, without the planner.

One role has more waiting per instance than it can serve within the limits, the other would do
with one instance fewer, and both have been so at every look for some seconds. Each flip that takes
back the one before doubles the time until the next, so that traffic which swings faster than an
instance drains is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from daskserve.core.instance import Role
from daskserve.replanning.decision import Evidence
from daskserve.replanning.observation import Observation

_MOST_COOL_DOWN_S = 600.0


@dataclass(frozen=True, slots=True)
class FastPathSettings:
    """Parameters
    ----------
    prefill_queue, decode_queue
        Requests per instance of a role that wait or are bound to it (prefill), and that wait
        without room (decode), from which on the role is starved.
    patience_s
        So long at every look.
    cool_down_s
        Between two flips.
    reserve
        Share of the slots of the instances that the other role keeps which must stay free.
    """

    prefill_queue: float = 6.0
    decode_queue: float = 3.0
    patience_s: float = 2.0
    cool_down_s: float = 15.0
    reserve: float = 0.4


@dataclass(frozen=True, slots=True)
class Starved:
    """Which role needs an instance of the other, and why."""

    role: Role
    evidence: Evidence


class FastPath:
    """Pure: `look` as often as the queues are known, at least a few times per second."""

    def __init__(self, settings: FastPathSettings = FastPathSettings()) -> None:
        self.settings = settings
        self._since: dict[Role, float] = {}
        self._last: Role | None = None
        self._cool_down_s = settings.cool_down_s
        self._free_at = float("-inf")

    def look(self, now_s: float, observation: Observation) -> Starved | None:
        """A role that has been starved long enough, while the other has an instance to spare."""
        found = None
        for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            queued, limit = self._queue(observation, role)
            if queued < limit or not self._can_spare(observation, other):
                self._since.pop(role, None)
                continue
            since_s = self._since.setdefault(role, now_s)
            if now_s - since_s >= self.settings.patience_s and now_s >= self._free_at:
                name = f"{role.value.lower()}_queue_per_instance"
                found = Starved(role, Evidence(name, 0.0, queued, queued, limit))
        return found

    def flipped(self, now_s: float, role: Role) -> None:
        """An instance was given to a role; also by the planner, whose changes cool down too."""
        if self._last is not None and self._last is not role:
            self._cool_down_s = min(2 * self._cool_down_s, _MOST_COOL_DOWN_S)
        elif now_s > self._free_at + _MOST_COOL_DOWN_S:
            self._cool_down_s = self.settings.cool_down_s
        self._last = role
        self._free_at = now_s + self._cool_down_s
        self._since.clear()

    def _queue(self, observation: Observation, role: Role) -> tuple[float, float]:
        load, count = observation.load(role), max(len(observation.of_role(role)), 1)
        if role is Role.PREFILL:
            return (load.num_waiting + load.num_running) / count, self.settings.prefill_queue
        return load.num_waiting / count, self.settings.decode_queue

    def _can_spare(self, observation: Observation, role: Role) -> bool:
        load, count = observation.load(role), len(observation.of_role(role))
        if count < 2 or load.num_waiting or not observation.idlest(role):
            return False
        if role is Role.PREFILL:
            # Each instance computes one batch at a time: with fewer requests than would be
            # left of them, one has nothing to do.
            return load.num_running < count - 1
        left = load.num_slots * (count - 1) / count
        return load.num_running <= (1 - self.settings.reserve) * left
