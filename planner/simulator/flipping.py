"""A simulated deployment whose instances change their role while requests run.

Every instance stands in the tables twice, as a prefill and as a decode instance, and is closed to
the router in the role that it does not have. It drains like a real one: nothing new, what it has
runs to its end. Each of its roles has a KV pool of its own here, in reality they share one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from daskserve.core.instance import Role
from daskserve.errors import ConfigError
from daskserve.planner.simulator.building import add_slots, build_tables
from daskserve.planner.simulator.compiled import records as r
from daskserve.planner.simulator.compiled.loop import run
from daskserve.planner.simulator.deployment import Deployment
from daskserve.planner.step_times import StepTimes

_CLOSED = 2**40
"""Tokens in the queue of a closed prefill instance, and blocks promised by a closed decode one, as
the router sees it: no queue is longer, and no pool has so much room."""

_FOREVER = 2**62


class FlippingSimulation:
    """Advances from one batch of arrivals to the next; between them roles can be changed.

    Parameters
    ----------
    times
        Step times of every instance.
    roles
        PREFILL or DECODE, of each instance; both must occur.
    links
        KV transfer, as `Deployment` has it.
    """

    def __init__(self, times: StepTimes, roles: list[Role], **links: Any) -> None:
        if {Role.PREFILL, Role.DECODE} != set(roles):
            raise ConfigError("roles must be PREFILL and DECODE, both at least once")
        count = len(roles)
        self._deployment = Deployment(
            prefill=times, num_prefill=count, decode=times, num_decode=count, **links
        )
        self._tables = build_tables(self._deployment)
        # Columns as plain arrays: records are slow to look at thousands of times.
        tables = self._tables
        self._queued = np.asarray(tables.router[r.QUEUED_REQUESTS])
        self._active = np.asarray(tables.instances["num_active"])
        self._queue_counts = np.asarray(tables.queues["count"])
        self._queue_of = [int(queue) for queue in tables.instances["queue"]]
        self._max_batch = times.max_batch_size * times.num_stages
        self.roles = list(roles)
        self._is_open = [True] * count
        for index, role in enumerate(roles):
            other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
            self._set_open(index, other, False)

    @property
    def now_s(self) -> float:
        """Time of the last event."""
        return float(self._tables.world[0].now_s)

    def advance(
        self, arrival_s: np.ndarray, prompt_tokens: np.ndarray, output_tokens: np.ndarray
    ) -> np.ndarray:
        """Run until the last of these requests has arrived; ``DONE`` rows of what has ended."""
        return self._run(arrival_s, prompt_tokens, output_tokens, is_last=False)

    def finish(self) -> np.ndarray:
        """Run until nothing is left to do; ``DONE`` rows of what has ended."""
        nothing = np.empty(0)
        return self._run(nothing, nothing, nothing, is_last=True)

    # Roles.

    def drain(self, index: int) -> None:
        """Give an instance nothing new."""
        if self._is_open[index]:
            self._is_open[index] = False
            self._set_open(index, self.roles[index], False)

    def is_drained(self, index: int) -> bool:
        """Whether it was closed and has finished what it had."""
        return not self._is_open[index] and self.num_running(index) == 0

    def resume(self, index: int, role: Role) -> None:
        """Open it, drained, in a role."""
        self.roles[index] = role
        self._is_open[index] = True
        self._set_open(index, role, True)

    def is_open(self, index: int) -> bool:
        return self._is_open[index]

    def num_running(self, index: int) -> int:
        """Requests bound to an instance in the role that it has."""
        if self.roles[index] is Role.PREFILL:
            return int(self._queued[index])
        return int(self._active[index] + self._queue_counts[self._queue_of[index]])

    def num_waiting(self) -> int:
        """Requests with a first token that no decode instance has room for."""
        return int(self._queue_counts[r.READY_QUEUE])

    @property
    def num_decode_slots(self) -> int:
        """Requests that one decode instance has at once."""
        return self._max_batch

    def _set_open(self, index: int, role: Role, is_open: bool) -> None:
        amount = -_CLOSED if is_open else _CLOSED
        if role is Role.PREFILL:
            self._tables.router[r.QUEUED_TOKENS, index] += amount
            return
        # What the router takes for the use of memory, see `_observe` in admission.py.
        books = "promised_blocks" if self._deployment.max_tokens is None else "booked_blocks"
        self._tables.instances[books][index] += amount

    def _run(
        self, arrival_s: Any, prompt_tokens: Any, output_tokens: Any, is_last: bool
    ) -> np.ndarray:
        world = self._tables.world[0]
        world.next_arrival, world.is_last_chunk = 0, is_last
        arrivals = (
            np.array(arrival_s, np.float64),
            np.array(prompt_tokens, np.int64),
            np.array(output_tokens, np.int64),
        )
        ended = []
        while True:
            status = run(self._tables.world, *arrivals, _FOREVER)
            ended.append(self._tables.done[: world.num_done].copy())
            world.num_done = 0
            if status == r.NEEDS_SLOTS:
                add_slots(self._tables)
            elif status != r.NEEDS_OUTPUT:
                return np.concatenate(ended)
