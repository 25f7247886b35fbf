"""Linear layers of 1 to 8 rows whose weights are 4-bit integers in groups (`grouped_weight`), on
Hopper GPUs, in Triton's Gluon dialect; accumulated in float32.

Called by linear layers in decode steps where `supports` is true; otherwise `grouped_product`
computes the same from the same packed weight.

The weight is read from global memory into the registers in which the tensor cores take it, 16 bytes
a thread at a time, without shared memory and barriers between. A sum over inputs does not depend on
their order, so the order within a run is the one in which the neighbouring words of a thread are
its fragments of successive products (an operand layout of eight neighbouring elements instead of
two). x is read likewise. With programmatic dependent launch the loads of the first units are issued
before the wait for the preceding kernel.

The warps of a program divide the inputs among themselves, unit by unit; their sums are added by way
of shared memory, in a fixed order.

One row may pass through an RMSNorm first. Each program norms it by itself, with the norm's weights
loaded before the wait, and keeps the result in shared memory: no launch separates two products, and
the second one loads its first weights while the first one runs.

An integer q becomes 128 + q in bfloat16 (1024 + q in float16) by writing its bits below the bits of
128 (1024), see `grouped_product`; here the offset and the zero point are subtracted from the sum of
a group: sum((128 + q) x) - (128 + zero) sum(x), where sum(x) is a product with ones, computed once
for all output features of a program if each warp has one unit of inputs, and otherwise with each
tile. In float32 this costs five (eight) bits of 24.
"""
# ruff: noqa: N803, N806, RUF005  (compile-time constants are written in capitals; Triton does not
# unpack tuples)

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from aioinfer.kernels.grouped_weight import TILE, PackedGroups
from aioinfer.kernels.launch import is_hopper, multiprocessors
from aioinfer.kernels.norm import rms_norm
from aioinfer.kernels.products import product_output
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: Columns of an mma instruction.
MAX_ROWS = 8
#: The maximum of inputs of a row that is normed: each program holds the row in registers.
MAX_NORMED_INPUTS = 16384
PARTS = gl.constexpr(4)  # runs of a unit
LOG2_E = gl.constexpr(1.4426950408889634)
#: The offset that an integer gets when its bits are written below the bits of a number.
OFFSETS = {torch.bfloat16: 128, torch.float16: 1024}
EXPANSION = """{
    .reg .b32 b, c, d;
    shr.u32 b, $4, 4;
    shr.u32 c, $4, 8;
    shr.u32 d, $4, 12;
    lop3.b32 $0, $4, 0x000F000F, MAGIC, 0xEA;
    lop3.b32 $1, b, 0x000F000F, MAGIC, 0xEA;
    lop3.b32 $2, c, 0x000F000F, MAGIC, 0xEA;
    lop3.b32 $3, d, 0x000F000F, MAGIC, 0xEA;
}"""
EXPANSION_128 = gl.constexpr(EXPANSION.replace("MAGIC", "0x43004300"))
EXPANSION_1024 = gl.constexpr(EXPANSION.replace("MAGIC", "0x64006400"))


@dataclass(frozen=True, slots=True)
class FewRowsGroupedConfig:
    """The configuration of the kernel and of its launch.

    Attributes:
        warps: of a program; they share the inputs: 4, 8 or 16.
        depth: units of 16 output features whose loads each warp has under way.
        programs: for each multiprocessor, which have its registers; a program computes one tile of
            16 output features after the other.
    """

    warps: int
    depth: int
    programs: int = 1

    @property
    def registers(self) -> int:
        """Registers that a thread may have."""
        return min(255, 65536 // (self.programs * self.warps * 32) // 8 * 8)


class GroupedSpec(NamedTuple):
    """What the kernel is compiled for.

    Attributes:
        inputs, width, units, run, group, has_zeros: of the weight; see `PackedGroups`.
        warps, depth: see `FewRowsGroupedConfig`.
        offset: see `OFFSETS`.
        shares: units of a warp.
        scaled: runs that are scaled together.
        masked: whether the last units go beyond the inputs.
    """

    inputs: int
    width: int
    units: int
    run: int
    group: int
    has_zeros: bool
    warps: int
    depth: int
    offset: int
    shares: int
    scaled: int
    masked: bool

    @classmethod
    def of(
        cls, weight: PackedGroups, config: FewRowsGroupedConfig, dtype: torch.dtype
    ) -> GroupedSpec:
        """Returns what the kernel is compiled for with x of a dtype."""
        run, group, shares = weight.run, weight.group, -(-weight.units // config.warps)
        return cls(
            weight.inputs, weight.width, weight.units, run, group, weight.has_zeros, config.warps,
            config.depth, OFFSETS[dtype], shares,
            1 if group == run else 4 if group % (4 * run) == 0 else 2,
            shares * config.warps * PARTS.value * run != weight.inputs,
        )  # fmt: skip


def few_rows_grouped_config(weight: PackedGroups) -> FewRowsGroupedConfig:
    """Returns the configuration for a weight, measured on an H200 for one and eight rows."""
    return FewRowsGroupedConfig(8, 2, 2) if weight.units <= 16 else FewRowsGroupedConfig(8, 4)


def supports(x: torch.Tensor, weight: PackedGroups) -> bool:
    """Whether this kernel can compute x [M, K] times a weight: 1 to 8 rows of bf16 or fp16, 4 bits,
    runs of 32 or 64 inputs, K a multiple of 8, on Hopper.

    The rows of x must be contiguous and begin at multiples of 16 bytes.
    """
    return (
        is_hopper(x.device)
        and 1 <= len(x) <= MAX_ROWS
        and x.dtype in OFFSETS
        and weight.bits == 4
        and weight.run in (32, 64)
        and x.shape[1] % 8 == 0
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
    )


def fuses_norm(rows: int, weight: PackedGroups) -> bool:
    """Whether the kernel computes the RMSNorm itself: of one row, which each program norms."""
    return rows == 1 and weight.inputs <= MAX_NORMED_INPUTS


@gluon.jit
def _load_item(packed, scales, tile, share, S: gl.constexpr, mma: gl.constexpr):
    """Returns of a tile of output features and each warp's unit number `share` the pairs of words,
    int32 [WARPS, 16, R / 2], and the elements [WARPS, 16] of `PackedGroups.scales` for each group;
    beyond the last tile the values are arbitrary."""
    WARPS: gl.constexpr = S.warps
    SCALED: gl.constexpr = S.scaled
    PAIRS: gl.constexpr = S.run // 2
    wide: gl.constexpr = gl.DotOperandLayout(0, mma, PAIRS // 8)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, wide)))
    feature = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, wide)))
    pair = gl.arange(0, PAIRS, gl.SliceLayout(0, gl.SliceLayout(1, wide)))
    unit = _unit_of(warp, share, S)
    place = packed.to(gl.pointer_type(gl.int32), bitcast=True)
    place += (unit[:, None, None] * 16 + feature[None, :, None]) * PAIRS + pair[None, None, :]
    place += tile.to(gl.int64) * (S.units * 16 * PAIRS)
    is_there = tile < S.width // 16
    # constants come last, where they become part of the instruction
    item = (gl.load(place + share * (WARPS * 16 * PAIRS), is_there),)

    GROUPS: gl.constexpr = PARTS * S.run // S.group  # of a unit
    of_feature: gl.constexpr = gl.SliceLayout(2, mma)
    unit = _unit_of(gl.arange(0, WARPS, gl.SliceLayout(1, of_feature)), share, S)
    feature = gl.arange(0, 16, gl.SliceLayout(0, of_feature))
    for part in gl.static_range(0, PARTS, SCALED):
        if GROUPS:
            place = scales + (unit[:, None] * (GROUPS * S.width) + feature[None, :]) + tile * 16
            place += (share * WARPS * GROUPS + part // SCALED) * S.width
        else:
            group = ((unit + share * WARPS) * PARTS + part) * S.run // S.group
            place = scales + group[:, None] * S.width + feature[None, :] + tile * 16
        item = item + (gl.load(place, is_there),)
    return item


@gluon.jit
def _unit_of(warp, share, S: gl.constexpr):
    """Returns each warp's unit number `share` less the first warp's; warps that have none repeat
    the last."""
    if (share + 1) * S.warps > S.units:
        warp = gl.minimum(warp, S.units - 1 - share * S.warps)
    return warp


@gluon.jit
def _load_x(x, normed, share, rows, stride, S: gl.constexpr, mma: gl.constexpr):
    """Returns x for each run of each warp's unit number `share`, right operands [WARPS, R, 8], of
    which columns beyond the last row repeat it. Of one row that is normed, `normed` is the result
    of `_norm_row`; else it is None."""
    RUN: gl.constexpr = S.run
    WARPS: gl.constexpr = S.warps
    wide: gl.constexpr = gl.DotOperandLayout(1, mma, RUN // 8)
    operand: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, wide)))[:, None, None]
    word = gl.arange(0, RUN, gl.SliceLayout(0, gl.SliceLayout(2, wide)))[None, :, None]
    row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, wide)))
    row = gl.minimum(row, rows - 1)[None, None, :] * stride
    k = warp * (PARTS * RUN) + word + row * 0
    place = x + row + k
    runs = ()
    for part in gl.static_range(PARTS):
        first = (share * WARPS * PARTS + part) * RUN
        if normed is not None:
            value = normed[share * PARTS + part].load(gl.SliceLayout(2, wide))
            value = value[:, :, None].broadcast_to([WARPS, RUN, 8])
        elif S.masked:
            value = gl.load(place + first, k + first < S.inputs, 0.0)
        else:
            value = gl.load(place + first)
        value = value.reshape([WARPS, 2, 4, RUN // 32, 2, 2, 8]).permute((0, 1, 3, 4, 2, 5, 6))
        value = value.reshape([WARPS, RUN, 8])
        runs = runs + (gl.convert_layout(value, operand, assert_trivial=True),)
    return runs


@gluon.jit
def _load_row(vector, S: gl.constexpr):
    """Returns a vector of S.inputs numbers as its runs [WARPS, R], in the order of `_load_x`'s."""
    RUN: gl.constexpr = S.run
    WARPS: gl.constexpr = S.warps
    layout: gl.constexpr = gl.BlockedLayout([1, RUN // 32], [1, 32], [WARPS, 1], [1, 0])
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, layout))[:, None]
    word = gl.arange(0, RUN, gl.SliceLayout(0, layout))[None, :]
    k = warp * (PARTS * RUN) + word
    RUNS: gl.constexpr = S.shares * PARTS
    runs = ()
    for run in gl.static_range(RUNS):
        first = (run // PARTS * WARPS * PARTS + run % PARTS) * RUN
        if S.masked:
            value = gl.load(vector + k + first, k + first < S.inputs, 0.0)
        else:
            value = gl.load(vector + k + first)
        runs = runs + (value,)
    return runs


@gluon.jit
def _norm_row(values, weights, eps, S: gl.constexpr):
    """Returns the RMSNorm of one row, given and returned as runs [WARPS, R], in shared memory."""
    RUNS: gl.constexpr = S.shares * PARTS
    dtype: gl.constexpr = values[0].dtype
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    square = values[0].to(gl.float32) * values[0].to(gl.float32)
    for run in gl.static_range(1, RUNS):
        value = values[run].to(gl.float32)
        square += value * value
    factor = gl.rsqrt(gl.sum(gl.sum(square, 1), 0) / S.inputs + eps)
    normed = ()  # a buffer for each: between stores to parts of one there would be barriers
    for run in gl.static_range(RUNS):
        value = values[run].to(gl.float32) * factor * weights[run].to(gl.float32)
        normed = normed + (
            gl.allocate_shared_memory(dtype, values[run].shape, layout, value.to(dtype)),
        )
    return normed


@gluon.jit
def _sum_x(runs, S: gl.constexpr, mma: gl.constexpr):
    """Returns the sums of x over each group of a unit, [WARPS, 16, 8] with equal rows."""
    RUN: gl.constexpr = S.run
    WARPS: gl.constexpr = S.warps
    SCALED: gl.constexpr = S.scaled
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    ones = gl.full([WARPS, 16, RUN], 1.0, runs[0].dtype, operand)
    sums = ()
    for part in gl.static_range(0, PARTS, SCALED):
        total = gl.zeros([WARPS, 16, 8], gl.float32, mma)
        for other in gl.static_range(SCALED):
            total = mma_v2(ones, runs[part + other], total)
        sums = sums + (total,)
    return sums


@gluon.jit
def _expand(pairs, S: gl.constexpr, mma: gl.constexpr):
    """Returns the integers of the four runs of pairs of words, enlarged by an offset, in 16 bits:
    left operands [WARPS, 16, R]."""
    RUN: gl.constexpr = S.run
    WARPS: gl.constexpr = S.warps
    words = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16))
    words = words.reshape([WARPS, 16, 2, 4, RUN // 32, 2, 2]).permute((0, 1, 2, 4, 5, 3, 6))
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    words = gl.convert_layout(words.reshape([WARPS, 16, RUN]), operand, assert_trivial=True)
    if S.offset == 128:
        runs = gl.inline_asm_elementwise(
            EXPANSION_128,
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        runs = gl.inline_asm_elementwise(
            EXPANSION_1024,
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
            is_pure=True,
            pack=2,
        )
    return runs


@gluon.jit
def _scale_of(kept, S: gl.constexpr):
    """Returns the scale, float32, and the zero point with the offset of elements of
    `PackedGroups.scales`."""
    if S.has_zeros:
        scale = (kept & -256).to(gl.float32, bitcast=True)
        # written below the bits of 2 ** 23
        zero = ((kept & 255) | 0x4B000000).to(gl.float32, bitcast=True) - (8388608.0 - S.offset)
        zero = zero[:, :, None]
    else:
        scale = kept.to(gl.float32, bitcast=True)
        zero = S.offset + 8.0
    return scale[:, :, None], zero


@gluon.jit
def _multiply(item, runs, sums, totals, S: gl.constexpr, mma: gl.constexpr):
    """Returns totals [WARPS, 16, 8] plus the products of an item and x."""
    WARPS: gl.constexpr = S.warps
    SCALED: gl.constexpr = S.scaled
    integers = _expand(item[0], S, mma)
    for part in gl.static_range(0, PARTS, SCALED):
        product = gl.zeros([WARPS, 16, 8], gl.float32, mma)
        for other in gl.static_range(SCALED):
            product = mma_v2(integers[part + other], runs[part + other], product)
        scale, zero = _scale_of(item[1 + part // SCALED], S)
        totals += (product - zero * sums[part // SCALED]) * scale
    return totals


@gluon.jit
def _next_items(
    items, packed, scales, tile, programs, share, S: gl.constexpr, mma: gl.constexpr
):  # fmt: skip
    """Returns the items without the first, of a tile's unit number `share`, and with the one that
    comes S.depth items after it."""
    DEPTH: gl.constexpr = S.depth
    later = ()
    for ahead in gl.static_range(1, DEPTH):
        later = later + (items[ahead],)
    item = _load_item(
        packed, scales, tile + (share + DEPTH) // S.shares * programs, (share + DEPTH) % S.shares,
        S, mma,
    )  # fmt: skip
    return later + (item,)


@gluon.jit
def _multiply_shares(
    items, totals, x, normed, packed, scales, tile, programs, rows, x_stride, S: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """Returns totals plus the products of several units of each warp, and the items after them."""
    SHARES: gl.constexpr = S.shares
    for share in gl.static_range(SHARES):
        runs = _load_x(x, normed, share, rows, x_stride, S, mma)
        totals = _multiply(items[0], runs, _sum_x(runs, S, mma), totals, S, mma)
        items = _next_items(items, packed, scales, tile, programs, share, S, mma)
    return totals, items


@gluon.jit
def _add_warps(totals, low, high, layout: gl.constexpr, WARPS: gl.constexpr):
    """Returns the sums over warps of the low and of the high eight features, [8, 8] each."""
    first, second = gl.split(totals.reshape([WARPS, 2, 8, 8]).permute((0, 2, 3, 1)))
    low.store(first)
    high.store(second)
    return gl.sum(low.load(layout), 0), gl.sum(high.load(layout), 0)


@gluon.jit
def _store(place, low, high, has_low, has_high, GATED: gl.constexpr):
    """Writes the outputs of the low and of the high eight features of a tile, [8, 8] each, or the
    outputs of a gate and of the features it is multiplied with."""
    dtype: gl.constexpr = place.dtype.element_ty
    if GATED:
        low = low / (1.0 + gl.exp2(-LOG2_E * low)) * high
    gl.store(place, low.to(dtype), has_low)
    if not GATED:
        gl.store(place + 8, high.to(dtype), has_high)


@gluon.jit(do_not_specialize=["rows"])
def _kernel(
    x, packed, scales, norm, residual, out, rows, features, x_stride_8, residual_stride,
    out_stride, eps,
    HAS_NORM: gl.constexpr, HAS_RESIDUAL: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
    S: gl.constexpr,
):  # fmt: skip
    """Computes every `num_programs`-th tile of 16 output features, from the program's number on.

    Items, the loads of a tile's unit, are asked for S.depth items ahead, also of the next tile.
    """
    WARPS: gl.constexpr = S.warps
    DEPTH: gl.constexpr = S.depth
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    first, programs = gl.program_id(0), gl.num_programs(0)
    x_stride = x_stride_8 * 8  # by which the compiler sees that rows are aligned
    items = ()
    for ahead in gl.static_range(DEPTH):
        tile = first + ahead // S.shares * programs
        items = items + (_load_item(packed, scales, tile, ahead % S.shares, S, mma),)
    if HAS_NORM:
        weights = _load_row(norm, S)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    normed = None
    if HAS_NORM:
        normed = _norm_row(_load_row(x, S), weights, eps, S)
    if S.shares == 1:  # x stays in registers
        runs = _load_x(x, normed, 0, rows, x_stride, S, mma)
        sums = _sum_x(runs, S, mma)

    layout: gl.constexpr = gl.BlockedLayout(
        [WARPS // 4, 1, 1], [4, 8, 1], [1, max(1, WARPS // 8), min(8, WARPS)], [1, 0, 2]
    )
    of_sum: gl.constexpr = gl.SliceLayout(0, layout)
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0, 2])
    low = gl.allocate_shared_memory(gl.float32, [WARPS, 8, 8], shared)
    high = gl.allocate_shared_memory(gl.float32, [WARPS, 8, 8], shared)
    feature = gl.arange(0, 8, gl.SliceLayout(1, of_sum))[:, None]
    row = gl.arange(0, 8, gl.SliceLayout(0, of_sum))[None, :]
    # after so many tiles of one unit the items are back in the registers where they began
    ROUND: gl.constexpr = DEPTH if S.shares == 1 else 1
    for begin in range(first, S.width // 16, ROUND * programs):
        for turn in gl.static_range(ROUND):
            tile = begin + turn * programs
            if turn == 0 or tile < S.width // 16:
                n = tile * (8 if GATED else 16) + feature
                has_low, has_high = (n < features) & (row < rows), (n + 8 < features) & (row < rows)
                if HAS_RESIDUAL:
                    place = residual + row * residual_stride + n
                    added_low, added_high = gl.load(place, has_low), gl.load(place + 8, has_high)
                totals = gl.zeros([WARPS, 16, 8], gl.float32, mma)
                if S.shares == 1:
                    totals = _multiply(items[0], runs, sums, totals, S, mma)
                else:
                    totals, items = _multiply_shares(
                        items, totals, x, normed, packed, scales, tile, programs, rows, x_stride,
                        S, mma,
                    )  # fmt: skip
                sum_low, sum_high = _add_warps(totals, low, high, layout, WARPS)
                if HAS_RESIDUAL:
                    sum_low += added_low.to(gl.float32)
                    sum_high += added_high.to(gl.float32)
                _store(out + row * out_stride + n, sum_low, sum_high, has_low, has_high, GATED)
            if S.shares == 1:
                items = _next_items(items, packed, scales, tile, programs, 0, S, mma)


def few_rows_grouped(
    x: torch.Tensor,
    weight: PackedGroups,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    config: FewRowsGroupedConfig | None = None,
) -> torch.Tensor:
    """Returns x @ weight.T for a weight of 4-bit integers in groups, accumulated in float32.

    Arguments, result and reference are the same as for `grouped_product`.

    Args:
        x: [M, K]; `supports(x, weight)` must be true.
        weight: [N, K]; with `gated` [2 * N, K], its rows interleaved by `gated_product.interleave`,
            N a multiple of 8.
        norm_weight: [K] of the RMSNorm (with `eps`) that x passes through first, contiguous; None
            for no norm. Where `fuses_norm` is false it is a launch of its own.
        residual: [M, N], added to the product; may be `out`.
        gated: returns silu(x @ gate.T) * (x @ up.T).
        out: [M, N] to write to; by default a new tensor.
        pdl: launch as a programmatic dependent of the preceding kernel; `weight` is read before
            that kernel ends, so that kernel must not write it.
        config: instead of `few_rows_grouped_config`'s (for tests and tuning).

    Raises:
        ValueError: the shapes do not fit, or `supports` returns false.
    """
    rows, shape = len(x), (weight.features, weight.inputs)
    out = product_output(x, shape, out, gated=gated, max_rows=MAX_ROWS)
    if not supports(x, weight):
        raise ValueError(f"supports() rejects x {tuple(x.shape)} of {x.dtype} with this weight")
    config = config or few_rows_grouped_config(weight)
    if norm_weight is not None and not fuses_norm(rows, weight):
        x, norm_weight = rms_norm(x, norm_weight, eps, pdl=pdl), None
    added = out if residual is None else residual
    _kernel[(min(weight.width // TILE, config.programs * multiprocessors(x.device)),)](
        x, weight.integers, weight.scales, x if norm_weight is None else norm_weight, added, out,
        rows, out.shape[1], x.stride(0) // 8, added.stride(0), out.stride(0), eps,
        HAS_NORM=norm_weight is not None, HAS_RESIDUAL=residual is not None, GATED=gated, PDL=pdl,
        S=GroupedSpec.of(weight, config, x.dtype),
        num_warps=config.warps, maxnreg=config.registers, launch_pdl=pdl,
    )  # fmt: skip
    return out
