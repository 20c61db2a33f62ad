"""Attention over pages. K is read where it lies; K and V are never repeated for grouped queries.

A decode item is one row and one KV head: its group of queries fills the lanes, and keys stream by
in blocks with a running softmax. A prompt item is 16 queries of one row and one KV head: queries
fill the lanes, one head of the group after the other.
"""

from __future__ import annotations

import numpy as np

from daskserve.workers.kernels.jit import kernel
from daskserve.workers.kernels.layers import pack, packed_bytes
from daskserve.workers.kernels.matmul import ROWS, STEP_BYTES, product
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
from daskserve.workers.kernels.vector import (
    LANES,
    broadcast,
    exp,
    fma,
    keep_between,
    load,
    load_bfloat16,
    load_half,
    load_int,
    load_scalar,
    load_word,
    maximum,
    pack_scalars,
    prefetch,
    splat,
    store,
    store_half,
    store_scalar,
    store_word,
)

KEYS_BLOCK = 64
"""Keys that a decode item takes at a time."""
_EVER = 1 << 62


@kernel
def row_field(step, row, field):
    """One field of a row."""
    return load_int(step.rows + (row * ROW_FIELDS + field) * 8)


@kernel
def _tile_address(decoder, step, table, layer, head, key):
    """Address of the K of ``key``, a multiple of 16: 16 keys lie one after the other there."""
    page = np.int64(load_word(table + key // step.block_size * 4))
    token_bytes = decoder.head_dim * decoder.element
    head_bytes = step.block_size * token_bytes
    within = key % step.block_size * token_bytes
    slot = layer * 2 * decoder.num_kv_heads + head
    return step.pages + page * step.page_bytes + slot * head_bytes + within


@kernel
def _values_offset(decoder, step):
    """Bytes from a token's K to its V."""
    return decoder.num_kv_heads * step.block_size * decoder.head_dim * decoder.element


@kernel
def _scores(decoder, step, table, layer, head, start, end, query, target):
    """Products of 16 lanes of queries with the keys start..end-1, ``start`` a multiple of 16."""
    token_bytes = decoder.head_dim * decoder.element
    for key in range(start, end, ROWS):
        first = _tile_address(decoder, step, table, layer, head, key)
        second = first
        if key + LANES < end:
            second = _tile_address(decoder, step, table, layer, head, key + LANES)
        steps = token_bytes // STEP_BYTES
        at = target + (key - start) * 64
        product(decoder.kind, first, second, token_bytes, query, 0, 1, steps, at, 0)


@kernel
def attend(thread, decoder, work, step, layer, scratch):
    """Attention items of one layer; a thread takes the next one when it is done with one.

    The shared counter must be 0 before; the caller resets it after the next barrier.
    """
    window = load_int(decoder.windows + layer * 8)
    while True:
        item = atomic_add(work.sync + 8 * COUNTER, 1)
        if item >= step.num_items:
            return
        at = step.items + item * ITEM_FIELDS * 8
        if load_int(at + ITEM_QUERIES * 8) == 0:
            _attend_decode(decoder, work, step, layer, at, window, scratch)
        else:
            _attend_prompt(decoder, work, step, layer, at, window, scratch)


@kernel
def _first_key(position, window, multiple):
    """The first key that ``position`` sees, rounded down to a multiple."""
    if window == 0:
        return 0
    return max(0, position - window + 1) // multiple * multiple


@kernel
def _attend_decode(decoder, work, step, layer, item, window, scratch):
    row, head = load_int(item + ITEM_ROW * 8), load_int(item + ITEM_HEAD * 8)
    lane, position = load_int(item + ITEM_LANE * 8), load_int(item + ITEM_POSITION * 8)
    table = row_field(step, row, ROW_TABLE)
    words = decoder.head_dim * decoder.element // 4
    group = decoder.num_heads // decoder.num_kv_heads
    scores = scratch
    sums = scores + KEYS_BLOCK * 64
    factors = sums + (group + 3) // 4 * 4 * decoder.head_dim * 4
    query = factors + 64
    for member in range(group):
        slot = (lane // LANES * decoder.num_heads + head * group + member) * words
        for word in range(words):
            value = load_word(work.query + (slot + word) * 64 + lane % LANES * 4)
            store_word(query + word * 64 + member * 4, value)
    for at in range(sums, factors, 64):
        store(at, splat(np.float32(0.0)))
    highest, total = splat(np.float32(-np.inf)), splat(np.float32(0.0))
    scale = splat(np.float32(decoder.attention_scale))
    start = _first_key(position, window, LANES)
    hidden = max(0, position - window + 1) - start if window != 0 else 0
    while start <= position:
        end = min(start + KEYS_BLOCK, position + 1)
        _fetch_tiles(decoder, step, table, layer, head, end, min(end + KEYS_BLOCK, position + 1))
        _scores(decoder, step, table, layer, head, start, end, query, scores)
        block_highest = highest
        for key in range(hidden, end - start):
            block_highest = maximum(block_highest, load(scores + key * 64) * scale)
        factor = exp(highest - block_highest)
        total, highest = total * factor, block_highest
        for key in range(hidden, end - start):
            weight = exp(load(scores + key * 64) * scale - highest)
            store(scores + key * 64, weight)
            total = total + weight
        store(factors, factor)
        for member in range(group):
            _rescale(sums + member * decoder.head_dim * 4, factors + member * 4, decoder.head_dim)
        for key in range(start, end, LANES):
            place = _tile_address(decoder, step, table, layer, head, key)
            place += _values_offset(decoder, step)
            skip = max(0, hidden - (key - start))
            num_keys = min(LANES, end - key)
            at = scores + (key - start) * 64
            _add_values(decoder, place, at, skip, num_keys, sums, group)
        start, hidden = end, 0
    store(factors, splat(np.float32(1.0)) / total)
    _store_attended(decoder, work, lane, head, group, sums, factors)


@kernel
def _fetch_tiles(decoder, step, table, layer, head, start, end):
    """Fetch the K and V that the next block of keys needs."""
    lines = LANES * decoder.head_dim * decoder.element // 64
    for key in range(start, end, LANES):
        place = _tile_address(decoder, step, table, layer, head, key)
        prefetch(place, lines)
        prefetch(place + _values_offset(decoder, step), lines)


@kernel
def _rescale(sums, factor, num_features):
    by = broadcast(factor)
    for at in range(sums, sums + num_features * 4, 64):
        store(at, load(at) * by)


@kernel
def _add_values(decoder, values, weights, start, end, sums, group):
    """Add the weighted values of some keys, four heads of the group at a time.

    Lanes past the group hold finite weights and their sums are never read.
    """
    token_bytes = decoder.head_dim * decoder.element
    row = decoder.head_dim * 4
    for member in range(0, group, 4):
        for feature in range(0, decoder.head_dim, 32):
            at = sums + member * row + feature * 4
            a0, a1 = load(at), load(at + 64)
            b0, b1 = load(at + row), load(at + row + 64)
            c0, c1 = load(at + 2 * row), load(at + 2 * row + 64)
            d0, d1 = load(at + 3 * row), load(at + 3 * row + 64)
            for key in range(start, end):
                place = values + key * token_bytes + feature * decoder.element
                if decoder.element == 2:
                    first, second = load_bfloat16(place), load_bfloat16(place + 32)
                else:
                    first, second = load(place), load(place + 64)
                weight = weights + key * 64 + member * 4
                w = broadcast(weight)
                a0, a1 = fma(w, first, a0), fma(w, second, a1)
                w = broadcast(weight + 4)
                b0, b1 = fma(w, first, b0), fma(w, second, b1)
                w = broadcast(weight + 8)
                c0, c1 = fma(w, first, c0), fma(w, second, c1)
                w = broadcast(weight + 12)
                d0, d1 = fma(w, first, d0), fma(w, second, d1)
            store(at, a0)
            store(at + 64, a1)
            store(at + row, b0)
            store(at + row + 64, b1)
            store(at + 2 * row, c0)
            store(at + 2 * row + 64, c1)
            store(at + 3 * row, d0)
            store(at + 3 * row + 64, d1)


@kernel
def _store_attended(decoder, work, lane, head, group, sums, factors):
    """One decode row's heads of a group into its lane of the packed attention output."""
    features = decoder.num_heads * decoder.head_dim
    block = work.attended + lane // LANES * packed_bytes(decoder, features) + lane % LANES * 4
    per_word = 4 // decoder.element
    for member in range(group):
        source = sums + member * decoder.head_dim * 4
        factor = load_scalar(factors + member * 4)
        start = (head * group + member) * decoder.head_dim
        for feature in range(0, decoder.head_dim, per_word):
            at = block + (start + feature) // per_word * 64
            value = load_scalar(source + feature * 4) * factor
            if decoder.element == 4:
                store_scalar(at, value)
            else:
                store_word(at, pack_scalars(value, load_scalar(source + feature * 4 + 4) * factor))


@kernel
def _attend_prompt(decoder, work, step, layer, item, window, scratch):
    row, head = load_int(item + ITEM_ROW * 8), load_int(item + ITEM_HEAD * 8)
    lane, position = load_int(item + ITEM_LANE * 8), load_int(item + ITEM_POSITION * 8)
    end = position + load_int(item + ITEM_QUERIES * 8)
    start = _first_key(position, window, KEYS_STEP)
    padded = (end - start + KEYS_STEP - 1) // KEYS_STEP * KEYS_STEP
    table = row_field(step, row, ROW_TABLE)
    group = decoder.num_heads // decoder.num_kv_heads
    block = lane // LANES
    words = decoder.head_dim * decoder.element // 4
    features = decoder.num_heads * decoder.head_dim
    attended = work.attended + block * packed_bytes(decoder, features)
    tile, scores = scratch, scratch + ROWS * 64
    for member in range(head * group, (head + 1) * group):
        query = work.query + (block * decoder.num_heads + member) * words * 64
        _scores(decoder, step, table, layer, head, start, end, query, scores)
        inverse = _prompt_weights(decoder, scores, start, end, padded, position, window)
        columns, row_bytes = _values_of(decoder, work, step, row, head)
        columns += start * decoder.element
        for feature in range(0, decoder.head_dim, ROWS):
            first = columns + feature * row_bytes
            second = first + LANES * row_bytes
            steps = padded * decoder.element // STEP_BYTES
            product(decoder.kind, first, second, row_bytes, scores, 0, 1, steps, tile, 0)
            for at in range(0, ROWS, 2):
                a, b = load(tile + at * 64) * inverse, load(tile + at * 64 + 64) * inverse
                pack(decoder, attended, member * decoder.head_dim + feature + at, a, b)


@kernel
def _prompt_weights(decoder, scores, start, end, padded, position, window):
    """Scores to packed softmax weights in place, not yet divided by the sum: its inverse."""
    scale = splat(np.float32(decoder.attention_scale))
    span = window if window != 0 else _EVER
    highest = splat(np.float32(-np.inf))
    for key in range(start, end):
        at = scores + (key - start) * 64
        score = load(at) * scale
        if key > position or window != 0:
            score = keep_between(position, key, key + span, score)
        store(at, score)
        highest = maximum(highest, score)
    zero = splat(np.float32(0.0))
    total = zero
    for key in range(0, padded, 2):
        first = exp(load(scores + key * 64) - highest) if start + key < end else zero
        second = exp(load(scores + key * 64 + 64) - highest) if start + key + 1 < end else zero
        total = total + first + second
        pack(decoder, scores, key, first, second)
    return splat(np.float32(1.0)) / total


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
    context = row_field(step, row, ROW_CONTEXT)
    table = row_field(step, row, ROW_TABLE)
    num_keys = min(LANES, max(0, context - key))
    source = np.int64(0)
    if num_keys > 0:
        source = _tile_address(decoder, step, table, layer, head, key)
        source += _values_offset(decoder, step)
    for feature in range(decoder.head_dim):
        at = target + feature * row_bytes + key * decoder.element
        for number in range(LANES):
            inside = number < num_keys
            place = source + (number * decoder.head_dim + feature) * decoder.element
            if decoder.element == 2:
                store_half(at + number * 2, load_half(place) if inside else np.int16(0))
            else:
                store_word(at + number * 4, load_word(place) if inside else np.int32(0))
