"""Who runs what: the books behind every routing decision, without Dask and without a clock.

Requests wait here, first come first served per role in order of submission, until an instance
has room; then they are bound to it (late binding, so that no KV is stranded behind one full
instance while another has room). The decisions themselves are `daskserve.scheduling.routing`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from sortedcontainers import SortedDict

from daskserve.core.instance import Role
from daskserve.core.kv import blocks_for
from daskserve.errors import InvalidParameter
from daskserve.scheduling.batching import NONE
from daskserve.scheduling.routing import least_loaded, shortest_queue


@dataclass(slots=True, eq=False)
class InstanceState:
    """What is bound to one instance.

    Parameters
    ----------
    slots
        Most stages that may be bound at once.
    num_blocks, block_size
        Size of its KV pool.
    """

    address: str
    role: Role
    slots: int
    num_blocks: int
    block_size: int
    queued_tokens: int = 0
    """Prompt tokens of what is bound."""
    used_blocks: int = 0
    """KV blocks of what is bound; on a prefill instance also of finished KV that still waits."""
    is_accepting: bool = True
    """False while Dask gives its worker no tasks (paused, or closing)."""
    is_draining: bool = False
    """True while it gets nothing new and finishes what it has, see `DispatchState.drain`."""
    on_probation: Stage | None = None
    """The one bound stage, if any, that was on an instance when it was lost."""
    bound: dict[str, Stage] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether it may be chosen at all."""
        return self.is_accepting and not self.is_draining


@dataclass(slots=True, eq=False)
class Stage:
    """One step of a request: its prefill, its decode, or all of it on a colocated instance.

    Parameters
    ----------
    key
        Of the Dask task; made the same way for an online request, which has none.
    prompt_tokens, pool_tokens
        Length of the prompt, and most tokens whose KV the instance must hold.
    """

    key: str
    role: Role
    prompt_tokens: int
    pool_tokens: int
    rank: tuple[float, ...] = ()
    """Lower is served first; equal ones in order of arrival."""
    ticket: tuple[float, ...] = ()
    """The rank made unique; kept when the stage has to run again."""
    losses: int = 0
    """Instances lost while this stage was bound to them."""
    is_suspect: bool = False
    """It may have been the cause of a loss."""
    is_convicted: bool = False
    """It took down one instance after another: it must not run again."""
    shunned: set[str] = field(default_factory=set)
    """Addresses that its caller could not reach."""
    instance: InstanceState | None = None
    bound_at: float = 0.0

    def blocks_on(self, instance: InstanceState) -> int:
        return blocks_for(self.pool_tokens, instance.block_size)


class DispatchState:
    """Instances, the stages bound to them, and the stages that wait.

    A stage that was new on an instance when that was lost is a suspect: it may have brought it
    down. Suspects run at most one per instance, beside others, so that a second loss names the
    culprit and spares everybody else. Times are seconds of one monotonic clock.

    Parameters
    ----------
    max_losses
        Instances that a stage may lose, the last one while on probation, before it is convicted.
    probation_s
        A stage that has run for so long has proved itself; after `max_losses` losses only its
        end proves anything.
    """

    def __init__(self, max_losses: int, probation_s: float) -> None:
        self._max_losses = max_losses
        self.num_arrived = self.num_refused = 0
        self._probation_s = probation_s
        self.instances: dict[str, InstanceState] = {}
        self.stages: dict[str, Stage] = {}
        self._by_role: dict[Role, list[InstanceState]] = {role: [] for role in Role}
        self._waiting: dict[Role, SortedDict] = {role: SortedDict() for role in Role}
        self._suspects: dict[Role, SortedDict] = {role: SortedDict() for role in Role}
        self._waiting_tokens = dict.fromkeys(Role, 0)
        self._held: dict[str, tuple[InstanceState, int]] = {}
        self._tickets = itertools.count()
        self.num_bound = dict.fromkeys(Role, 0)
        """Stages bound so far."""

    def add_instance(self, instance: InstanceState) -> None:
        """An instance is ready for requests."""
        self.instances[instance.address] = instance
        self._by_role[instance.role].append(instance)

    def remove_instance(self, address: str, is_loss: bool, now: float) -> None:
        """An instance is gone; what was bound to it is unbound and keeps its ticket.

        Parameters
        ----------
        is_loss
            It went without notice, so what was new on it is suspected from now on.
        """
        instance = self.instances.pop(address, None)
        if instance is None:
            return
        self._by_role[instance.role].remove(instance)
        for key in [k for k, (home, _) in self._held.items() if home is instance]:
            del self._held[key]
        for stage in instance.bound.values():
            stage.instance = None
            if is_loss:
                self._suspect(stage, instance, now)

    def drain(self, address: str) -> None:
        """An instance is chosen for nothing new until `resume`; what it has runs to its end.

        Raises
        ------
        InvalidParameter
            No such instance is ready.
        """
        self._ready(address).is_draining = True

    def is_drained(self, address: str) -> bool:
        """Whether an instance gets nothing new, runs nothing and holds no KV that is waited for.

        True too for one that is gone. KV that is on its way to a decode instance just now does
        not count here: `InstanceLoad.num_holding` of the instance itself tells.
        """
        instance = self.instances.get(address)
        if instance is None:
            return True
        is_idle = not instance.bound and all(
            home is not instance for home, _ in self._held.values()
        )
        return instance.is_draining and is_idle

    def resume(self, address: str, role: Role | None = None, slots: int | None = None) -> None:
        """An instance takes requests again, or for the first time those of another role.

        Parameters
        ----------
        role
            None keeps it; another one needs an instance that drains and on which nothing is
            bound. KV that it holds stays there until it is pulled.
        slots
            Most stages at once from now on; None keeps the number.

        Raises
        ------
        InvalidParameter
            No such instance is ready, or it still works and the role is another one.
        """
        instance = self._ready(address)
        if role is not None and role is not instance.role:
            if instance.bound or not instance.is_draining:
                limit = f"is for drained instances; {address} still works as {instance.role.value}"
                raise InvalidParameter("role", role.value, limit)
            self._by_role[instance.role].remove(instance)
            self._by_role[role].append(instance)
            instance.role = role
        if slots is not None:
            instance.slots = slots
        instance.is_draining = False

    def _ready(self, address: str) -> InstanceState:
        instance = self.instances.get(address)
        if instance is None:
            known = ", ".join(sorted(self.instances)) or "none"
            raise InvalidParameter("instance", address, f"must be one that is ready: {known}")
        return instance

    def _suspect(self, stage: Stage, instance: InstanceState, now: float) -> None:
        stage.losses += 1
        has_many = stage.losses >= self._max_losses
        stage.is_convicted = has_many and instance.on_probation is stage
        # Prompts wait in their instance's queue, so there the time says nothing.
        is_new = stage.role is Role.PREFILL or now - stage.bound_at < self._probation_s
        stage.is_suspect = has_many or is_new

    def acquit(self, stage: Stage) -> None:
        """A stage is known to have got on with its work on the instance that was lost."""
        stage.is_suspect = stage.is_suspect and stage.losses >= self._max_losses

    def instances_of(self, role: Role) -> list[InstanceState]:
        return self._by_role[role]

    def waiting(self, role: Role) -> list[Stage]:
        """Stages that wait for room, suspects first, in the order they are served."""
        return [*self._suspects[role].values(), *self._waiting[role].values()]

    def num_waiting(self, role: Role) -> int:
        return len(self._suspects[role]) + len(self._waiting[role])

    def waiting_tokens(self, role: Role) -> int:
        """Prompt tokens of the stages that wait for room."""
        return self._waiting_tokens[role]

    def arrive(self, stage: Stage) -> Stage:
        """A stage can run now: it waits for `next_binding`. A known one keeps its ticket."""
        known = self.stages.get(stage.key)
        if known is None:
            stage.ticket = (*stage.rank, next(self._tickets))
            self.stages[stage.key] = known = stage
            self.num_arrived += stage.role is not Role.DECODE
        if known.instance is None:
            self._dequeue(known)
            queue = self._suspects if known.is_suspect else self._waiting
            queue[known.role][known.ticket] = known
            self._waiting_tokens[known.role] += known.prompt_tokens
        return known

    def withdraw(self, key: str) -> None:
        """A stage neither runs nor waits any more, but may come back."""
        stage = self.stages.get(key)
        if stage is None:
            return
        self._dequeue(stage)
        if stage.instance is not None:
            self._unbind(stage, stage.instance)

    def leave(self, key: str) -> None:
        """A stage is over: forget it and free its room."""
        self.withdraw(key)
        self.stages.pop(key, None)

    def hold(self, key: str, address: str, pool_tokens: int) -> None:
        """Finished KV of the prefill stage ``key`` stays on its instance until `let_go`."""
        instance = self.instances.get(address)
        if instance is not None:
            blocks = blocks_for(pool_tokens, instance.block_size)
            self._held[key] = (instance, blocks)
            instance.used_blocks += blocks

    def let_go(self, key: str) -> None:
        """The KV of a prefill stage is being pulled, or is freed."""
        held = self._held.pop(key, None)
        if held is not None:
            instance, blocks = held
            instance.used_blocks -= blocks

    def held_blocks(self, instance: InstanceState) -> int:
        """KV blocks of finished prefills that wait on an instance."""
        return sum(blocks for home, blocks in self._held.values() if home is instance)

    def counters(self, role: Role) -> dict[str, int]:
        """What is true of a role now, for display; see `Service.status`."""
        instances = self._by_role[role]
        held = [(home, blocks) for home, blocks in self._held.values() if home.role is role]
        return {
            "ready": len(instances),
            "accepting": sum(instance.is_open for instance in instances),
            "draining": sum(instance.is_draining for instance in instances),
            "waiting": self.num_waiting(role),
            "waiting_prompt_tokens": self._waiting_tokens[role],
            "running": sum(len(instance.bound) for instance in instances),
            "slots": sum(instance.slots for instance in instances),
            "held": len(held),
            "held_kv_blocks": sum(blocks for _, blocks in held),
            "used_kv_blocks": sum(instance.used_blocks for instance in instances),
            "total_kv_blocks": sum(instance.num_blocks for instance in instances),
        }

    def next_binding(self, role: Role, now: float) -> tuple[Stage, InstanceState] | None:
        """Bind the next stage that an instance has room for; None when all wait on.

        First come first served: a stage that needs more room than there is holds up those
        behind it, so that it is never starved by smaller ones. A suspect that waits for its turn
        alone does not hold up the others.
        """
        suspect = next(iter(self._suspects[role].values()), None)
        if suspect is not None:
            free = [i for i in self._by_role[role] if i.on_probation is None and i.is_open]
            chosen = choose(suspect, free)
            if chosen is not None:
                return self._bind(suspect, chosen, now)
            if free:
                return None
        stage = next(iter(self._waiting[role].values()), None)
        chosen = choose(stage, self._by_role[role]) if stage is not None else None
        return self._bind(stage, chosen, now) if chosen is not None else None

    def end_probations(self, now: float) -> None:
        """Let the next suspect run where one has proved itself."""
        for instance in self.instances.values():
            stage = instance.on_probation
            if stage is None or stage.losses >= self._max_losses:
                continue
            if now - stage.bound_at >= self._probation_s:
                instance.on_probation = None

    def _bind(
        self, stage: Stage, instance: InstanceState, now: float
    ) -> tuple[Stage, InstanceState]:
        self._dequeue(stage)
        self.num_bound[stage.role] += 1
        stage.instance = instance
        stage.bound_at = now
        instance.bound[stage.key] = stage
        instance.queued_tokens += stage.prompt_tokens
        instance.used_blocks += stage.blocks_on(instance)
        if stage.is_suspect:
            instance.on_probation = stage
        return stage, instance

    def _unbind(self, stage: Stage, instance: InstanceState) -> None:
        del instance.bound[stage.key]
        instance.queued_tokens -= stage.prompt_tokens
        instance.used_blocks -= stage.blocks_on(instance)
        if instance.on_probation is stage:
            instance.on_probation = None
        stage.instance = None

    def _dequeue(self, stage: Stage) -> None:
        for queue in (self._waiting, self._suspects):
            if queue[stage.role].pop(stage.ticket, None) is not None:
                self._waiting_tokens[stage.role] -= stage.prompt_tokens


def choose(stage: Stage, candidates: list[InstanceState]) -> InstanceState | None:
    """The instance for a stage among those with room; None when none has any."""
    candidates = [i for i in candidates if i.is_open and i.address not in stage.shunned]
    if stage.role is Role.PREFILL:
        roomy = [
            i
            for i in candidates
            if len(i.bound) < i.slots and i.used_blocks + stage.blocks_on(i) <= i.num_blocks
        ]
        index = shortest_queue([i.queued_tokens for i in roomy], [len(i.bound) for i in roomy])
        return None if index == NONE else roomy[index]
    if not candidates:
        return None
    index = least_loaded(
        [i.used_blocks for i in candidates],
        [i.num_blocks for i in candidates],
        [len(i.bound) for i in candidates],
        [i.slots for i in candidates],
        max(stage.blocks_on(i) for i in candidates),
    )
    return None if index == NONE else candidates[index]
