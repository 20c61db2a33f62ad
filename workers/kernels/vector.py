"""16 float32 lanes as a numba type, with the arithmetic that the kernels need.

LLVM splits the vectors where a CPU has narrower registers, so the same kernels run anywhere.
Addresses are int64; loads and stores need no alignment.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

LANES = 16

i32, i64, f32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
v16f, v16i, v16h = (ir.VectorType(t, LANES) for t in (f32, i32, ir.IntType(16)))


class Float32x16(types.Type):
    """16 float32 values in one vector value."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


class Int32x16(types.Type):
    """16 int32 values, or bit patterns of float32 or pairs of bfloat16, in one vector value."""

    def __init__(self) -> None:
        super().__init__(name="int32x16")


floats, ints = Float32x16(), Int32x16()


@register_model(Float32x16)
class _FloatModel(models.PrimitiveModel):
    def __init__(self, dmm: object, fe_type: types.Type) -> None:
        super().__init__(dmm, fe_type, v16f)


@register_model(Int32x16)
class _IntModel(models.PrimitiveModel):
    def __init__(self, dmm: object, fe_type: types.Type) -> None:
        super().__init__(dmm, fe_type, v16i)


def splat_value(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """IR of a vector whose lanes all hold ``scalar``."""
    vector = ir.VectorType(scalar.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, i32(0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(v16i, None))


def load_value(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """IR that loads ``kind`` from an address without assuming alignment."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def store_value(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """IR that stores ``value`` at an address without assuming alignment."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def call_llvm(
    builder: ir.IRBuilder, name: str, result: ir.Type, arguments: list[ir.Value]
) -> ir.Value:
    """IR that calls a function or LLVM intrinsic by name."""
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(result, [a.type for a in arguments])
        function = ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)


def define(result: types.Type, *arguments: types.Type) -> Callable:
    """Make a function for kernels from ``emit(builder, *values) -> value``."""
    names = ["typingctx", *(f"a{i}" for i in range(len(arguments)))]
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in names]

    def wrap(emit: Callable) -> Callable:
        def code(context, builder, _signature, values):
            value = emit(builder, *values)
            return context.get_dummy_value() if result == types.void else value

        def declare(typingctx, *_types):
            return result(*arguments), code

        declare.__name__, declare.__doc__ = emit.__name__, emit.__doc__
        declare.__signature__ = inspect.Signature(parameters)
        return intrinsic(declare)

    return wrap


@define(floats, types.int64)
def load(builder, address):
    """16 float32 from an address."""
    return load_value(builder, address, v16f)


@define(ints, types.int64)
def load_words(builder, address):
    """16 int32 from an address."""
    return load_value(builder, address, v16i)


@define(types.void, types.int64, floats)
def store(builder, address, value):
    """16 float32 to an address."""
    store_value(builder, address, value)


@define(types.void, types.int64, ints)
def store_words(builder, address, value):
    """16 int32 to an address."""
    store_value(builder, address, value)


@define(floats, types.int64)
def load_bfloat16(builder, address):
    """16 bfloat16 from an address, widened."""
    wide = builder.zext(load_value(builder, address, v16h), v16i)
    return builder.bitcast(builder.shl(wide, splat_value(builder, i32(16))), v16f)


@define(floats, types.int64)
def broadcast(builder, address):
    """One float32 from an address in all lanes."""
    return splat_value(builder, load_value(builder, address, f32))


@define(floats, types.float32)
def splat(builder, scalar):
    """One float32 in all lanes."""
    return splat_value(builder, scalar)


@define(types.int32, types.int64)
def load_word(builder, address):
    """One int32 from an address."""
    return load_value(builder, address, i32)


@define(types.void, types.int64, types.int32)
def store_word(builder, address, value):
    """One int32 to an address."""
    store_value(builder, address, value)


@define(types.int16, types.int64)
def load_half(builder, address):
    """One int16, or the bits of a bfloat16, from an address."""
    return load_value(builder, address, ir.IntType(16))


@define(types.void, types.int64, types.int16)
def store_half(builder, address, value):
    """One int16 to an address."""
    store_value(builder, address, value)


@define(types.float32, types.int64)
def load_scalar(builder, address):
    """One float32 from an address."""
    return load_value(builder, address, f32)


@define(types.float32, types.int64)
def load_scalar_bfloat16(builder, address):
    """One bfloat16 from an address, widened."""
    wide = builder.zext(load_value(builder, address, ir.IntType(16)), i32)
    return builder.bitcast(builder.shl(wide, i32(16)), f32)


@define(types.void, types.int64, types.float32)
def store_scalar(builder, address, value):
    """One float32 to an address."""
    store_value(builder, address, value)


@define(types.int64, types.int64)
def load_int(builder, address):
    """One int64 from an address."""
    return load_value(builder, address, i64)


@define(floats, floats, floats, floats)
def fma(builder, a, b, c):
    """a * b + c, rounded once."""
    return call_llvm(builder, "llvm.fma.v16f32", v16f, [a, b, c])


@define(floats, floats, floats)
def maximum(builder, a, b):
    """The larger of each lane."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@define(floats, floats)
def square_root(builder, a):
    """Square root of each lane."""
    return call_llvm(builder, "llvm.sqrt.v16f32", v16f, [a])


@define(floats, floats)
def exp(builder, x):
    """e to the power of each lane within 2 units in the last place; 0 below -87."""

    def const(value):
        return splat_value(builder, f32(value))

    power = call_llvm(builder, "llvm.rint.v16f32", v16f, [builder.fmul(x, const(1.44269504))])
    r = call_llvm(builder, "llvm.fma.v16f32", v16f, [power, const(-0.693359375), x])
    r = call_llvm(builder, "llvm.fma.v16f32", v16f, [power, const(2.12194440e-4), r])
    poly = const(1.9875691500e-4)
    for coefficient in _EXP_POLYNOMIAL:
        poly = call_llvm(builder, "llvm.fma.v16f32", v16f, [poly, r, const(coefficient)])
    poly = call_llvm(builder, "llvm.fma.v16f32", v16f, [poly, builder.fmul(r, r), r])
    poly = builder.fadd(poly, const(1.0))
    biased = builder.add(builder.fptosi(power, v16i), splat_value(builder, i32(127)))
    scale = builder.bitcast(builder.shl(biased, splat_value(builder, i32(23))), v16f)
    tiny = builder.fcmp_ordered("<", x, const(-87.0))
    return builder.select(tiny, const(0.0), builder.fmul(poly, scale))


_EXP_POLYNOMIAL = (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 0.16666665459, 0.50000001201)


def _rounded_bits(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Bits of float32 lanes whose upper half is the nearest bfloat16, ties to even."""
    pattern = builder.bitcast(value, v16i)
    odd = builder.and_(builder.lshr(pattern, _each(16)), _each(1))
    return builder.add(pattern, builder.add(odd, _each(0x7FFF)))


@define(types.int32, types.float32, types.float32)
def pack_scalars(builder, low, high):
    """Two float32 as bfloat16 side by side, ``low`` in the lower half."""
    rounded = []
    for value in (low, high):
        pattern = builder.bitcast(value, i32)
        odd = builder.and_(builder.lshr(pattern, i32(16)), i32(1))
        rounded.append(builder.add(pattern, builder.add(odd, i32(0x7FFF))))
    return builder.or_(builder.lshr(rounded[0], i32(16)), builder.and_(rounded[1], i32(-65536)))


def _each(value: int) -> ir.Constant:
    return ir.Constant(v16i, [value] * LANES)


@define(ints, floats, floats)
def pack_pair(builder, low, high):
    """Two features as bfloat16 side by side in each lane, ``low`` in the lower half."""
    low_half = builder.lshr(_rounded_bits(builder, low), _each(16))
    return builder.or_(low_half, builder.and_(_rounded_bits(builder, high), _each(-65536)))


@define(floats, types.int64, types.int64, types.int64, floats)
def keep_between(builder, lane_zero, low, high, value):
    """``value`` where low <= lane_zero + lane < high, else minus infinity."""
    lanes = ir.Constant(ir.VectorType(i64, LANES), list(range(LANES)))
    at = builder.add(splat_value(builder, lane_zero), lanes)
    inside = builder.and_(
        builder.icmp_signed(">=", at, splat_value(builder, low)),
        builder.icmp_signed("<", at, splat_value(builder, high)),
    )
    return builder.select(inside, value, splat_value(builder, f32(float("-inf"))))


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


@define(types.void, types.int64, types.int64)
def prefetch(builder, address, num_lines):
    """Fetch ``num_lines`` cache lines that are needed soon into the second-level cache."""
    with cgutils.for_range(builder, num_lines) as loop:
        at = builder.add(address, builder.mul(loop.index, i64(64)))
        pointer = builder.inttoptr(at, ir.IntType(8).as_pointer())
        arguments = [pointer, i32(0), i32(2), i32(1)]
        call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), arguments)


def _overload_operator(symbol: Callable, name: str) -> None:
    @define(floats, floats, floats)
    def operation(builder, a, b):
        return getattr(builder, name)(a, b)

    @overload(symbol)
    def choose(a, b):
        if isinstance(a, Float32x16) and isinstance(b, Float32x16):
            return lambda a, b: operation(a, b)
        return None


for _symbol, _name in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _overload_operator(_symbol, _name)
