"""Launches the Triton kernels of paged attention. Importing it needs Triton."""

from __future__ import annotations

import os
from typing import Any

import torch
import triton

from daskserve.workers.cuda.paged_kernels import attend_tiles, join_splits
from daskserve.workers.cuda.step import Asked, DeviceStep

_LINES = 64  # query tokens times heads in a tile of a prompt
_FEWEST_LINES = 16  # what a matrix product takes
_MOST_SPLITS = 32
_LEAST_SPLIT_TOKENS = 128
_PROGRAMS_PER_PROCESSOR = 2


def tile_shape(group: int, max_query: int) -> tuple[int, int]:
    """Tokens of a tile, and its lines: tokens times heads, up to a power of two."""
    lines = max(triton.next_power_of_2(group), _FEWEST_LINES)
    if max_query > 1:
        lines = max(lines, _LINES)
    return (lines // group if max_query > 1 else 1), lines


def splits_for(num_tiles: int, kv_heads: int, max_context: int, num_processors: int) -> int:
    """Among how many programs a context is shared out so that all processors have work.

    A power of two. With a captured graph ``max_context`` is the longest that there can be: programs
    of short contexts find nothing to do and end.
    """
    wanted = num_processors * _PROGRAMS_PER_PROCESSOR // max(num_tiles * kv_heads, 1)
    useful = max_context // _LEAST_SPLIT_TOKENS
    most = max(min(wanted, useful, _MOST_SPLITS), 1)
    return 1 << (most.bit_length() - 1)


class TritonAttention:
    """Any page size, head size, window, soft-capping and sinks; float32 as exact as it can be.

    Parameters
    ----------
    num_processors
        Of the card: how many programs run at once.
    """

    name = "Triton"

    def __init__(self, num_processors: int) -> None:
        self._num_processors = num_processors

    def tile_tokens(self, group: int, max_query: int) -> int:
        return tile_shape(group, max_query)[0]

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        step: DeviceStep,
        asked: Asked,
    ) -> torch.Tensor:
        num_heads, head_dim = query.shape[1:]
        kv_heads = keys.shape[2]
        num_tiles = len(step.tile_rows)
        splits = 1
        if step.max_query == 1:
            splits = splits_for(num_tiles, kv_heads, step.max_context, self._num_processors)
        if query.stride(2) != 1:
            query = query.contiguous()
        out = query.new_empty(query.shape)
        parts, logs = out, out
        if splits > 1:
            parts = query.new_empty((*query.shape[:2], splits, head_dim), dtype=torch.float32)
            logs = query.new_empty((*query.shape[:2], splits), dtype=torch.float32)
        sinks = out if asked.sinks is None else asked.sinks.float()
        tensors = (out, parts, logs, query, keys, values, sinks)
        lengths = (step.query_start, step.context_tokens, step.page_table)
        options = (asked.scaling, asked.softcap or 0.0, asked.window or 0)
        strides = (*query.stride()[:2], *keys.stride()[:3], step.page_table.stride(0))
        attend_tiles[(num_tiles, kv_heads, splits)](
            *tensors,
            *lengths,
            step.tile_rows,
            step.tile_starts,
            *options,
            *strides,
            **_sizes(query, keys, asked, step.max_query),
            num_splits=splits,
            num_warps=4,
            num_stages=2,
        )
        if splits > 1:
            self._join(out, parts, logs, sinks, splits, asked.sinks is not None)
        return out

    def _join(
        self,
        out: torch.Tensor,
        parts: torch.Tensor,
        logs: torch.Tensor,
        sinks: torch.Tensor,
        splits: int,
        has_sinks: bool,
    ) -> None:
        num_tokens, num_heads, head_dim = out.shape
        join_splits[(num_tokens * num_heads,)](
            out,
            parts,
            logs,
            sinks,
            num_heads,
            head_dim=head_dim,
            padded_dim=triton.next_power_of_2(head_dim),
            num_splits=splits,
            has_sinks=has_sinks,
            num_warps=4,
        )


def _sizes(query: torch.Tensor, keys: torch.Tensor, asked: Asked, max_query: int) -> dict[str, Any]:
    """What a kernel is compiled for."""
    head_dim, dtype = query.shape[2], query.dtype
    group = query.shape[1] // keys.shape[2]
    tile_tokens, tile_lines = tile_shape(group, max_query)
    return {
        "group": group,
        "head_dim": head_dim,
        "padded_dim": max(triton.next_power_of_2(head_dim), 16),
        "page_size": keys.shape[1],
        "tile_tokens": tile_tokens,
        "tile_lines": tile_lines,
        # Of context at a time: what fits into a multiprocessor's memory beside the queries.
        "step_tokens": 32 if dtype == torch.float32 or head_dim > 128 else 64,
        "has_softcap": asked.softcap is not None,
        "has_sinks": asked.sinks is not None,
        "has_window": asked.window is not None,
        "precision": "ieee" if dtype == torch.float32 else "tf32",
        "widened": dtype == torch.bfloat16 and _is_interpreted(),
    }


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
