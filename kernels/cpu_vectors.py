"""Vectors of float32 for kernels on CPUs that numba compiles.

numba (Lam, Pitrou and Seibert 2015) compiles Python to machine code through LLVM. Its loops are
vectorized as LLVM sees fit; the types here say which values are in a register instead: a vector of
`LANES` numbers, and a tile of vectors that are summed in registers. Each function below is one LLVM
instruction or a few. Addresses are int64, in bytes; nothing is checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

#: Numbers in a vector, and rows of the largest tile: what fits into the registers of AVX-512 (32 of
#: 64 bytes), or into the registers of AVX2 and of processors of other makes (16 of 32 bytes).
HAS_AVX512 = bool(binding.get_host_cpu_features().get("avx512f"))
LANES = 16 if HAS_AVX512 else 8
VECTOR_BYTES = LANES * 4

_F32, _I8, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FLOATS = ir.VectorType(_F32, LANES)
_INTEGERS = ir.VectorType(_I32, LANES)
_BYTES = ir.VectorType(_I8, LANES)


class _Vector(types.Type):
    """A vector in a register; `values` is its LLVM type."""

    def __init__(self, name: str, values: Any):
        self.values = values
        super().__init__(name)


class _Tile(types.Type):
    """`rows` pairs of vectors."""

    def __init__(self, rows: int):
        self.rows = rows
        self.values = ir.ArrayType(_FLOATS, 2 * rows)
        super().__init__(f"tile_of_{rows}")


@register_model(_Vector)
@register_model(_Tile)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any):
        super().__init__(manager, kind, kind.values)


floats = _Vector("floats", _FLOATS)
integers = _Vector("integers", _INTEGERS)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _splat(builder: Any, value: Any) -> Any:
    """Returns a vector with a float32 in all lanes."""
    none = ir.Constant(_FLOATS, ir.Undefined)
    first = builder.insert_element(none, value, _I32(0))
    return builder.shuffle_vector(first, none, ir.Constant(_INTEGERS, [0] * LANES))


def _multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return builder.call(function, [x, y, z])


def _each_lane(value: int) -> Any:
    return ir.Constant(_INTEGERS, [value] * LANES)


@intrinsic
def load(context, address):
    """Returns the vector at an address."""

    def emit(context, builder, signature, given):
        return builder.load(_pointer(builder, given[0], _FLOATS), align=4)

    return floats(types.int64), emit


@intrinsic
def store(context, address, vector):
    """Writes a vector to an address."""

    def emit(context, builder, signature, given):
        builder.store(given[1], _pointer(builder, given[0], _FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, floats), emit


@intrinsic
def load_bytes(context, address):
    """Returns the unsigned bytes at an address, one in each lane."""

    def emit(context, builder, signature, given):
        loaded = builder.load(_pointer(builder, given[0], _BYTES), align=1)
        return builder.zext(loaded, _INTEGERS)

    return integers(types.int64), emit


@intrinsic
def load_signed(context, address):
    """Returns the signed bytes at an address as float32."""

    def emit(context, builder, signature, given):
        loaded = builder.load(_pointer(builder, given[0], _BYTES), align=1)
        return builder.sitofp(builder.sext(loaded, _INTEGERS), _FLOATS)

    return floats(types.int64), emit


@intrinsic
def low_bits(context, vector):
    """Returns the low four bits of each lane as float32."""

    def emit(context, builder, signature, given):
        return builder.sitofp(builder.and_(given[0], _each_lane(15)), _FLOATS)

    return floats(integers), emit


@intrinsic
def high_bits(context, vector):
    """Returns the bits above the low four of each lane as float32."""

    def emit(context, builder, signature, given):
        return builder.sitofp(builder.lshr(given[0], _each_lane(4)), _FLOATS)

    return floats(integers), emit


@intrinsic
def broadcast(context, value):
    """Returns a vector with a float32 in all lanes."""

    def emit(context, builder, signature, given):
        return _splat(builder, given[0])

    return floats(types.float32), emit


@intrinsic
def multiply_add(context, x, y, z):
    """Returns x * y + z, rounded once."""

    def emit(context, builder, signature, given):
        return _multiply_add(builder, *given)

    return floats(floats, floats, floats), emit


@intrinsic
def add(context, x, y):
    """Returns x + y."""

    def emit(context, builder, signature, given):
        return builder.fadd(*given)

    return floats(floats, floats), emit


@intrinsic
def multiply(context, x, y):
    """Returns x * y."""

    def emit(context, builder, signature, given):
        return builder.fmul(*given)

    return floats(floats, floats), emit


@intrinsic
def divide(context, x, y):
    """Returns x / y."""

    def emit(context, builder, signature, given):
        return builder.fdiv(*given)

    return floats(floats, floats), emit


@intrinsic
def lower_of(context, x, y):
    """Returns the lower of x and y in each lane, y if either is NaN."""

    def emit(context, builder, signature, given):
        return builder.select(builder.fcmp_ordered("<", *given), *given)

    return floats(floats, floats), emit


@intrinsic
def higher_of(context, x, y):
    """Returns the higher of x and y in each lane, y if either is NaN."""

    def emit(context, builder, signature, given):
        return builder.select(builder.fcmp_ordered(">", *given), *given)

    return floats(floats, floats), emit


@intrinsic
def subtract(context, x, y):
    """Returns x - y."""

    def emit(context, builder, signature, given):
        return builder.fsub(*given)

    return floats(floats, floats), emit


@intrinsic
def power_of_two(context, x):
    """Returns 2 ** n for x = 1.5 * 2 ** 23 + n, which holds the whole number n, -126 to 127, in its
    lowest bits."""

    def emit(context, builder, signature, given):
        exponent = builder.add(builder.bitcast(given[0], _INTEGERS), _each_lane(127))
        return builder.bitcast(builder.shl(exponent, _each_lane(23)), _FLOATS)

    return floats(floats), emit


@intrinsic
def sum_lanes(context, x):
    """Returns the sum of the lanes, added in pairs."""

    def emit(context, builder, signature, given):
        kind = ir.FunctionType(_F32, [_F32, _FLOATS])
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, [_F32(0.0), given[0]], fastmath=("reassoc",))

    return types.float32(floats), emit


@intrinsic(prefer_literal=True)
def zero_tile(context, rows):
    """Returns a tile of zeros; `rows` is known at compile time."""
    tile = _Tile(rows.literal_value)

    def emit(context, builder, signature, given):
        return ir.Constant(tile.values, [ir.Constant(_FLOATS, [0.0] * LANES)] * (2 * tile.rows))

    return tile(rows), emit


@intrinsic
def add_outer(context, tile, first, second, x, stride):
    """Returns a tile with x[row] * first added to the first vector of each row, and x[row] * second
    to its second; the float32 of the rows are `stride` bytes apart, from the address x on."""

    def emit(context, builder, signature, given):
        sums, *weights, address, stride = given
        for row in range(tile.rows):
            value = _splat(builder, builder.load(_pointer(builder, address, _F32), align=4))
            for place, weight in enumerate(weights, 2 * row):
                total = _multiply_add(builder, weight, value, builder.extract_value(sums, place))
                sums = builder.insert_value(sums, total, place)
            address = builder.add(address, stride)
        return sums

    return tile(tile, floats, floats, types.int64, types.int64), emit


@intrinsic
def store_tile(context, address, tile):
    """Writes a tile, row after row."""

    def emit(context, builder, signature, given):
        address, sums = given
        for place in range(2 * tile.rows):
            part = builder.add(address, _I64(place * VECTOR_BYTES))
            vector = builder.extract_value(sums, place)
            builder.store(vector, _pointer(builder, part, _FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, tile), emit


@intrinsic
def load_integer(context, address):
    """Returns the int64 at an address."""

    def emit(context, builder, signature, given):
        return builder.load(_pointer(builder, given[0], _I64), align=8)

    return types.int64(types.int64), emit


@intrinsic
def store_integer(context, address, value):
    """Writes an int64 to an address."""

    def emit(context, builder, signature, given):
        builder.store(given[1], _pointer(builder, given[0], _I64), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def load_short(context, address):
    """Returns the int32 at an address as int64."""

    def emit(context, builder, signature, given):
        loaded = builder.load(_pointer(builder, given[0], _I32), align=4)
        return builder.sext(loaded, _I64)

    return types.int64(types.int64), emit


@intrinsic
def store_number(context, address, value):
    """Writes a float32 to an address."""

    def emit(context, builder, signature, given):
        builder.store(given[1], _pointer(builder, given[0], _F32), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), emit


@intrinsic
def load_number(context, address):
    """Returns the float32 at an address."""

    def emit(context, builder, signature, given):
        return builder.load(_pointer(builder, given[0], _F32), align=4)

    return types.float32(types.int64), emit


@njit
def exponential(x):
    """Returns exp(x) of a vector, from exp(-87) to exp(87), as in the Cephes library (Moshier
    1992): within two units in the last place; NaN stays NaN."""
    x = higher_of(broadcast(np.float32(-87.0)), lower_of(broadcast(np.float32(87.0)), x))
    bias = broadcast(np.float32(12582912.0))
    shifted = multiply_add(x, broadcast(np.float32(1.44269504)), bias)
    power = subtract(shifted, bias)
    rest = multiply_add(power, broadcast(np.float32(-0.693359375)), x)
    rest = multiply_add(power, broadcast(np.float32(2.12194440e-4)), rest)
    terms = broadcast(np.float32(1.9875691500e-4))
    terms = multiply_add(terms, rest, broadcast(np.float32(1.3981999507e-3)))
    terms = multiply_add(terms, rest, broadcast(np.float32(8.3334519073e-3)))
    terms = multiply_add(terms, rest, broadcast(np.float32(4.1665795894e-2)))
    terms = multiply_add(terms, rest, broadcast(np.float32(1.6666665459e-1)))
    terms = multiply_add(terms, rest, broadcast(np.float32(5.0000001201e-1)))
    terms = multiply_add(terms, multiply(rest, rest), rest)
    return multiply(add(terms, broadcast(np.float32(1.0))), power_of_two(shifted))
