"""Linear layers with float8 weights for one to eight rows on Hopper GPUs, in Triton's Gluon
dialect.

The alternative to `few_rows_scaled` for float8_e4m3 weights and 16-bit activations (`supports` says
which), whose time is that of reading the weights. The tensor cores multiply: the left operand of
`mma.sync.m16n8k16` is sixteen output features, its eight columns are the rows of x, repeated where
there are fewer. Both operands are float16: two weights are converted by one instruction, exactly,
and rows of x are scaled by powers of two (`few_rows_inputs`).

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
from aioinfer.kernels.few_rows_dense import EARLY_TRIGGER_BYTES
from aioinfer.kernels.few_rows_inputs import CHUNK, allocate_x, load_row, stage_x
from aioinfer.kernels.few_rows_scaled import ScaledMatrix
from aioinfer.kernels.launch import is_hopper, multiprocessors
from aioinfer.kernels.products import product_output
from aioinfer.kernels.quantize import GROUP
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_ROWS = 8
TILE = 16  # output features of a tensor-core product
LOG2_E = gl.constexpr(1.4426950408889634)
#: Bytes of shared memory of a thread block.
SHARED_MEMORY = 227 * 1024


@dataclass(frozen=True, slots=True)
class FewRowsFloat8Config:
    """The configuration of the kernel and of its launch.

    Attributes:
        features: rows of the weight that a program multiplies at a time: 16 or 32.
        num_warps: 4 or 8; each has 128 inputs of a step.
        depth: steps whose weights are loaded ahead, 16 bytes a thread for every four rows.
        programs: of a multiprocessor, as many as registers and shared memory leave room for.
    """

    features: int
    num_warps: int
    depth: int
    programs: int


def few_rows_float8_config(
    rows: int, lines: int, inputs: int, *, grouped: bool
) -> FewRowsFloat8Config:
    """Returns the configuration for x [rows, inputs] and a weight of `lines` rows: of one row
    measured on an H200, of more guessed."""
    if rows > 2:
        fits_twice = not grouped and _padded(rows) * inputs * 4 <= SHARED_MEMORY - 16 * 1024
        return FewRowsFloat8Config(16, 8, 1, 2 if fits_twice else 1)
    if grouped:
        return (
            FewRowsFloat8Config(16, 8, 4, 1) if inputs > 8192 else FewRowsFloat8Config(16, 4, 2, 3)
        )
    if lines >= 12288 and inputs <= 8192:
        return FewRowsFloat8Config(16, 4, 4, 3)
    return FewRowsFloat8Config(16, 8, 2, 2) if inputs <= 8192 else FewRowsFloat8Config(16, 8, 4, 1)


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
    place, scale_place, k, wanted, STEP: gl.constexpr, INPUTS: gl.constexpr,
    FEATURES: gl.constexpr, WARPS: gl.constexpr, GROUPED: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """Returns the weights of a step as words, [FEATURES, WARPS * CHUNK / 4], and with scales of
    blocks the scales, [WARPS, FEATURES]."""
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
        scale_place += STEP * WARPS
        if (STEP + 1) * WARPS * CHUNK > INPUTS:
            warp = gl.arange(0, WARPS, gl.SliceLayout(1, scale_place.type.layout))
            there = (STEP * WARPS * CHUNK + warp * CHUNK < INPUTS)[:, None]
            if MASKED:
                there = there & wanted
            scale = gl.load(scale_place, there, 0.0)
        elif MASKED:
            scale = gl.load(scale_place, wanted)
        else:
            scale = gl.load(scale_place)
        loaded = loaded + (scale,)
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
def _allocate_parts(FEATURES: gl.constexpr, WARPS: gl.constexpr, GATED: gl.constexpr):
    """Returns shared memory for the sums of each warp."""
    HALVES: gl.constexpr = 2 if GATED else 1
    return gl.allocate_shared_memory(
        gl.float32, [WARPS, FEATURES // 16, HALVES, 16 // HALVES, 8],
        gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0]),
    )  # fmt: skip


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
    queue, x_smem, place, scale_place, next_place, next_scales, k, more,
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
                place, scale_place, k, True, step + DEPTH, INPUTS, FEATURES, WARPS,
                GROUPED, False,
            )  # fmt: skip
        else:
            queue = queue + _load_weights(
                next_place, next_scales, k, more, step + DEPTH - STEPS, INPUTS, FEATURES,
                WARPS, GROUPED, True,
            )  # fmt: skip
    return accs[0] + accs[1], queue


@gluon.jit
def _weight_places(
    weight, tile, k, INPUTS: gl.constexpr, FEATURES: gl.constexpr, WARPS: gl.constexpr
):
    """Returns where the words of a tile's first step are, [FEATURES, WARPS * CHUNK / 4]."""
    line = gl.arange(0, FEATURES, gl.SliceLayout(1, _weight_layout(FEATURES, WARPS)))
    place = weight.to(gl.pointer_type(gl.int32), bitcast=True)
    place = place + tile.to(gl.int64) * (FEATURES * INPUTS // 4)
    return place + (line[:, None] * (INPUTS // 4) + k[None, :])


@gluon.jit
def _scale_places(
    scales, tile, INPUTS: gl.constexpr, FEATURES: gl.constexpr, WARPS: gl.constexpr,
    GROUPED: gl.constexpr, ROWS_PER_SCALE: gl.constexpr,
):  # fmt: skip
    """Returns where the scales of a tile are: of its features, [1, FEATURES], or of its first step,
    [WARPS, FEATURES]."""
    layout: gl.constexpr = gl.SliceLayout(
        2, gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    )
    line = tile * FEATURES + gl.arange(0, FEATURES, gl.SliceLayout(0, layout))[None, :]
    place = line // ROWS_PER_SCALE
    if GROUPED:
        place = (
            place * ((INPUTS + CHUNK - 1) // CHUNK)
            + gl.arange(0, WARPS, gl.SliceLayout(1, layout))[:, None]
        )
    return scales + place


@gluon.jit
def _load_first_tile(
    weight, scales, tile, k, INPUTS: gl.constexpr, FEATURES: gl.constexpr, WARPS: gl.constexpr,
    DEPTH: gl.constexpr, GROUPED: gl.constexpr, ROWS_PER_SCALE: gl.constexpr,
):  # fmt: skip
    """Returns where a program's first weights and their scales are, the queue of its first DEPTH
    steps, and the scales of the tile's features, 0 where scales are of blocks."""
    place = _weight_places(weight, tile, k, INPUTS, FEATURES, WARPS)
    scale_place = _scale_places(scales, tile, INPUTS, FEATURES, WARPS, GROUPED, ROWS_PER_SCALE)
    queue = ()
    for step in gl.static_range(DEPTH):
        queue = queue + _load_weights(
            place, scale_place, k, True, step, INPUTS, FEATURES, WARPS, GROUPED, False
        )
    scale = 0.0
    if not GROUPED:
        scale = gl.load(scale_place)
    return place, scale_place, queue, scale


@gluon.jit(do_not_specialize=["rows", "tiles", "residual_stride", "out_stride"])
def _few_rows_kernel(
    x, weight, scales, norm, residual, out, rows, tiles, x_stride, residual_stride,
    out_stride, eps,
    INPUTS: gl.constexpr, ROWS: gl.constexpr, FEATURES: gl.constexpr, DEPTH: gl.constexpr,
    HAS_NORM: gl.constexpr, HAS_RESIDUAL: gl.constexpr, GATED: gl.constexpr, GROUPED: gl.constexpr,
    ROWS_PER_SCALE: gl.constexpr, PDL: gl.constexpr, EARLY_TRIGGER: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = (INPUTS + WARPS * CHUNK - 1) // (WARPS * CHUNK)
    OUTPUTS: gl.constexpr = FEATURES // 2 if GATED else FEATURES
    columns: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [WARPS, 1], [1, 0])
    parts = _allocate_parts(FEATURES, WARPS, GATED)
    x_smem = allocate_x(STEPS, ROWS, WARPS)
    tile, programs = gl.program_id(0), gl.num_programs(0)

    # weights are read before waiting for the preceding kernel, which writes x
    k = gl.arange(0, WARPS * CHUNK // 4, gl.SliceLayout(0, _weight_layout(FEATURES, WARPS)))
    place, scale_place, queue, scale = _load_first_tile(
        weight, scales, tile, k, INPUTS, FEATURES, WARPS, DEPTH, GROUPED, ROWS_PER_SCALE
    )
    norms = load_row(norm, STEPS, WARPS, INPUTS) if HAS_NORM else ()
    if PDL:
        gdc_wait()
        if EARLY_TRIGGER:
            gdc_launch_dependents()
    feature = gl.arange(0, OUTPUTS, gl.SliceLayout(1, columns))[:, None]
    row = gl.arange(0, 8, gl.SliceLayout(0, columns))[None, :]
    residual_place = residual + row * residual_stride + tile * OUTPUTS + feature
    added = 0.0
    if HAS_RESIDUAL:
        added = gl.load(residual_place, row < rows, 0.0)
    factor = stage_x(x, norms, x_smem, rows, x_stride, eps, INPUTS, STEPS, ROWS, WARPS, HAS_NORM)

    for tile in range(gl.program_id(0), tiles, programs):
        following = tile + programs
        next_place = place + programs.to(gl.int64) * (FEATURES * INPUTS // 4)
        next_scales = _scale_places(
            scales, following, INPUTS, FEATURES, WARPS, GROUPED, ROWS_PER_SCALE
        )
        acc, queue = _multiply(
            queue, x_smem, place, scale_place, next_place, next_scales, k,
            following < tiles, INPUTS, STEPS, ROWS, FEATURES, WARPS, DEPTH, GROUPED,
        )  # fmt: skip
        if PDL and not EARLY_TRIGGER and following >= tiles:
            gdc_launch_dependents()
        acc = acc * factor
        if not GROUPED:
            acc = acc * scale[:, :, None]
            scale = gl.load(next_scales, following < tiles)
        here = added
        if HAS_RESIDUAL:
            residual_place += programs * OUTPUTS
            added = gl.load(residual_place, (row < rows) & (following < tiles), 0.0)
        place = next_place
        scale_place = next_scales
        total = gl.convert_layout(_sum_of_warps(acc, parts, FEATURES, WARPS, GATED), columns)
        if HAS_RESIDUAL:
            total += here.to(gl.float32)
        n = tile * OUTPUTS + feature
        gl.store(out + row * out_stride + n, total.to(out.dtype.element_ty), row < rows)


def supports(x: torch.Tensor, weight: ScaledMatrix) -> bool:
    """Whether this kernel can compute x [M, K] times weight [N, K]: on Hopper, M <= 8, x in bf16 or
    fp16, the weight in float8_e4m3, K and N multiples of 16, and x fitting into shared memory."""
    rows, inputs = x.shape
    return (
        is_hopper(x.device)
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.values.dtype == torch.float8_e4m3fn
        and weight.values.shape[0] % TILE == 0
        and inputs % TILE == 0
        and 0 < rows <= MAX_ROWS
        and _padded(rows) * 2 * (inputs + 8 * GROUP) <= SHARED_MEMORY - 16 * 1024
    )


def _padded(rows: int) -> int:
    """Returns the rows of x as the kernel is compiled for them."""
    return triton.next_power_of_2(rows)


def few_rows_float8(
    x: torch.Tensor,
    weight: ScaledMatrix,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    config: FewRowsFloat8Config | None = None,
) -> torch.Tensor:
    """Returns x @ weight.T, accumulated in float32, as `few_rows_scaled` does.

    Args:
        x: [M, K], M <= 8; bf16 or fp16; rows may be strided.
        weight: float8 [N, K]; with `gated` [2 * N, K], interleaved, N a multiple of 8.
        norm_weight: [K] of the RMSNorm (with `eps`) that x passes through first; None for no norm.
        residual: [M, N], added to the product; may be `out`.
        gated: weight holds two projections: eight rows of the gate, then the matching eight of up,
            and so on; returns silu(x @ gate.T) * (x @ up.T).
        out: [M, N] to write to; by default a new tensor.
        pdl: launch as a programmatic dependent of the kernel before; `weight` and `norm_weight` are
            read before that kernel ends, so that kernel must not write them.
        config: instead of `few_rows_float8_config`'s (for tests and tuning).

    Returns:
        [M, N] in x's dtype.

    Raises:
        ValueError: the shapes do not fit, or `supports` returns false.
    """
    rows, inputs = x.shape
    values, lines = weight.values, weight.values.shape[0]
    out = product_output(
        x, values.shape, out, gated=gated, max_rows=MAX_ROWS, stored=(values, weight.scales)
    )  # fmt: skip
    config = config or few_rows_float8_config(rows, lines, inputs, grouped=weight.is_grouped)
    if not supports(x, weight) or lines % config.features:
        raise ValueError(f"no kernel for x {tuple(x.shape)} and weight {tuple(values.shape)}")
    norm = x if norm_weight is None else norm_weight
    added = x if residual is None else residual
    tiles = lines // config.features
    _few_rows_kernel[(min(tiles, multiprocessors(x.device) * config.programs),)](
        x, values, weight.scales, norm, added, out, rows, tiles,
        x.stride(0) if rows > 1 else 0, added.stride(0), out.stride(0), eps,
        **constants(config, rows, inputs), HAS_NORM=norm_weight is not None,
        HAS_RESIDUAL=residual is not None, GATED=gated, GROUPED=weight.is_grouped,
        ROWS_PER_SCALE=weight.rows_per_scale, PDL=pdl,
        EARLY_TRIGGER=values.nbytes < EARLY_TRIGGER_BYTES,
        num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def constants(config: FewRowsFloat8Config, rows: int, inputs: int) -> dict[str, int]:
    """Returns those constants of the kernel that follow from the configuration."""
    steps = -(-inputs // (config.num_warps * GROUP))
    return {
        "INPUTS": inputs, "ROWS": _padded(rows), "FEATURES": config.features,
        "DEPTH": min(config.depth, steps),
    }  # fmt: skip
