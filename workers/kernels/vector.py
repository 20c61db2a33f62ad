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
from numba.extending import intrinsic, models, overload, register_model

from daskserve.workers.kernels.cpu import HAS_AVX512

LANES = 16


class _BFloat16(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


i32, i64, f32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
v16f, v16i, v16h = (ir.VectorType(t, LANES) for t in (f32, i32, ir.IntType(16)))
v32b = ir.VectorType(_BFloat16(), 2 * LANES)


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


def splat_value(builder: ir.IRBuilder, scalar: ir.Value, lanes: int = LANES) -> ir.Value:
    """IR of a vector whose lanes all hold ``scalar``."""
    vector, places = ir.VectorType(scalar.type, lanes), ir.VectorType(i32, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, i32(0))
    empty = ir.Constant(vector, ir.Undefined)
    return builder.shuffle_vector(first, empty, ir.Constant(places, None))


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


def loop(builder: ir.IRBuilder, count: ir.Value, carried: list[ir.Value]):
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


def prefetch_line(builder: ir.IRBuilder, address: ir.Value) -> None:
    """IR that fetches a cache line that is needed soon into the second-level cache."""
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    arguments = [pointer, i32(0), i32(2), i32(1)]
    call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), arguments)


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


@define(types.void, types.int64, floats)
def store(builder, address, value):
    """16 float32 to an address."""
    store_value(builder, address, value)


@define(types.void, types.int64, ints)
def store_words(builder, address, value):
    """16 int32 to an address."""
    store_value(builder, address, value)


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
def exp2(builder, x):
    """2 to the power of each lane; below -100 a number that adds nothing, and is no denormal."""

    def const(value):
        return splat_value(builder, f32(value))

    # Adding 1.5 * 2**23 rounds to a whole number, which stands in the low bits of the sum.
    magic = const(12582912.0)
    x = builder.select(builder.fcmp_ordered(">", x, const(-100.0)), x, const(-100.0))
    shifted = builder.fadd(x, magic)
    rest = builder.fsub(x, builder.fsub(shifted, magic))
    value = const(_EXP2_POLYNOMIAL[0])
    for coefficient in _EXP2_POLYNOMIAL[1:]:
        value = call_llvm(builder, "llvm.fma.v16f32", v16f, [value, rest, const(coefficient)])
    exponent = builder.shl(builder.bitcast(shifted, v16i), _each(23))
    return builder.bitcast(builder.add(builder.bitcast(value, v16i), exponent), v16f)


# Of 2**x on -0.5..0.5, fitted for the least relative error (2e-9), highest power first.
_EXP2_POLYNOMIAL = (
    *(1.534581097e-4, 1.33999309e-3, 9.618489072e-3, 5.550328642e-2),
    *(0.2402264625, 0.6931471825, 1.0),
)
LOG2_E = 1.4426950408889634


@define(floats, floats)
def reciprocal(builder, x):
    """1 / x of each lane, to the last two bits or so."""
    if not HAS_AVX512:
        return builder.fdiv(splat_value(builder, f32(1.0)), x)
    everything = ir.IntType(16)(-1)
    arguments = [x, ir.Constant(v16f, None), everything]
    guess = call_llvm(builder, "llvm.x86.avx512.rcp14.ps.512", v16f, arguments)
    error = [builder.fneg(x), guess, splat_value(builder, f32(2.0))]
    return builder.fmul(guess, call_llvm(builder, "llvm.fma.v16f32", v16f, error))


def _each(value: int) -> ir.Constant:
    return ir.Constant(v16i, [value] * LANES)


def _fold(builder: ir.IRBuilder, vector: ir.Value, combine: Callable) -> ir.Value:
    """Combine all lanes of a vector into one number."""
    for distance in (8, 4, 2, 1):
        order = ir.Constant(v16i, [lane ^ distance for lane in range(LANES)])
        swapped = builder.shuffle_vector(vector, ir.Constant(v16f, ir.Undefined), order)
        vector = combine(vector, swapped)
    return builder.extract_element(vector, i32(0))


@define(types.float32, floats)
def highest_lane(builder, a):
    """The largest lane."""
    return _fold(builder, a, lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))


@define(types.float32, floats)
def sum_lanes(builder, a):
    """The sum of all lanes."""
    return _fold(builder, a, builder.fadd)


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
