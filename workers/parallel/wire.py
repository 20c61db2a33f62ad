"""What the head tells the other ranks: one broadcast for a usual decode step, two for longer."""

from __future__ import annotations

from enum import IntEnum, auto

import numpy as np
import torch

from daskserve.workers.forward import ForwardBatch
from daskserve.workers.parallel.group import RankGroup

ANSWERS = 1 << 20
"""Tag of what followers answer; tags of hidden states begin at 0."""

_INLINE = 2046  # numbers that the first broadcast has room for


class Order(IntEnum):
    """What comes next for all ranks."""

    BIND = auto()
    """Make a KV pool: blocks, block size."""
    STEP = auto()
    """Run a step: rows, tokens, width of the page table, then the arrays of the batch."""
    BEAT = auto()
    """Say that you live, and how long you have computed."""
    DIGEST = auto()
    """Say the digests of these pages, by layer and head."""
    PLACE = auto()
    """Put what was pulled for this owner into these pages."""
    DROP = auto()
    """Forget what was pulled for this owner."""
    CLOSE = auto()


class OrderLine:
    """Orders from the head to the followers, int32 numbers each."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._buffer = torch.zeros(_INLINE + 2, dtype=torch.int32)
        self._numbers = self._buffer.numpy()

    def give(self, order: Order, numbers: np.ndarray | tuple[int, ...] = ()) -> None:
        """On the head."""
        payload = np.asarray(numbers, dtype=np.int32)
        inline = payload[:_INLINE]
        self._numbers[:2] = order, payload.size
        self._numbers[2 : 2 + inline.size] = inline
        self._group.broadcast(self._buffer)
        if payload.size > _INLINE:
            self._group.broadcast(torch.from_numpy(payload[_INLINE:]))

    def take(self) -> tuple[Order, np.ndarray]:
        """On a follower: wait for the next order."""
        self._group.broadcast(self._buffer)
        order, size = Order(self._numbers[0]), int(self._numbers[1])
        payload = self._numbers[2 : 2 + min(size, _INLINE)].copy()
        if size > _INLINE:
            rest = torch.empty(size - _INLINE, dtype=torch.int32)
            self._group.broadcast(rest)
            payload = np.concatenate([payload, rest.numpy()])
        return order, payload


def pack_batch(batch: ForwardBatch) -> np.ndarray:
    """A batch as int32 numbers."""
    sizes = (batch.num_rows, batch.num_tokens, batch.page_table.shape[1])
    arrays = (batch.token_ids, batch.positions, batch.query_start, batch.context_tokens)
    parts = [np.array(sizes), *arrays, batch.page_table.reshape(-1)]
    return np.concatenate([part.astype(np.int32, copy=False) for part in parts])


def unpack_batch(numbers: np.ndarray) -> ForwardBatch:
    """The batch that `pack_batch` made numbers of."""
    num_rows, num_tokens, width = (int(number) for number in numbers[:3])
    counts = (num_tokens, num_tokens, num_rows + 1, num_rows, num_rows * width)
    edges = 3 + np.cumsum((0, *counts))
    tokens, positions, starts, context, table = (
        numbers[start:end] for start, end in zip(edges[:-1], edges[1:], strict=True)
    )
    return ForwardBatch(
        token_ids=tokens.astype(np.int64),
        positions=positions.astype(np.int64),
        query_start=starts,
        context_tokens=context,
        page_table=table.reshape(num_rows, width),
    )
