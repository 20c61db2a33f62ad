"""The one matrix product of all kernels: 32 weight rows times one or two blocks of 16 tokens.

``out[block][row][lane] = sum over k of weight[row][k] * input[block][k][lane]``. Weights stay in
their plain row-major layout, so they are shared with every other user of them. Inputs are packed:
float32 ``[k][16]``, or bfloat16 in pairs ``[k / 2][16][2]``. The loop over k takes 64 bytes of each
row at a time, so rows must be multiples of 64 bytes; that step of an input is 1024 bytes for both.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import types

from daskserve.workers.kernels.cpu import COMPILES_AMX
from daskserve.workers.kernels.jit import kernel
from daskserve.workers.kernels.vector import (
    call_llvm,
    define,
    f32,
    i32,
    i64,
    load_value,
    splat_value,
    store_value,
    v16f,
    v16i,
)

FLOAT32, BFLOAT16, BFLOAT16_AMX = 0, 1, 2
"""Kinds of product: the type of weights and inputs, and whether the CPU's matrix tiles do it."""

ROWS = 32
"""Weight rows of one call: two groups of 16; the output is ``[blocks][32][16]`` float32."""
STEP_BYTES, STEP_INPUT_BYTES = 64, 1024
_UNROLL = 4  # features of a row that follow each other: its address is loaded once for them
_GROUP_BYTES = 16 * 64  # 16 rows of 16 float32 lanes in the output

_VOID, _I8 = ir.VoidType(), ir.IntType(8)
_BYTES = _I8.as_pointer()


def _loop(builder: ir.IRBuilder, count: ir.Value, carried: list[ir.Value]):
    """Open a loop over 0..count-1 (at least once): index, carried values, and how to close it."""
    before = builder.basic_block
    body, after = builder.append_basic_block("step"), builder.append_basic_block("done")
    builder.branch(body)
    builder.position_at_end(body)
    index = builder.phi(i64)
    index.add_incoming(i64(0), before)
    phis = [builder.phi(value.type) for value in carried]
    for phi, value in zip(phis, carried, strict=True):
        phi.add_incoming(value, before)

    def close(values: list[ir.Value]) -> None:
        following = builder.add(index, i64(1))
        index.add_incoming(following, builder.basic_block)
        for phi, value in zip(phis, values, strict=True):
            phi.add_incoming(value, builder.basic_block)
        builder.cbranch(builder.icmp_signed("<", following, count), body, after)
        builder.position_at_end(after)

    return index, list(phis), close


def _offset(builder: ir.IRBuilder, address: ir.Value, stride: ir.Value, times: int) -> ir.Value:
    return builder.add(address, builder.mul(stride, i64(times)))


def _prefetch_rows(builder: ir.IRBuilder, address: ir.Value, row_bytes: ir.Value) -> None:
    """Fetch one step of 16 rows that a later call will need into the second-level cache."""
    for row in range(16):
        line = builder.inttoptr(_offset(builder, address, row_bytes, row), _BYTES)
        call_llvm(builder, "llvm.prefetch.p0", _VOID, [line, i32(0), i32(2), i32(1)])


def _product(emit: Callable, num_blocks: int, prefetch: bool):
    arguments = (types.int64,) * 8

    @define(types.void, *arguments)
    def product(builder, first, second, row_bytes, source, stride, steps, out, ahead):
        """first, second: the two groups of weight rows; ahead: bytes to the next call's rows."""

        def fetch(column: ir.Value) -> None:
            if prefetch:
                for group in (first, second):
                    at = builder.add(builder.add(group, ahead), column)
                    _prefetch_rows(builder, at, row_bytes)

        sources = [_offset(builder, source, stride, block) for block in range(num_blocks)]
        emit(builder, (first, second), row_bytes, sources, steps, out, fetch)

    return product


def _emit_tiles(builder, groups, row_bytes, sources, steps, out, fetch) -> None:
    """Matrix tiles: accumulators 0..3, inputs 4..5, weights 6..7."""

    def tile(name: str, *values: ir.Value | int) -> None:
        arguments = [_I8(v) if isinstance(v, int) else v for v in values]
        call_llvm(builder, f"llvm.x86.{name}", _VOID, arguments)

    def accumulator(group: int, block: int) -> int:
        return group * len(sources) + block

    for number in range(2 * len(sources)):
        tile("tilezero", number)
    index, _, close = _loop(builder, steps, [])
    column = builder.mul(index, i64(STEP_BYTES))
    for block, source in enumerate(sources):
        at = _offset(builder, source, index, STEP_INPUT_BYTES)
        tile("tileloadd64", 4 + block, builder.inttoptr(at, _BYTES), i64(64))
    for group, rows in enumerate(groups):
        at = builder.inttoptr(builder.add(rows, column), _BYTES)
        tile("tileloadd64", 6 + group, at, row_bytes)
        for block in range(len(sources)):
            tile("tdpbf16ps", accumulator(group, block), 6 + group, 4 + block)
    fetch(column)
    close([])
    for block in range(len(sources)):
        for group in range(2):
            at = builder.add(out, i64((2 * block + group) * _GROUP_BYTES))
            tile("tilestored64", accumulator(group, block), builder.inttoptr(at, _BYTES), i64(64))


def _emit_vectors(multiply: Callable) -> Callable:
    """Fused multiply-adds with 16 accumulators in registers, 8 or 16 rows at a time."""

    def emit(builder, groups, row_bytes, sources, steps, out, fetch) -> None:
        num_rows = 16 // len(sources)
        for start in range(0, ROWS, num_rows):
            rows = _offset(builder, groups[start // 16], row_bytes, start % 16)
            zeros = [ir.Constant(v16f, None)] * 16
            index, sums, close = _loop(builder, steps, zeros)
            column = builder.mul(index, i64(STEP_BYTES))
            inputs = [_offset(builder, source, index, STEP_INPUT_BYTES) for source in sources]
            rows_here = [
                builder.add(_offset(builder, rows, row_bytes, row), column)
                for row in range(num_rows)
            ]
            multiply(builder, rows_here, inputs, sums)
            if start == 0:
                fetch(column)
            close(sums)
            for block in range(len(sources)):
                for row in range(num_rows):
                    at = builder.add(out, i64(2 * block * _GROUP_BYTES + (start + row) * 64))
                    store_value(builder, at, sums[row * len(sources) + block])

    return emit


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return call_llvm(builder, "llvm.fma.v16f32", v16f, [a, b, c])


def _multiply_float32(builder, rows, inputs, sums) -> None:
    for start in range(0, 16, _UNROLL):
        features = range(start, start + _UNROLL)
        vectors = {
            (k, block): load_value(builder, builder.add(x, i64(64 * k)), v16f)
            for k in features
            for block, x in enumerate(inputs)
        }
        for row, address in enumerate(rows):
            for k in features:
                weight = load_value(builder, builder.add(address, i64(4 * k)), f32)
                weight = splat_value(builder, weight)
                for block in range(len(inputs)):
                    slot = row * len(inputs) + block
                    sums[slot] = _fma(builder, weight, vectors[k, block], sums[slot])


def _halves(builder: ir.IRBuilder, pairs: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The lower and the upper bfloat16 of each lane as float32."""
    low = builder.shl(pairs, ir.Constant(v16i, [16] * 16))
    high = builder.and_(pairs, ir.Constant(v16i, [-65536] * 16))
    return builder.bitcast(low, v16f), builder.bitcast(high, v16f)


def _multiply_bfloat16(builder, rows, inputs, sums) -> None:
    for start in range(0, 16, _UNROLL // 2):
        pairs = range(start, start + _UNROLL // 2)
        vectors = {
            (p, block): _halves(builder, load_value(builder, builder.add(x, i64(64 * p)), v16i))
            for p in pairs
            for block, x in enumerate(inputs)
        }
        for row, address in enumerate(rows):
            for p in pairs:
                weight = load_value(builder, builder.add(address, i64(4 * p)), i32)
                low, high = _halves(builder, splat_value(builder, weight))
                for block in range(len(inputs)):
                    slot = row * len(inputs) + block
                    even, odd = vectors[p, block]
                    sums[slot] = _fma(builder, low, even, sums[slot])
                    sums[slot] = _fma(builder, high, odd, sums[slot])


def _emit_nothing(builder, groups, row_bytes, sources, steps, out, fetch) -> None:
    """Where the compiler's target has no matrix tiles: never called."""


_tiles = _emit_tiles if COMPILES_AMX else _emit_nothing
_float32, _bfloat16 = _emit_vectors(_multiply_float32), _emit_vectors(_multiply_bfloat16)

_tiles_1, _tiles_2 = _product(_tiles, 1, False), _product(_tiles, 2, False)
_tiles_1_ahead, _tiles_2_ahead = _product(_tiles, 1, True), _product(_tiles, 2, True)
_float32_1, _float32_2 = _product(_float32, 1, True), _product(_float32, 2, True)
_bfloat16_1, _bfloat16_2 = _product(_bfloat16, 1, True), _product(_bfloat16, 2, True)


@kernel
def product(kind, first, second, row_bytes, source, stride, num_blocks, steps, out, ahead):
    """Multiply 32 weight rows with one or two blocks of 16 tokens.

    Parameters
    ----------
    kind
        FLOAT32, BFLOAT16 or BFLOAT16_AMX; the last one needs ``tile_config`` on this thread.
    first, second, row_bytes
        Addresses of the two groups of 16 weight rows, and the bytes from row to row.
    source, stride, num_blocks
        Address of the packed input, bytes from block to block, 1 or 2 blocks.
    steps
        Row length in steps of 64 bytes, at least 1.
    out
        Address of the output ``[num_blocks][32][16]`` float32.
    ahead
        Bytes from these rows to rows that are needed soon, to fetch them; 0 fetches nothing.
    """
    if kind == BFLOAT16_AMX:
        if ahead == 0:
            if num_blocks == 2:
                _tiles_2(first, second, row_bytes, source, stride, steps, out, ahead)
            else:
                _tiles_1(first, second, row_bytes, source, stride, steps, out, ahead)
        elif num_blocks == 2:
            _tiles_2_ahead(first, second, row_bytes, source, stride, steps, out, ahead)
        else:
            _tiles_1_ahead(first, second, row_bytes, source, stride, steps, out, ahead)
    elif kind == BFLOAT16:
        if num_blocks == 2:
            _bfloat16_2(first, second, row_bytes, source, stride, steps, out, ahead)
        else:
            _bfloat16_1(first, second, row_bytes, source, stride, steps, out, ahead)
    elif num_blocks == 2:
        _float32_2(first, second, row_bytes, source, stride, steps, out, ahead)
    else:
        _float32_1(first, second, row_bytes, source, stride, steps, out, ahead)


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
def open_tiles(kind, config):
    """Set this thread's matrix tiles up with the 64 bytes at address ``config``."""
    if kind == BFLOAT16_AMX:
        _configure(config)


@kernel
def close_tiles(kind):
    """Hand this thread's matrix tiles back."""
    if kind == BFLOAT16_AMX:
        _release()


def tile_config() -> np.ndarray:
    """Eight tiles of 16 rows of 64 bytes, as the CPU wants to read it."""
    config = np.zeros(64, dtype=np.uint8)
    config[0] = 1  # palette
    config[16:32].view(np.uint16)[:] = STEP_BYTES
    config[48:56] = 16  # rows
    return config
