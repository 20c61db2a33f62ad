"""A cluster of our own with a GPU for every rank: dask-cuda's, which sets up RMM and UCX.

Imports dask-cuda: only where it is known to be there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from dask_cuda import LocalCUDACluster

from daskserve.service.cards import RMM_POOL
from daskserve.service.local import HOST, OwnCluster


class OwnCUDACluster(OwnCluster, LocalCUDACluster):
    """LocalCUDACluster whose workers have a role each.

    Parameters
    ----------
    cards
        One for each worker, all different.
    workers
        Options of each worker, as `daskserve.service.local` makes them.
    scheduler
        Options of the scheduler.
    asynchronous
        For use inside a running event loop.
    """

    def __init__(
        self,
        cards: Sequence[str],
        workers: Sequence[dict[str, Any]],
        scheduler: dict[str, Any],
        asynchronous: bool,
    ) -> None:
        self._options = list(workers)
        super().__init__(
            CUDA_VISIBLE_DEVICES=",".join(cards),
            n_workers=len(cards),
            protocol="ucx",  # which finds NVLink and InfiniBand by itself
            rmm_pool_size=RMM_POOL,
            device_memory_limit=None,  # nothing of Dask's is on the card, so nothing to spill
            memory_limit=None,
            host=HOST,
            scheduler_port=0,
            dashboard_address=scheduler["dashboard_address"] if scheduler["dashboard"] else None,
            asynchronous=asynchronous,
            silence_logs=logging.WARNING,
        )

    def new_worker_spec(self) -> dict[Any, dict[str, Any]]:
        """dask-cuda's for the next card, with the options of the rank that gets it."""
        ((card, spec),) = super().new_worker_spec().items()
        own = self._options[self.cuda_visible_devices.index(card)]
        theirs = spec["options"]
        merged = {name: theirs.get(name, {}) | own[name] for name in ("env", "config")}
        plugins = {*theirs.get("plugins", ()), *own["plugins"]}
        kept = {
            name: value for name, value in own.items() if name not in ("host", "protocol", "env")
        }
        spec["options"] = theirs | kept | merged | {"plugins": tuple(plugins)}
        return {card: spec}
