"""The head's KV pool: the books of all ranks, which have the same pages, each its part of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from daskserve.core.placement import Parallelism
from daskserve.core.shards import Shard
from daskserve.workers.cuda.pool import DevicePool
from daskserve.workers.forward import ModelShape
from daskserve.workers.kv_pool import KVPool
from daskserve.workers.parallel.wire import Order


class Ranks(Protocol):
    """What the pool needs of the group."""

    shape: ModelShape
    dtype: torch.dtype
    shard: Shard
    device: torch.device | None
    """Whose copies the head's KV needs; None: it is on the host."""
    parallelism: Parallelism
    addresses: tuple[str, ...]
    stage_layers: tuple[int, ...]

    def begin_digests(
        self, pool: KVPool, owners_pages: Sequence[Sequence[int]]
    ) -> Callable[[], list[np.ndarray]]:
        """As for `KVPool`, of the pages on all ranks."""

    def settle(self, order: Order, owner: int, page_ids: Sequence[int] = ()) -> None:
        """Have the followers put what they pulled for ``owner`` into pages, or drop it."""


class HeadPool(KVPool):
    """Owns the pages of all ranks and holds the KV of the head's shard. Use `head_pool`."""

    _ranks: Ranks

    @property
    def home(self) -> dict[str, Any]:
        shape, stage_layers = self._ranks.parallelism, self._ranks.stage_layers
        return {
            "tp": shape.tp,
            "pp": shape.pp,
            "ranks": self._ranks.addresses,
            "stage_layers": stage_layers,
        }

    def begin_digests(
        self, owners_pages: Sequence[Sequence[int]]
    ) -> Callable[[], list[np.ndarray]]:
        return self._ranks.begin_digests(self, owners_pages)

    def end_pull(self, owner: Hashable, succeeded: bool) -> None:
        if succeeded:
            self._ranks.settle(Order.PLACE, owner, self.pages_of(owner))
        else:
            self._ranks.settle(Order.DROP, owner)


class HeadDevicePool(HeadPool, DevicePool):
    """The same with the KV on a device."""


def head_pool(ranks: Ranks, num_blocks: int, block_size: int) -> HeadPool:
    """The pool of the head of these ranks, where that computes."""
    sizes = (ranks.shape, ranks.dtype, num_blocks, block_size)
    pool: HeadPool
    if ranks.device is None:
        pool = HeadPool(*sizes, ranks.shard)
    else:
        pool = HeadDevicePool(*sizes, ranks.device, ranks.shard)
    pool._ranks = ranks
    return pool
