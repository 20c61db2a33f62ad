"""What the decoder kernels are told: sizes, addresses and the lanes of one step.

Everything is a plain number, since numba passes tuples of numbers at almost no cost; whoever
builds these tuples keeps the arrays behind the addresses alive.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from daskserve.workers.kernels.jit import kernel
from daskserve.workers.kernels.matmul import Product
from daskserve.workers.kernels.vector import LANES


class Decoder(NamedTuple):
    """A model of the Llama family. Addresses of absent parts are 0."""

    product: Product
    """Of the weights."""
    attention: Product
    """Of keys and values."""
    element: int
    """Bytes of one weight, input or KV value: 2 or 4."""
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    epsilon: float
    attention_scale: float
    rotary_scale: float
    embedding: int
    head: int
    qkv: int
    """[layers][heads + 2 kv_heads][head_dim][hidden]."""
    output: int
    gate_up: int
    """[layers][2 inner][hidden], the gate first."""
    down: int
    first_norm: int
    """float32 [layers][hidden], as are the other norms and biases."""
    second_norm: int
    final_norm: int
    qkv_bias: int
    query_norm: int
    key_norm: int
    frequencies: int
    """float32 [head_dim / 2]."""
    rotary: int
    """int64 [layers]: whether positions rotate queries and keys there."""
    windows: int
    """int64 [layers]: sliding window in tokens, 0 where all is seen."""


class Workspace(NamedTuple):
    """Addresses of buffers for up to some number of lanes."""

    residual: int
    """float32 [blocks][hidden][16]."""
    packed: int
    """Normed input of the projections, packed."""
    query: int
    """[blocks][heads][head_dim words][16]."""
    attended: int
    inner: int
    cosine: int
    """float32 [blocks][head_dim / 2][16]."""
    sine: int
    values: int
    """Values of prompt rows, feature by feature, for the product with the attention weights."""
    scratch: int
    scratch_bytes: int
    """Per thread."""
    tiles: int
    sync: int


class Step(NamedTuple):
    """The lanes, rows and attention items of one step, laid out by ``lay_out``."""

    num_blocks: int
    num_rows: int
    num_items: int
    has_prompts: bool
    lanes: int
    """int64 [blocks * 16][LANE_FIELDS]."""
    rows: int
    """int64 [rows][ROW_FIELDS]."""
    items: int
    """int64 [items][ITEM_FIELDS]."""
    pages: int
    page_bytes: int
    block_size: int
    logits: int
    """float32 [rows][vocab]."""


LANE_INDEX, LANE_TOKEN, LANE_POSITION, LANE_KV, LANE_FIELDS = 0, 1, 2, 3, 4
"""Place in the batch or -1 for an empty lane; token id; position; address of its K in layer 0 and
head 0, or 0."""

ROW_CONTEXT, ROW_TABLE, ROW_VALUES, ROW_LANE, ROW_FIELDS = 0, 1, 2, 3, 4
"""Tokens seen; address of its int32 page ids; offset of its values or -1; its last token's lane."""

ITEM_ROW, ITEM_HEAD, ITEM_LANE, ITEM_POSITION, ITEM_QUERIES, ITEM_FIELDS = 0, 1, 2, 3, 4, 5
"""Row; KV head; first lane; its position; queries from there, 0 for a row that decodes."""

KEYS_STEP = 32
"""Keys of prompt attention are padded to a multiple of this."""


@kernel
def blocks_of(num_tokens):
    """Blocks of 16 lanes that hold ``num_tokens``."""
    return (num_tokens + LANES - 1) // LANES


@kernel
def count_lanes(query_start):
    """Blocks of lanes that ``lay_out`` will use."""
    num_decode, num_blocks = 0, 0
    for row in range(len(query_start) - 1):
        num_new = query_start[row + 1] - query_start[row]
        if num_new == 1:
            num_decode += 1
        else:
            num_blocks += blocks_of(num_new)
    return num_blocks + blocks_of(num_decode)


@kernel
def lay_out(batch, table_address, pool, sizes, lanes, rows, items):
    """Give every token a lane: prompt rows from a fresh block each, then decode rows side by side.

    Parameters
    ----------
    batch
        Arrays (token_ids, positions, query_start, context_tokens, page_table) of a ForwardBatch.
    table_address
        Address of the page table.
    pool
        (address of the pages, bytes per page, tokens per page).
    sizes
        (KV heads, bytes of one token of one head).
    lanes, rows, items
        Arrays to fill, described in ``Step``; large enough.

    Returns
    -------
    tuple
        Number of items, and bytes of values that prompt rows need (0: there are none).
    """
    _, _, query_start, context_tokens, page_table = batch
    num_kv_heads, token_bytes = sizes
    lanes[:, LANE_INDEX] = -1
    lanes[:, LANE_KV] = 0
    lane, num_items, values_bytes = 0, 0, 0
    for prompts in (True, False):
        for row in range(len(context_tokens)):
            num_new = query_start[row + 1] - query_start[row]
            if (num_new > 1) != prompts:
                continue
            context = context_tokens[row]
            rows[row, ROW_CONTEXT] = context
            rows[row, ROW_TABLE] = table_address + 4 * row * page_table.shape[1]
            rows[row, ROW_VALUES] = values_bytes if prompts else -1
            rows[row, ROW_LANE] = lane + num_new - 1
            _fill_lanes(batch, row, pool, token_bytes, lanes, lane)
            first = context - num_new
            if prompts:
                # The last queries see the most keys: started first, they leave no thread behind.
                for block in range(blocks_of(num_new) - 1, -1, -1):
                    start = block * LANES
                    queries = min(LANES, num_new - start)
                    place = (lane + start, first + start, queries)
                    num_items = _add_items(items, num_items, row, num_kv_heads, place)
                lane += blocks_of(num_new) * LANES
                padded = (context + KEYS_STEP - 1) // KEYS_STEP * KEYS_STEP
                values_bytes += padded * token_bytes * num_kv_heads
            else:
                num_items = _add_items(items, num_items, row, num_kv_heads, (lane, first, 0))
                lane += 1
    return num_items, values_bytes


@kernel
def _fill_lanes(batch, row, pool, token_bytes, lanes, lane):
    token_ids, positions, query_start, _, page_table = batch
    pages, page_bytes, block_size = pool
    for token in range(query_start[row], query_start[row + 1]):
        position = positions[token]
        page = np.int64(page_table[row, position // block_size])
        lanes[lane, LANE_INDEX] = token
        lanes[lane, LANE_TOKEN] = token_ids[token]
        lanes[lane, LANE_POSITION] = position
        lanes[lane, LANE_KV] = pages + page * page_bytes + position % block_size * token_bytes
        lane += 1


@kernel
def _add_items(items, num_items, row, num_kv_heads, place):
    for head in range(num_kv_heads):
        lane, position, queries = place
        items[num_items, ITEM_ROW] = row
        items[num_items, ITEM_HEAD] = head
        items[num_items, ITEM_LANE] = lane
        items[num_items, ITEM_POSITION] = position
        items[num_items, ITEM_QUERIES] = queries
        num_items += 1
    return num_items
