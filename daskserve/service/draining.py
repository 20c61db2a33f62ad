"""Instances that are to go, or to change their role: nothing new for them, what they have ends.

Handlers of the scheduler. The books say what is bound; whether KV is still being pulled only the
instance itself knows, so it is asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from distributed import Scheduler

from daskserve.core.instance import Role
from daskserve.service.dispatch_state import DispatchState
from daskserve.service.names import DRAIN, LOAD, RESUME

logger = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 2.0
_AT_WORK = ("num_waiting", "num_running", "num_holding")


class Dispatch(Protocol):
    """What is asked of the dispatch plugin."""

    state: DispatchState

    def wake(self) -> None: ...


class Draining:
    """Drains and resumes instances, which are known by their head's address or by name.

    Parameters
    ----------
    scheduler
        Reaches the workers.
    dispatch
        Owner of the books.
    find
        The address of a named instance; None when there is none.
    """

    def __init__(
        self, scheduler: Scheduler, dispatch: Dispatch, find: Callable[[str], str | None]
    ) -> None:
        self._scheduler = scheduler
        self._dispatch = dispatch
        self._find = find
        self._leaving: set[str] = set()

    @property
    def handlers(self) -> dict[str, Any]:
        return {DRAIN: self.drain, RESUME: self.resume}

    async def drain(self, instances: list[str]) -> dict[str, bool]:
        """Give instances nothing new; whether each is drained by now. Ask again until it is.

        One that is gone or still loads counts as drained; it will get nothing when it is ready.
        """
        state = self._dispatch.state
        addresses = {instance: self._find(instance) or instance for instance in instances}
        self._leaving.update(addresses.values())
        for address in state.instances.keys() & set(addresses.values()):
            state.drain(address)
        is_idle = await self._are_idle([a for a in addresses.values() if state.is_drained(a)])
        return {instance: is_idle.get(address, False) for instance, address in addresses.items()}

    async def resume(
        self, instance: str, role: str | None = None, slots: int | None = None
    ) -> None:
        """Let an instance take requests again (InvalidParameter), see `DispatchState.resume`."""
        address = self._find(instance) or instance
        self._dispatch.state.resume(address, None if role is None else Role(role), slots)
        self._leaving.discard(address)
        self._dispatch.wake()

    def is_leaving(self, instance: str) -> bool:
        """Whether an instance was told to drain, perhaps before it was ready."""
        return instance in self._leaving

    def forget(self, instance: str) -> None:
        """Its worker has left."""
        self._leaving.discard(instance)

    async def _are_idle(self, addresses: Iterable[str]) -> dict[str, bool]:
        """What instances say that the books take for drained."""
        known = [a for a in addresses if a in self._dispatch.state.instances]
        at_work = await asyncio.gather(*map(self._is_at_work, known))
        busy = {address for address, is_busy in zip(known, at_work, strict=True) if is_busy}
        return {address: address not in busy for address in addresses}

    async def _is_at_work(self, address: str) -> bool:
        """An instance that does not answer is taken to be at work: ask again."""
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                counters = await getattr(self._scheduler.rpc(address), LOAD)()
                return any(counters.get(name) for name in _AT_WORK)
        except (OSError, TimeoutError) as error:
            logger.debug("%s does not say whether it is drained: %r", address, error)
            return True
