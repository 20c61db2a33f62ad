"""The head of an instance of several ranks: looks to the engine like a model on one device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from daskserve.core.instance import EngineConfig
from daskserve.core.shards import Shard
from daskserve.errors import InstanceLost, ModelError
from daskserve.workers.forward import ForwardBatch, HostRunner
from daskserve.workers.kv_digest import slice_digests
from daskserve.workers.kv_pool import KVPool, page_bytes
from daskserve.workers.parallel.answers import Answer, merged
from daskserve.workers.parallel.group import HEAD
from daskserve.workers.parallel.head_pool import head_pool
from daskserve.workers.parallel.micro_batches import num_micro_batches
from daskserve.workers.parallel.stage import ROOM, Stage
from daskserve.workers.parallel.wire import (
    BUSY,
    DIGESTS,
    LOGITS,
    SCORES,
    Order,
    OrderLine,
    StepOrder,
    pack_lists,
    pack_step,
)
from daskserve.workers.scores import Scores

_BEATS_PER_TIMEOUT = 3

T = TypeVar("T")


class ParallelRunner(HostRunner):
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
        self.stage_layers = stage.shards.stage_layers
        self.shape, self.dtype, self.shard = stage.shape, stage.dtype, stage.shard
        self.device = None if stage.computing.is_on_host else stage.device
        self.is_on_host = stage.computing.is_on_host
        self.page_tokens = stage.computing.page_tokens
        self.budget_tokens = stage.computing.budget_tokens
        self.max_open = stage.group.parallelism.pp
        self.busy_s: list[float] = []
        """Seconds that each stage has computed, as of the last beat."""
        self.bubble_share = 0.0
        self._num_open = 0
        self._opened_at = 0.0
        self._elapsed_s = 0.0
        self._orders = OrderLine(stage.group)
        self._on_lost = on_lost
        self._lost: InstanceLost | None = None
        self._turn = threading.Lock()
        self._is_closed = threading.Event()
        self._beat = threading.Thread(target=self._keep_alive, name="rank beat", daemon=True)
        self._beat.start()

    def new_pool(self, num_blocks: int, block_size: int) -> KVPool:
        """Pages of all ranks; holds those of the head."""
        return head_pool(self, num_blocks, block_size)

    def default_kv_bytes(self, config: EngineConfig) -> int:
        """Of the head's shard; every rank has room for as many tokens."""
        if self.is_on_host:
            return super().default_kv_bytes(config)
        token_bytes = page_bytes(self.shape, self.dtype, 1, self.shard)
        return min(map(int, self.group.shared(ROOM))) * token_bytes

    def bind(self, pool_pages: torch.Tensor) -> None:
        """Use this pool for the head's shard; every rank has made one of as many blocks then."""
        shard, head_dim = self.shard, self.shape.head_dim
        expected = (shard.num_layers, 2, shard.num_heads, pool_pages.shape[4], head_dim)
        if tuple(pool_pages.shape[1:]) != expected or pool_pages.dtype != self.dtype:
            raise ModelError(
                f"KV pool {tuple(pool_pages.shape)} {pool_pages.dtype} does not fit the head's"
                f" shard: [blocks + 1, {', '.join(map(str, expected))}] {self.dtype} is needed"
            )
        sizes = (pool_pages.shape[0] - 1, pool_pages.shape[4])
        self._order(Order.BIND, sizes, lambda: self.stage.bind(pool_pages))
        self.beat()

    @property
    def elapsed_s(self) -> float:
        """Seconds so far in which a step was open."""
        open_s = time.perf_counter() - self._opened_at if self._num_open else 0.0
        return self._elapsed_s + open_s

    def begin(self, batch: ForwardBatch, asked: Sequence[int]) -> Callable[[], Scores]:
        """Start a step on all ranks: returns when the head's stage has done its share."""
        num_parts = num_micro_batches(batch, self.parallelism.pp, self._num_open)
        step = StepOrder(batch, num_parts, asked)
        if not self._num_open:
            self._opened_at = time.perf_counter()
        self._num_open += 1
        waits = self._order(Order.STEP, pack_step(step), lambda: self._begin(step))
        return lambda: self._finish(waits, asked)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32 logits ``[R, vocab]`` of each row's last token; writes the new tokens' KV."""
        rows = range(batch.num_rows)
        scores = self.begin(batch, rows)()
        return torch.from_numpy(np.stack([scores.logits[row] for row in rows]))

    def begin_digests(
        self, pool: KVPool, owners_pages: Sequence[Sequence[int]]
    ) -> Callable[[], list[np.ndarray]]:
        """Digests of each owner's pages on all ranks, uint64 ``[layers, kv_heads]`` of the model.

        They are of what is there after the steps begun so far. ``pool`` is the bound one.
        """
        if not owners_pages:
            return list
        waits = self._order(
            Order.DIGEST, pack_lists(owners_pages), lambda: self._begin_digests(pool, owners_pages)
        )
        return lambda: self._in_turn(lambda: self._whole_digests(waits))

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
                self._order(Order.CLOSE, (), self._close)
            except InstanceLost:
                return

    def _order(self, order: Order, numbers: np.ndarray | Sequence[int], work: Callable[[], T]) -> T:
        def given() -> T:
            self._orders.give(order, numbers)
            return work()

        return self._in_turn(given)

    def _in_turn(self, work: Callable[[], T]) -> T:
        """One caller at a time; whatever goes wrong ends the group."""
        with self._turn:
            if self._lost is not None:
                raise self._lost
            try:
                return work()
            except Exception as error:
                # Whatever it was, the ranks are no longer at the same point.
                self._lost = self.group.fail(error)
                self._on_lost(self._lost)
                raise self._lost from error

    def _begin(self, step: StepOrder) -> list[Callable[[], Answer]]:
        """The head's share of a step; what is returned waits for each rank of the last stage."""
        num_rows = step.batch.num_rows
        # Asked for before they are there, so that they arrive while the head does other things.
        others = [self._ask(rank, num_rows, step.asked) for rank in self._last_followers()]
        own = self.stage.run(step.batch, step.num_parts, step.asked)
        return others if own is None else [own, *others]

    def _last_followers(self) -> list[int]:
        return [rank for rank in self.group.last_ranks if rank != HEAD]

    def _ask(self, rank: int, num_rows: int, asked: Sequence[int]) -> Callable[[], Answer]:
        answer = Answer.empty(num_rows, len(asked), self.stage.vocabulary_of(rank), self.dtype)
        waits = [self.group.receive(answer.best, rank, SCORES)]
        if asked:
            waits.append(self.group.receive(answer.logits, rank, LOGITS))

        def arrived() -> Answer:
            for wait in waits:
                wait()
            return answer

        return arrived

    def _finish(self, waits: list[Callable[[], Answer]], asked: Sequence[int]) -> Scores:
        # The last first: connections tell of a dead rank at once, a card does not.
        answers = self._in_turn(lambda: [wait() for wait in reversed(waits)])[::-1]
        self._num_open -= 1
        if not self._num_open:
            self._elapsed_s += time.perf_counter() - self._opened_at
        return merged(answers, asked)

    def _begin_digests(
        self, pool: KVPool, owners_pages: Sequence[Sequence[int]]
    ) -> list[tuple[Shard, Callable[[], np.ndarray]]]:
        """Of each rank: what it holds, and what waits for its digests ``[owners, ...]``."""

        def compute() -> np.ndarray:
            return np.stack([slice_digests(pool, pages) for pages in owners_pages])

        # On a card the steps begun so far are computed when somebody waits for the digests.
        own = compute if self.device is not None else partial(np.asarray, compute())
        parts: list[tuple[Shard, Callable[[], np.ndarray]]] = [(self.shard, own)]
        for rank in range(1, self.group.num_ranks):
            shard = self.stage.shards.of_rank(rank)
            size = (len(owners_pages), shard.num_layers, shard.num_heads)
            wait = self.group.receive(torch.empty(size, dtype=torch.int64), rank, DIGESTS)
            parts.append((shard, partial(_unsigned, wait)))
        return parts

    def _whole_digests(
        self, parts: list[tuple[Shard, Callable[[], np.ndarray]]]
    ) -> list[np.ndarray]:
        arrived = [(shard, wait()) for shard, wait in parts]
        shape = (len(arrived[0][1]), self.shape.num_layers, self.shape.num_kv_heads)
        whole = np.empty(shape, np.uint64)
        for shard, digests in arrived:
            layers, heads = shard.within(self.shape.whole)
            whole[:, layers, heads] = digests
        return list(whole)

    def _gather_busy(self) -> None:
        busy = [self.stage.busy()]
        for rank in range(1, self.group.num_ranks):
            busy.append(self.group.receive(torch.empty_like(busy[0]), rank, BUSY)())
        self.busy_s = [float(each) for each in busy[:: self.parallelism.tp]]
        elapsed_s = self.elapsed_s
        share = sum(self.busy_s) / len(self.busy_s) / max(elapsed_s, 1e-9)
        self.bubble_share = max(1 - share, 0.0) if elapsed_s else 0.0

    def _close(self) -> None:
        self._orders.drain()
        self.group.close()

    def _keep_alive(self) -> None:
        while not self._is_closed.wait(self.group.timeout_s / _BEATS_PER_TIMEOUT):
            try:
                self.beat()
            except InstanceLost:
                return


def _unsigned(wait: Callable[[], torch.Tensor]) -> np.ndarray:
    return wait().numpy().view(np.uint64)
