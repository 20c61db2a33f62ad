"""One engine step on the device: its tokens, where their KV goes, and what each row sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from daskserve.workers.forward import ForwardBatch

if TYPE_CHECKING:
    from daskserve.workers.cuda.attention import Attention


class Asked(NamedTuple):
    """What a layer asks of attention, beyond queries, keys and values."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(slots=True)
class DeviceStep:
    """Tensors of a step; travels through the model as the ``paged`` argument.

    T new tokens of R rows. ``page_table`` may be wider than any row needs.
    """

    attention: Attention
    pages: torch.Tensor
    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    write_pages: torch.Tensor  # int64 [T]
    write_slots: torch.Tensor  # int64 [T]
    last_tokens: torch.Tensor | None  # int64 [R]; None: every token is its row's only one
    query_start: torch.Tensor  # int32 [R + 1]
    context_tokens: torch.Tensor  # int32 [R]
    page_table: torch.Tensor  # int32 [R, pages of a row]
    tile_rows: torch.Tensor  # int32 [tiles]
    tile_starts: torch.Tensor  # int32 [tiles]
    max_query: int
    max_context: int
    is_fresh: bool
    """Whether no row has anything cached: keys and values are all in the step itself."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        asked: Asked,
    ) -> torch.Tensor:
        """Output ``[T, heads, D]`` for ``[heads, T, D]`` inputs whose K and V it also stores."""
        q, k, v = (each.transpose(0, 1) for each in (query, key, value))
        # [pages, page_size, kv_heads, D]: views, however the pool lies in memory.
        keys, values = (self.pages[:, layer, part].transpose(1, 2) for part in (0, 1))
        keys[self.write_pages, self.write_slots] = k
        values[self.write_pages, self.write_slots] = v
        fresh_op = self.attention.fresh_op
        if self.is_fresh and fresh_op is not None:
            return fresh_op(q, k, v, self, asked)
        return self.attention.paged_op(q, keys, values, self, asked)


def tiles(query_start: np.ndarray, tile_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and first tokens of tiles of so many tokens, none of which crosses a row; int32."""
    lengths = np.diff(query_start)
    counts = -(-lengths // tile_tokens)
    rows = np.repeat(np.arange(len(lengths)), counts)
    before = np.cumsum(counts) - counts
    index = np.arange(len(rows)) - before[rows]
    return rows.astype(np.int32), (query_start[rows] + index * tile_tokens).astype(np.int32)


def write_places(batch: ForwardBatch, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Page and slot of every new token."""
    rows = np.repeat(np.arange(batch.num_rows), np.diff(batch.query_start))
    return batch.page_table[rows, batch.positions // page_size], batch.positions % page_size


def to_device(
    batch: ForwardBatch, pages: torch.Tensor, attention: Attention, device: torch.device
) -> DeviceStep:
    """Everything of a batch, in one asynchronous copy."""
    page_size = pages.shape[4]
    max_query = int(np.diff(batch.query_start).max())
    write_pages, write_slots = write_places(batch, page_size)
    tile_rows, tile_starts = tiles(batch.query_start, attention.tile_tokens(max_query))
    longs = [batch.token_ids, batch.positions, write_pages, write_slots, batch.query_start[1:] - 1]
    shorts = [batch.query_start, batch.context_tokens, batch.page_table, tile_rows, tile_starts]
    parts = send([*longs, *shorts], device)
    token_ids, positions, write_pages, write_slots, last = (part.long() for part in parts[:5])
    query_start, context_tokens, page_table, tile_rows, tile_starts = parts[5:]
    return DeviceStep(
        attention=attention,
        pages=pages,
        token_ids=token_ids,
        positions=positions,
        write_pages=write_pages,
        write_slots=write_slots,
        last_tokens=None if batch.is_decode else last,
        query_start=query_start,
        context_tokens=context_tokens,
        page_table=page_table,
        tile_rows=tile_rows,
        tile_starts=tile_starts,
        max_query=max_query,
        max_context=int(batch.context_tokens.max()),
        is_fresh=bool((np.diff(batch.query_start) == batch.context_tokens).all()),
    )


def send(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as int32 on the device: views of one buffer, copied once and not waited for."""
    sizes = [array.size for array in arrays]
    # Pinned memory comes back from PyTorch's cache, never before its copy is done.
    host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    flat, end = host.numpy(), 0
    for array in arrays:
        start, end = end, end + array.size
        flat[start:end] = array.reshape(-1)
    parts = host.to(device, non_blocking=True).split(sizes)
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
