"""What a service tells about itself: its instances, their load, and how far its work is."""

from __future__ import annotations

from typing import Any

from daskserve.observe import JobProgress
from daskserve.service.connection import AddressedInstance, Connection


class ServiceFigures:
    """Part of `Service`: it asks the scheduler's dispatch, or the instances."""

    client: Any
    _connection: Connection | None

    def info(self) -> Any:
        """The ready instances: address and `InstanceInfo` of each."""
        return self.client.sync(self._info)

    def load(self) -> Any:
        """`InstanceLoad` of every ready instance by address; asks each, so it is exact."""
        return self.client.sync(self._connection.load)

    def kv_pulled(self) -> Any:
        """KV that came to every rank: `Pulled` by address of the rank, then of the holder."""
        return self.client.sync(self._connection.kv_pulled)

    def status(self) -> Any:
        """What the scheduler knows of instances and requests, in one message.

        Returns
        -------
        dict
            ``workers``: role by address of every worker with one. ``instances``: a list of
            ``address, status, role, slots, config_id, info, error, is_draining``, where ``status``
            is "loading", "ready" or "failed". ``losses``: ``address, role, reason`` of the last
            that went without notice. ``dispatch``: among others ``roles``, which has for
            each of PREFILL, DECODE and COLOCATED the numbers of ``ready``, ``accepting`` and
            ``draining`` instances; of requests ``waiting`` for one (with
            ``waiting_prompt_tokens``) and ``running`` on one (of so many ``slots``), futures and
            streams together; of requests whose KV is ``held`` (in ``held_kv_blocks``) on a prefill
            instance; and the KV blocks booked, ``used_kv_blocks`` of ``total_kv_blocks``: what
            requests may grow to, held ones included. `load` tells what instances use at this
            moment.
        """
        return self.client.sync(self._connection.refresh)

    def observe(self, cursor: int = 0, num_decisions: int = 0) -> Any:
        """A `daskserve.observe.Snapshot`: instances, queues, and what was finished of late.

        With the ``cursor`` and ``num_decisions`` of the last snapshot only what is new since.
        Instances tell once a second; nothing asks them.
        """
        return self.client.sync(self._connection.observe, cursor, num_decisions)

    def note_job(self, job: JobProgress) -> None:
        """Show whoever watches how far a batch job is; returns at once. Any thread."""
        self.client.loop.add_callback(self._connection.note_job, job)

    async def _info(self) -> list[AddressedInstance]:
        await self._connection.refresh()
        return self._connection.instances
