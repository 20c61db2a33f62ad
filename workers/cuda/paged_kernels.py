"""Triton kernels: attention of packed tokens over paged keys and values.

A program computes one tile: some new tokens of one row, with all query heads that share one KV
head. Where rows are few the context is shared out among several programs, whose parts a second
kernel puts together. Importing this module needs Triton; nothing here needs a GPU to be imported.

    out, query      [tokens, heads, dim]
    keys, values    [pages, page_size, kv_heads, dim], the same strides
    parts           float32 [tokens, heads, splits, dim], used when there are several splits
    part_logs       float32 [tokens, heads, splits]: log of the sum of weights
    sinks           float32 [heads], used when has_sinks
    query_start     int32 [rows + 1]; context_tokens int32 [rows]
    page_table      int32 [rows, pages of a row]
    tile_rows       int32 [tiles]; tile_starts int32 [tiles]: row and first token of each tile
    window          used when has_window
    group           query heads of a KV head
    tile_lines      at least tile_tokens * group, a power of two
    widened         products in float32, since the interpreter has none in bfloat16
"""

# fmt: off
from __future__ import annotations

import triton
import triton.language as tl

_NEVER = tl.constexpr(-float("inf"))


@triton.jit
def attend_tiles(
    out, parts, part_logs, query, keys, values, sinks,
    query_start, context_tokens, page_table, tile_rows, tile_starts,
    scale, softcap, window,
    query_token_stride, query_head_stride, page_stride, slot_stride, kv_head_stride, table_stride,
    group: tl.constexpr, head_dim: tl.constexpr, padded_dim: tl.constexpr,
    page_size: tl.constexpr, tile_tokens: tl.constexpr, tile_lines: tl.constexpr,
    step_tokens: tl.constexpr, num_splits: tl.constexpr, has_softcap: tl.constexpr,
    has_sinks: tl.constexpr, has_window: tl.constexpr, precision: tl.constexpr,
    widened: tl.constexpr,
):
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(tile_rows + tile)
    first = tl.load(tile_starts + tile)
    row_end = tl.load(query_start + row + 1)
    context = tl.load(context_tokens + row)

    line = tl.arange(0, tile_lines)
    token = first + line // group
    head = kv_head * group + line % group
    is_line = (line < tile_tokens * group) & (token < row_end)
    position = context - row_end + token
    feature = tl.arange(0, padded_dim)
    is_value = is_line[:, None] & (feature < head_dim)[None, :]
    query_at = token[:, None].to(tl.int64) * query_token_stride + head[:, None] * query_head_stride
    q = tl.load(query + query_at + feature[None, :], mask=is_value, other=0.0)
    if widened:
        q = q.to(tl.float32)

    # What any line of the tile looks at, and the share of this program.
    end = context - row_end + tl.minimum(first + tile_tokens, row_end)
    begin = 0
    if has_window:
        begin = tl.maximum(context - row_end + first - window + 1, 0)
    share = tl.cdiv(tl.cdiv(end - begin, num_splits), step_tokens) * step_tokens
    begin = begin + split * share
    end = tl.minimum(begin + share, end)
    acc, total, best = _over_context(
        q, position, begin, end, keys + kv_head * kv_head_stride, values + kv_head * kv_head_stride,
        page_table + row.to(tl.int64) * table_stride, scale, softcap, window, page_stride,
        slot_stride, head_dim, padded_dim, page_size, tile_lines, step_tokens, has_softcap,
        has_window, precision, widened,
    )
    place = token.to(tl.int64) * (tl.num_programs(1) * group) + head
    if has_sinks and num_splits == 1:
        sink = tl.load(sinks + head, mask=is_line, other=0.0)
        top = tl.maximum(best, sink)
        total = total * tl.exp(best - top) + tl.exp(sink - top)
        acc = acc * tl.exp(best - top)[:, None]
    divisor = tl.where(total == 0.0, 1.0, total)
    acc = acc / divisor[:, None]
    if num_splits == 1:
        target = out + place[:, None] * head_dim + feature[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=is_value)
    else:
        place = place * num_splits + split
        tl.store(parts + place[:, None] * head_dim + feature[None, :], acc, mask=is_value)
        log = tl.where(total == 0.0, _NEVER, best + tl.log(divisor))
        tl.store(part_logs + place, log, mask=is_line)


@triton.jit
def _over_context(
    q, position, begin, end, keys, values, table, scale, softcap, window, page_stride, slot_stride,
    head_dim: tl.constexpr, padded_dim: tl.constexpr, page_size: tl.constexpr,
    tile_lines: tl.constexpr, step_tokens: tl.constexpr, has_softcap: tl.constexpr,
    has_window: tl.constexpr, precision: tl.constexpr, widened: tl.constexpr,
):
    """Weighted values, sum of weights and largest score of each line over a part of its row."""
    feature = tl.arange(0, padded_dim)
    is_feature = feature < head_dim
    best = tl.full([tile_lines], _NEVER, tl.float32)
    total = tl.zeros([tile_lines], tl.float32)
    acc = tl.zeros([tile_lines, padded_dim], tl.float32)
    for start in range(begin, end, step_tokens):
        other = start + tl.arange(0, step_tokens)
        is_there = other < end
        page = tl.load(table + other // page_size, mask=is_there, other=0)
        slot = page.to(tl.int64) * page_stride + (other % page_size) * slot_stride
        k_mask = is_there[None, :] & is_feature[:, None]
        k = tl.load(keys + slot[None, :] + feature[:, None], mask=k_mask, other=0.0)
        if widened:
            k = k.to(tl.float32)
        score = tl.dot(q, k, input_precision=precision) * scale
        if has_softcap:
            # tanh through the sigmoid, which every version of Triton has.
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
        is_visible = is_there[None, :] & (other[None, :] <= position[:, None])
        if has_window:
            is_visible &= position[:, None] - other[None, :] < window
        score = tl.where(is_visible, score, _NEVER)
        new_best = tl.maximum(best, tl.max(score, 1))
        # A line that has seen nothing yet: the difference of two infinities is not a number.
        origin = tl.where(new_best == _NEVER, 0.0, new_best)
        weight = tl.exp(score - origin[:, None])
        fade = tl.exp(best - origin)
        v_mask = is_there[:, None] & is_feature[None, :]
        v = tl.load(values + slot[:, None] + feature[None, :], mask=v_mask, other=0.0)
        if widened:
            v = v.to(tl.float32)
        acc = acc * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=precision)
        total = total * fade + tl.sum(weight, 1)
        best = new_best
    return acc, total, best


@triton.jit
def join_splits(
    out, parts, part_logs, sinks, num_heads,
    head_dim: tl.constexpr, padded_dim: tl.constexpr, num_splits: tl.constexpr,
    has_sinks: tl.constexpr,
):
    """One token and head: its parts, weighted by what each has seen."""
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, num_splits)
    feature = tl.arange(0, padded_dim)
    is_feature = feature < head_dim
    log = tl.load(part_logs + place * num_splits + split)
    top = tl.max(log, 0)
    if has_sinks:
        sink = tl.load(sinks + place % num_heads)
        top = tl.maximum(top, sink)
    weight = tl.exp(log - top)
    total = tl.sum(weight, 0)
    if has_sinks:
        total += tl.exp(sink - top)
    part_at = (place * num_splits + split[:, None]) * head_dim + feature[None, :]
    part = tl.load(parts + part_at, mask=is_feature[None, :], other=0.0)
    joined = tl.sum(part * weight[:, None], 0) / total
    tl.store(out + place * head_dim + feature, joined.to(out.dtype.element_ty), mask=is_feature)
