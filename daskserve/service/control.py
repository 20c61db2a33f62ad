"""What a service can do with its running instances, each named by its address, and on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from daskserve.config import ServiceSettings
from daskserve.core.instance import EngineConfig, Role
from daskserve.core.placement import Parallelism
from daskserve.core.slo import SLO
from daskserve.errors import ConfigError
from daskserve.service.connection import Connection
from daskserve.service.local import instance_workers

if TYPE_CHECKING:
    from daskserve.service.replan_options import ReplanOptions
    from daskserve.service.replanner import Instances, Replanner


class InstanceControl:
    """Part of `Service`: all of it goes to the scheduler's dispatch."""

    config: EngineConfig
    slo: SLO | None
    client: Any
    replanner: Replanner | None = None
    """At work after `replan`."""
    _cluster: Any
    _own: dict[str, Any] | None
    _settings: ServiceSettings
    _connection: Connection | None

    def drain(self, instances: Sequence[str]) -> Any:
        """Give instances nothing new; whether each has finished what it had.

        Call it again until all have. Requests that wait go elsewhere, or wait on.
        """
        return self.client.sync(self._connection.drain, instances)

    def resume(self, instance: str) -> Any:
        """Let an instance that was drained take requests again (InvalidParameter)."""
        return self.client.sync(self._connection.resume, instance)

    def flip(self, instance: str, role: Role, timeout_s: float = 60.0) -> Any:
        """Give an instance the other one of the roles PREFILL and DECODE.

        It finishes what it has, while the others take what is new, and goes on in its new role
        with the weights that it has. Its worker must be able to have both: ``flippable`` of
        `Service.local`, or resources for both.

        Parameters
        ----------
        timeout_s
            An instance that has not finished by then keeps its role.

        Returns
        -------
        dict
            ``took_s``, of it ``drain_s`` to finish its work, and ``pause_s``: the longest time
            in which requests waited and none of their kind was sent to any instance.

        Raises
        ------
        InvalidParameter, ClusterError, InstanceLost
            It cannot have the role, or is the last of its own; time is up; it was lost.
        """
        return self.client.sync(self._connection.flip, instance, role, timeout_s)

    def replan(self, options: ReplanOptions) -> Any:
        """Have the split of the instances follow the traffic from now on, until the service ends.

        `replanner` then has the journal, and takes manual orders.

        Raises
        ------
        ConfigError
            No SLO, too few instances, no step times for the model, or it is at work already.
        """
        return self.client.sync(self._start_replanning, options)

    async def _start_replanning(self, options: ReplanOptions) -> None:
        if self.replanner is not None:
            raise ConfigError("the service replans already")
        # The planner takes seconds to load, and no token should wait for it.
        self.replanner = await asyncio.to_thread(self._new_replanner, options)
        self.replanner.start()

    def _new_replanner(self, options: ReplanOptions) -> Replanner:
        from daskserve.replanning.policy import Policy
        from daskserve.replanning.record import Journal
        from daskserve.service.replan_options import outlook_of
        from daskserve.service.replanner import Hands, Replanner

        connection = self._connection
        infos = [instance.info for instance in connection.instances]
        outlook = outlook_of(self.config, self.slo, options, infos)
        journal = Journal(options.decisions)
        policy = Policy(outlook, self.slo, journal.take_id, options.policy, options.is_dry_run)
        hands = Hands(
            connection.observe,
            connection.flip,
            connection.note_decision,
            self._instances(options),
        )
        return Replanner(hands, policy, journal, self.slo, options.measure_s, options.interval_s)

    def _instances(self, options: ReplanOptions) -> Instances:
        from daskserve.service.growing import LocalInstances
        from daskserve.service.replanner import FixedInstances

        if self._cluster is None:
            if options.max_instances is not None:
                raise ConfigError("instances can be started on a cluster of our own only")
            return FixedInstances()
        if options.max_instances is None:
            return FixedInstances("starting instances was not allowed (--replan-max-instances)")
        return LocalInstances(
            cluster=self._cluster,
            spec_of=self._spec_of,
            observe=self._connection.observe,
            drain=self._connection.drain,
            most=options.max_instances,
            start_timeout_s=self._settings.start_timeout_s,
        )

    def _spec_of(self, name: str, role: Role, shape: Parallelism) -> dict[str, Any]:
        """Workers of one more instance; they share all cores with the others."""
        cores = [None] * shape.num_gpus
        return instance_workers(
            name, role, shape, self.config, self._settings, cores, self._own["is_flippable"]
        )

    async def _stop_replanning(self) -> None:
        if self.replanner is not None:
            await self.replanner.close()
