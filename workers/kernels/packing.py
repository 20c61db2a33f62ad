"""Between lanes of tokens and rows of features: bfloat16 pairs and transposed stores."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from daskserve.workers.kernels.cpu import HAS_AVX512_BF16
from daskserve.workers.kernels.vector import (
    LANES,
    call_llvm,
    define,
    f32,
    floats,
    i32,
    i64,
    ints,
    load_value,
    store_value,
    v16f,
    v16i,
    v32b,
)


def _each(value: int) -> ir.Constant:
    return ir.Constant(v16i, [value] * LANES)


def _rounded_bits(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Bits of float32 lanes whose upper half is the nearest bfloat16, ties to even."""
    pattern = builder.bitcast(value, v16i)
    odd = builder.and_(builder.lshr(pattern, _each(16)), _each(1))
    return builder.add(pattern, builder.add(odd, _each(0x7FFF)))


@define(ints, floats, floats)
def pack_pair(builder, low, high):
    """Two features as bfloat16 side by side in each lane, ``low`` in the lower half.

    CPUs with an instruction for it take subnormal numbers for 0.
    """
    if HAS_AVX512_BF16:
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        halves = ir.VectorType(ir.IntType(16), 32)
        one_after_the_other = call_llvm(builder, name, v32b, [high, low])
        value = builder.bitcast(one_after_the_other, halves)
        order = _order(n // 2 + n % 2 * LANES for n in range(32))
        mixed = builder.shuffle_vector(value, ir.Constant(halves, ir.Undefined), order)
        return builder.bitcast(mixed, v16i)
    low_half = builder.lshr(_rounded_bits(builder, low), _each(16))
    return builder.or_(low_half, builder.and_(_rounded_bits(builder, high), _each(-65536)))


@define(types.int32, types.float32, types.float32)
def pack_scalars(builder, low, high):
    """Two float32 as bfloat16 side by side, ``low`` in the lower half."""
    rounded = []
    for value in (low, high):
        pattern = builder.bitcast(value, i32)
        odd = builder.and_(builder.lshr(pattern, i32(16)), i32(1))
        rounded.append(builder.add(pattern, builder.add(odd, i32(0x7FFF))))
    return builder.or_(builder.lshr(rounded[0], i32(16)), builder.and_(rounded[1], i32(-65536)))


@define(types.void, types.int64, types.int64, types.int64, types.int64)
def store_transposed(builder, source, target, row_bytes, num_rows):
    """Write 16 vectors of 16 lanes as rows: lane r of vector n becomes ``target`` row r, item n."""
    rows = [load_value(builder, builder.add(source, i64(64 * n)), v16f) for n in range(LANES)]
    for step in (8, 4, 2, 1):
        low = [n for n in range(LANES) if not n & step]
        first = [i if not i & step else LANES + (i ^ step) for i in range(LANES)]
        second = [i | step if not i & step else LANES + i for i in range(LANES)]
        mixed = list(rows)
        for n in low:
            a, b = rows[n], rows[n | step]
            mixed[n] = builder.shuffle_vector(a, b, ir.Constant(v16i, first))
            mixed[n | step] = builder.shuffle_vector(a, b, ir.Constant(v16i, second))
        rows = mixed
    for r in range(LANES):
        with builder.if_then(builder.icmp_signed("<", i64(r), num_rows), likely=True):
            store_value(builder, builder.add(target, builder.mul(row_bytes, i64(r))), rows[r])


@define(types.void, types.int64, types.int64, types.int64)
def transpose_four(builder, source, target, row_bytes):
    """Write the first four lanes of 16 vectors as four rows of 16, ``row_bytes`` apart."""
    quarter = ir.VectorType(f32, 4)
    quarters = [load_value(builder, builder.add(source, i64(64 * n)), quarter) for n in range(16)]
    # Vector i holds vectors i, 4 + i, 8 + i and 12 + i of the source, a quarter each.
    stacked = []
    for i in range(4):
        halves = [
            builder.shuffle_vector(
                quarters[i + 8 * half], quarters[i + 8 * half + 4], _order(range(8))
            )
            for half in range(2)
        ]
        stacked.append(builder.shuffle_vector(*halves, _order(range(16))))
    pairs = [
        builder.shuffle_vector(stacked[2 * i], stacked[2 * i + 1], _order(_interleaved(start, 1)))
        for start in (0, 2)
        for i in range(2)
    ]
    for row in range(4):
        first, second = pairs[row // 2 * 2], pairs[row // 2 * 2 + 1]
        order = _order(_interleaved(row % 2 * 2, 2))
        at = builder.add(target, builder.mul(row_bytes, i64(row)))
        store_value(builder, at, builder.shuffle_vector(first, second, order))


def _order(lanes) -> ir.Constant:
    lanes = list(lanes)
    return ir.Constant(ir.VectorType(i32, len(lanes)), lanes)


def _interleaved(start: int, width: int) -> list[int]:
    """In each quarter: ``width`` lanes of one vector, then of the other, from lane ``start`` on."""
    order = []
    for quarter in range(0, LANES, 4):
        for step in range(0, 2, width):
            for vector in (0, LANES):
                order += [vector + quarter + start + step + lane for lane in range(width)]
    return order
