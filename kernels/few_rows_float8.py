"""Linear layers with float8 weights for one to eight rows on Hopper GPUs, in Triton's Gluon dialect.

The alternative to `scaled_linear` for float8_e4m3 weights and 16-bit activations (`supports` says
which), whose time is that of reading the weights. The tensor cores multiply: the left operand of
`mma.sync.m16n8k16` is sixteen output features, its eight columns are the rows of x, repeated where
there are fewer. Both operands are float16: two weights are converted by one instruction, exactly,
and rows of x are scaled by powers of two that bring their largest magnitude to 2^14 .. 2^15.

Weights do not pass through shared memory. A sum over the inputs may be taken in any order, and so
the order of the inputs within the operands is one in which each thread's part are 16 neighbouring
bytes of memory: lane t of a quad reads inputs 16 t .. 16 t + 15 of 64, which are its four values in
each of four products. The warps of a program divide the inputs. Programs are persistent, keep x in
shared memory, and read the first weights of an output tile while the tile before is computed.
"""
# ruff: noqa: N803, N806, RUF005  (compile-time constants are written in capitals; Triton does not
# unpack tuples)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from aioinfer.kernels.activation import GATE_RUN
from aioinfer.kernels.linear import EARLY_TRIGGER_BYTES
from aioinfer.kernels.linear_arguments import check_linear
from aioinfer.kernels.norm import rms_norm
from aioinfer.kernels.quantize import GROUP
from aioinfer.kernels.scaled_linear import ScaledMatrix
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_ROWS = 8
TILE = 16  # output features of a tensor-core product
#: Inputs of a warp's step: those that share a scale of blocks.
CHUNK = gl.constexpr(GROUP)
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def _weight_layout(features, warps):
    """The layout [features, warps * CHUNK / 4] of words in which a thread reads 16 neighbouring
    bytes."""
    registers = [[0, 1], [0, 2], [0, 16], [8, 0]]
    registers += [[row, 0] for row in (16, 32) if row < features]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    over = [[0, 32 << bit] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, over, [], [features, warps * 32])


@gluon.constexpr_function
def _input_layout(rows, warps):
    """The layout [8 / rows, rows, warps * CHUNK] of x that fits `_weight_layout`."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 64]]
    lanes = [[0, 0, 16], [0, 0, 32]]
    lanes += [[0, bit, 0] if bit < rows else [bit // rows, 0, 0] for bit in (1, 2, 4)]
    over = [[0, 0, 128 << bit] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, over, [], [8 // rows, rows, warps * 128])


@gluon.jit
def _load_weights(
    place, scale_place, k, groups, wanted, STEP: gl.constexpr, INPUTS: gl.constexpr,
    FEATURES: gl.constexpr, WARPS: gl.constexpr, GROUPED: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """Returns the weights of a step as words, [FEATURES, WARPS * CHUNK / 4], and with scales of blocks theirs,
    [WARPS, FEATURES]."""
    WORDS: gl.constexpr = WARPS * CHUNK // 4
    if (STEP + 1) * WORDS * 4 > INPUTS:
        inside = (STEP * WORDS + k < INPUTS // 4)[None, :]
        if MASKED:
            inside = inside & wanted
        w = gl.load(place + STEP * WORDS, inside, 0)
    elif MASKED:
        w = gl.load(place + STEP * WORDS, wanted)
    else:
        w = gl.load(place + STEP * WORDS)
    loaded = (w,)
    if GROUPED:
        warp = gl.arange(0, WARPS, gl.SliceLayout(1, scale_place.type.layout))
        there = (STEP * WARPS + warp < groups)[:, None]
        if MASKED:
            there = there & wanted
        loaded = loaded + (gl.load(scale_place + STEP * WARPS, there, 0.0),)
    return loaded


@gluon.jit
def _to_float16(words):
    """Returns the four float8 numbers of each word [A, B] as float16, [A, B, 2, 2].

    Words, since the compiler carries single bytes through a loop in a register each.
    """
    first, second, third, fourth = gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .b32 lows, highs;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 lows, low;
        cvt.rn.f16x2.e4m3x2 highs, high;
        mov.b32 {$0, $1}, lows;
        mov.b32 {$2, $3}, highs;
        }""",
        "=h,=h,=h,=h,r",
        [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    return gl.join(gl.join(first, third), gl.join(second, fourth))


@gluon.jit
def _add_step(
    accs, loaded, x_step, ROWS: gl.constexpr, FEATURES: gl.constexpr, WARPS: gl.constexpr,
    GROUPED: gl.constexpr,
):  # fmt: skip
    """Returns the two sums `accs`, each [WARPS, FEATURES, 8], plus the products of one step, of
    which each gets one half: a product waits for the one before it in the same sum."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    # [features, warp, half, lane of the quad, product, two pairs of inputs], the half at last
    a = _to_float16(loaded[0]).reshape([FEATURES, WARPS, 2, 4, 4, 2, 2])
    a, a_2 = gl.split(a.permute((1, 0, 4, 5, 3, 6, 2)).reshape([WARPS, FEATURES, CHUNK // 2, 2]))
    b = x_step.load(_input_layout(ROWS, WARPS)).broadcast_to([8 // ROWS, ROWS, WARPS * CHUNK])
    b = b.reshape([8, WARPS, 2, 4, 4, 2, 2]).permute((1, 4, 5, 3, 6, 0, 2))
    b, b_2 = gl.split(b.reshape([WARPS, CHUNK // 2, 8, 2]))
    a = gl.convert_layout(a, left, assert_trivial=True)
    b = gl.convert_layout(b, right, assert_trivial=True)
    a_2 = gl.convert_layout(a_2, left, assert_trivial=True)
    b_2 = gl.convert_layout(b_2, right, assert_trivial=True)
    if GROUPED:
        zeros = gl.zeros([WARPS, FEATURES, 8], gl.float32, mma)
        scale = loaded[1][:, :, None]
        accs = (accs[0] + mma_v2(a, b, zeros) * scale, accs[1] + mma_v2(a_2, b_2, zeros) * scale)
    else:
        accs = (mma_v2(a, b, accs[0]), mma_v2(a_2, b_2, accs[1]))
    return accs


@gluon.jit
def _load_x(place, k, STEP: gl.constexpr, WIDTH: gl.constexpr, INPUTS: gl.constexpr):
    """Returns the inputs of a step in float32, zeros beyond the last."""
    if (STEP + 1) * WIDTH > INPUTS:
        return gl.load(place + STEP * WIDTH, STEP * WIDTH + k < INPUTS, 0.0).to(gl.float32)
    return gl.load(place + STEP * WIDTH).to(gl.float32)


@gluon.jit
def _stage_x(
    x, norm, x_smem, rows, x_stride, eps, INPUTS: gl.constexpr, STEPS: gl.constexpr,
    ROWS: gl.constexpr, WARPS: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    """Writes x to shared memory as float16, each row times a power of two; returns by what the sums
    have to be multiplied, [1, ROWS]."""
    WIDTH: gl.constexpr = WARPS * CHUNK
    KEPT: gl.constexpr = STEPS * ROWS <= 8
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, 1, WARPS], [2, 1, 0])
    of_row: gl.constexpr = gl.SliceLayout(2, layout)
    k = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    row = gl.arange(0, ROWS, gl.SliceLayout(0, of_row))[None, :, None]
    place = x + (gl.minimum(row, rows - 1) * x_stride + k)
    norm_place = norm + k
    kept = ()
    for step in gl.static_range(STEPS):
        value = _load_x(place, k, step, WIDTH, INPUTS)
        if HAS_NORM:
            square = gl.sum((value * value).reshape([1, ROWS, WIDTH // 4, 4]), 3)
            squares = square if step == 0 else squares + square
            value = value * _load_x(norm_place, k, step, WIDTH, INPUTS)
        size = gl.max(gl.abs(value).reshape([1, ROWS, WIDTH // 4, 4]), 3)
        largest = size if step == 0 else gl.maximum(largest, size)
        if KEPT:
            kept = kept + (value,)
    largest = gl.convert_layout(gl.max(largest, 2), of_row, assert_trivial=True)
    exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 15)
    scale = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    for step in gl.static_range(STEPS):
        if KEPT:
            value = kept[step]
        else:
            value = _load_x(place, k, step, WIDTH, INPUTS)
            if HAS_NORM:
                value = value * _load_x(norm_place, k, step, WIDTH, INPUTS)
        x_smem[step].store((value * scale[:, :, None]).to(gl.float16))
    factor = ((exponent - 14) << 23).to(gl.float32, bitcast=True)
    if HAS_NORM:
        squares = gl.convert_layout(gl.sum(squares, 2), of_row, assert_trivial=True)
        factor = factor * gl.rsqrt(squares / INPUTS + eps)
    return factor


@gluon.jit
def _sum_of_warps(acc, parts, FEATURES: gl.constexpr, WARPS: gl.constexpr, GATED: gl.constexpr):
    """Returns the sums over the warps, [outputs, 8]; of a gated weight silu(gate) * up."""
    HALVES: gl.constexpr = 2 if GATED else 1
    threads: gl.constexpr = gl.BlockedLayout(
        [WARPS, 1, HALVES, 1, 1], [1, 1, 1, 4, 8], [1, 1, 1, WARPS, 1], [4, 3, 2, 1, 0]
    )
    parts.store(acc.reshape([WARPS, FEATURES // 16, HALVES, 16 // HALVES, 8]))
    total = gl.sum(parts.load(threads), 0)
    if GATED:
        gate, up = gl.split(total.permute((0, 2, 3, 1)))
        total = gate / (1.0 + gl.exp2(-LOG2_E * gate)) * up
    return total.reshape([FEATURES // HALVES, 8])


@gluon.jit
def _multiply(
    queue, x_smem, place, scale_place, next_place, next_scales, k, groups, more,
    INPUTS: gl.constexpr, STEPS: gl.constexpr, ROWS: gl.constexpr, FEATURES: gl.constexpr,
    WARPS: gl.constexpr, DEPTH: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """Returns the products of a tile, [WARPS, FEATURES, 8], and the queue of loaded weights: the
    first steps of the tile that follows, if there is `more`."""
    ENTRY: gl.constexpr = 2 if GROUPED else 1  # tensors of a step in the queue
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    zeros = gl.zeros([WARPS, FEATURES, 8], gl.float32, mma)
    accs = (zeros, zeros)
    for step in gl.static_range(STEPS):
        accs = _add_step(accs, queue[:ENTRY], x_smem[step], ROWS, FEATURES, WARPS, GROUPED)
        queue = queue[ENTRY:]
        if step + DEPTH < STEPS:
            queue = queue + _load_weights(
                place, scale_place, k, groups, True, step + DEPTH, INPUTS, FEATURES, WARPS,
                GROUPED, False,
            )  # fmt: skip
        else:
            queue = queue + _load_weights(
                next_place, next_scales, k, groups, more, step + DEPTH - STEPS, INPUTS, FEATURES,
                WARPS, GROUPED, True,
            )  # fmt: skip
    return accs[0] + accs[1], queue


@gluon.jit(do_not_specialize=["rows", "tiles"])
def _few_rows_kernel(
    x, weight, scales, norm, residual, out, rows, tiles, groups, x_stride, residual_stride,
    out_stride, eps,
    INPUTS: gl.constexpr, ROWS: gl.constexpr, FEATURES: gl.constexpr, DEPTH: gl.constexpr,
    HAS_NORM: gl.constexpr, HAS_RESIDUAL: gl.constexpr, GATED: gl.constexpr, GROUPED: gl.constexpr,
    ROWS_PER_SCALE: gl.constexpr, PDL: gl.constexpr, EARLY_TRIGGER: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = (INPUTS + WARPS * CHUNK - 1) // (WARPS * CHUNK)
    HALVES: gl.constexpr = 2 if GATED else 1
    OUTPUTS: gl.constexpr = FEATURES // HALVES
    loads: gl.constexpr = _weight_layout(FEATURES, WARPS)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    by_row: gl.constexpr = gl.SliceLayout(2, mma)
    # a buffer for each step, so that no barrier is put between writing one and the next
    x_smem = ()
    for _ in gl.static_range(STEPS):
        x_smem = x_smem + (
            gl.allocate_shared_memory(
                gl.float16, [1, ROWS, WARPS * CHUNK],
                gl.SwizzledSharedLayout(8, 1, 2 if ROWS > 1 else 1, [2, 1, 0]),
            ),
        )  # fmt: skip
    parts = gl.allocate_shared_memory(
        gl.float32, [WARPS, FEATURES // 16, HALVES, 16 // HALVES, 8],
        gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0]),
    )  # fmt: skip

    # the first weights are read before waiting for the preceding kernel, which writes x
    weight = weight.to(gl.pointer_type(gl.int32), bitcast=True)
    k = gl.arange(0, WARPS * CHUNK // 4, gl.SliceLayout(0, loads))
    line = gl.arange(0, FEATURES, gl.SliceLayout(1, loads))
    scaled = gl.arange(0, FEATURES, gl.SliceLayout(0, by_row))[None, :]
    group = gl.arange(0, WARPS, gl.SliceLayout(1, by_row))[:, None]
    tile = gl.program_id(0)
    place = weight + tile.to(gl.int64) * (FEATURES * INPUTS // 4)
    place = place + (line[:, None] * (INPUTS // 4) + k[None, :])
    advance = gl.num_programs(0).to(gl.int64) * (FEATURES * INPUTS // 4)
    scale_place = scales + ((tile * FEATURES + scaled) // ROWS_PER_SCALE * groups + group)
    queue = ()
    for step in gl.static_range(DEPTH):
        queue = queue + _load_weights(
            place, scale_place, k, groups, True, step, INPUTS, FEATURES, WARPS, GROUPED, False
        )
    if PDL:
        gdc_wait()
        if EARLY_TRIGGER:
            gdc_launch_dependents()
    factor = _stage_x(x, norm, x_smem, rows, x_stride, eps, INPUTS, STEPS, ROWS, WARPS, HAS_NORM)
    by_column: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, mma))
    factor = gl.convert_layout(factor.broadcast_to([8 // ROWS, ROWS]).reshape([8]), by_column)
    columns: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [WARPS, 1], [1, 0])
    feature = gl.arange(0, OUTPUTS, gl.SliceLayout(1, columns))[:, None]
    row = gl.arange(0, 8, gl.SliceLayout(0, columns))[None, :]
    programs = gl.num_programs(0)
    for tile in range(gl.program_id(0), tiles, programs):
        following = tile + programs
        next_place = place + advance
        next_scales = scales + (following * FEATURES + scaled) // ROWS_PER_SCALE * groups + group
        if not GROUPED:
            scale = gl.load(scales + (tile * FEATURES + scaled) // ROWS_PER_SCALE)
        n = tile * OUTPUTS + feature
        if HAS_RESIDUAL:
            added = gl.load(residual + row * residual_stride + n, row < rows, 0.0).to(gl.float32)
        acc, queue = _multiply(
            queue, x_smem, place, scale_place, next_place, next_scales, k, groups,
            following < tiles, INPUTS, STEPS, ROWS, FEATURES, WARPS, DEPTH, GROUPED,
        )  # fmt: skip
        place = next_place
        scale_place = next_scales
        if PDL and not EARLY_TRIGGER:
            if following >= tiles:
                gdc_launch_dependents()
        acc = acc * factor[None, None, :]
        if not GROUPED:
            acc = acc * scale[:, :, None]
        total = _sum_of_warps(acc, parts, FEATURES, WARPS, GATED)
        total = gl.convert_layout(total, columns)
        if HAS_RESIDUAL:
            total += added
        gl.store(out + row * out_stride + n, total.to(out.dtype.element_ty), row < rows)
