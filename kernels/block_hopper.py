"""Float8 products with scales of blocks on Hopper GPUs, the tokens as the left operand's rows, in
Triton's Gluon dialect.

The alternative to `scaled_hopper` where 128 weight rows share a scale (`supports`); called by
`layers.formats.kernel_scaled` where `scaled_tiles` says that it is the faster one. In that kernel
tokens are columns of the accumulator, and a thread needs the scales of 32 or more of them for each
128 inputs. Here they are rows, as in DeepGEMM (DeepSeek-AI, 2025): a thread has two tokens of a
wgmma's 64, and the weight's scale is one for all columns, or one for the gate's and one for up's.
So scaling the sums of a stage takes one instruction a sum.

Consumer warpgroups divide a tile's tokens or its weight rows. Each has 64 tokens, or 128 in two
halves. Where registers hold them, the sums of two wgmmas stand beside the totals, and one is
computed while the other is scaled; otherwise one consumer multiplies while another scales. Scales
are loaded to registers ahead of their stage, from global memory, since reads of a stage in shared
memory by the consumers would have to be fenced before TMA may write it again, and that fence waits
for all loads. The rest of the schedule is `gated_product`'s.
"""
# ruff: noqa: N803, N806, RUF005  (compile-time constants are written in capitals; Triton does not
# unpack tuples)

from __future__ import annotations

import torch
from aioinfer.kernels.few_rows_scaled import ScaledMatrix
from aioinfer.kernels.hopper_pipeline import (
    LOG2_E,
    PRODUCER_REGISTERS,
    allocate_boxes,
    descriptor,
    make_barriers,
    next_stage,
    produce_boxes,
    rows_are_aligned,
    tiles_of_item,
)
from aioinfer.kernels.launch import multiprocessors
from aioinfer.kernels.products import product_output
from aioinfer.kernels.quantize import GROUP as BLOCK
from aioinfer.kernels.quantize import ScaledInputs
from aioinfer.kernels.scaled_hopper import supports as supports_hopper
from aioinfer.kernels.scaled_product import Inputs
from aioinfer.kernels.scaled_tiles import (
    BLOCK_CONFIGS,
    HALF,
    STEP,
    BlockConfig,
    HopperConfig,
    hopper_config,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

RUN = gl.constexpr(8)  # neighbouring weight rows of the gate, and of up
PAIR = gl.constexpr(16)  # of both


@gluon.jit
def _start(X_BOX: gl.constexpr, W_BOX: gl.constexpr, acc, stage, x_smem, w_smem, full):
    """Begins the products of 64 tokens of a stage that is there, in the registers of `acc`."""
    STAGES: gl.constexpr = full.shape[0]
    X_BOXES: gl.constexpr = x_smem.shape[0] // STAGES
    W_BOXES: gl.constexpr = w_smem.shape[0] // STAGES
    return warpgroup_mma(
        x_smem.index(stage * X_BOXES + X_BOX),
        w_smem.index(stage * W_BOXES + W_BOX).permute((1, 0)),
        warpgroup_mma_init(acc), use_acc=False, is_async=True,
    )  # fmt: skip


@gluon.jit
def _load_scales(place, stride, index):
    """Returns the tokens' scales of a stage, from where they were written just now."""
    return gl.load(place + index * stride, cache_modifier=".cg")


@gluon.jit
def _load_pair(place, groups, index, PAIRED: gl.constexpr):
    """Returns the weight's scales of a stage: the gate's and up's, or the same one twice."""
    first = gl.load(place + index)
    second = first
    if PAIRED:
        second = gl.load(place + groups + index)
    return first, second


@gluon.jit
def _add_scaled(total, sums, tokens, first, second, layout: gl.constexpr, PAIRED: gl.constexpr):
    """Returns total + sums [64, LINES] times the scales of tokens and weight rows."""
    if PAIRED:
        line = gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, layout))
        lines = gl.where(line // RUN % 2 == 0, first, second)
        total += sums * (tokens[:, None] * lines[None, :])
    else:
        total += sums * (tokens * first)[:, None]
    return total


@gluon.jit
def _sums(
    X_BOX: gl.constexpr, W_BOX: gl.constexpr, PAIRED: gl.constexpr, left, stage, phase, steps,
    x_place, x_stride, w_place, groups, x_smem, w_smem, full, empty, layout: gl.constexpr
):  # fmt: skip
    """Returns the scaled sums of 64 tokens [64, LINES], the last stage and its phase; `left` are
    the products of the first, which have begun.

    The products of a stage run while the sums of the stage before are scaled. Stages take turns
    with two sets of registers, `even` and `odd`, so that none are moved. Scales are loaded two
    stages ahead.
    """
    STAGES: gl.constexpr = full.shape[0]
    TOKENS: gl.constexpr = x_smem.shape[1]
    LINES: gl.constexpr = w_smem.shape[1]
    total = gl.zeros([TOKENS, LINES], gl.float32, layout)
    odd = gl.zeros([TOKENS, LINES], gl.float32, layout)
    last = steps - 1
    tokens = _load_scales(x_place, x_stride, 0)
    first, second = _load_pair(w_place, groups, 0, PAIRED)
    later = _load_scales(x_place, x_stride, gl.minimum(1, last))
    later_first, later_second = _load_pair(w_place, groups, gl.minimum(1, last), PAIRED)
    for index in range(2, steps, 2):
        following, phase = next_stage(stage, phase, STAGES)
        mbarrier.wait(full.index(following), phase)
        right = _start(X_BOX, W_BOX, odd, following, x_smem, w_smem, full)
        even = warpgroup_mma_wait(1, [left])
        mbarrier.arrive(empty.index(stage))
        total = _add_scaled(total, even, tokens, first, second, layout, PAIRED)
        total = warpgroup_mma_wait(1, [total])  # or the compiler adds some after the next start
        tokens = _load_scales(x_place, x_stride, index)
        first, second = _load_pair(w_place, groups, index, PAIRED)
        stage, phase = next_stage(following, phase, STAGES)
        mbarrier.wait(full.index(stage), phase)
        left = _start(X_BOX, W_BOX, even, stage, x_smem, w_smem, full)
        odd = warpgroup_mma_wait(1, [right])
        mbarrier.arrive(empty.index(following))
        total = _add_scaled(total, odd, later, later_first, later_second, layout, PAIRED)
        total = warpgroup_mma_wait(1, [total])
        ahead = gl.minimum(index + 1, last)
        later = _load_scales(x_place, x_stride, ahead)
        later_first, later_second = _load_pair(w_place, groups, ahead, PAIRED)
    if steps % 2 == 0:
        following, phase = next_stage(stage, phase, STAGES)
        mbarrier.wait(full.index(following), phase)
        right = _start(X_BOX, W_BOX, odd, following, x_smem, w_smem, full)
        even = warpgroup_mma_wait(1, [left])
        mbarrier.arrive(empty.index(stage))
        total = _add_scaled(total, even, tokens, first, second, layout, PAIRED)
        odd = warpgroup_mma_wait(0, [right])
        mbarrier.arrive(empty.index(following))
        total = _add_scaled(total, odd, later, later_first, later_second, layout, PAIRED)
        stage = following
    else:
        even = warpgroup_mma_wait(0, [left])
        mbarrier.arrive(empty.index(stage))
        total = _add_scaled(total, even, tokens, first, second, layout, PAIRED)
    return total, stage, phase


@gluon.jit
def _sums_of_halves(
    X_BOX: gl.constexpr, W_BOX: gl.constexpr, PAIRED: gl.constexpr, left, stage, phase, steps,
    x_place, other_place, x_stride, w_place, groups, x_smem, w_smem, full, empty,
    layout: gl.constexpr
):  # fmt: skip
    """Returns the scaled sums of twice 64 tokens, each [64, LINES], the last stage and its phase;
    `left` are the products of the first stage and half, which have begun.

    Both halves take turns with one set of registers, and other consumers' products run while sums
    are scaled. (With two sets the assembler waits for every single product.)
    """
    STAGES: gl.constexpr = full.shape[0]
    TOKENS: gl.constexpr = x_smem.shape[1]
    LINES: gl.constexpr = w_smem.shape[1]
    total = gl.zeros([TOKENS, LINES], gl.float32, layout)
    other = gl.zeros([TOKENS, LINES], gl.float32, layout)
    tokens = _load_scales(x_place, x_stride, 0)
    others = _load_scales(other_place, x_stride, 0)
    first, second = _load_pair(w_place, groups, 0, PAIRED)
    for index in range(1, steps):
        sums = warpgroup_mma_wait(0, [left])
        total = _add_scaled(total, sums, tokens, first, second, layout, PAIRED)
        total = warpgroup_mma_wait(0, [total])  # see `_sums`
        right = _start(X_BOX + 1, W_BOX, sums, stage, x_smem, w_smem, full)
        tokens = _load_scales(x_place, x_stride, index)
        next_first, next_second = _load_pair(w_place, groups, index, PAIRED)
        following, next_phase = next_stage(stage, phase, STAGES)
        sums = warpgroup_mma_wait(0, [right])
        mbarrier.arrive(empty.index(stage))
        other = _add_scaled(other, sums, others, first, second, layout, PAIRED)
        other = warpgroup_mma_wait(0, [other])
        mbarrier.wait(full.index(following), next_phase)
        left = _start(X_BOX, W_BOX, sums, following, x_smem, w_smem, full)
        others = _load_scales(other_place, x_stride, index)
        first = next_first
        second = next_second
        stage = following
        phase = next_phase
    sums = warpgroup_mma_wait(0, [left])
    total = _add_scaled(total, sums, tokens, first, second, layout, PAIRED)
    total = warpgroup_mma_wait(0, [total])
    right = _start(X_BOX + 1, W_BOX, sums, stage, x_smem, w_smem, full)
    sums = warpgroup_mma_wait(0, [right])
    mbarrier.arrive(empty.index(stage))
    other = _add_scaled(other, sums, others, first, second, layout, PAIRED)
    return total, other, stage, phase


@gluon.jit
def _sums_in_turn(
    X_BOX: gl.constexpr, W_BOX: gl.constexpr, PAIRED: gl.constexpr, left, stage, phase, steps,
    x_place, x_stride, w_place, groups, x_smem, w_smem, full, empty, layout: gl.constexpr
):  # fmt: skip
    """`_sums` with one set of registers: other consumers' products run while sums are scaled."""
    STAGES: gl.constexpr = full.shape[0]
    TOKENS: gl.constexpr = x_smem.shape[1]
    LINES: gl.constexpr = w_smem.shape[1]
    total = gl.zeros([TOKENS, LINES], gl.float32, layout)
    tokens = _load_scales(x_place, x_stride, 0)
    first, second = _load_pair(w_place, groups, 0, PAIRED)
    for index in range(1, steps):
        next_tokens = _load_scales(x_place, x_stride, index)
        next_first, next_second = _load_pair(w_place, groups, index, PAIRED)
        sums = warpgroup_mma_wait(0, [left])
        mbarrier.arrive(empty.index(stage))
        total = _add_scaled(total, sums, tokens, first, second, layout, PAIRED)
        total = warpgroup_mma_wait(0, [total])  # see `_sums`
        stage, phase = next_stage(stage, phase, STAGES)
        mbarrier.wait(full.index(stage), phase)
        left = _start(X_BOX, W_BOX, sums, stage, x_smem, w_smem, full)
        tokens = next_tokens
        first = next_first
        second = next_second
    sums = warpgroup_mma_wait(0, [left])
    mbarrier.arrive(empty.index(stage))
    total = _add_scaled(total, sums, tokens, first, second, layout, PAIRED)
    return total, stage, phase


@gluon.jit
def _tile_sums(
    X_BOX: gl.constexpr, W_BOX: gl.constexpr, PAIRED: gl.constexpr, HALVES: gl.constexpr,
    OVERLAPPED: gl.constexpr, ROWS_PER_SCALE: gl.constexpr, begun, stage, phase, steps, token, part,
    x_scales, w_scales, rows, lines, x_stride, groups, x_smem, w_smem, full, empty,
    layout: gl.constexpr
):  # fmt: skip
    """Returns the scaled sums of the tokens from `token` on and the weight rows of number `part`, a
    tensor for each half, the last stage and its phase. `begun` are the products of the first stage
    and half; with one half they stand for the second one's sums."""
    # Beyond the last rows and lines are zeros, whose scales need only be finite.
    tokens = token + gl.arange(0, x_smem.shape[1], layout=gl.SliceLayout(1, layout))
    x_place = x_scales + gl.minimum(tokens, rows - 1)
    w_place = w_scales + gl.minimum(part * w_smem.shape[1], lines - PAIR) // ROWS_PER_SCALE * groups
    other = begun
    if HALVES == 2:
        acc, other, stage, phase = _sums_of_halves(
            X_BOX, W_BOX, PAIRED, begun, stage, phase, steps, x_place,
            x_scales + gl.minimum(tokens + x_smem.shape[1], rows - 1), x_stride, w_place, groups,
            x_smem, w_smem, full, empty, layout
        )  # fmt: skip
    elif OVERLAPPED:
        acc, stage, phase = _sums(
            X_BOX, W_BOX, PAIRED, begun, stage, phase, steps, x_place, x_stride, w_place, groups,
            x_smem, w_smem, full, empty, layout
        )  # fmt: skip
    else:
        acc, stage, phase = _sums_in_turn(
            X_BOX, W_BOX, PAIRED, begun, stage, phase, steps, x_place, x_stride, w_place, groups,
            x_smem, w_smem, full, empty, layout
        )  # fmt: skip
    return acc, other, stage, phase


@gluon.jit
def _load_residual(residual, token, column, staging, first, added, HALVES: gl.constexpr):
    """Begins to load a tile's part of the residual to `staging`, once the stores of the preceding
    tile have read it; `added` completes when it is there."""
    tma.store_wait(0)
    gl.thread_barrier()
    mbarrier.expect(added, HALVES * residual.block_type.nbytes)
    for half in gl.static_range(HALVES):
        tma.async_copy_global_to_shared(
            residual, [token + half * residual.block_type.shape[0], column], added,
            staging.index(first + half)
        )  # fmt: skip


@gluon.jit
def _finish(
    GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr, acc, out, place, mine, layout: gl.constexpr
):  # fmt: skip
    """Writes a tile's part [64, LINES] through shared memory; a residual is there already."""
    TOKENS: gl.constexpr = acc.shape[0]
    LINES: gl.constexpr = acc.shape[1]
    value = acc
    if HAS_RESIDUAL:
        value += mine.load(layout).to(gl.float32)
        gl.thread_barrier()
    if GATED:
        pairs = acc.reshape([TOKENS, LINES // PAIR, 2, RUN]).permute((0, 1, 3, 2))
        gate, up = gl.split(pairs)
        value = (gate / (1.0 + gl.exp2(-LOG2_E * gate)) * up).reshape([TOKENS, LINES // 2])
    mine.store(value.to(out.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out, place, mine)


@gluon.jit
def _consume(
    PART: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr, PAIRED: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, HALVES: gl.constexpr, SPLITS_LINES: gl.constexpr,
    OVERLAPPED: gl.constexpr, ROWS_PER_SCALE: gl.constexpr, out, residual, x_scales, w_scales,
    rows, lines, x_stride, groups, staging, added, x_smem, w_smem, full, empty, items, token_tiles,
    weight_tiles, steps
):  # fmt: skip
    """Computes the part of consumer `PART` of every work item: `HALVES` times 64 tokens."""
    STAGES: gl.constexpr = full.shape[0]
    TOKENS: gl.constexpr = x_smem.shape[1]
    LINES: gl.constexpr = w_smem.shape[1]
    X_BOXES: gl.constexpr = x_smem.shape[0] // STAGES
    W_BOXES: gl.constexpr = w_smem.shape[0] // STAGES
    X_BOX: gl.constexpr = 0 if SPLITS_LINES else PART * HALVES
    W_BOX: gl.constexpr = PART if SPLITS_LINES else 0
    OUTPUTS: gl.constexpr = out.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LINES, 32])
    stage = gl.program_id(0) * 0
    phase = stage
    turn = stage
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token_tile, weight_tile = tiles_of_item(item, token_tiles, weight_tiles, GROUP)
        token = (token_tile * X_BOXES + X_BOX) * TOKENS
        part = weight_tile * W_BOXES + W_BOX
        mbarrier.wait(full.index(stage), phase)
        begun = _start(
            X_BOX, W_BOX, gl.zeros([TOKENS, LINES], gl.float32, layout), stage, x_smem, w_smem,
            full
        )  # fmt: skip
        # The preceding kernels have ended, since the stage is there: their results can be read.
        if HAS_RESIDUAL:
            _load_residual(
                residual, token, part * OUTPUTS, staging, PART * HALVES, added.index(PART), HALVES
            )
        acc, other, stage, phase = _tile_sums(
            X_BOX, W_BOX, PAIRED, HALVES, OVERLAPPED, ROWS_PER_SCALE, begun, stage, phase, steps,
            token, part, x_scales, w_scales, rows, lines, x_stride, groups, x_smem, w_smem,
            full, empty, layout
        )  # fmt: skip
        stage, phase = next_stage(stage, phase, STAGES)
        if HAS_RESIDUAL:
            mbarrier.wait(added.index(PART), turn & 1)
            turn += 1
        else:
            tma.store_wait(0)
            gl.thread_barrier()
        place = [token, part * OUTPUTS]
        _finish(GATED, HAS_RESIDUAL, acc, out, place, staging.index(PART * HALVES), layout)
        if HALVES == 2:
            place = [token + TOKENS, part * OUTPUTS]
            mine = staging.index(PART * HALVES + 1)
            _finish(GATED, HAS_RESIDUAL, other, out, place, mine, layout)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "rows", "lines", "x_stride", "groups", "items", "token_tiles", "weight_tiles", "steps",
    ]
)  # fmt: skip
def _product_kernel(
    x, weight, out, residual, x_scales, w_scales, rows, lines, x_stride, groups, items,
    token_tiles, weight_tiles, steps,
    STAGES: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr, PAIRED: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, HALVES: gl.constexpr, SPLITS_LINES: gl.constexpr,
    OVERLAPPED: gl.constexpr, ROWS_PER_SCALE: gl.constexpr, CONSUMERS: gl.constexpr,
    REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    X_BOXES: gl.constexpr = HALVES if SPLITS_LINES else CONSUMERS * HALVES
    W_BOXES: gl.constexpr = CONSUMERS if SPLITS_LINES else 1
    x_smem = allocate_boxes(x, STAGES * X_BOXES)
    w_smem = allocate_boxes(weight, STAGES * W_BOXES)
    staging = allocate_boxes(out, CONSUMERS * HALVES)
    full, empty = make_barriers(STAGES, CONSUMERS)
    added = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(CONSUMERS):
        mbarrier.init(added.index(part), 1)
    fence_async_shared()
    gl.thread_barrier()
    ring = (x_smem, w_smem, full, empty, items, token_tiles, weight_tiles, steps)
    ends = (out, residual, x_scales, w_scales, rows, lines, x_stride, groups, staging, added) + ring
    # constants must be named in each tuple: in a variable they would become constants of constants
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, GROUP, GATED, PAIRED, HAS_RESIDUAL, HALVES, SPLITS_LINES,
                            OVERLAPPED, ROWS_PER_SCALE) + ends),
                (_consume, (1, GROUP, GATED, PAIRED, HAS_RESIDUAL, HALVES, SPLITS_LINES,
                            OVERLAPPED, ROWS_PER_SCALE) + ends),
                (produce_boxes, (PDL, GROUP, x, weight) + ring),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (0, GROUP, GATED, PAIRED, HAS_RESIDUAL, HALVES, SPLITS_LINES,
                            OVERLAPPED, ROWS_PER_SCALE) + ends),
                (_consume, (1, GROUP, GATED, PAIRED, HAS_RESIDUAL, HALVES, SPLITS_LINES,
                            OVERLAPPED, ROWS_PER_SCALE) + ends),
                (_consume, (2, GROUP, GATED, PAIRED, HAS_RESIDUAL, HALVES, SPLITS_LINES,
                            OVERLAPPED, ROWS_PER_SCALE) + ends),
                (produce_boxes, (PDL, GROUP, x, weight) + ring),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


def has_blocks(weight: ScaledMatrix) -> bool:
    """Whether 128 rows of the weight have one scale, or the gate rows and the up rows among them
    one each."""
    return weight.is_grouped and (weight.is_paired or weight.rows_per_scale % BLOCK == 0)


def supports(x: ScaledInputs, weight: ScaledMatrix, dtype: torch.dtype) -> bool:
    """Whether `block_product` takes these arguments: the same as `scaled_hopper` with scales of
    blocks."""
    return has_blocks(weight) and x.scales.stride(0) == 1 and supports_hopper(x, weight, dtype)


def select_config(
    x: Inputs,
    weight: ScaledMatrix,
    dtype: torch.dtype,
    *,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
) -> BlockConfig | HopperConfig | None:
    """Returns the configuration of `block_product` or `hopper_product` where one of them takes
    these arguments and is faster than `scaled_product`, otherwise None."""
    if not isinstance(x, ScaledInputs) or not supports_hopper(x, weight, dtype):
        return None
    if not all(t is None or (t.stride(0) and rows_are_aligned(t)) for t in (residual, out)):
        return None
    programs, (lines, inputs) = multiprocessors(x.values.device), weight.values.shape
    return hopper_config(
        len(x), lines, inputs, programs, gated=gated, grouped=weight.is_grouped,
        blocks=supports(x, weight, dtype),
    )  # fmt: skip


def block_product(
    x: ScaledInputs,
    weight: ScaledMatrix,
    dtype: torch.dtype,
    *,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    config: BlockConfig | None = None,
) -> torch.Tensor:
    """Returns x @ weight.T; the arguments are `hopper_product`'s, and `supports` must accept them.

    Raises:
        ValueError: the shapes do not fit, or `supports` returns false.
    """
    out = product_output(x.values, weight.values.shape, out, gated=gated, dtype=dtype)
    (rows, inputs), lines = x.values.shape, len(weight.values)
    if not supports(x, weight, dtype):
        raise ValueError(f"supports() rejects x {tuple(x.values.shape)} with this weight")
    if not rows:
        return out
    config = config or BLOCK_CONFIGS[0]
    token_tiles, weight_tiles = -(-rows // config.tokens), -(-lines // config.lines)
    items = token_tiles * weight_tiles
    tile = [HALF, config.part_lines // 2 if gated else config.part_lines]
    target = descriptor(out, tile)
    _product_kernel[(min(items, multiprocessors(out.device)),)](
        descriptor(x.values, [HALF, STEP]), descriptor(weight.values, [config.part_lines, STEP]),
        target, target if residual is None else descriptor(residual, tile), x.scales,
        weight.scales, rows, lines, x.scales.stride(1), weight.scales.shape[1], items, token_tiles,
        weight_tiles, inputs // STEP,
        STAGES=config.stages(gated=gated), GROUP=config.group, GATED=gated, PAIRED=weight.is_paired,
        HAS_RESIDUAL=residual is not None, HALVES=config.halves, SPLITS_LINES=config.splits_lines,
        OVERLAPPED=config.overlapped, ROWS_PER_SCALE=weight.rows_per_scale,
        CONSUMERS=config.consumers, REGISTERS=config.registers, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
