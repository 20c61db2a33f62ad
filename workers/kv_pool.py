"""The paged KV memory of one instance: who owns which page, and the bytes of each page.

A page holds ``block_size`` tokens of one request over all layers, so that a request's KV is a
few contiguous pieces of memory and moves between instances without packing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from daskserve.core.kv import KVStream, blocks_for
from daskserve.core.shards import Shard
from daskserve.errors import ConfigError
from daskserve.workers.forward import ModelShape
from daskserve.workers.kv_digest import host_digests

SCRATCH_PAGE = 0
"""Padding rows and unused page-table entries point here; nobody owns it."""


class AccountingError(RuntimeError):
    """A page was freed twice or by a stranger: a bug here, never the user's fault."""


def kv_layout(model: str, shape: ModelShape, dtype: torch.dtype, block_size: int) -> str:
    """All that two pools must share before pages may move between them, the model by its hash."""
    name = hashlib.sha256(model.encode()).hexdigest()[:8]
    size = f"{shape.num_layers}x{shape.num_kv_heads}x{shape.head_dim}"
    return f"{name} {str(dtype).removeprefix('torch.')} block_size={block_size} {size}"


def page_bytes(
    shape: ModelShape, dtype: torch.dtype, block_size: int, shard: Shard | None = None
) -> int:
    """Bytes of one page over all layers and heads, or those of the shard; keys and values."""
    held = shard or shape.whole
    elements = held.num_layers * 2 * held.num_heads * block_size * shape.head_dim
    return elements * dtype.itemsize


class KVPool:
    """Pages of KV with exactly one owner each.

    Only the engine's thread allocates and frees; the counters may be read from any thread.

    Parameters
    ----------
    shape, dtype
        Sizes of the model's KV.
    num_blocks
        Pages to hand out; page 0 (scratch) comes on top.
    block_size
        Tokens per page.
    shard
        Layers and KV heads that are held here; None: all of them.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
        shard: Shard | None = None,
    ) -> None:
        self.shard = shard = shard or shape.whole
        head_dim = shape.head_dim
        head_bytes = block_size * head_dim * dtype.itemsize
        if head_bytes % 8:
            raise ConfigError(
                f"block_size={block_size} gives {head_bytes} bytes per KV head in a block; must be"
                " a multiple of 8"
            )
        size = (num_blocks + 1, shard.num_layers, 2, shard.num_heads, block_size, head_dim)
        self.pages = self._make_pages(size, dtype)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks
        self.page_bytes = self.pages[0].nbytes
        # One byte per page, 1 = free: bytearray.find then finds runs of free pages at C speed.
        self._free_map = bytearray(b"\x00" + b"\x01" * num_blocks)
        self._pages_of: dict[Hashable, list[int]] = {}

    def _make_pages(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        pages = torch.zeros(size, dtype=dtype)
        raw = pages.view(torch.uint8)
        self._bytes = raw.view(size[0], -1).numpy()
        self._slices = raw.view(*size[:4], -1).numpy().view(np.uint64)
        return pages

    @property
    def slice_bytes(self) -> int:
        """Bytes of one head's keys, or values, of one layer in one page."""
        return self.block_size * self.pages.shape[-1] * self.pages.itemsize

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)

    def pages_of(self, owner: Hashable) -> list[int]:
        """Page ids of an owner in token order; raises `AccountingError` for a stranger."""
        try:
            return self._pages_of[owner]
        except KeyError:
            raise AccountingError(f"{owner!r} owns no pages") from None

    def allocate(self, owner: Hashable, num_pages: int) -> list[int] | None:
        """Give ``num_pages`` pages to a new owner, consecutive if a run is free; None if full."""
        if owner in self._pages_of:
            raise AccountingError(f"{owner!r} already owns pages")
        if num_pages > self.num_free:
            return None
        pages: list[int] = []
        run = num_pages
        while len(pages) < num_pages:
            run = min(run, num_pages - len(pages))
            start = self._free_map.find(b"\x01" * run)
            if start < 0:
                run = max(run // 2, 1)
                continue
            pages.extend(range(start, start + run))
            self._free_map[start : start + run] = bytes(run)
        self.num_free -= num_pages
        self._pages_of[owner] = pages
        return pages

    def extend(self, owner: Hashable) -> int | None:
        """Give one more page to an owner: the next one in memory if free; None if full."""
        pages = self.pages_of(owner)
        if self.num_free == 0:
            return None
        page = pages[-1] + 1 if pages else 1
        if page > self.num_blocks or not self._free_map[page]:
            # The far end: whole prompts are allocated from the near end and want long runs.
            page = self._free_map.rfind(b"\x01")
        self._free_map[page] = 0
        self.num_free -= 1
        pages.append(page)
        return page

    def free(self, owner: Hashable) -> None:
        """Take back all pages of an owner."""
        pages = self.pages_of(owner)
        for page in pages:
            if self._free_map[page]:
                raise AccountingError(f"page {page} of {owner!r} is already free")
            self._free_map[page] = 1
        self.num_free += len(pages)
        del self._pages_of[owner]

    def begin_digests(
        self, owners_pages: Sequence[Sequence[int]]
    ) -> Callable[[], list[np.ndarray]]:
        """Digests of each owner's pages, as they are after all steps begun so far.

        Each is uint64 ``[layers, kv_heads]`` of the model. What is returned waits for them and is
        called once those steps are finished.
        """
        return lambda: [self.slice_digests(pages) for pages in owners_pages]

    def slice_digests(self, page_ids: Sequence[int], shard: Shard | None = None) -> np.ndarray:
        """Of the layers and KV heads that are held here, or those of ``shard``. Any thread."""
        return host_digests(self._slices, page_ids, self.shard, shard or self.shard)

    def end_pull(self, owner: Hashable, succeeded: bool) -> None:
        """A pull into the pages of ``owner`` is over; other ranks are told, where there are any."""

    @property
    def home(self) -> dict[str, Any]:
        """What handles say of where the KV is, beside the head's address."""
        return {}

    def page_views(self, page_ids: Sequence[int]) -> list[memoryview]:
        """Writable raw bytes of the pages in the given order; consecutive pages come merged."""
        self._check_ids(page_ids)
        runs = runs_of(page_ids)
        return [memoryview(self._bytes[first : last + 1].reshape(-1)) for first, last in runs]

    def outgoing(self, page_ids: Sequence[int]) -> list[memoryview] | KVStream:
        """The bytes of the pages, in order, to be sent. Any thread."""
        return self.page_views(page_ids)

    def incoming(self, page_ids: Sequence[int]) -> list[memoryview] | KVStream:
        """Where bytes of pages, in order, are to be written. Any thread."""
        return self.page_views(page_ids)

    def read_slices(
        self, page_ids: Sequence[int], layers: slice, heads: slice, out: np.ndarray
    ) -> None:
        """Copy ``[pages, layers, 2, heads]`` to ``out``, contiguous uint8."""
        source = self._slices[:, layers, :, heads]
        words, start = out.view(np.uint64).reshape(-1, *source.shape[1:]), 0
        for first, last in runs_of(page_ids):
            run = source[first : last + 1]
            words[start : start + len(run)] = run
            start += len(run)

    def write_slices(
        self, page_ids: Sequence[int], layers: slice, heads: slice, data: np.ndarray
    ) -> None:
        """Write what `read_slices` of as many pages gave, here or elsewhere."""
        target = self._slices[:, layers, :, heads]
        words, start = data.view(np.uint64).reshape(-1, *target.shape[1:]), 0
        for first, last in runs_of(page_ids):
            run = target[first : last + 1]
            run[...] = words[start : start + len(run)]
            start += len(run)

    def _check_ids(self, page_ids: Sequence[int]) -> None:
        for first, last in runs_of(page_ids):
            if not (0 < first and last <= self.num_blocks):
                raise AccountingError(f"pages {first} to {last} are outside the pool")


def runs_of(page_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last page of each run of consecutive ones, in order."""
    start = 0
    for end in range(1, len(page_ids) + 1):
        if end == len(page_ids) or page_ids[end] != page_ids[end - 1] + 1:
            yield page_ids[start], page_ids[end - 1]
            start = end
