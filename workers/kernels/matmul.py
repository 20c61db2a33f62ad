"""The one matrix product of all kernels: 32 weight rows times one or two blocks of 16 tokens.

``out[block][row][lane] = sum over k of weight[row][k] * input[block][k][lane]``. Weights stay in
their plain row-major layout, so they are shared with every other user of them. Inputs are packed:
float32 ``[k][16]``, or bfloat16 in pairs ``[k / 2][16][2]``. The loop over k takes 64 bytes of each
row at a time, so rows must be multiples of 64 bytes; that step of an input is 1024 bytes for both.

Each kind is compiled once, and kernels call it through its address: inlined into every caller, the
unrolled loops would take most of the time that compiling takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from daskserve.workers.kernels.cpu import COMPILES_AMX, HAS_AVX512, HAS_AVX512_BF16
from daskserve.workers.kernels.jit import kernel, pointer
from daskserve.workers.kernels.vector import (
    LANES,
    call_llvm,
    define,
    f32,
    i32,
    i64,
    load_value,
    loop,
    prefetch_line,
    splat_value,
    store_value,
    v16f,
    v16i,
    v32b,
)

ROWS = 32
"""Weight rows of one call: two groups of 16; the output is ``[blocks][32][16]`` float32."""
STEP_BYTES, STEP_INPUT_BYTES = 64, 1024
_GROUP_BYTES = 16 * 64  # 16 rows of 16 float32 lanes in the output
_ACCUMULATORS = 16 if HAS_AVX512 else 4
"""Vectors of 16 lanes that are summed up at a time: half of 32 registers of their width, or two
halves each of 16 narrower registers. More would live in memory."""
FEW_LANES = LANES if HAS_AVX512 else LANES // 2
"""Lanes of one register: a block with no more tokens than that costs half where it is half."""
_FEW_ROWS = _ACCUMULATORS * LANES // FEW_LANES
"""Rows at a time of such a block; as with ``_ACCUMULATORS``, so many rows on is what comes next."""

_VOID, _I8 = ir.VoidType(), ir.IntType(8)
_BYTES = _I8.as_pointer()
_ARGUMENTS = (types.int64,) * 8
_SIGNATURE = types.void(*_ARGUMENTS)


def _offset(builder: ir.IRBuilder, address: ir.Value, stride: ir.Value, times: int) -> ir.Value:
    return builder.add(address, builder.mul(stride, i64(times)))


def _product(emit: Callable, num_blocks: int, **options: bool) -> Callable:
    @define(types.void, *_ARGUMENTS)
    def product(builder, first, second, row_bytes, source, stride, steps, out, ahead):
        sources = [_offset(builder, source, stride, block) for block in range(num_blocks)]
        emit(builder, (first, second), row_bytes, sources, steps, out, ahead, **options)

    return product


def _emit_tiles(builder, groups, row_bytes, sources, steps, out, ahead, fetch: bool) -> None:
    """Matrix tiles: accumulators 0..3, inputs 4..5, weights 6..7."""

    def tile(name: str, *values: ir.Value | int) -> None:
        arguments = [_I8(v) if isinstance(v, int) else v for v in values]
        call_llvm(builder, f"llvm.x86.{name}", _VOID, arguments)

    def accumulator(group: int, block: int) -> int:
        return group * len(sources) + block

    if not COMPILES_AMX:
        return
    for number in range(2 * len(sources)):
        tile("tilezero", number)
    index, _, close = loop(builder, steps, [])
    column = builder.mul(index, i64(STEP_BYTES))
    for block, source in enumerate(sources):
        at = _offset(builder, source, index, STEP_INPUT_BYTES)
        tile("tileloadd64", 4 + block, builder.inttoptr(at, _BYTES), i64(64))
    for group, rows in enumerate(groups):
        at = builder.inttoptr(builder.add(rows, column), _BYTES)
        tile("tileloadd64", 6 + group, at, row_bytes)
        for block in range(len(sources)):
            tile("tdpbf16ps", accumulator(group, block), 6 + group, 4 + block)
    for rows in groups if fetch else ():
        at = builder.add(builder.add(rows, ahead), column)
        for row in range(16):
            prefetch_line(builder, _offset(builder, at, row_bytes, row))
    close([])
    for block in range(len(sources)):
        for group in range(2):
            at = builder.add(out, i64((2 * block + group) * _GROUP_BYTES))
            tile("tilestored64", accumulator(group, block), builder.inttoptr(at, _BYTES), i64(64))


def _emit_vectors(multiply: Callable, lanes: int = LANES) -> Callable:
    """Multiply-adds of as many rows at a time as there are accumulators for.

    With fewer ``lanes`` than 16 those behind come out as 0.
    """
    kind = ir.VectorType(f32, lanes)
    zeros, all_lanes = ir.Constant(kind, None), ir.Constant(v16i, list(range(LANES)))
    num_sums = _ACCUMULATORS * LANES // lanes

    def emit(builder, groups, row_bytes, sources, steps, out, ahead, fetch: bool) -> None:
        # Two blocks together load a weight once for both, which takes many registers.
        turns = [sources] if HAS_AVX512 else [[source] for source in sources]
        num_rows = num_sums // len(turns[0])
        part, _, close_part = loop(builder, i64(ROWS // num_rows), [])
        start = builder.mul(part, i64(num_rows))
        in_second = builder.icmp_signed(">=", start, i64(16))
        group = builder.select(in_second, groups[1], groups[0])
        rows = builder.add(group, builder.mul(row_bytes, builder.and_(start, i64(15))))
        target = builder.add(out, builder.mul(start, i64(64)))
        for number, together in enumerate(turns):
            next_rows = builder.add(rows, ahead) if fetch and number == 0 else None
            sums = sum_up(builder, (rows, row_bytes, num_rows), together, steps, next_rows)
            for slot, value in enumerate(sums):
                row, block = divmod(slot, len(together))
                at = (number + block) * 2 * _GROUP_BYTES + row * 64
                if lanes < LANES:
                    value = builder.shuffle_vector(value, zeros, all_lanes)
                store_value(builder, builder.add(target, i64(at)), value)
        close_part([])

    def sum_up(builder, some_rows, sources, steps, next_rows) -> list[ir.Value]:
        rows, row_bytes, num_rows = some_rows
        index, sums, close = loop(builder, builder.mul(steps, i64(4)), [zeros] * num_sums)
        column = builder.mul(index, i64(STEP_BYTES // 4))
        inputs = [_offset(builder, source, index, STEP_INPUT_BYTES // 4) for source in sources]
        rows_here = [
            builder.add(_offset(builder, rows, row_bytes, row), column) for row in range(num_rows)
        ]
        multiply(builder, rows_here, inputs, sums, kind)
        # A quarter of the rows in each quarter of a step: every line once.
        for row in range(num_rows // 4 if next_rows is not None else 0):
            turn = builder.mul(builder.and_(index, i64(3)), i64(num_rows // 4))
            at = builder.add(next_rows, builder.mul(row_bytes, builder.add(turn, i64(row))))
            prefetch_line(builder, builder.add(at, column))
        close(sums)
        return sums

    return emit


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return call_llvm(builder, f"llvm.fma.v{a.type.count}f32", a.type, [a, b, c])


def _multiply_float32(builder, rows, inputs, sums, kind) -> None:
    vectors = [
        [load_value(builder, builder.add(x, i64(64 * k)), kind) for x in inputs] for k in range(4)
    ]
    for row, address in enumerate(rows):
        for k in range(4):  # one after the other: the row's address stays in a register
            weight = load_value(builder, builder.add(address, i64(4 * k)), f32)
            weight = splat_value(builder, weight, kind.count)
            for block, vector in enumerate(vectors[k]):
                slot = row * len(inputs) + block
                sums[slot] = _fma(builder, weight, vector, sums[slot])


def _halves(builder: ir.IRBuilder, pairs: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The lower and the upper bfloat16 of each lane as float32."""
    lanes = pairs.type.count
    low = builder.shl(pairs, ir.Constant(pairs.type, [16] * lanes))
    high = builder.and_(pairs, ir.Constant(pairs.type, [-65536] * lanes))
    kind = ir.VectorType(f32, lanes)
    return builder.bitcast(low, kind), builder.bitcast(high, kind)


def _multiply_bfloat16(builder, rows, inputs, sums, kind) -> None:
    words = ir.VectorType(i32, kind.count)
    for pair in range(4):
        loaded = [load_value(builder, builder.add(x, i64(64 * pair)), words) for x in inputs]
        vectors = [_halves(builder, pairs) for pairs in loaded]
        for row, address in enumerate(rows):
            weight = load_value(builder, builder.add(address, i64(4 * pair)), i32)
            low, high = _halves(builder, splat_value(builder, weight, kind.count))
            for block, (even, odd) in enumerate(vectors):
                slot = row * len(inputs) + block
                sums[slot] = _fma(builder, low, even, sums[slot])
                sums[slot] = _fma(builder, high, odd, sums[slot])


def _multiply_pairs(builder, rows, inputs, sums, kind) -> None:
    """Products of two bfloat16 pairs at a time, where the CPU has them."""
    if not HAS_AVX512_BF16:
        return
    for pair in range(4):
        vectors = [load_value(builder, builder.add(x, i64(64 * pair)), v32b) for x in inputs]
        for row, address in enumerate(rows):
            weight = load_value(builder, builder.add(address, i64(4 * pair)), i32)
            weights = builder.bitcast(splat_value(builder, weight), v32b)
            for block, vector in enumerate(vectors):
                slot = row * len(inputs) + block
                arguments = [sums[slot], weights, vector]
                sums[slot] = call_llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", v16f, arguments)


def _kind(emit: Callable, fetch: bool = False) -> tuple[Callable, Callable]:
    return _product(emit, 1, fetch=fetch), _product(emit, 2, fetch=fetch)


_tiles_1, _tiles_2 = _kind(_emit_tiles)
_tiles_1_ahead, _tiles_2_ahead = _kind(_emit_tiles, fetch=True)
_float32_1, _float32_2 = _kind(_emit_vectors(_multiply_float32), fetch=not HAS_AVX512)
_bfloat16_1, _bfloat16_2 = _kind(_emit_vectors(_multiply_bfloat16), fetch=not HAS_AVX512)
_float32_few = _product(_emit_vectors(_multiply_float32, FEW_LANES), 1, fetch=True)
_bfloat16_few = _product(_emit_vectors(_multiply_bfloat16, FEW_LANES), 1, fetch=True)
_pairs_1, _pairs_2 = _kind(_emit_vectors(_multiply_pairs))
_pairs_1_ahead, _pairs_2_ahead = _kind(_emit_vectors(_multiply_pairs), fetch=True)


@pointer(_SIGNATURE)
def _tiles_one(first, second, row_bytes, source, stride, steps, out, ahead):
    if ahead == 0:
        _tiles_1(first, second, row_bytes, source, stride, steps, out, ahead)
    else:
        _tiles_1_ahead(first, second, row_bytes, source, stride, steps, out, ahead)


@pointer(_SIGNATURE)
def _tiles_two(first, second, row_bytes, source, stride, steps, out, ahead):
    if ahead == 0:
        _tiles_2(first, second, row_bytes, source, stride, steps, out, ahead)
    else:
        _tiles_2_ahead(first, second, row_bytes, source, stride, steps, out, ahead)


@pointer(_SIGNATURE)
def _float32_one(first, second, row_bytes, source, stride, steps, out, ahead):
    _float32_1(first, second, row_bytes, source, stride, steps, out, row_bytes * _ACCUMULATORS)


@pointer(_SIGNATURE)
def _float32_two(first, second, row_bytes, source, stride, steps, out, ahead):
    _float32_2(first, second, row_bytes, source, stride, steps, out, row_bytes * _ACCUMULATORS)


@pointer(_SIGNATURE)
def _bfloat16_one(first, second, row_bytes, source, stride, steps, out, ahead):
    _bfloat16_1(first, second, row_bytes, source, stride, steps, out, row_bytes * _ACCUMULATORS)


@pointer(_SIGNATURE)
def _bfloat16_two(first, second, row_bytes, source, stride, steps, out, ahead):
    _bfloat16_2(first, second, row_bytes, source, stride, steps, out, row_bytes * _ACCUMULATORS)


@pointer(_SIGNATURE)
def _float32_one_of_few(first, second, row_bytes, source, stride, steps, out, ahead):
    _float32_few(first, second, row_bytes, source, stride, steps, out, row_bytes * _FEW_ROWS)


@pointer(_SIGNATURE)
def _bfloat16_one_of_few(first, second, row_bytes, source, stride, steps, out, ahead):
    _bfloat16_few(first, second, row_bytes, source, stride, steps, out, row_bytes * _FEW_ROWS)


@pointer(_SIGNATURE)
def _pairs_one(first, second, row_bytes, source, stride, steps, out, ahead):
    if ahead == 0:
        _pairs_1(first, second, row_bytes, source, stride, steps, out, ahead)
    else:
        _pairs_1_ahead(first, second, row_bytes, source, stride, steps, out, ahead)


@pointer(_SIGNATURE)
def _pairs_two(first, second, row_bytes, source, stride, steps, out, ahead):
    if ahead == 0:
        _pairs_2(first, second, row_bytes, source, stride, steps, out, ahead)
    else:
        _pairs_2_ahead(first, second, row_bytes, source, stride, steps, out, ahead)


class Product(NamedTuple):
    """Addresses of one kind of product, and whether a thread must open its matrix tiles for it."""

    one: int
    """For one block of tokens."""
    two: int
    uses_tiles: bool


def compile_product(kind: str, of_few: bool = False) -> Product:
    """The product for ``float32`` or ``bfloat16``, which more CPUs have instructions for.

    ``pairs`` takes two products in one instruction, ``tiles`` goes through matrix tiles. That
    ``of_few`` computes no more than ``FEW_LANES`` of a single block, where that is cheaper.
    """
    if of_few and FEW_LANES < LANES and kind in ("float32", "bfloat16"):
        one = _float32_one_of_few if kind == "float32" else _bfloat16_one_of_few
        return compile_product(kind)._replace(one=one())
    one, two = {
        "float32": (_float32_one, _float32_two),
        "bfloat16": (_bfloat16_one, _bfloat16_two),
        "pairs": (_pairs_one, _pairs_two),
        "tiles": (_tiles_one, _tiles_two),
    }[kind]
    return Product(one(), two(), kind == "tiles")


@define(types.void, types.int64, *_ARGUMENTS)
def _call(builder, address, *arguments):
    kind = ir.FunctionType(_VOID, [i64] * len(arguments)).as_pointer()
    builder.call(builder.inttoptr(address, kind), arguments)


@kernel
def multiply(product, num_blocks, first, second, row_bytes, source, stride, steps, out, ahead):
    """Multiply 32 weight rows with one or two blocks of 16 tokens.

    Parameters
    ----------
    product
        What ``compile_product`` made.
    num_blocks
        1 or 2.
    first, second, row_bytes
        Addresses of the two groups of 16 weight rows, and the bytes from row to row.
    source, stride
        Address of the packed input, bytes from block to block.
    steps
        Row length in steps of 64 bytes, at least 1.
    out
        Address of the output ``[num_blocks][32][16]`` float32.
    ahead
        Bytes from these rows to rows that are needed soon, to fetch them; 0 fetches nothing.
    """
    address = product.two if num_blocks == 2 else product.one
    _call(address, first, second, row_bytes, source, stride, steps, out, ahead)


@define(types.void, types.int64)
def _configure(builder, address):
    if COMPILES_AMX:
        pointer = builder.inttoptr(address, _BYTES)
        call_llvm(builder, "llvm.x86.ldtilecfg", _VOID, [pointer])


@define(types.void)
def _release(builder):
    if COMPILES_AMX:
        call_llvm(builder, "llvm.x86.tilerelease", _VOID, [])


@kernel
def open_tiles(product, config):
    """Set this thread's matrix tiles up with the 64 bytes at address ``config``."""
    if product.uses_tiles:
        _configure(config)


@kernel
def close_tiles(product):
    """Hand this thread's matrix tiles back."""
    if product.uses_tiles:
        _release()


def tile_config() -> np.ndarray:
    """Eight tiles of 16 rows of 64 bytes, as the CPU wants to read it."""
    config = np.zeros(64, dtype=np.uint8)
    config[0] = 1  # palette
    config[16:32].view(np.uint16)[:] = STEP_BYTES
    config[48:56] = 16  # rows
    return config
