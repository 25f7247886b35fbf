"""The activations of `few_rows_float8` in shared memory: float16, each row times the power of two
that brings its largest magnitude to 2^14 .. 2^15.

A row of bfloat16 may lie beyond the range of float16; so scaled, its largest values keep all of
their bits. An RMSNorm is applied on the way: its weight to the values, its factor to the sums.
"""
# ruff: noqa: N803, N806, RUF005  (compile-time constants are written in capitals; Triton does not
# unpack tuples)

from __future__ import annotations

from aioinfer.kernels.quantize import GROUP
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

#: Inputs of a warp's step: those that share a scale of blocks.
CHUNK = gl.constexpr(GROUP)
#: Steps times rows of x that are kept in registers while they are measured.
KEPT = gl.constexpr(8)


@gluon.constexpr_function
def _staging_layout(warps):
    """The layout [1, rows, warps * CHUNK] in which x is read and written to shared memory."""
    return gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, 1, warps], [2, 1, 0])


@gluon.jit
def _load_step(place, STEP: gl.constexpr, WARPS: gl.constexpr, INPUTS: gl.constexpr):
    """Returns the inputs of a step, zeros beyond the last."""
    WIDTH: gl.constexpr = WARPS * CHUNK
    if (STEP + 1) * WIDTH > INPUTS:
        layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, _staging_layout(WARPS)))
        k = gl.arange(0, WIDTH, layout)[None, None, :]
        value = gl.load(place + STEP * WIDTH, STEP * WIDTH + k < INPUTS, 0.0)
    else:
        value = gl.load(place + STEP * WIDTH)
    return value


@gluon.jit
def load_row(row, STEPS: gl.constexpr, WARPS: gl.constexpr, INPUTS: gl.constexpr):
    """Returns the steps of a row [K] as a tuple."""
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, _staging_layout(WARPS)))
    place = row + gl.arange(0, WARPS * CHUNK, layout)[None, None, :]
    values = ()
    for step in gl.static_range(STEPS):
        values = values + (_load_step(place, step, WARPS, INPUTS),)
    return values


@gluon.jit
def _fold(parts, MAXIMUM: gl.constexpr):
    """Returns the maxima or the sums over a tuple of tensors."""
    total = parts[0]
    for index in gl.static_range(1, len(parts)):
        total = gl.maximum(total, parts[index]) if MAXIMUM else total + parts[index]
    return total


@gluon.jit
def _maximum_and_sum(maximum, total, other_maximum, other_total):
    return gl.maximum(maximum, other_maximum), total + other_total


@gluon.jit
def _measure(
    place, norms, INPUTS: gl.constexpr, STEPS: gl.constexpr, ROWS: gl.constexpr,
    WARPS: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    """Returns the largest magnitude of each row of x (times the weight of the norm), and its sum of
    squares without that weight, [1, ROWS]; and x, as a tuple of steps."""
    of_row: gl.constexpr = gl.SliceLayout(2, _staging_layout(WARPS))
    OWN: gl.constexpr = [1, ROWS, WARPS * CHUNK // 4, 4]  # a thread's inputs are summed first
    values = ()
    sizes = ()
    sums = ()
    for step in gl.static_range(STEPS):
        value = _load_step(place, step, WARPS, INPUTS).to(gl.float32)
        if HAS_NORM:
            sums = sums + (gl.sum((value * value).reshape(OWN), 3),)
            value = value * norms[step].to(gl.float32)
        sizes = sizes + (gl.max(gl.abs(value).reshape(OWN), 3),)
        values = values + (value,)
    own_largest = _fold(sizes, True)
    if HAS_NORM:
        largest, squares = gl.reduce((own_largest, _fold(sums, False)), 2, _maximum_and_sum)
        squares = gl.convert_layout(squares, of_row, assert_trivial=True)
    else:
        largest = gl.max(own_largest, 2)
        squares = gl.zeros([1, ROWS], gl.float32, of_row)
    largest = gl.convert_layout(largest, of_row, assert_trivial=True)
    return largest, squares, values


@gluon.jit
def stage_x(
    x, norms, x_smem, rows, x_stride, eps, INPUTS: gl.constexpr, STEPS: gl.constexpr,
    ROWS: gl.constexpr, WARPS: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    """Writes x to shared memory as float16, each row times a power of two; returns the factors by
    which to multiply the sums, [1, 1, 8]."""
    layout: gl.constexpr = _staging_layout(WARPS)
    k = gl.arange(0, WARPS * CHUNK, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    place = x + (gl.minimum(row, rows - 1) * x_stride + k)
    largest, squares, values = _measure(place, norms, INPUTS, STEPS, ROWS, WARPS, HAS_NORM)
    # 2^14 .. 2^15 once multiplied; both factors are normal numbers
    exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 15)
    scale = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    for step in gl.static_range(STEPS):
        value = values[step]
        if STEPS * ROWS > KEPT:  # more than the registers hold: read again
            value = _load_step(place, step, WARPS, INPUTS).to(gl.float32)
            if HAS_NORM:
                value = value * norms[step].to(gl.float32)
        x_smem[step].store((value * scale[:, :, None]).to(gl.float16))
    factor = ((exponent - 14) << 23).to(gl.float32, bitcast=True)
    if HAS_NORM:
        factor = factor * gl.rsqrt(squares / INPUTS + eps)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    by_column: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, mma))
    factor = factor.broadcast_to([8 // ROWS, ROWS]).reshape([8])
    return gl.convert_layout(factor, by_column)[None, None, :]


@gluon.jit
def allocate_x(STEPS: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Returns a buffer for each step, so that no barrier is put between writing one and the
    next."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 2 if ROWS > 1 else 1, [2, 1, 0])
    buffers = ()
    for _ in gl.static_range(STEPS):
        buffer = gl.allocate_shared_memory(gl.float16, [1, ROWS, WARPS * CHUNK], layout)
        buffers = buffers + (buffer,)
    return buffers
