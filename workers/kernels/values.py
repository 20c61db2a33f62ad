"""Weighted sums of value rows: the second half of decode attention, up to four heads at a time."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from daskserve.workers.kernels.jit import kernel
from daskserve.workers.kernels.vector import (
    LANES,
    call_llvm,
    define,
    f32,
    i64,
    load_value,
    loop,
    prefetch_line,
    splat_value,
    store_value,
    v16f,
    v16i,
)

CHUNK = 32
"""Features of one pass: a cache line of bfloat16."""


def _split_pairs(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    """Even and odd features of 32 bfloat16 values."""
    pairs = load_value(builder, address, v16i)
    low = builder.shl(pairs, ir.Constant(v16i, [16] * LANES))
    high = builder.and_(pairs, ir.Constant(v16i, [-65536] * LANES))
    return [builder.bitcast(low, v16f), builder.bitcast(high, v16f)]


def _two_vectors(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    return [load_value(builder, builder.add(address, i64(64 * n)), v16f) for n in range(2)]


def _weighted_sum(num_heads: int, element: int):
    @define(types.void, *(types.int64,) * 8)
    def add(builder, values, row_bytes, weights, weight_bytes, count, sums, sum_bytes, ahead):
        places = [
            builder.add(builder.add(sums, builder.mul(sum_bytes, i64(head))), i64(64 * half))
            for head in range(num_heads)
            for half in range(2)
        ]
        heads = [builder.add(weights, builder.mul(weight_bytes, i64(h))) for h in range(num_heads)]
        before = [load_value(builder, place, v16f) for place in places]
        index, totals, close = loop(builder, count, before)
        offset = builder.mul(index, row_bytes)
        load_row = _split_pairs if element == 2 else _two_vectors
        row = load_row(builder, builder.add(values, offset))
        for head, address in enumerate(heads):
            at = builder.add(address, builder.mul(index, i64(4)))
            weight = splat_value(builder, load_value(builder, at, f32))
            for half in range(2):
                slot = 2 * head + half
                arguments = [weight, row[half], totals[slot]]
                totals[slot] = call_llvm(builder, "llvm.fma.v16f32", v16f, arguments)
        for line in range(element // 2):
            at = builder.add(builder.add(ahead, offset), i64(64 * line))
            prefetch_line(builder, at)
        close(totals)
        for place, total in zip(places, totals, strict=True):
            store_value(builder, place, total)

    return add


_half_1, _half_2, _half_3, _half_4 = (_weighted_sum(n, 2) for n in (1, 2, 3, 4))
_full_1, _full_2, _full_3, _full_4 = (_weighted_sum(n, 4) for n in (1, 2, 3, 4))


@kernel
def add_values(
    element, num_heads, values, row_bytes, weights, weight_bytes, count, sums, sum_bytes, ahead
):
    """Add ``count`` (at least 1) weighted value rows, 32 features of them, to the heads' sums.

    Parameters
    ----------
    element, num_heads
        Bytes of one value, 2 or 4; heads in this pass, 1..4.
    values, row_bytes
        Address of the features in the first row; bytes from row to row.
    weights, weight_bytes
        Address of the first head's float32 weights; bytes from head to head.
    sums, sum_bytes
        Address of the first head's sums and bytes from head to head. bfloat16 sums stand as 16
        even features, then 16 odd ones; float32 sums in order.
    ahead
        Address of rows that are needed soon, fetched at the same pace.
    """
    if element == 2:
        if num_heads == 1:
            _half_1(values, row_bytes, weights, weight_bytes, count, sums, sum_bytes, ahead)
        elif num_heads == 2:
            _half_2(values, row_bytes, weights, weight_bytes, count, sums, sum_bytes, ahead)
        elif num_heads == 3:
            _half_3(values, row_bytes, weights, weight_bytes, count, sums, sum_bytes, ahead)
        else:
            _half_4(values, row_bytes, weights, weight_bytes, count, sums, sum_bytes, ahead)
    elif num_heads == 1:
        _full_1(values, row_bytes, weights, weight_bytes, count, sums, sum_bytes, ahead)
    elif num_heads == 2:
        _full_2(values, row_bytes, weights, weight_bytes, count, sums, sum_bytes, ahead)
    elif num_heads == 3:
        _full_3(values, row_bytes, weights, weight_bytes, count, sums, sum_bytes, ahead)
    else:
        _full_4(values, row_bytes, weights, weight_bytes, count, sums, sum_bytes, ahead)
