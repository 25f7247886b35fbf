"""Products with quantized weights on CPUs, compiled by numba: integers of 4 or 8 bits with a scale
and an offset for each group of inputs, float32 activations, float32 sums.

Output features lie side by side in vectors (`cpu_vectors`), two of which, a pair of panels, are
computed together. Every output is one sum over the inputs, from the first to the last:

    weight = round(integer * scale + offset);  sum = round(weight * x + sum)

so the result for a row is the same, bit for bit, whatever other rows there are, however many
threads, and whichever of the loops below computes it: for up to four rows integers become weights
in registers, for more they are written to a scratch panel that stays in the second-level cache
while tiles of rows are multiplied with it. A norm before, and SiLU of the gate, a bias or a
residual sum behind the product go with it.

Products are described by a task in memory (`Task`, `Segment`), so that a call takes one address.
"""

from __future__ import annotations

import enum
from functools import cache
from typing import Any

import numpy as np
from aioinfer.kernels.cpu_team import Compiled, fetch_add, own_scratch, run_task
from aioinfer.kernels.cpu_vectors import (
    HAS_AVX512,
    LANES,
    VECTOR_BYTES,
    add,
    add_outer,
    broadcast,
    divide,
    exponential,
    high_bits,
    load,
    load_bytes,
    load_integer,
    load_number,
    load_signed,
    low_bits,
    multiply,
    multiply_add,
    store,
    store_tile,
    sum_lanes,
    zero_tile,
)
from numba import njit

#: Output features of a pair of panels.
PAIR = 2 * LANES
#: Rows of the largest tile.
_MOST = 12 if HAS_AVX512 else 6
#: Up to so many rows, integers become weights in registers.
_DIRECT_ROWS = 4
#: Bytes of a thread's scratch memory before its panel: a tile of sums.
TILE_BYTES = _MOST * 2 * VECTOR_BYTES


class Task(enum.IntEnum):
    """Indices into the description of a product, int64 each; strides are in bytes.

    Fields that change from call to call come first.
    """

    ROWS = 0
    X = enum.auto()  # float32 [rows, inputs]
    Y = enum.auto()  # float32 [rows, outputs]
    X_STRIDE = enum.auto()
    Y_STRIDE = enum.auto()
    FLAGS = enum.auto()
    BIAS = enum.auto()  # float32 [outputs], or 0
    NORM = enum.auto()  # the weight of an RMSNorm of x, float32 [inputs], or 0
    EPS = enum.auto()  # of the norm: the bits of a float32
    NORMED = enum.auto()  # float32 [rows, inputs], for the normed x
    SCRATCH = enum.auto()  # of all threads
    THREADS = enum.auto()
    # fields that stay
    CHUNK = enum.auto()  # pairs that a thread takes at a time
    SCRATCH_STRIDE = enum.auto()  # of a thread
    TEAM = enum.auto()  # the address of the team, where there are several threads
    BODY = enum.auto()  # the address of `Compiled.work`
    INPUTS = enum.auto()
    PAIRS = enum.auto()  # of all segments
    SEGMENTS = enum.auto()  # the address of the first segment
    NEXT = enum.auto()  # the next pair that no thread has taken
    ARRIVED = enum.auto()  # threads that have begun


class Segment(enum.IntEnum):
    """Indices into the description of a part of a weight, int64 each."""

    END = 0  # the number of its last pair of panels, plus 1
    BITS = enum.auto()  # 4, 8, or 32 for float32
    GROUP = enum.auto()  # inputs that share a scale
    INTEGERS = enum.auto()  # [pairs, 2, inputs * bits / 8, LANES]; or float32 [pairs, in, 2, LANES]
    SCALES = enum.auto()  # float32 [pairs, 2, groups, LANES]
    OFFSETS = enum.auto()  # likewise, or 0
    COLUMN = enum.auto()  # the first output
    STEP = enum.auto()  # from the outputs of a pair to the outputs of the next
    SECOND = enum.auto()  # from the outputs of a first panel to the outputs of the second


#: Flags: the result is added to y; it is silu(first panel) * second panel.
ADDS, GATES = 1, 2
# numba takes members of an enumeration for objects: plain numbers
_T = {place.name: 8 * place.value for place in Task}
_ROWS, _X, _Y, _X_STRIDE, _Y_STRIDE, _FLAGS, _BIAS, _NORM, _EPS, _NORMED = list(_T.values())[:10]
_SCRATCH, _THREADS, _CHUNK, _SCRATCH_STRIDE, _TEAM, _BODY = list(_T.values())[10:16]
_INPUTS, _PAIRS, _SEGMENTS, _NEXT, _ARRIVED = list(_T.values())[16:]
_S = {place.name: 8 * place.value for place in Segment}
_END, _BITS, _GROUP, _INTEGERS, _SCALES, _OFFSETS, _COLUMN, _STEP, _SECOND = _S.values()
_SEGMENT_BYTES = 8 * len(Segment)
#: The fields that `run_task` reads.
_WORK = (_THREADS, _TEAM, _BODY, _ARRIVED, _NEXT)


@njit
def _silu(x):
    """Returns x / (1 + exp(-x)) of a vector."""
    minus = multiply(x, broadcast(np.float32(-1.0)))
    return divide(x, add(exponential(minus), broadcast(np.float32(1.0))))


@njit
def _norm_rows(task):
    """Writes the RMSNorm of each row of x to the normed rows."""
    inputs, rows = load_integer(task + _INPUTS), load_integer(task + _ROWS)
    weight, eps = load_integer(task + _NORM), load_number(task + _EPS)
    out = load_integer(task + _NORMED)
    for row in range(rows):
        x = load_integer(task + _X) + row * load_integer(task + _X_STRIDE)
        squares = broadcast(np.float32(0.0))
        for place in range(0, 4 * inputs, VECTOR_BYTES):
            part = load(x + place)
            squares = multiply_add(part, part, squares)
        mean = sum_lanes(squares) / np.float32(inputs)
        scale = broadcast(np.float32(1.0) / np.sqrt(mean + eps))
        for place in range(0, 4 * inputs, VECTOR_BYTES):
            store(out + place, multiply(multiply(load(x + place), scale), load(weight + place)))
        out += 4 * inputs


def _make_direct_4(rows: int) -> Any:
    @njit
    def product(integers, scales, offsets, inputs, group, x, stride, tile):
        """Sums of a few rows over a pair of panels of 4 bits, written to the tile."""
        sums = zero_tile(rows)
        panel = inputs * LANES // 2
        groups = inputs // group * VECTOR_BYTES
        for _ in range(inputs // group):
            scale, other_scale = load(scales), load(scales + groups)
            offset, other_offset = load(offsets), load(offsets + groups)
            for _ in range(group // 2):
                first, second = load_bytes(integers), load_bytes(integers + panel)
                sums = add_outer(sums, multiply_add(low_bits(first), scale, offset),
                                 multiply_add(low_bits(second), other_scale, other_offset),
                                 x, stride)  # fmt: skip
                sums = add_outer(sums, multiply_add(high_bits(first), scale, offset),
                                 multiply_add(high_bits(second), other_scale, other_offset),
                                 x + 4, stride)  # fmt: skip
                integers += LANES
                x += 8
            scales += VECTOR_BYTES
            offsets += VECTOR_BYTES
        store_tile(tile, sums)

    return product


def _make_direct_8(rows: int) -> Any:
    @njit
    def product(integers, scales, offsets, inputs, group, x, stride, tile):
        """Sums of a few rows over a pair of panels of 8 bits, written to the tile."""
        sums = zero_tile(rows)
        panel = inputs * LANES
        groups = inputs // group * VECTOR_BYTES
        offset = other_offset = broadcast(np.float32(0.0))
        for number in range(inputs // group):
            place = number * VECTOR_BYTES
            scale, other_scale = load(scales + place), load(scales + place + groups)
            if offsets:
                offset, other_offset = load(offsets + place), load(offsets + place + groups)
            for _ in range(group):
                sums = add_outer(sums, multiply_add(load_signed(integers), scale, offset),
                                 multiply_add(load_signed(integers + panel), other_scale,
                                              other_offset),
                                 x, stride)  # fmt: skip
                integers += LANES
                x += 4
        store_tile(tile, sums)

    return product


def _make_product(rows: int) -> Any:
    @njit
    def product(weights, inputs, x, stride, tile):
        """Sums of some rows over a pair of panels of float32 [inputs, 2, LANES]."""
        sums = zero_tile(rows)
        for _ in range(inputs):
            sums = add_outer(sums, load(weights), load(weights + VECTOR_BYTES), x, stride)
            weights += 2 * VECTOR_BYTES
            x += 4
        store_tile(tile, sums)

    return product


_direct_4_1, _direct_4_2, _direct_4_4 = (_make_direct_4(rows) for rows in (1, 2, 4))
_direct_8_1, _direct_8_2, _direct_8_4 = (_make_direct_8(rows) for rows in (1, 2, 4))
_product_1, _product_2, _product_4, _product_most = (
    _make_product(rows) for rows in (1, 2, 4, _MOST)
)


@njit
def _unpack_4(integers, scales, offsets, inputs, group, out):
    """Writes the weights of a pair of panels of 4 bits, float32 [inputs, 2, LANES]."""
    panel = inputs * LANES // 2
    groups = inputs // group * VECTOR_BYTES
    for _ in range(inputs // group):
        scale, other_scale = load(scales), load(scales + groups)
        offset, other_offset = load(offsets), load(offsets + groups)
        for _ in range(group // 2):
            first, second = load_bytes(integers), load_bytes(integers + panel)
            store(out, multiply_add(low_bits(first), scale, offset))
            store(out + VECTOR_BYTES, multiply_add(low_bits(second), other_scale, other_offset))
            out += 2 * VECTOR_BYTES
            store(out, multiply_add(high_bits(first), scale, offset))
            store(out + VECTOR_BYTES, multiply_add(high_bits(second), other_scale, other_offset))
            out += 2 * VECTOR_BYTES
            integers += LANES
        scales += VECTOR_BYTES
        offsets += VECTOR_BYTES


@njit
def _unpack_8(integers, scales, offsets, inputs, group, out):
    """Writes the weights of a pair of panels of 8 bits, float32 [inputs, 2, LANES]."""
    panel = inputs * LANES
    groups = inputs // group * VECTOR_BYTES
    offset = other_offset = broadcast(np.float32(0.0))
    for number in range(inputs // group):
        place = number * VECTOR_BYTES
        scale, other_scale = load(scales + place), load(scales + place + groups)
        if offsets:
            offset, other_offset = load(offsets + place), load(offsets + place + groups)
        for _ in range(group):
            store(out, multiply_add(load_signed(integers), scale, offset))
            other = multiply_add(load_signed(integers + panel), other_scale, other_offset)
            store(out + VECTOR_BYTES, other)
            out += 2 * VECTOR_BYTES
            integers += LANES


@njit
def _write(task, tile, rows, y, second, bias):
    """Writes the sums of a tile to some rows of y, from the output on at which y points."""
    flags, stride = load_integer(task + _FLAGS), load_integer(task + _Y_STRIDE)
    for _ in range(rows):
        first, other = load(tile), load(tile + VECTOR_BYTES)
        if flags & GATES:
            store(y, multiply(_silu(first), other))
        else:
            if bias:
                first, other = add(first, load(bias)), add(other, load(bias + second))
            if flags & ADDS:
                first, other = add(load(y), first), add(load(y + second), other)
            store(y, first)
            store(y + second, other)
        tile += 2 * VECTOR_BYTES
        y += stride


@njit
def _multiply_pair(task, pair, scratch):
    """Computes all rows of a pair of panels."""
    segment, first = load_integer(task + _SEGMENTS), 0
    while pair >= load_integer(segment + _END):
        first = load_integer(segment + _END)
        segment += _SEGMENT_BYTES
    place = pair - first
    inputs, rows = load_integer(task + _INPUTS), load_integer(task + _ROWS)
    bits, group = load_integer(segment + _BITS), load_integer(segment + _GROUP)
    integers = load_integer(segment + _INTEGERS) + place * PAIR * inputs * bits // 8
    scales, offsets = load_integer(segment + _SCALES), load_integer(segment + _OFFSETS)
    if bits < 32:
        scales += place * 4 * PAIR * (inputs // group)
        if offsets:
            offsets += place * 4 * PAIR * (inputs // group)
    column = 4 * (load_integer(segment + _COLUMN) + place * load_integer(segment + _STEP))
    second, bias = 4 * load_integer(segment + _SECOND), load_integer(task + _BIAS)
    if bias:
        bias += column
    stride, y_stride = load_integer(task + _X_STRIDE), load_integer(task + _Y_STRIDE)
    x, y = load_integer(task + _X), load_integer(task + _Y) + column
    if load_integer(task + _NORM):
        x, stride = load_integer(task + _NORMED), 4 * inputs
    weights = integers
    is_direct = bits < 32 and rows <= _DIRECT_ROWS
    if bits < 32 and not is_direct:
        weights = scratch + TILE_BYTES
        if bits == 4:
            _unpack_4(integers, scales, offsets, inputs, group, weights)
        else:
            _unpack_8(integers, scales, offsets, inputs, group, weights)
    while rows:
        count = _tile_rows(rows)
        if not is_direct:
            if count == _MOST:
                _product_most(weights, inputs, x, stride, scratch)
            elif count == 4:
                _product_4(weights, inputs, x, stride, scratch)
            elif count == 2:
                _product_2(weights, inputs, x, stride, scratch)
            else:
                _product_1(weights, inputs, x, stride, scratch)
        elif bits == 4:
            if count == 4:
                _direct_4_4(integers, scales, offsets, inputs, group, x, stride, scratch)
            elif count == 2:
                _direct_4_2(integers, scales, offsets, inputs, group, x, stride, scratch)
            else:
                _direct_4_1(integers, scales, offsets, inputs, group, x, stride, scratch)
        elif count == 4:
            _direct_8_4(integers, scales, offsets, inputs, group, x, stride, scratch)
        elif count == 2:
            _direct_8_2(integers, scales, offsets, inputs, group, x, stride, scratch)
        else:
            _direct_8_1(integers, scales, offsets, inputs, group, x, stride, scratch)
        _write(task, scratch, count, y, second, bias)
        rows -= count
        x += count * stride
        y += count * y_stride


@njit
def _tile_rows(rows):
    """Returns the rows of the next tile, of so many that are left."""
    if rows >= _MOST:
        return _MOST
    if rows >= 4:
        return 4
    return 2 if rows >= 2 else 1


def _work(task):
    """One thread's part of a product: takes pairs of panels until none is left."""
    stride = load_integer(task + _SCRATCH_STRIDE)
    scratch = own_scratch(task + _ARRIVED, load_integer(task + _SCRATCH), stride)
    pairs, chunk = load_integer(task + _PAIRS), load_integer(task + _CHUNK)
    first = fetch_add(task + _NEXT, chunk)
    while first < pairs:
        for pair in range(first, min(first + chunk, pairs)):
            _multiply_pair(task, pair, scratch)
        first = fetch_add(task + _NEXT, chunk)


def _run(task):
    """Computes a product."""
    if load_integer(task + _NORM):
        _norm_rows(task)
    run_task(task, _WORK)


@cache
def compile_kernel() -> Compiled:
    """Compiles the functions; see `compile_functions`."""
    return Compiled.compile("affine_product", _run, _work)
