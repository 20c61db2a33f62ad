"""The head of an instance of several ranks: looks to the engine like a model on one device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from daskserve.errors import InstanceLost, ModelError
from daskserve.workers.forward import ForwardBatch
from daskserve.workers.kv_pool import KVPool
from daskserve.workers.parallel.group import HEAD
from daskserve.workers.parallel.loader import vocabulary_part
from daskserve.workers.parallel.stage import Stage
from daskserve.workers.parallel.wire import Order, OrderLine, pack_batch, unpack_batch

_LOGITS = 1 << 20  # tags of logits begin here, tags of hidden states at 0
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
    on_lost
        Called once, on any thread, when the group is lost.
    """

    def __init__(
        self, stage: Stage, on_lost: Callable[[InstanceLost], None] = lambda error: None
    ) -> None:
        self.stage = stage
        self.group = stage.group
        self.shape, self.dtype, self.shard = stage.shape, stage.dtype, stage.shard
        self.elapsed_s = 0.0
        """Seconds spent in ``forward`` so far."""
        self._orders = OrderLine(stage.group)
        self._on_lost = on_lost
        self._lost: InstanceLost | None = None
        self._turn = threading.Lock()
        self._is_closed = threading.Event()
        self._beat = threading.Thread(target=self._keep_alive, name="rank beat", daemon=True)
        self._beat.start()

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

    def bubble_shares(self) -> list[float]:
        """Of each stage: the share of the steps' time in which it waited for others."""
        busy_s = self._order(Order.BUSY, (), lambda: _gather_busy(self.stage))
        by_stage = busy_s[:: self.group.parallelism.tp]
        return [1 - busy / max(self.elapsed_s, busy, 1e-9) for busy in by_stage]

    def close(self) -> None:
        """End the group; the followers return."""
        self._is_closed.set()
        if self._lost is None:
            try:
                self._order(Order.CLOSE, (), self.group.close)
            except InstanceLost:
                return

    def _order(
        self, order: Order, numbers: np.ndarray | tuple[int, ...], work: Callable[[], T]
    ) -> T:
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
                group.receive(received, rank, _LOGITS)()
                logits[:, where] = received
        return logits

    def _keep_alive(self) -> None:
        while not self._is_closed.wait(self.group.timeout_s / _BEATS_PER_TIMEOUT):
            try:
                self._order(Order.BEAT, (), self.group.barrier)
            except InstanceLost:
                return


class Follower:
    """Any rank but the head: does what it is told until the head says that it is over.

    Parameters
    ----------
    stage
        Of this rank.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.pool: KVPool | None = None
        self._orders = OrderLine(stage.group)

    def serve(self) -> None:
        """Blocks until the group is closed; InstanceLost when it breaks."""
        try:
            while self._obey(*self._orders.take()):
                pass
        except Exception as error:
            raise self.stage.group.fail(error) from error
        self.stage.group.close()

    def _obey(self, order: Order, numbers: np.ndarray) -> bool:
        stage, group = self.stage, self.stage.group
        if order is Order.STEP:
            self._step(unpack_batch(numbers))
        elif order is Order.BIND:
            num_blocks, block_size = (int(number) for number in numbers)
            self.pool = KVPool(stage.shape, stage.dtype, num_blocks, block_size, stage.shard)
            stage.bind(self.pool.pages)
        elif order is Order.BEAT:
            group.barrier()
        elif order is Order.BUSY:
            _gather_busy(stage)
        return order is not Order.CLOSE

    def _step(self, batch: ForwardBatch) -> None:
        group = self.stage.group
        answers = self.stage.run(batch)
        if not group.is_last:
            return
        logits = torch.empty(batch.num_rows, answers[0][1].shape[1])
        for part, answer in answers:
            logits[torch.from_numpy(part.rows)] = answer
        group.send(logits, HEAD, _LOGITS)()


def _gather_busy(stage: Stage) -> list[float]:
    own = torch.tensor([stage.busy_s], dtype=torch.float64)
    return [float(busy) for busy in stage.group.gather(own)]
