"""Float8 products of many rows on Hopper GPUs, in Triton's Gluon dialect.

The alternative to `scaled_product` for activations and weights in float8: `supports` says which,
and `block_hopper.select_config` where it is the faster one. Called by
`layers.formats.kernel_scaled`.
The schedule is `gated_product`'s: a tile of the output's transpose is 64 weight rows for each of
two or three consumer warpgroups times the tile's tokens; one warp loads both with TMA through a
ring of stages of 128 inputs, as many bytes as 64 inputs of bfloat16; programs are persistent.
Scales of output features and tokens are applied at the end of a tile, scales of blocks after each
stage, whose sums then stand beside the total (DeepSeek-V3, DeepSeek-AI 2024), and beside the sums
of the next stage, which is multiplied meanwhile. The producer loads a stage's scales of tokens with
its operands. A gate is computed in registers; a residual is loaded by TMA, while the tile's
products run, into the buffer from which the result is written.
"""
# ruff: noqa: N803, N806, RUF005  (compile-time constants are written in capitals; Triton does not
# unpack tuples)

from __future__ import annotations

import torch
from aioinfer.kernels.few_rows_scaled import ScaledMatrix
from aioinfer.kernels.hopper_pipeline import (
    PRODUCER_REGISTERS,
    TORCH_DTYPES,
    WEIGHT_ROWS,
    allocate_boxes,
    apply_gate,
    descriptor,
    make_barriers,
    produce,
    rows_are_aligned,
    scale_layout,
    tiles_of_item,
)
from aioinfer.kernels.launch import is_hopper, multiprocessors
from aioinfer.kernels.products import product_output
from aioinfer.kernels.quantize import ScaledInputs
from aioinfer.kernels.scaled_tiles import CONFIGS, STEP, HopperConfig
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@gluon.jit
def _start(PART: gl.constexpr, used, acc, x_smem, w_smem, full):
    """Waits for a stage, and begins its products in the registers of `acc`."""
    STAGES: gl.constexpr = x_smem.shape[0]
    PARTS: gl.constexpr = w_smem.shape[0] // STAGES
    stage = used % STAGES
    mbarrier.wait(full.index(stage), (used // STAGES) & 1)
    return warpgroup_mma(
        w_smem.index(stage * PARTS + PART), x_smem.index(stage).permute((1, 0)),
        warpgroup_mma_init(acc), use_acc=False, is_async=True,
    )  # fmt: skip


@gluon.jit
def _sums(
    PART: gl.constexpr, acc, used, steps, x_smem, w_smem, full, empty
):  # fmt: skip
    """Returns the sums of a tile [ROWS, TOKENS] over all stages, unscaled; `acc` are the products
    of the first, which have begun."""
    STAGES: gl.constexpr = x_smem.shape[0]
    PARTS: gl.constexpr = w_smem.shape[0] // STAGES
    for _ in range(1, steps):
        used += 1
        stage = used % STAGES
        mbarrier.wait(full.index(stage), (used // STAGES) & 1)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES))
        acc = warpgroup_mma(
            w_smem.index(stage * PARTS + PART), x_smem.index(stage).permute((1, 0)), acc,
            is_async=True,
        )  # fmt: skip
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index(used % STAGES))
    return acc


@gluon.jit
def _token_scales(used, scale_smem, layout: gl.constexpr):
    """Returns the scales of a stage's tokens."""
    STAGES: gl.constexpr = scale_smem.shape[0]
    TOKENS: gl.constexpr = scale_smem.shape[2]
    scales = scale_smem.index(used % STAGES).reshape([TOKENS])
    return scales.load(gl.SliceLayout(0, layout))


@gluon.jit
def _release(used, empty):
    """Gives a stage back to the producer. The next writes of TMA must not overtake the loads of the
    tokens' scales."""
    fence_async_shared()
    mbarrier.arrive(empty.index(used % empty.shape[0]))


@gluon.jit
def _row_scales(
    place, line, lines, index, ROWS: gl.constexpr, ROWS_PER_SCALE: gl.constexpr
):  # fmt: skip
    """Returns the scales of a tile's weight rows: one, where they share it."""
    if ROWS_PER_SCALE % ROWS == 0:
        scales = gl.load(place + index)
    else:
        scales = gl.load(place + index, mask=line < lines, other=0.0)
    return scales


@gluon.jit
def _add_scaled(total, sums, tokens, rows, ROWS: gl.constexpr, ROWS_PER_SCALE: gl.constexpr):
    """Returns total + sums times the scales of tokens and rows."""
    if ROWS_PER_SCALE % ROWS == 0:
        total += sums * (tokens * rows)[None, :]
    else:
        total += sums * tokens[None, :] * rows[:, None]
    return total


@gluon.jit
def _block_sums(
    PART: gl.constexpr, left, used, steps, w_scales, first, lines, groups, scale_smem, x_smem,
    w_smem, full, empty, layout: gl.constexpr, ROWS_PER_SCALE: gl.constexpr
):  # fmt: skip
    """Returns the sums of a tile [ROWS, TOKENS], scaled stage by stage; `left` are the products of
    the first, which have begun.

    The products of a stage run while the sums of the stage before are scaled. Stages take turns
    with two sets of registers, `even` and `odd`, so that none are moved. The weight's scales are
    loaded two stages ahead.
    """
    TOKENS: gl.constexpr = x_smem.shape[1]
    ROWS: gl.constexpr = w_smem.shape[1]
    line = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    if ROWS_PER_SCALE % ROWS == 0:
        place = w_scales + gl.minimum(first, lines - 1) // ROWS_PER_SCALE * groups
    else:
        place = w_scales + line // ROWS_PER_SCALE * groups
    total = gl.zeros([ROWS, TOKENS], gl.float32, layout)
    odd = gl.zeros([ROWS, TOKENS], gl.float32, layout)
    last = steps - 1
    scale = _row_scales(place, line, lines, 0, ROWS, ROWS_PER_SCALE)
    next_scale = _row_scales(place, line, lines, gl.minimum(1, last), ROWS, ROWS_PER_SCALE)
    for index in range(2, steps, 2):
        right = _start(PART, used + 1, odd, x_smem, w_smem, full)
        tokens = _token_scales(used, scale_smem, layout)
        even = warpgroup_mma_wait(1, [left])
        _release(used, empty)
        total = _add_scaled(total, even, tokens, scale, ROWS, ROWS_PER_SCALE)
        total = warpgroup_mma_wait(1, [total])  # or the compiler adds some after the next start
        scale = _row_scales(place, line, lines, index, ROWS, ROWS_PER_SCALE)
        left = _start(PART, used + 2, even, x_smem, w_smem, full)
        tokens = _token_scales(used + 1, scale_smem, layout)
        odd = warpgroup_mma_wait(1, [right])
        _release(used + 1, empty)
        total = _add_scaled(total, odd, tokens, next_scale, ROWS, ROWS_PER_SCALE)
        total = warpgroup_mma_wait(1, [total])
        next_scale = _row_scales(
            place, line, lines, gl.minimum(index + 1, last), ROWS, ROWS_PER_SCALE
        )
        used += 2
    tokens = _token_scales(used, scale_smem, layout)
    if steps % 2 == 0:
        right = _start(PART, used + 1, odd, x_smem, w_smem, full)
        even = warpgroup_mma_wait(1, [left])
        _release(used, empty)
        total = _add_scaled(total, even, tokens, scale, ROWS, ROWS_PER_SCALE)
        tokens = _token_scales(used + 1, scale_smem, layout)
        odd = warpgroup_mma_wait(0, [right])
        _release(used + 1, empty)
        total = _add_scaled(total, odd, tokens, next_scale, ROWS, ROWS_PER_SCALE)
    else:
        even = warpgroup_mma_wait(0, [left])
        _release(used, empty)
        total = _add_scaled(total, even, tokens, scale, ROWS, ROWS_PER_SCALE)
    return total


@gluon.jit
def _consume(
    PART: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    GROUPED: gl.constexpr, ROWS_PER_SCALE: gl.constexpr, out, residual, x_scales, w_scales, rows,
    lines, groups, staging, added, scale_smem, x_smem, w_smem, full, empty, items, token_tiles,
    weight_tiles, steps
):  # fmt: skip
    """Computes the part of consumer `PART` of every work item: 64 weight rows."""
    TOKENS: gl.constexpr = x_smem.shape[1]
    PARTS: gl.constexpr = staging.shape[0]
    ROWS: gl.constexpr = w_smem.shape[1]
    OUTPUTS: gl.constexpr = ROWS // 2 if GATED else ROWS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 32])
    mine = staging.index(PART)
    used = gl.program_id(0) * 0
    turn = gl.program_id(0) * 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token_tile, weight_tile = tiles_of_item(item, token_tiles, weight_tiles, GROUP)
        first = (weight_tile * PARTS + PART) * ROWS
        place = [token_tile * TOKENS, (weight_tile * PARTS + PART) * OUTPUTS]
        begun = _start(
            PART, used, gl.zeros([ROWS, TOKENS], gl.float32, layout), x_smem, w_smem, full
        )
        # The preceding kernels have ended, since the stage is there: their results can be read.
        if HAS_RESIDUAL:
            tma.store_wait(0)  # until the store of the preceding tile has read `mine`
            gl.thread_barrier()
            mbarrier.expect(added.index(PART), out.block_type.nbytes)
            tma.async_copy_global_to_shared(residual, place, added.index(PART), mine)
        if GROUPED:
            acc = _block_sums(
                PART, begun, used, steps, w_scales, first, lines, groups, scale_smem, x_smem,
                w_smem, full, empty, layout, ROWS_PER_SCALE
            )  # fmt: skip
        else:
            line = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
            token = token_tile * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))
            of_rows = gl.load(w_scales + line // ROWS_PER_SCALE, mask=line < lines, other=0.0)
            of_tokens = gl.load(x_scales + token, mask=token < rows, other=0.0)
            acc = _sums(PART, begun, used, steps, x_smem, w_smem, full, empty)
            acc *= of_rows[:, None]
            acc *= of_tokens[None, :]
        used += steps
        if HAS_RESIDUAL:
            mbarrier.wait(added.index(PART), turn & 1)
            acc += mine.permute((1, 0)).load(layout).to(gl.float32)
        else:
            tma.store_wait(0)
        gl.thread_barrier()
        value = acc
        if GATED:
            value = apply_gate(acc)
        mine.permute((1, 0)).store(value.to(out.dtype))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out, place, mine)
        turn += 1
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["rows", "lines", "groups", "items", "token_tiles", "weight_tiles", "steps"]
)
def _product_kernel(
    x, weight, scales, out, residual, x_scales, w_scales, rows, lines, groups, items, token_tiles,
    weight_tiles, steps,
    STAGES: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    GROUPED: gl.constexpr, ROWS_PER_SCALE: gl.constexpr, CONSUMERS: gl.constexpr,
    REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = x.block_type.shape[0]
    x_smem = allocate_boxes(x, STAGES)
    w_smem = allocate_boxes(weight, STAGES * CONSUMERS)
    scale_smem = gl.allocate_shared_memory(
        gl.float32, [STAGES if GROUPED else 1, 1, TOKENS], scales.layout
    )
    staging = allocate_boxes(out, CONSUMERS)
    full, empty = make_barriers(STAGES, CONSUMERS)
    added = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(CONSUMERS):
        mbarrier.init(added.index(part), 1)
    fence_async_shared()
    gl.thread_barrier()
    ring = (scale_smem, x_smem, w_smem, full, empty, items, token_tiles, weight_tiles, steps)
    loads = (x, weight, scales, x, x, x)  # no adapters
    ends = (out, residual, x_scales, w_scales, rows, lines, groups, staging, added)
    # constants must be named in each tuple: in a variable they would become constants of constants
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, GROUP, GATED, HAS_RESIDUAL, GROUPED, ROWS_PER_SCALE) + ends + ring),
                (_consume, (1, GROUP, GATED, HAS_RESIDUAL, GROUPED, ROWS_PER_SCALE) + ends + ring),
                (produce, (PDL, GROUPED, GROUP, False) + loads + ring),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, GROUP, GATED, HAS_RESIDUAL, GROUPED, ROWS_PER_SCALE) + ends + ring),
                (_consume, (1, GROUP, GATED, HAS_RESIDUAL, GROUPED, ROWS_PER_SCALE) + ends + ring),
                (_consume, (2, GROUP, GATED, HAS_RESIDUAL, GROUPED, ROWS_PER_SCALE) + ends + ring),
                (produce, (PDL, GROUPED, GROUP, False) + loads + ring),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )


def supports(x: ScaledInputs, weight: ScaledMatrix, dtype: torch.dtype) -> bool:
    """Whether `hopper_product` takes these: on Hopper, float8, scales of tokens and weight rows, or
    of blocks on both sides; a result in bf16 or fp16; K a multiple of 128."""
    values = x.values
    return (
        is_hopper(values.device)
        and values.dtype == weight.values.dtype == torch.float8_e4m3fn
        and dtype in TORCH_DTYPES
        and values.shape[1] % STEP == 0
        and len(weight.values) % 16 == 0
        and (x.scales.shape[1] > 1) == weight.is_grouped
        and (not weight.is_grouped or x.scales.stride(1) % 4 == 0)  # TMA: rows of 16 bytes
        and rows_are_aligned(values)
        and weight.values.is_contiguous()
    )


def hopper_product(
    x: ScaledInputs,
    weight: ScaledMatrix,
    dtype: torch.dtype,
    *,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    config: HopperConfig | None = None,
) -> torch.Tensor:
    """Returns x @ weight.T; the arguments are `scaled_product`'s, and `supports` must accept them.

    A residual's rows are aligned to 16 bytes and not strided by 0; it may be `out`.

    Raises:
        ValueError: the shapes do not fit, or `supports` returns false.
    """
    out = product_output(x.values, weight.values.shape, out, gated=gated, dtype=dtype)
    (rows, inputs), lines = x.values.shape, len(weight.values)
    if not supports(x, weight, dtype):
        raise ValueError(f"supports() rejects x {tuple(x.values.shape)} with this weight")
    if not rows:
        return out
    grouped = weight.is_grouped
    config = config or CONFIGS[gated, grouped][0]
    token_tiles = -(-rows // config.tokens)
    weight_tiles = -(-lines // config.lines)
    items = token_tiles * weight_tiles
    tile = [config.tokens, WEIGHT_ROWS // 2 if gated else WEIGHT_ROWS]
    target = descriptor(out, tile)
    scales = x.scales.t() if grouped else weight.scales.view(1, -1)
    _product_kernel[(min(items, multiprocessors(out.device)),)](
        descriptor(x.values, [config.tokens, STEP]),
        descriptor(weight.values, [WEIGHT_ROWS, STEP]),
        _scale_descriptor(scales, config.tokens), target,
        target if residual is None else descriptor(residual, tile), x.scales, weight.scales,
        rows, lines, weight.scales.shape[1], items, token_tiles, weight_tiles, inputs // STEP,
        STAGES=config.stages, GROUP=config.group, GATED=gated, HAS_RESIDUAL=residual is not None,
        GROUPED=grouped, ROWS_PER_SCALE=weight.rows_per_scale, CONSUMERS=config.consumers,
        REGISTERS=config.registers, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _scale_descriptor(scales: torch.Tensor, tokens: int) -> TensorDescriptor:
    """`scales`: float32 [groups, T], the tokens contiguous."""
    strides = [max(scales.stride(0), 4), 1]
    return TensorDescriptor(scales, list(scales.shape), strides, [1, tokens], scale_layout())
