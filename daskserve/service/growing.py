"""Instances of an own cluster that come and go while it serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from daskserve.core.instance import Role
from daskserve.core.placement import Parallelism
from daskserve.errors import ClusterError
from daskserve.observe import Snapshot
from daskserve.service.local import OwnCluster

_LOOK_S = 0.2
_DRAIN_S = 120.0


@dataclass(eq=False)
class LocalInstances:
    """Starts and stops the worker processes of a cluster on this machine.

    Parameters
    ----------
    cluster
        Ours.
    spec_of
        The workers of one instance by their names, given its name, role and shape.
    observe, drain
        Of the service.
    most
        Instances at once.
    start_timeout_s
        For one to load its model.
    """

    cluster: OwnCluster
    spec_of: Callable[[str, Role, Parallelism], dict[str, Any]]
    observe: Callable[[], Awaitable[Snapshot]]
    drain: Callable[[list[str]], Awaitable[dict[str, bool]]]
    most: int
    start_timeout_s: float
    can_remove: bool = True
    _num_started: int = field(default=0, init=False)

    @property
    def why_not(self) -> str:
        return f"no more than {self.most} instances were allowed"

    def room(self, num_running: int) -> int:
        return max(self.most - num_running, 0)

    async def add(self, role: Role, shape: Parallelism) -> None:
        """Start one and wait until it is ready (ClusterError)."""
        self._num_started += 1
        name = f"{role.value.lower()}-added-{self._num_started}"
        workers = self.spec_of(name, role, shape)
        self.cluster.worker_spec.update(workers)
        await self.cluster._correct_state()
        deadline = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline:
            for one in (await self.observe()).instances:
                if one.place.name == name and one.state == "ready":
                    return
                if one.place.name == name and one.state == "failed":
                    await self._stop(list(workers))
                    raise ClusterError(f"{name} could not start: {one.error}")
            await asyncio.sleep(_LOOK_S)
        await self._stop(list(workers))
        raise ClusterError(f"{name} was not ready within {self.start_timeout_s:g} s")

    async def remove(self, address: str) -> None:
        """Drain one and stop it (ClusterError)."""
        found = [one for one in (await self.observe()).instances if one.address == address]
        if not found:
            raise ClusterError(f"no instance at {address}")
        deadline = time.monotonic() + _DRAIN_S
        while not (await self.drain([address]))[address]:
            if time.monotonic() > deadline:
                raise ClusterError(f"{address} was not drained within {_DRAIN_S:g} s")
            await asyncio.sleep(_LOOK_S)
        name = found[0].place.name
        await self._stop([one for one in self.cluster.worker_spec if _instance_of(one) == name])

    async def _stop(self, names: list[str]) -> None:
        for name in names:
            self.cluster.worker_spec.pop(name, None)
        await self.cluster._correct_state()


def _instance_of(worker: Any) -> str:
    """The instance that a worker's name says it is a rank of."""
    return str(worker).partition(".")[0]
