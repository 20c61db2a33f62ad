"""Prefill instances that become decode instances, and the other way round, without a reload.

Handlers of the scheduler. An instance that is to flip gets nothing new, finishes what it has while
the others take the rest, and then takes its other role with the same weights and KV pool. KV that
it holds for waiting decodes stays where it is: waiting for those to go would hold up exactly the
flips that are there to make room for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

from distributed import Scheduler

from daskserve.core.instance import Role
from daskserve.errors import ClusterError, InstanceLost, InvalidParameter
from daskserve.service.dispatch_state import DispatchState, InstanceState
from daskserve.service.names import BECOME, FLIP, roles_of

_LOOK_S = 0.02


class Dispatch(Protocol):
    """What is asked of the dispatch plugin."""

    state: DispatchState

    def wake(self) -> None: ...


class Flipping:
    """Flips instances, which are named by their head's address.

    Parameters
    ----------
    scheduler
        Reaches the workers.
    dispatch
        Owner of the books.
    on_flipped
        Told the address and what its instance now says of itself: role, slots and info.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        dispatch: Dispatch,
        on_flipped: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._scheduler = scheduler
        self._dispatch = dispatch
        self._on_flipped = on_flipped

    @property
    def handlers(self) -> dict[str, Any]:
        return {FLIP: self.flip}

    async def flip(self, instance: str, role: str, timeout_s: float) -> dict[str, float]:
        """Give an instance another role, once it has finished what it has.

        Returns
        -------
        dict
            ``took_s``: until it worked in its new role; ``drain_s`` of it until it had finished
            the old work; ``pause_s``: the longest time meanwhile in which requests waited and none
            of their kind could be bound anywhere.

        Raises
        ------
        InvalidParameter
            No such instance, it cannot have that role, or no other one would be left.
        ClusterError
            It did not finish within ``timeout_s`` seconds: it goes on in its old role.
        InstanceLost
            It went meanwhile.
        """
        state, new = self._dispatch.state, Role(role)
        flipped = self._check(instance, new)
        watch = _Watch(state)
        started_at = time.monotonic()
        deadline = started_at + timeout_s
        state.drain(instance)
        try:
            while flipped.bound:
                await watch.look(_LOOK_S)
                self._check_is_there(flipped)
                _check_time(instance, timeout_s, deadline)
            drained_at = time.monotonic()
            # What was cancelled just now may still run there.
            while not (said := await self._become(flipped, new, watch)):
                await watch.look(_LOOK_S)
                _check_time(instance, timeout_s, deadline)
            state.resume(instance, new, said["slots"])
        finally:
            if state.instances.get(instance) is flipped and flipped.is_draining:
                state.resume(instance)
            self._dispatch.wake()
        self._on_flipped(instance, {"role": new.value, **said})
        now = time.monotonic()
        return {
            "took_s": now - started_at,
            "drain_s": drained_at - started_at,
            "pause_s": watch.pause_s,
        }

    def _check(self, address: str, new: Role) -> InstanceState:
        state = self._dispatch.state
        ready = ", ".join(sorted(state.instances)) or "none"
        instance = state.instances.get(address)
        if instance is None:
            raise InvalidParameter("instance", address, f"must be one that is ready: {ready}")
        worker = self._scheduler.workers.get(address)
        if worker is None or new not in roles_of(worker.resources):
            limit = f"needs a worker with the resource {new.value} beside its own"
            raise InvalidParameter("role", new.value, limit)
        if new is instance.role or instance.is_draining:
            what = "drains already" if instance.is_draining else f"works as {new.value} already"
            raise InvalidParameter("instance", address, f"must be another one: it {what}")
        if not any(i.is_open for i in state.instances_of(instance.role) if i is not instance):
            limit = f"must leave another {instance.role.value} instance at work"
            raise InvalidParameter("instance", address, limit)
        return instance

    def _check_is_there(self, instance: InstanceState) -> None:
        if self._dispatch.state.instances.get(instance.address) is not instance:
            raise InstanceLost(f"{instance.address} was lost while it changed its role")

    async def _become(self, instance: InstanceState, new: Role, watch: _Watch) -> dict[str, Any]:
        """Ask the worker to take the role; empty while it still has work.

        Never given up: an instance that took the role must not stand in the books with the old one.
        """
        asking = asyncio.ensure_future(
            getattr(self._scheduler.rpc(instance.address), BECOME)(role=new.value)
        )
        while not asking.done():
            await watch.look(_LOOK_S)
        try:
            said: dict[str, Any] = asking.result()
        except OSError as error:
            raise InstanceLost(f"{instance.address} does not answer: {error}") from error
        self._check_is_there(instance)
        return said


def _check_time(address: str, timeout_s: float, deadline: float) -> None:
    if time.monotonic() > deadline:
        text = f"{address} did not finish its work within {timeout_s:g} s; it stays as it is"
        raise ClusterError(text)


class _Watch:
    """How long requests of a kind waited at most without any of them being bound."""

    def __init__(self, state: DispatchState) -> None:
        self._state = state
        self._bound = dict(state.num_bound)
        self._since = dict.fromkeys((Role.PREFILL, Role.DECODE), time.monotonic())
        self.pause_s = 0.0

    async def look(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        now = time.monotonic()
        for role, since in self._since.items():
            bound = self._state.num_bound[role]
            if bound != self._bound[role] or not self._state.num_waiting(role):
                self._bound[role] = bound
                self._since[role] = now
            else:
                self.pause_s = max(self.pause_s, now - since)
