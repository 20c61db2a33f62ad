"""Attention of one layer for models whose other layers run in torch: tokens in, tokens out."""

from __future__ import annotations

from typing import NamedTuple

from daskserve.workers.kernels.jit import kernel
from daskserve.workers.kernels.layers import lane_field, packed_bytes
from daskserve.workers.kernels.matmul import close_tiles, open_tiles
from daskserve.workers.kernels.paged import attend, spread_values
from daskserve.workers.kernels.tables import LANE_INDEX, LANE_KV
from daskserve.workers.kernels.team import COUNTER, reset, share, wait_for_all
from daskserve.workers.kernels.vector import LANES, load_word, store_word


class Packed(NamedTuple):
    """Addresses of a layer's queries, keys, values and output, and bytes from token to token and
    from head to head. The features of a head lie side by side; the output is ``[T][heads][D]``."""

    query: int
    query_token: int
    query_head: int
    key: int
    key_token: int
    key_head: int
    value: int
    value_token: int
    value_head: int
    output: int


@kernel
def attend_layer(thread, num_threads, decoder, work, step, layer, packed):
    """Write K and V to their pages and let every row attend to its context.

    Of ``decoder`` only the fields that describe attention are read.
    """
    open_tiles(decoder.attention, work.tiles)
    _take_in(thread, num_threads, decoder, work, step, layer, packed)
    wait_for_all(work.sync, num_threads)
    if step.has_prompts:
        spread_values(thread, num_threads, decoder, work, step, layer)
        wait_for_all(work.sync, num_threads)
    attend(thread, decoder, work, step, layer, work.scratch + thread * work.scratch_bytes)
    close_tiles(decoder.attention)
    wait_for_all(work.sync, num_threads)
    if thread == 0:
        reset(work.sync + 8 * COUNTER)
    _give_out(thread, num_threads, decoder, work, step, packed.output)
    wait_for_all(work.sync, num_threads)


@kernel
def _take_in(thread, num_threads, decoder, work, step, layer, packed):
    words = decoder.head_dim * decoder.element // 4
    head_bytes = step.block_size * words * 4
    keys = layer * 2 * decoder.num_kv_heads * head_bytes
    values = keys + decoder.num_kv_heads * head_bytes
    low, high = share(step.num_blocks * LANES, thread, num_threads)
    for lane in range(low, high):
        token = lane_field(step, lane, LANE_INDEX)
        if token < 0:
            continue
        first = lane // LANES * decoder.num_heads * words
        for head in range(decoder.num_heads):
            source = packed.query + token * packed.query_token + head * packed.query_head
            target = work.query + (first + head * words) * 64 + lane % LANES * 4
            for word in range(words):
                store_word(target + word * 64, load_word(source + word * 4))
        place = lane_field(step, lane, LANE_KV)
        for head in range(decoder.num_kv_heads):
            source = packed.key + token * packed.key_token + head * packed.key_head
            _copy(source, place + keys + head * head_bytes, words)
            source = packed.value + token * packed.value_token + head * packed.value_head
            _copy(source, place + values + head * head_bytes, words)


@kernel
def _copy(source, target, words):
    for word in range(words):
        store_word(target + word * 4, load_word(source + word * 4))


@kernel
def _give_out(thread, num_threads, decoder, work, step, output):
    features = decoder.num_heads * decoder.head_dim
    words = features * decoder.element // 4
    low, high = share(step.num_blocks * LANES, thread, num_threads)
    for lane in range(low, high):
        token = lane_field(step, lane, LANE_INDEX)
        if token >= 0:
            source = work.attended + lane // LANES * packed_bytes(decoder, features)
            source += lane % LANES * 4
            for word in range(words):
                store_word(output + (token * words + word) * 4, load_word(source + word * 64))
