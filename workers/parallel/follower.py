"""Any rank of an instance but the head: does what the head says, and keeps its part of the KV."""

from __future__ import annotations

import numpy as np
import torch

from daskserve.core.shards import Shard
from daskserve.workers.kv_digest import slice_digests
from daskserve.workers.kv_pieces import piece_bytes, write_piece
from daskserve.workers.kv_pool import KVPool
from daskserve.workers.parallel.group import HEAD
from daskserve.workers.parallel.stage import Stage
from daskserve.workers.parallel.wire import (
    BUSY,
    DIGESTS,
    LOGITS,
    SCORES,
    Order,
    OrderLine,
    StepOrder,
    unpack_lists,
    unpack_step,
)

Pieces = list[tuple[Shard, memoryview]]
"""Layers and heads that were pulled, and their bytes."""


class Follower:
    """Serves on one thread; `keep` and `forget` may be called on any.

    Parameters
    ----------
    stage
        Of this rank.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.pool: KVPool | None = None
        self._pulled: dict[int, Pieces] = {}
        self._orders = OrderLine(stage.group)

    def serve(self) -> None:
        """Blocks until the head closes the group; InstanceLost when it breaks."""
        try:
            while self._obey(*self._orders.take()):
                pass
        except Exception as error:
            raise self.stage.group.fail(error) from error
        self.stage.group.close()

    def keep(self, owner: int, pieces: Pieces) -> None:
        """What was pulled for the pages of ``owner``, until the head says what to do with it.

        Pages are written in the order of the steps only, so that nothing is written to pages
        that the head has given to somebody else meanwhile.
        """
        self._pulled[owner] = pieces

    def forget(self, owner: int) -> None:
        """Drop what was kept; nothing if the head has settled it already."""
        self._pulled.pop(owner, None)

    def _obey(self, order: Order, numbers: np.ndarray) -> bool:
        if order is Order.STEP:
            self._step(unpack_step(numbers))
        elif order is Order.BIND:
            self._bind(*numbers.tolist())
        elif order is Order.BEAT:
            self.stage.group.post(self.stage.busy(), HEAD, BUSY)
        elif order is Order.DIGEST:
            self.stage.settle()
            digests = np.stack([slice_digests(self.pool, pages) for pages in unpack_lists(numbers)])
            self.stage.group.post(torch.from_numpy(digests.view(np.int64)), HEAD, DIGESTS)
        elif order is Order.PLACE:
            self._place(int(numbers[0]), numbers[1:])
        elif order is Order.DROP:
            self.forget(int(numbers[0]))
        return order is not Order.CLOSE

    def _bind(self, num_blocks: int, block_size: int) -> None:
        self.pool = self.stage.new_pool(num_blocks, block_size)
        self.stage.bind(self.pool.pages)

    def _place(self, owner: int, page_ids: np.ndarray) -> None:
        self.stage.settle()  # a step of before may still read these pages
        for shard, data in self._pulled.pop(owner):
            num_pages = data.nbytes // piece_bytes(self.pool, 1, shard)
            write_piece(self.pool, page_ids[:num_pages], shard, data)

    def _step(self, step: StepOrder) -> None:
        group = self.stage.group
        wait = self.stage.run(step.batch, step.num_parts, step.asked)
        if wait is not None:
            answer = wait()
            group.post(answer.best, HEAD, SCORES)
            if step.asked:
                group.post(answer.logits, HEAD, LOGITS)
