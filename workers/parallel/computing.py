"""What a stage computes with: the kernels of CPUs, or attention and copies of a card.

Both take the same batches and give the same answers. On a card steps are eager: no CUDA graphs are
recorded over several ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import numpy as np
import torch

from daskserve.core.instance import DEFAULT_BLOCK_SIZE, DEFAULT_BUDGET_TOKENS, HOST_KV_BYTES
from daskserve.core.shards import Shard
from daskserve.workers.attention import PagedStep
from daskserve.workers.cuda.attention import (
    VARLEN_PAGE_TOKENS,
    Attention,
    VarlenAttention,
    choose_attention,
)
from daskserve.workers.cuda.device import free_kv_bytes
from daskserve.workers.cuda.pool import DevicePool
from daskserve.workers.cuda.staging import Mark, mark_now
from daskserve.workers.cuda.step import DeviceStep, send, to_device
from daskserve.workers.forward import ForwardBatch, LayerFacts, ModelShape
from daskserve.workers.kernels.cpu import ask_for_huge_pages
from daskserve.workers.kernels.vector import LANES
from daskserve.workers.kv_pool import KVPool
from daskserve.workers.layer_attention import LayerAttention, can_attend
from daskserve.workers.parallel.answers import Answer, Answering
from daskserve.workers.parallel.micro_batches import MicroBatch

Outputs = Sequence[tuple[MicroBatch, torch.Tensor]]
"""Micro-batches of a step, in order, and their logits."""


class Inputs(NamedTuple):
    """A batch as the module of a stage takes it."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    paged: PagedStep | DeviceStep


class Computing(Protocol):
    """One stage's way to compute; `learn` comes first, then `bind`."""

    device: torch.device
    dtype: torch.dtype
    is_on_host: bool
    """Whether the pool is plain memory, without copies of a device."""
    budget_tokens: int
    """L_m where neither the configuration nor a profile says it."""
    busy_s: float
    """Seconds spent on micro-batches so far, waits between stages not counted."""

    def learn(self, facts: list[LayerFacts]) -> None:
        """What the stage's layers ask of attention."""

    @property
    def page_tokens(self) -> int:
        """Tokens of a page where the configuration does not say."""

    def kv_bytes(self, memory_fraction: float) -> int:
        """Memory for KV where the configuration does not say (ConfigError)."""

    def new_pool(self, shape: ModelShape, blocks: int, block_size: int, shard: Shard) -> KVPool:
        """A pool of the shard's KV."""

    def bind(self, pages: torch.Tensor) -> None:
        """Compute over these pages."""

    def active(self) -> AbstractContextManager[None]:
        """Around all that computes, and what follows on it."""

    def inputs(self, batch: ForwardBatch) -> Inputs:
        """A batch where it is computed."""

    def indices(self, numbers: Sequence[int]) -> torch.Tensor:
        """Numbers to index what was computed."""

    def timed(self) -> AbstractContextManager[None]:
        """Around what counts as busy."""

    def answer(self, outputs: Outputs, rows: int, asked: Sequence[int], part: range) -> Answering:
        """Start to find what the stage says of a step's rows."""

    def mark(self) -> Mark:
        """The end of what was started so far."""


class HostComputing:
    """On this machine's cores.

    Parameters
    ----------
    dtype, num_threads
        Of weights and KV; of the matrix products and of attention.
    """

    device = torch.device("cpu")
    is_on_host = True
    page_tokens = DEFAULT_BLOCK_SIZE
    budget_tokens = DEFAULT_BUDGET_TOKENS

    def __init__(self, dtype: torch.dtype, num_threads: int) -> None:
        self.dtype, self._num_threads = dtype, num_threads
        self.busy_s = 0.0
        self._compiled: LayerAttention | None = None
        self._pages: torch.Tensor | None = None

    def learn(self, facts: list[LayerFacts]) -> None:
        if can_attend(facts):
            self._compiled = LayerAttention(facts, self.dtype, self._num_threads)

    def kv_bytes(self, memory_fraction: float) -> int:
        return HOST_KV_BYTES

    def new_pool(self, shape: ModelShape, blocks: int, block_size: int, shard: Shard) -> KVPool:
        return KVPool(shape, self.dtype, blocks, block_size, shard)

    def bind(self, pages: torch.Tensor) -> None:
        ask_for_huge_pages(pages.data_ptr(), pages.nbytes)
        self._pages = pages

    def active(self) -> AbstractContextManager[None]:
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        return nullcontext()

    def inputs(self, batch: ForwardBatch) -> Inputs:
        compiled = self._compiled if self._pages.shape[4] % LANES == 0 else None
        step = PagedStep.of(self._pages, batch, compiled)
        return Inputs(torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions), step)

    def indices(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.as_tensor(numbers, dtype=torch.long)

    @contextmanager
    def timed(self) -> Iterator[None]:
        started_at = time.perf_counter()
        yield
        self.busy_s += time.perf_counter() - started_at

    def answer(self, outputs: Outputs, rows: int, asked: Sequence[int], part: range) -> Answering:
        return Answering.done(Answer.of(outputs, rows, asked, part, self.dtype))

    def mark(self) -> Mark:
        return Mark(None)


class DeviceComputing:
    """On a card, or with ``cpu`` through the same code without one.

    Parameters
    ----------
    device, dtype
        Where, and the type of weights and KV.
    varlen
        What computes as PyTorch's ``varlen_attn``; None: PyTorch.
    """

    is_on_host = False
    # Weights are read once a step: below this many tokens a GPU waits for them.
    budget_tokens = 2048

    def __init__(
        self, device: torch.device, dtype: torch.dtype, varlen: VarlenAttention | None = None
    ) -> None:
        self.device, self.dtype, self._varlen = device, dtype, varlen
        # Not the default stream: UCXX waits for that one before it sends or receives.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._facts: list[LayerFacts] = []
        self._attention: Attention | None = None
        self._pages: torch.Tensor | None = None
        self._busy_s = 0.0
        self._spans: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def learn(self, facts: list[LayerFacts]) -> None:
        self._facts = facts

    @property
    def page_tokens(self) -> int:
        largest = self._choose(VARLEN_PAGE_TOKENS)
        has_pages = isinstance(largest.paged_op, VarlenAttention)
        return VARLEN_PAGE_TOKENS if has_pages else DEFAULT_BLOCK_SIZE

    def kv_bytes(self, memory_fraction: float) -> int:
        is_card = self.device.type == "cuda"
        return free_kv_bytes(self.device, memory_fraction) if is_card else HOST_KV_BYTES

    def new_pool(self, shape: ModelShape, blocks: int, block_size: int, shard: Shard) -> KVPool:
        return DevicePool(shape, self.dtype, blocks, block_size, self.device, shard)

    def bind(self, pages: torch.Tensor) -> None:
        self._pages, self._attention = pages, self._choose(pages.shape[4])
        if self._stream is not None:
            # The pool was made on another stream; nothing of another rank is under way here.
            torch.cuda.synchronize(self.device)

    def active(self) -> AbstractContextManager[None]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def inputs(self, batch: ForwardBatch) -> Inputs:
        step = to_device(batch, self._pages, self._attention, self.device)
        return Inputs(step.token_ids, step.positions, step)

    def indices(self, numbers: Sequence[int]) -> torch.Tensor:
        # Pinned: a copy from other memory may wait for the card, and that without a deadline.
        return send([np.asarray(numbers, np.int64)], self.device)[0].long()

    @property
    def busy_s(self) -> float:
        while self._spans and self._spans[0][1].query():
            start, end = self._spans.popleft()
            self._busy_s += start.elapsed_time(end) / 1000
        return self._busy_s

    @contextmanager
    def timed(self) -> Iterator[None]:
        if self._stream is None:
            started_at = time.perf_counter()
            yield
            self._busy_s += time.perf_counter() - started_at
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self._stream)
        yield
        end.record(self._stream)
        self._spans.append((start, end))

    def answer(self, outputs: Outputs, rows: int, asked: Sequence[int], part: range) -> Answering:
        # Every row ends in one micro-batch, and they are in order.
        logits = torch.cat([each for _, each in outputs])
        values, tokens = logits.max(dim=1)
        best = torch.stack([(tokens + part.start).double(), values.double()])
        wanted = logits[self.indices(asked)].to(self.dtype)
        return Answering.fetched(best, wanted)

    def mark(self) -> Mark:
        with self.active():
            return mark_now(self.device)

    def _choose(self, page_size: int) -> Attention:
        return choose_attention(self._facts, self.dtype, page_size, self.device, self._varlen)
