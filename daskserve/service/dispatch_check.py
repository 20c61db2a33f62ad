"""Proof that dispatch chooses right: every choice again, from Dask's own state and by brute force.

For tests and benchmarks (``daskserve.service.check-dispatch``): it costs a pass over all that
runs for every request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed import Scheduler

from daskserve.core.instance import Role
from daskserve.core.kv import blocks_for
from daskserve.service.dispatch_state import DispatchState, InstanceState, Stage
from daskserve.service.names import ANNOTATION, Facts, role_of

_MAX_NOTES = 20


class DispatchCheck:
    """Counts choices, and violations with a note each.

    Parameters
    ----------
    scheduler
        Dask's truth: which tasks each worker processes.
    state
        The books to be verified.
    told_to_use
        Stages of online requests whose services were told to use an instance.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        state: DispatchState,
        told_to_use: Callable[[str], list[Stage]],
    ) -> None:
        self._scheduler = scheduler
        self._state = state
        self._told_to_use = told_to_use
        self.num_choices = 0
        self.num_starts = 0
        self.num_violations = 0
        self.notes: list[str] = []

    def verify_choice(self, stage: Stage, chosen: InstanceState) -> None:
        """The stage was just bound: was the instance a true minimum without it?"""
        self.num_choices += 1
        loads = {
            instance.address: self._true_load(instance, without=stage.key)
            for instance in self._state.instances_of(stage.role)
        }
        for instance in self._state.instances_of(stage.role):
            self._compare_books(instance, stage)
        best = min(
            (load for address, load in loads.items() if self._has_room(stage, address)),
            default=None,
        )
        if best is None or loads[chosen.address] != best:
            self._note(f"{stage.key} went to {chosen.address} at {loads}")

    def verify_start(self, ts: Any) -> None:
        """Dask has sent a task to a worker: is it the one it was bound to?"""
        self.num_starts += 1
        stage = self._state.stages.get(ts.key)
        bound = stage.instance.address if stage and stage.instance else None
        if ts.processing_on is None or ts.processing_on.address != bound:
            self._note(f"{ts.key} started on {ts.processing_on}, bound to {bound}")

    def _tasks_on(self, address: str) -> dict[str, Any]:
        """Our tasks that Dask has on a worker, and those bound in this very pump."""
        processing = {
            ts.key: ts
            for ts in self._scheduler.workers[address].processing
            if ANNOTATION in (ts.annotations or ())
        }
        for ts in list(self._scheduler.unrunnable):
            if ts.worker_restrictions == {address} and ANNOTATION in (ts.annotations or ()):
                processing[ts.key] = ts
        return processing

    def _true_sums(self, instance: InstanceState, without: str) -> tuple[int, int, int]:
        """Prompt tokens, KV blocks and number of the tasks that Dask has on the worker."""
        online = [s for s in self._told_to_use(instance.address) if s.key != without]
        tokens = sum(stage.prompt_tokens for stage in online)
        blocks = sum(stage.blocks_on(instance) for stage in online)
        count = len(online)
        for key, ts in self._tasks_on(instance.address).items():
            if key == without:
                continue
            facts = Facts(*ts.annotations[ANNOTATION])
            pool_tokens = facts.pool_tokens(role_of(ts.resource_restrictions))
            tokens += facts.prompt_tokens
            blocks += blocks_for(pool_tokens, instance.block_size)
            count += 1
        return tokens, blocks, count

    def _true_load(self, instance: InstanceState, without: str) -> tuple[float, int]:
        tokens, blocks, count = self._true_sums(instance, without)
        if instance.role is Role.PREFILL:
            return tokens, count
        return blocks / instance.num_blocks, count

    def _has_room(self, stage: Stage, address: str) -> bool:
        instance = self._state.instances[address]
        mine = instance is stage.instance
        used = instance.used_blocks - (stage.blocks_on(instance) if mine else 0)
        count = len(instance.bound) - mine
        on_probation = instance.on_probation not in (None, stage)
        return (
            instance.is_open
            and address not in stage.shunned
            and not (stage.is_suspect and on_probation)
            and count < instance.slots
            and used + stage.blocks_on(instance) <= instance.num_blocks
        )

    def _compare_books(self, instance: InstanceState, stage: Stage) -> None:
        tokens, blocks, count = self._true_sums(instance, without=stage.key)
        mine = instance is stage.instance
        booked_tokens = instance.queued_tokens - (stage.prompt_tokens if mine else 0)
        booked_count = len(instance.bound) - mine
        held = self._state.held_blocks(instance)
        booked_blocks = instance.used_blocks - held - (stage.blocks_on(instance) if mine else 0)
        booked = (booked_tokens, booked_blocks, booked_count)
        if booked != (tokens, blocks, count):
            self._note(f"{instance.address} is booked {booked}, Dask has {tokens, blocks, count}")

    def _note(self, text: str) -> None:
        self.num_violations += 1
        if len(self.notes) < _MAX_NOTES:
            self.notes.append(text)
