"""Attention over pages. K is read where it lies; K and V are never repeated for grouped queries.

A decode item is one row and one KV head: its group of queries fills the lanes, and keys stream by
in blocks with a running softmax. A prompt item is 16 queries of one row and one KV head: queries
fill the lanes, one head of the group after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from daskserve.workers.kernels.jit import kernel
from daskserve.workers.kernels.layers import pack, packed_bytes
from daskserve.workers.kernels.matmul import ROWS, STEP_BYTES, multiply
from daskserve.workers.kernels.packing import pack_scalars, transpose_four
from daskserve.workers.kernels.tables import (
    ITEM_FIELDS,
    ITEM_HEAD,
    ITEM_LANE,
    ITEM_POSITION,
    ITEM_QUERIES,
    ITEM_ROW,
    KEYS_STEP,
    ROW_CONTEXT,
    ROW_FIELDS,
    ROW_TABLE,
    ROW_VALUES,
)
from daskserve.workers.kernels.team import COUNTER, atomic_add, share
from daskserve.workers.kernels.values import CHUNK, add_values
from daskserve.workers.kernels.vector import (
    LANES,
    LOG2_E,
    exp2,
    highest_lane,
    keep_between,
    load,
    load_half,
    load_int,
    load_scalar,
    load_word,
    maximum,
    reciprocal,
    splat,
    store,
    store_half,
    store_scalar,
    store_word,
    sum_lanes,
)

KEYS_BLOCK = 128
"""Keys that a decode item takes at a time."""
_EVER = 1 << 62


class Pages(NamedTuple):
    """Where one row's keys of one layer and KV head lie."""

    base: int
    """Address that they would have in page 0."""
    table: int
    page_bytes: int
    block_size: int
    token_bytes: int
    values_offset: int
    """Bytes from a token's K to its V."""


@kernel
def row_field(step, row, field):
    """One field of a row."""
    return load_int(step.rows + (row * ROW_FIELDS + field) * 8)


@kernel
def _pages_of(decoder, step, row, layer, head):
    token_bytes = decoder.head_dim * decoder.element
    head_bytes = step.block_size * token_bytes
    slot = layer * 2 * decoder.num_kv_heads + head
    return Pages(
        step.pages + slot * head_bytes,
        row_field(step, row, ROW_TABLE),
        step.page_bytes,
        step.block_size,
        token_bytes,
        decoder.num_kv_heads * head_bytes,
    )


@kernel
def _tile_address(pages, key):
    """Address of the K of ``key``, a multiple of 16: 16 keys lie one after the other there."""
    page = np.int64(load_word(pages.table + key // pages.block_size * 4))
    within = key % pages.block_size * pages.token_bytes
    return pages.base + page * pages.page_bytes + within


@kernel
def _scores(product, pages, start, end, query, target, context):
    """Products of 16 lanes of queries with the keys start..end-1, ``start`` a multiple of 16.

    Keys one block later are fetched meanwhile, up to ``context``.
    """
    steps = pages.token_bytes // STEP_BYTES
    for key in range(start, end, ROWS):
        first = _tile_address(pages, key)
        second = _tile_address(pages, key + LANES) if key + LANES < end else first
        ahead = 0
        if key + KEYS_BLOCK < context:
            ahead = _tile_address(pages, key + KEYS_BLOCK) - first
        at = target + (key - start) * 64
        multiply(product, 1, first, second, pages.token_bytes, query, 0, steps, at, ahead)


@kernel
def attend(thread, decoder, work, step, layer, scratch):
    """Attention items of one layer; a thread takes the next one when it is done with one.

    The shared counter must be 0 before; the caller resets it after the next barrier.
    """
    window = load_int(decoder.windows + layer * 8)
    counter = work.sync + 8 * COUNTER
    item = atomic_add(counter, 1)
    while item < step.num_items:
        at = step.items + item * ITEM_FIELDS * 8
        if load_int(at + ITEM_QUERIES * 8) == 0:
            _attend_decode(decoder, work, step, layer, at, window, scratch)
        else:
            _attend_prompt(decoder, work, step, layer, at, window, scratch)
        item = atomic_add(counter, 1)


@kernel
def _first_key(position, window, multiple):
    """The first key that ``position`` sees, rounded down to a multiple."""
    if window == 0:
        return 0
    return max(0, position - window + 1) // multiple * multiple


@kernel
def _item_pages(decoder, step, layer, item):
    row, head = load_int(item + ITEM_ROW * 8), load_int(item + ITEM_HEAD * 8)
    return _pages_of(decoder, step, row, layer, head)


@kernel
def _attend_decode(decoder, work, step, layer, item, window, scratch):
    head, lane = load_int(item + ITEM_HEAD * 8), load_int(item + ITEM_LANE * 8)
    position = load_int(item + ITEM_POSITION * 8)
    pages = _item_pages(decoder, step, layer, item)
    group = decoder.num_heads // decoder.num_kv_heads
    padded_group = (group + 3) // 4 * 4
    head_bytes = decoder.head_dim * 4
    scores = scratch
    weights = scores + KEYS_BLOCK * 64
    sums = weights + padded_group * KEYS_BLOCK * 4
    highest = sums + padded_group * head_bytes
    totals = highest + 64
    query = totals + 64
    _gather_query(decoder, work, head, lane, query)
    for at in range(sums, highest, 64):
        store(at, splat(np.float32(0.0)))
    store(highest, splat(np.float32(-np.inf)))
    store(totals, splat(np.float32(0.0)))
    scale = np.float32(decoder.attention_scale * LOG2_E)
    start = _first_key(position, window, LANES)
    hidden = max(0, position - window + 1) - start if window != 0 else 0
    while start <= position:
        end = min(start + KEYS_BLOCK, position + 1)
        _scores(decoder.attention, pages, start, end, query, scores, position + 1)
        for member in range(0, group, 4):
            for key in range(0, end - start, LANES):
                row = weights + member * KEYS_BLOCK * 4 + key * 4
                transpose_four(scores + key * 64 + member * 4, row, KEYS_BLOCK * 4)
        for member in range(group):
            at, sums_at = weights + member * KEYS_BLOCK * 4, sums + member * head_bytes
            state = (highest + member * 4, totals + member * 4)
            _soften(at, hidden, end - start, scale, state, sums_at, sums_at + head_bytes)
        for key in range(start, end, LANES):
            place = _tile_address(pages, key)
            ahead = place
            if key + KEYS_BLOCK <= position:
                ahead = _tile_address(pages, key + KEYS_BLOCK)
            for member in range(0, group, 4):
                for feature in range(0, decoder.head_dim, CHUNK):
                    offset = feature * decoder.element
                    add_values(
                        decoder.element,
                        min(4, group - member),
                        place + pages.values_offset + offset,
                        pages.token_bytes,
                        weights + member * KEYS_BLOCK * 4 + (key - start) * 4,
                        KEYS_BLOCK * 4,
                        min(LANES, end - key),
                        sums + member * head_bytes + feature * 4,
                        head_bytes,
                        ahead + pages.values_offset + offset,
                    )
        start, hidden = end, 0
    _store_attended(decoder, work, lane, head, group, sums, totals)


@kernel
def _gather_query(decoder, work, head, lane, target):
    """One row's queries of a group, side by side in the lanes of a packed input."""
    words = decoder.head_dim * decoder.element // 4
    group = decoder.num_heads // decoder.num_kv_heads
    for member in range(group):
        slot = (lane // LANES * decoder.num_heads + head * group + member) * words
        source = work.query + slot * 64 + lane % LANES * 4
        for word in range(words):
            store_word(target + word * 64 + member * 4, load_word(source + word * 64))


@kernel
def _soften(weights, hidden, num_keys, scale, state, sums, sums_end):
    """Scores of one head to softmax weights, in place; its sums and total are rescaled to them.

    ``scale`` holds the logarithm's base; ``state`` addresses of the running maximum and total.
    """
    highest_at, total_at = state
    end = weights + (num_keys + LANES - 1) // LANES * 64
    if hidden != 0 or num_keys % LANES != 0:
        for at in range(weights, end, 64):
            store(at, keep_between((at - weights) // 4, hidden, num_keys, load(at)))
    top = splat(np.float32(-np.inf))
    for at in range(weights, end, 64):
        top = maximum(top, load(at))
    before = load_scalar(highest_at)
    highest = max(before, highest_lane(top))
    by, shift = splat(scale), splat(-highest * scale)
    total = splat(np.float32(0.0))
    for at in range(weights, end, 64):
        weight = exp2(load(at) * by + shift)
        store(at, weight)
        total = total + weight
    factor = exp2(splat((before - highest) * scale))
    store_scalar(highest_at, highest)
    store_scalar(
        total_at, load_scalar(total_at) * sum_lanes(factor) / np.float32(LANES) + sum_lanes(total)
    )
    if highest > before:
        for at in range(sums, sums_end, 64):
            store(at, load(at) * factor)


@kernel
def _store_attended(decoder, work, lane, head, group, sums, totals):
    """One decode row's heads of a group into its lane of the packed attention output."""
    features = decoder.num_heads * decoder.head_dim
    block = work.attended + lane // LANES * packed_bytes(decoder, features) + lane % LANES * 4
    for member in range(group):
        source = sums + member * decoder.head_dim * 4
        factor = np.float32(1.0) / load_scalar(totals + member * 4)
        words = decoder.head_dim * decoder.element // 4
        target = block + (head * group + member) * words * 64
        for word in range(words):
            if decoder.element == 4:
                store_scalar(target + word * 64, load_scalar(source + word * 4) * factor)
            else:
                even = source + (word // LANES * CHUNK + word % LANES) * 4
                low, high = load_scalar(even) * factor, load_scalar(even + LANES * 4) * factor
                store_word(target + word * 64, pack_scalars(low, high))


@kernel
def _attend_prompt(decoder, work, step, layer, item, window, scratch):
    row, head = load_int(item + ITEM_ROW * 8), load_int(item + ITEM_HEAD * 8)
    lane, position = load_int(item + ITEM_LANE * 8), load_int(item + ITEM_POSITION * 8)
    end = position + load_int(item + ITEM_QUERIES * 8)
    start = _first_key(position, window, KEYS_STEP)
    padded = (end - start + KEYS_STEP - 1) // KEYS_STEP * KEYS_STEP
    pages = _item_pages(decoder, step, layer, item)
    group = decoder.num_heads // decoder.num_kv_heads
    block = lane // LANES
    words = decoder.head_dim * decoder.element // 4
    features = decoder.num_heads * decoder.head_dim
    attended = work.attended + block * packed_bytes(decoder, features)
    tile, scores = scratch, scratch + ROWS * 64
    for member in range(head * group, (head + 1) * group):
        query = work.query + (block * decoder.num_heads + member) * words * 64
        _scores(decoder.attention, pages, start, end, query, scores, 0)
        inverse = _prompt_weights(decoder, scores, start, end, padded, position, window)
        columns, row_bytes = _values_of(decoder, work, step, row, head)
        columns += start * decoder.element
        for feature in range(0, decoder.head_dim, ROWS):
            first = columns + feature * row_bytes
            second = first + LANES * row_bytes
            steps = padded * decoder.element // STEP_BYTES
            multiply(decoder.attention, 1, first, second, row_bytes, scores, 0, steps, tile, 0)
            for at in range(0, ROWS, 2):
                a, b = load(tile + at * 64) * inverse, load(tile + at * 64 + 64) * inverse
                pack(decoder.element, attended, member * decoder.head_dim + feature + at, a, b)


@kernel
def _prompt_weights(decoder, scores, start, end, padded, position, window):
    """Scores to packed softmax weights in place, not yet divided by the sum: its inverse."""
    scale = np.float32(decoder.attention_scale * LOG2_E)
    span = window if window != 0 else _EVER
    for key in range(start if window != 0 else max(start, position), end):
        at = scores + (key - start) * 64
        store(at, keep_between(position, key, key + span, load(at)))
    highest = splat(np.float32(-np.inf))
    for at in range(scores, scores + (end - start) * 64, 64):
        highest = maximum(highest, load(at))
    for at in range(scores + (end - start) * 64, scores + padded * 64, 64):
        store(at, splat(np.float32(-np.inf)))
    by = splat(scale)
    shift = splat(np.float32(0.0)) - highest * by
    total = splat(np.float32(0.0))
    for key in range(0, padded, 2):
        first = exp2(load(scores + key * 64) * by + shift)
        second = exp2(load(scores + key * 64 + 64) * by + shift)
        total = total + first + second
        pack(decoder.element, scores, key, first, second)
    return reciprocal(total)


@kernel
def _values_of(decoder, work, step, row, head):
    """Address of a prompt row's values of one head, features as rows; bytes of one such row."""
    context = row_field(step, row, ROW_CONTEXT)
    row_bytes = (context + KEYS_STEP - 1) // KEYS_STEP * KEYS_STEP * decoder.element
    start = work.values + row_field(step, row, ROW_VALUES)
    return start + head * decoder.head_dim * row_bytes, row_bytes


@kernel
def spread_values(thread, num_threads, decoder, work, step, layer):
    """Turn the values of every prompt row from pages of tokens into rows of features."""
    for row in range(step.num_rows):
        if row_field(step, row, ROW_VALUES) < 0:
            continue
        context = row_field(step, row, ROW_CONTEXT)
        low, high = share((context + KEYS_STEP - 1) // KEYS_STEP, thread, num_threads)
        for head in range(decoder.num_kv_heads):
            target, row_bytes = _values_of(decoder, work, step, row, head)
            for key in range(low * KEYS_STEP, high * KEYS_STEP, LANES):
                _turn_tile(decoder, step, layer, row, head, key, target, row_bytes)


@kernel
def _turn_tile(decoder, step, layer, row, head, key, target, row_bytes):
    """Values of 16 keys; those past the context become 0."""
    pages = _pages_of(decoder, step, row, layer, head)
    num_keys = min(LANES, max(0, row_field(step, row, ROW_CONTEXT) - key))
    source = np.int64(0)
    if num_keys > 0:
        source = _tile_address(pages, key) + pages.values_offset
    for feature in range(decoder.head_dim):
        at = target + feature * row_bytes + key * decoder.element
        for number in range(LANES):
            inside = number < num_keys
            place = source + (number * decoder.head_dim + feature) * decoder.element
            if decoder.element == 2:
                store_half(at + number * 2, load_half(place) if inside else np.int16(0))
            else:
                store_word(at + number * 4, load_word(place) if inside else np.int32(0))
