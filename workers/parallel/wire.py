"""What the head tells the other ranks: one message for a usual decode step, two for longer.

Orders run ahead of the followers: each has asked for the next few before they are given, so that
the head need not wait for a rank that still computes the step before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto

import numpy as np
import torch

from daskserve.workers.forward import ForwardBatch
from daskserve.workers.parallel.group import HEAD, RankGroup

SCORES, LOGITS, DIGESTS, BUSY, _ORDERS, _REST = range(1 << 20, (1 << 20) + 6)
"""Tags of what followers answer, and of orders; tags of hidden states begin at 0."""

_INLINE = 4094  # numbers that the first message has room for
_AHEAD = 8  # orders that may be given before the first of them is taken


class Order(IntEnum):
    """What comes next for all ranks."""

    BIND = auto()
    """Make a KV pool: blocks, block size."""
    STEP = auto()
    """Run a step, see `pack_step`."""
    BEAT = auto()
    """Say that you live, and how long you have computed."""
    DIGEST = auto()
    """Say the digests of some lists of pages, by layer and head, see `pack_lists`."""
    PLACE = auto()
    """Put what was pulled for this owner into these pages."""
    DROP = auto()
    """Forget what was pulled for this owner."""
    CLOSE = auto()


class OrderLine:
    """Orders from the head to the followers, int32 numbers each."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._buffers = [torch.zeros(_INLINE + 2, dtype=torch.int32) for _ in range(_AHEAD)]
        self._waits: list[list[Callable[[], torch.Tensor]]] = [[] for _ in self._buffers]
        self._next = 0
        if group.rank != HEAD:
            for place in range(_AHEAD):
                self._ask(place)

    def give(self, order: Order, numbers: np.ndarray | tuple[int, ...] = ()) -> None:
        """On the head; waits only where a follower is many orders behind."""
        place = self._turn()
        self._settle(place)
        payload = np.asarray(numbers, dtype=np.int32)
        buffer, inline = self._buffers[place].numpy(), payload[:_INLINE]
        buffer[:2] = order, payload.size
        buffer[2 : 2 + inline.size] = inline
        for rank in range(1, self._group.num_ranks):
            self._waits[place].append(self._group.send(self._buffers[place], rank, _ORDERS))
        if payload.size > _INLINE:
            rest = torch.from_numpy(payload[_INLINE:].copy())
            for rank in range(1, self._group.num_ranks):
                self._waits[place].append(self._group.send(rest, rank, _REST))

    def take(self) -> tuple[Order, np.ndarray]:
        """On a follower: wait for the next order."""
        place = self._turn()
        self._settle(place)
        buffer = self._buffers[place].numpy()
        order, size = Order(buffer[0]), int(buffer[1])
        payload = buffer[2 : 2 + min(size, _INLINE)].copy()
        self._ask(place)
        if size > _INLINE:
            rest = torch.empty(size - _INLINE, dtype=torch.int32)
            self._group.receive(rest, HEAD, _REST)()
            payload = np.concatenate([payload, rest.numpy()])
        return order, payload

    def drain(self) -> None:
        """On the head: until every order has reached every follower."""
        for place in range(_AHEAD):
            self._settle(place)

    def _turn(self) -> int:
        place = self._next
        self._next = (place + 1) % _AHEAD
        return place

    def _ask(self, place: int) -> None:
        self._waits[place].append(self._group.receive(self._buffers[place], HEAD, _ORDERS))

    def _settle(self, place: int) -> None:
        waits, self._waits[place] = self._waits[place], []
        for wait in waits:
            wait()


@dataclass(frozen=True, slots=True)
class StepOrder:
    """A step as all ranks compute it.

    Parameters
    ----------
    batch
        Its tokens.
    num_parts
        Micro-batches that it is cut into.
    asked
        Rows whose logits are wanted.
    """

    batch: ForwardBatch
    num_parts: int
    asked: Sequence[int]


def pack_step(step: StepOrder) -> np.ndarray:
    """A step as int32 numbers."""
    batch = step.batch
    sizes = (batch.num_rows, batch.num_tokens, batch.page_table.shape[1])
    head = (step.num_parts, len(step.asked), *sizes, *step.asked)
    arrays = (batch.token_ids, batch.positions, batch.query_start, batch.context_tokens)
    parts = [np.array(head), *arrays, batch.page_table.reshape(-1)]
    return np.concatenate([part.astype(np.int32, copy=False) for part in parts])


def unpack_step(numbers: np.ndarray) -> StepOrder:
    """The step that `pack_step` made numbers of."""
    num_parts, num_asked, num_rows, num_tokens, width = (int(number) for number in numbers[:5])
    counts = (num_asked, num_tokens, num_tokens, num_rows + 1, num_rows, num_rows * width)
    edges = 5 + np.cumsum((0, *counts))
    asked, tokens, positions, starts, context, table = (
        numbers[start:end] for start, end in zip(edges[:-1], edges[1:], strict=True)
    )
    batch = ForwardBatch(
        token_ids=tokens.astype(np.int64),
        positions=positions.astype(np.int64),
        query_start=starts,
        context_tokens=context,
        page_table=table.reshape(num_rows, width),
    )
    return StepOrder(batch, num_parts, asked.tolist())


def pack_lists(lists: Sequence[Sequence[int]]) -> np.ndarray:
    """Lists of page ids as int32 numbers: how many, their lengths, then all of them."""
    numbers = [len(lists), *map(len, lists), *itertools.chain.from_iterable(lists)]
    return np.array(numbers, dtype=np.int32)


def unpack_lists(numbers: np.ndarray) -> list[np.ndarray]:
    """The lists that `pack_lists` made numbers of."""
    count = int(numbers[0])
    return np.split(numbers[1 + count :], np.cumsum(numbers[1 : 1 + count])[:-1])
