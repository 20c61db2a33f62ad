"""The head of an instance of several workers: waits for its ranks, then loads with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from distributed import Worker
from distributed.comm import get_address_host

from daskserve.config import RankSettings, ServiceSettings
from daskserve.core.instance import EngineConfig, Role
from daskserve.core.placement import Parallelism
from daskserve.errors import InstanceLost
from daskserve.service.names import OPEN_GROUP

if TYPE_CHECKING:
    import torch.distributed as dist

    from daskserve.text.tokenizer import Tokenizer
    from daskserve.workers.loading import LoadModel
    from daskserve.workers.parallel.runner import ParallelRunner


def shape_of(place: RankSettings) -> Parallelism:
    """Shape of the instance that a worker is a rank of."""
    return Parallelism(place.tensor_parallel, place.pipeline_parallel)


class HeadRank:
    """Makes the runner of a head; use `load` as the instance's way to its model.

    Parameters
    ----------
    worker
        Whose process it is.
    place
        Which instance, and its shape.
    settings
        How long to wait for the other ranks.
    role
        What the instance does.
    on_lost
        Called on any thread when a rank is lost.
    """

    def __init__(
        self,
        worker: Worker,
        place: RankSettings,
        settings: ServiceSettings,
        role: Role,
        on_lost: Callable[[InstanceLost], None],
    ) -> None:
        self._worker = worker
        self._place = place
        self._settings = settings
        self._role = role
        self._on_lost = on_lost
        self._parallelism = shape_of(place)
        self._host = get_address_host(worker.address)
        self._store: dist.Store | None = None
        self._runner: ParallelRunner | None = None

    async def open(self, config: EngineConfig) -> LoadModel:
        """Let the other ranks find us; what is returned loads the model with them."""
        from daskserve.workers.parallel.group import open_group

        meeting, store = await asyncio.to_thread(
            open_group, self._parallelism, self._host, config.rank_timeout_s
        )
        self._store = store
        await getattr(self._worker.scheduler, OPEN_GROUP)(
            instance=self._place.instance,
            worker=self._worker.address,
            host=meeting.host,
            port=meeting.port,
        )

        def load(config: EngineConfig) -> tuple[ParallelRunner, Tokenizer]:
            from daskserve.models.catalog import resolve
            from daskserve.text.tokenizer import Tokenizer
            from daskserve.workers.parallel.runner import ParallelRunner
            from daskserve.workers.parallel.start import ADDRESS, start_rank

            stage = start_rank(
                config,
                self._parallelism,
                0,
                store,
                host=self._host,
                address=self._worker.contact_address or self._worker.address,
                load_timeout_s=self._settings.start_timeout_s,
                role=self._role,
            )
            self._runner = ParallelRunner(stage, stage.group.shared(ADDRESS), self._on_lost)
            return self._runner, Tokenizer.load(resolve(config.model))

        return load

    def call_off(self) -> None:
        """Stop waiting for the other ranks, or for their weights."""
        if self._store is not None and self._runner is None:
            from daskserve.workers.parallel.group import call_off

            call_off(self._store)

    def close(self) -> None:
        """End the group, once nothing is computed any more."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None
