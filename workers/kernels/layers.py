"""The decoder's phases apart from attention: embedding, norms, projections, the output head.

Each phase runs on every thread of the team, which shares out blocks of lanes or weight rows; the
caller puts a barrier between phases. One block of one phase is 16 tokens wide.
"""

from __future__ import annotations

import numpy as np

from daskserve.workers.kernels.jit import kernel
from daskserve.workers.kernels.matmul import ROWS, STEP_BYTES, multiply
from daskserve.workers.kernels.packing import pack_pair, store_transposed
from daskserve.workers.kernels.tables import (
    LANE_FIELDS,
    LANE_INDEX,
    LANE_KV,
    LANE_POSITION,
    LANE_TOKEN,
    ROW_FIELDS,
    ROW_LANE,
    blocks_of,
)
from daskserve.workers.kernels.team import share
from daskserve.workers.kernels.vector import (
    LANES,
    LOG2_E,
    broadcast,
    exp2,
    fma,
    load,
    load_int,
    load_scalar,
    load_scalar_bfloat16,
    load_word,
    maximum,
    reciprocal,
    splat,
    square_root,
    store,
    store_scalar,
    store_word,
    store_words,
)

GATE_RUN = 2
"""Times 32 rows of gates before as many of ups: CPUs read ahead well only in runs of some length
(on one, 64 rows of 1152 bytes come twice as fast as 32)."""
_INPUT_CACHE_BYTES = 768 * 1024  # packed input that may stay in the second-level cache


@kernel
def packed_bytes(decoder, num_features):
    """Bytes of one block of a packed input."""
    return num_features * decoder.element * LANES


@kernel
def pack(element, target, feature, first, second):
    """Store features ``feature`` (even) and the one after it of one packed block."""
    if element == 2:
        store_words(target + feature * 32, pack_pair(first, second))
    else:
        store(target + feature * 64, first)
        store(target + feature * 64 + 64, second)


@kernel
def lane_field(step, lane, field):
    """One field of a lane."""
    return load_int(step.lanes + (lane * LANE_FIELDS + field) * 8)


@kernel
def load_weight(decoder, address):
    """One weight as float32."""
    if decoder.element == 4:
        return load_scalar(address)
    return load_scalar_bfloat16(address)


@kernel
def embed(thread, num_threads, decoder, work, step):
    """Token embeddings into the residual, and the rotation of each lane's position."""
    low, high = share(step.num_blocks, thread, num_threads)
    row_bytes = decoder.hidden * decoder.element
    half = decoder.head_dim // 2
    for block in range(low, high):
        residual = work.residual + block * decoder.hidden * 64
        for lane in range(LANES):
            if lane_field(step, block * LANES + lane, LANE_INDEX) < 0:
                for feature in range(decoder.hidden):
                    store_scalar(residual + feature * 64 + lane * 4, np.float32(0.0))
                continue
            token = lane_field(step, block * LANES + lane, LANE_TOKEN)
            source = decoder.embedding + token * row_bytes
            for feature in range(decoder.hidden):
                value = load_weight(decoder, source + feature * decoder.element)
                store_scalar(residual + feature * 64 + lane * 4, value)
            position = np.float32(lane_field(step, block * LANES + lane, LANE_POSITION))
            for pair in range(half):
                angle = position * load_scalar(decoder.frequencies + pair * 4)
                at = (block * half + pair) * 64 + lane * 4
                scale = np.float32(decoder.rotary_scale)
                store_scalar(work.cosine + at, np.cos(angle) * scale)
                store_scalar(work.sine + at, np.sin(angle) * scale)


@kernel
def _inverse_norm(source, num_features, epsilon):
    total = splat(np.float32(0.0))
    other = total
    for feature in range(0, num_features, 2):
        first, second = load(source + feature * 64), load(source + feature * 64 + 64)
        total, other = fma(first, first, total), fma(second, second, other)
    mean = (total + other) * splat(np.float32(1.0 / num_features))
    return splat(np.float32(1.0)) / square_root(mean + splat(np.float32(epsilon)))


@kernel
def normalize(thread, num_threads, decoder, work, step, weight):
    """RMSNorm of the residual into the packed input."""
    low, high = share(step.num_blocks, thread, num_threads)
    for block in range(low, high):
        source = work.residual + block * decoder.hidden * 64
        target = work.packed + block * packed_bytes(decoder, decoder.hidden)
        scale = _inverse_norm(source, decoder.hidden, decoder.epsilon)
        for feature in range(0, decoder.hidden, 2):
            first = load(source + feature * 64) * scale * broadcast(weight + feature * 4)
            second = load(source + feature * 64 + 64) * scale * broadcast(weight + feature * 4 + 4)
            pack(decoder.element, target, feature, first, second)


@kernel
def _chunk_of_blocks(row_bytes):
    """An even number of blocks whose packed input stays in the second-level cache."""
    return max(2, _INPUT_CACHE_BYTES // (row_bytes * LANES) // 2 * 2)


@kernel
def _multiply_pair(decoder, first, second, row_bytes, source, block, num_blocks, out, ahead):
    """32 weight rows times one or two blocks of a packed input, into ``[num_blocks][32][16]``."""
    stride = row_bytes * LANES
    steps = row_bytes // STEP_BYTES
    at = source + block * stride
    # Tiles take the rows faster than the CPU reads ahead by itself; other products do not.
    ahead = ahead if block == 0 and decoder.product.uses_tiles else 0
    multiply(decoder.product, num_blocks, first, second, row_bytes, at, stride, steps, out, ahead)


@kernel
def project_heads(thread, num_threads, decoder, work, step, layer, scratch):
    """Queries, keys and values: normed and rotated where the model does, K and V to their pages."""
    num_heads = decoder.num_heads + 2 * decoder.num_kv_heads
    low, high = share(num_heads, thread, num_threads)
    row_bytes = decoder.hidden * decoder.element
    head_bytes = decoder.head_dim * row_bytes
    features = scratch + decoder.head_dim * 2 * 64
    chunk = _chunk_of_blocks(row_bytes)
    for start in range(0, step.num_blocks, chunk):
        for head in range(low, high):
            weights = decoder.qkv + (layer * num_heads + head) * head_bytes
            ahead = head_bytes if head + 1 < high else 0
            for block in range(start, min(start + chunk, step.num_blocks), 2):
                num_blocks = min(2, step.num_blocks - block)
                for part in range(decoder.head_dim // ROWS):
                    first = weights + part * ROWS * row_bytes
                    second = first + LANES * row_bytes
                    out = scratch + part * num_blocks * ROWS * 64
                    _multiply_pair(
                        *(decoder, first, second, row_bytes),
                        *(work.packed, block, num_blocks, out, ahead),
                    )
                for b in range(num_blocks):
                    _gather_features(decoder.head_dim, scratch, b, num_blocks, features)
                    _finish_head(decoder, work, step, layer, head, block + b, features)


@kernel
def _gather_features(head_dim, tiles, block, num_blocks, target):
    """One head's features of one block, in order."""
    for feature in range(head_dim):
        tile = (feature // ROWS * num_blocks + block) * ROWS + feature % ROWS
        store(target + feature * 64, load(tiles + tile * 64))


@kernel
def _finish_head(decoder, work, step, layer, head, block, features):
    """Bias, norm and rotation of one head's features, and where they belong."""
    half = decoder.head_dim // 2
    num_heads = decoder.num_heads + 2 * decoder.num_kv_heads
    if decoder.qkv_bias != 0:
        bias = decoder.qkv_bias + (layer * num_heads + head) * decoder.head_dim * 4
        for feature in range(decoder.head_dim):
            at = features + feature * 64
            store(at, load(at) + broadcast(bias + feature * 4))
    is_query, is_value = head < decoder.num_heads, head >= decoder.num_heads + decoder.num_kv_heads
    if not is_value:
        weight = decoder.query_norm if is_query else decoder.key_norm
        if weight != 0:
            _normalize_head(decoder, features, weight + layer * decoder.head_dim * 4)
        if load_int(decoder.rotary + layer * 8) != 0:
            _rotate(work, block, half, features)
    words = decoder.head_dim * decoder.element // 4
    target = features
    if is_query:
        target = work.query + (block * decoder.num_heads + head) * words * 64
    for feature in range(0, decoder.head_dim, 2):
        first, second = load(features + feature * 64), load(features + feature * 64 + 64)
        pack(decoder.element, target, feature, first, second)
    if not is_query:
        kv_head = head - decoder.num_heads
        _write_kv(decoder, step, layer, kv_head, block, features, words)


@kernel
def _normalize_head(decoder, features, weight):
    scale = _inverse_norm(features, decoder.head_dim, decoder.epsilon)
    for feature in range(decoder.head_dim):
        at = features + feature * 64
        store(at, load(at) * scale * broadcast(weight + feature * 4))


@kernel
def _rotate(work, block, half, features):
    for pair in range(half):
        low, high = features + pair * 64, features + (pair + half) * 64
        cosine = load(work.cosine + (block * half + pair) * 64)
        sine = load(work.sine + (block * half + pair) * 64)
        first, second = load(low), load(high)
        store(low, first * cosine - second * sine)
        store(high, second * cosine + first * sine)


@kernel
def _write_kv(decoder, step, layer, kv_head, block, words_at, words):
    """Each lane's key or value to its page; heads of values follow those of keys there."""
    head_bytes = step.block_size * words * 4
    offset = (layer * 2 * decoder.num_kv_heads + kv_head) * head_bytes
    for lane in range(LANES):
        place = lane_field(step, block * LANES + lane, LANE_KV)
        if place != 0:
            for word in range(words):
                value = load_word(words_at + word * 64 + lane * 4)
                store_word(place + offset + word * 4, value)


@kernel
def project_residual(
    thread, num_threads, decoder, work, step, weights, num_features, source, scratch
):
    """Add a projection of a packed input to the residual."""
    low, high = share(decoder.hidden // ROWS, thread, num_threads)
    row_bytes = num_features * decoder.element
    chunk = _chunk_of_blocks(row_bytes)
    for start in range(0, step.num_blocks, chunk):
        for item in range(low, high):
            first = weights + item * ROWS * row_bytes
            second = first + LANES * row_bytes
            ahead = ROWS * row_bytes if item + 1 < high else 0
            for block in range(start, min(start + chunk, step.num_blocks), 2):
                num_blocks = min(2, step.num_blocks - block)
                _multiply_pair(
                    *(decoder, first, second, row_bytes),
                    *(source, block, num_blocks, scratch, ahead),
                )
                for b in range(num_blocks):
                    tile = scratch + b * ROWS * 64
                    target = work.residual + ((block + b) * decoder.hidden + item * ROWS) * 64
                    for at in range(0, ROWS * 64, 64):
                        store(target + at, load(target + at) + load(tile + at))


@kernel
def project_inner(thread, num_threads, decoder, work, step, layer, scratch):
    """The gated feed-forward's inner features: silu(gate) * up, packed."""
    # The last 32 rows start early enough to end with the others; what is done twice is equal.
    low, high = share((decoder.inner + ROWS - 1) // ROWS, thread, num_threads)
    row_bytes = decoder.hidden * decoder.element
    gates = decoder.gate_up + layer * 2 * decoder.inner * row_bytes
    ups = gates + decoder.inner * row_bytes
    chunk = _chunk_of_blocks(row_bytes)
    for start in range(0, step.num_blocks, chunk):
        for item in range(low, high, GATE_RUN):
            count = min(GATE_RUN, high - item)
            ahead = count * ROWS * row_bytes if item + 2 * count <= high else 0
            for block in range(start, min(start + chunk, step.num_blocks), 2):
                num_blocks = min(2, step.num_blocks - block)
                tiles_bytes = num_blocks * ROWS * 64
                for part, weights in enumerate((gates, ups)):
                    for number in range(count):
                        feature = min((item + number) * ROWS, decoder.inner - ROWS)
                        first = weights + feature * row_bytes
                        out = scratch + (part * GATE_RUN + number) * tiles_bytes
                        _multiply_pair(
                            *(decoder, first, first + LANES * row_bytes, row_bytes),
                            *(work.packed, block, num_blocks, out, ahead),
                        )
                for number in range(count):
                    for b in range(num_blocks):
                        gate = scratch + number * tiles_bytes + b * ROWS * 64
                        target = work.inner + (block + b) * packed_bytes(decoder, decoder.inner)
                        feature = min((item + number) * ROWS, decoder.inner - ROWS)
                        _gate(decoder, gate, gate + GATE_RUN * tiles_bytes, target, feature)


@kernel
def _gate(decoder, gates, ups, target, feature):
    """32 inner features of one block, from ``feature`` on."""
    for row in range(0, ROWS, 2):
        first = _gated(gates + row * 64, ups + row * 64)
        second = _gated(gates + row * 64 + 64, ups + row * 64 + 64)
        pack(decoder.element, target, feature + row, first, second)


@kernel
def _gated(gate_at, up_at):
    gate, up = load(gate_at), load(up_at)
    # Below -80 the gate is closed to the last bit; the bound keeps the power finite.
    power = exp2(maximum(gate, splat(np.float32(-80.0))) * splat(np.float32(-LOG2_E)))
    return gate * up * reciprocal(splat(np.float32(1.0)) + power)


@kernel
def gather_last(thread, num_threads, decoder, work, step, scratch):
    """Final norm of every row's last token into the packed input, rows in the batch's order."""
    low, high = share(blocks_of(step.num_rows), thread, num_threads)
    for block in range(low, high):
        for lane in range(min(LANES, step.num_rows - block * LANES)):
            row = block * LANES + lane
            last = load_int(step.rows + (row * ROW_FIELDS + ROW_LANE) * 8)
            source = work.residual + last // LANES * decoder.hidden * 64 + last % LANES * 4
            for feature in range(decoder.hidden):
                store_scalar(scratch + feature * 64 + lane * 4, load_scalar(source + feature * 64))
        target = work.packed + block * packed_bytes(decoder, decoder.hidden)
        scale = _inverse_norm(scratch, decoder.hidden, decoder.epsilon)
        for feature in range(0, decoder.hidden, 2):
            weight = decoder.final_norm + feature * 4
            first = load(scratch + feature * 64) * scale * broadcast(weight)
            second = load(scratch + feature * 64 + 64) * scale * broadcast(weight + 4)
            pack(decoder.element, target, feature, first, second)


@kernel
def project_vocabulary(thread, num_threads, decoder, work, step, scratch):
    """Logits of the rows gathered by ``gather_last``."""
    # The last item starts early enough to end with the vocabulary; rows done twice are equal.
    low, high = share((decoder.vocab + ROWS - 1) // ROWS, thread, num_threads)
    row_bytes = decoder.hidden * decoder.element
    blocks_in_all = blocks_of(step.num_rows)
    for item in range(low, high):
        token = min(item * ROWS, decoder.vocab - ROWS)
        first = decoder.head + token * row_bytes
        second = first + LANES * row_bytes
        ahead = ROWS * row_bytes if item + 2 < high else 0
        for block in range(0, blocks_in_all, 2):
            num_blocks = min(2, blocks_in_all - block)
            _multiply_pair(
                *(decoder, first, second, row_bytes),
                *(work.packed, block, num_blocks, scratch, ahead),
            )
            for b in range(num_blocks):
                row = (block + b) * LANES
                for group in range(0, ROWS, LANES):
                    store_transposed(
                        scratch + (b * ROWS + group) * 64,
                        step.logits + (row * decoder.vocab + token + group) * 4,
                        decoder.vocab * 4,
                        step.num_rows - row,
                    )
