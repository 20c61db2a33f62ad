"""The head of an instance of several ranks: looks to the engine like a model on one device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from daskserve.errors import InstanceLost, ModelError
from daskserve.workers.forward import ForwardBatch
from daskserve.workers.kv_digest import slice_digests
from daskserve.workers.kv_pool import KVPool
from daskserve.workers.parallel.group import HEAD
from daskserve.workers.parallel.head_pool import HeadPool
from daskserve.workers.parallel.loader import vocabulary_part
from daskserve.workers.parallel.stage import Stage
from daskserve.workers.parallel.wire import ANSWERS, Order, OrderLine, pack_batch

_BEATS_PER_TIMEOUT = 3

T = TypeVar("T")


class ParallelRunner:
    """Gives every rank its orders, computes its own share, and puts the logits together.

    Any thread may call; calls wait for each other. Between steps the ranks are asked for a sign of
    life, so that a dead one is noticed though nothing is to be computed.

    Parameters
    ----------
    stage
        Of the head.
    addresses
        Where KV can be pulled from, of every rank.
    on_lost
        Called once, on any thread, when the group is lost.
    """

    def __init__(
        self,
        stage: Stage,
        addresses: tuple[str, ...] = (),
        on_lost: Callable[[InstanceLost], None] = lambda error: None,
    ) -> None:
        self.stage = stage
        self.group = stage.group
        self.addresses = addresses
        self.parallelism = stage.group.parallelism
        self.shape, self.dtype, self.shard = stage.shape, stage.dtype, stage.shard
        self.elapsed_s = 0.0
        """Seconds spent in ``forward`` so far."""
        self.busy_s: list[float] = []
        """Seconds that each stage has computed, as of the last beat."""
        self.bubble_share = 0.0
        self._orders = OrderLine(stage.group)
        self._on_lost = on_lost
        self._lost: InstanceLost | None = None
        self._turn = threading.Lock()
        self._is_closed = threading.Event()
        self._beat = threading.Thread(target=self._keep_alive, name="rank beat", daemon=True)
        self._beat.start()

    def new_pool(self, num_blocks: int, block_size: int) -> KVPool:
        """Pages of all ranks; holds those of the head."""
        return HeadPool(self, num_blocks, block_size)

    def bind(self, pool_pages: torch.Tensor) -> None:
        """Use this pool for the head's shard; every rank makes one of as many blocks."""
        shard, head_dim = self.shard, self.shape.head_dim
        expected = (shard.num_layers, 2, shard.num_heads, pool_pages.shape[4], head_dim)
        if tuple(pool_pages.shape[1:]) != expected or pool_pages.dtype != self.dtype:
            raise ModelError(
                f"KV pool {tuple(pool_pages.shape)} {pool_pages.dtype} does not fit the head's"
                f" shard: [blocks + 1, {', '.join(map(str, expected))}] {self.dtype} is needed"
            )
        sizes = (pool_pages.shape[0] - 1, pool_pages.shape[4])
        self._order(Order.BIND, sizes, lambda: self.stage.bind(pool_pages))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32 logits ``[R, vocab]`` of each row's last token; writes the new tokens' KV."""
        return self._order(Order.STEP, pack_batch(batch), lambda: self._run(batch))

    def digests(self, pool: KVPool, page_ids: Sequence[int]) -> np.ndarray:
        """Digests of pages on all ranks, uint64 ``[layers, kv_heads]`` of the model.

        ``pool`` is the bound one.
        """
        return self._order(Order.DIGEST, page_ids, lambda: self._gather_digests(pool, page_ids))

    def settle(self, order: Order, owner: int, page_ids: Sequence[int] = ()) -> None:
        """PLACE what the followers pulled for ``owner`` into these pages, or DROP it."""
        self._order(order, (owner, *page_ids), lambda: None)

    def beat(self) -> None:
        """Have every rank say that it lives (InstanceLost); renews ``busy_s``."""
        self._order(Order.BEAT, (), self._gather_busy)

    def close(self) -> None:
        """End the group; the followers return."""
        self._is_closed.set()
        if self._lost is None:
            try:
                self._order(Order.CLOSE, (), self.group.close)
            except InstanceLost:
                return

    def _order(self, order: Order, numbers: np.ndarray | Sequence[int], work: Callable[[], T]) -> T:
        with self._turn:
            if self._lost is not None:
                raise self._lost
            started_at = time.perf_counter()
            try:
                self._orders.give(order, numbers)
                result = work()
            except Exception as error:
                # Whatever it was, the ranks are no longer at the same point.
                self._lost = self.group.fail(error)
                self._on_lost(self._lost)
                raise self._lost from error
            if order is Order.STEP:
                self.elapsed_s += time.perf_counter() - started_at
            return result

    def _run(self, batch: ForwardBatch) -> torch.Tensor:
        group, vocab_size = self.group, self.shape.vocab_size
        logits = torch.empty(batch.num_rows, vocab_size)
        own = self.stage.run(batch)
        for rank in group.last_ranks:
            tokens = vocabulary_part(vocab_size, group.parallelism.tp, rank % group.parallelism.tp)
            where = slice(tokens.start, tokens.stop)
            if rank == HEAD:
                for part, answer in own:
                    logits[torch.from_numpy(part.rows), where] = answer
            else:
                received = torch.empty(batch.num_rows, len(tokens))
                group.receive(received, rank, ANSWERS)()
                logits[:, where] = received
        return logits

    def _gather_digests(self, pool: KVPool, page_ids: Sequence[int]) -> np.ndarray:
        shards = self.stage.shards
        whole = np.empty((shards.num_layers, shards.num_kv_heads), np.uint64)
        for rank in range(shards.num_ranks):
            shard = shards.of_rank(rank)
            if rank == HEAD:
                digests = slice_digests(pool, page_ids)
            else:
                received = torch.empty(shard.num_layers, shard.num_heads, dtype=torch.int64)
                digests = self.group.receive(received, rank, ANSWERS)().numpy().view(np.uint64)
            whole[shard.within(self.shape.whole)] = digests
        return whole

    def _gather_busy(self) -> None:
        busy_s = [float(busy) for busy in self.group.gather(self.stage.busy())]
        self.busy_s = busy_s[:: self.parallelism.tp]
        share = sum(self.busy_s) / len(self.busy_s) / max(self.elapsed_s, 1e-9)
        self.bubble_share = max(1 - share, 0.0) if self.elapsed_s else 0.0

    def _keep_alive(self) -> None:
        while not self._is_closed.wait(self.group.timeout_s / _BEATS_PER_TIMEOUT):
            try:
                self.beat()
            except InstanceLost:
                return
