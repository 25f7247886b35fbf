"""Products of many rows with weights of 4-bit integers in groups, on Hopper GPUs, in Triton's Gluon
dialect.

The alternative to `grouped_product` where arithmetic is the bound (`supports`, `use_hopper`);
called by the weight format for groups (`aioinfer.layers.formats.kernel_grouped`).

A tile of the output's transpose is 64 weight rows for each of three consumer warpgroups times the
tile's tokens. A consumer reads the packed words of 256 inputs from shared memory once, as the left
operand of a wgmma lies in registers, and expands them, 64 inputs at a time, while its preceding
wgmma is running: the product with x, from shared memory, is asynchronous. One warp loads words and
scales with TMA, another x, each through a ring of stages of its own: words run ahead of the kernel
that writes x. The rest of the schedule is `gated_product`'s.

The integers less their zero points, exact in 16 bits, are multiplied by the group's scale in x's
dtype before the product, as in Frantar et al., "MARLIN", 2024: the rounding is that of a weight
dequantized to 16 bits. Scaling sums of a group instead, which `grouped_product` does, would need as
many registers again as the sums of a tile, and a wait for each group's product.

Where tiles are fewer than multiprocessors, the inputs are divided over several programs (split-K).
The last to finish sums their parts in a fixed order.
"""
# ruff: noqa: N803, N806, RUF005  (compile-time constants are written in capitals; Triton does not
# unpack tuples)

from __future__ import annotations

import torch
from aioinfer.kernels.grouped_expansion import expand, scale_of
from aioinfer.kernels.grouped_hopper_configs import (
    CONSUMERS,
    REGISTERS,
    GroupedHopperConfig,
    grouped_hopper_config,
    shares,
    weight_tiles_of,
)
from aioinfer.kernels.grouped_weight import MAX_RUN, TILE, PackedGroups
from aioinfer.kernels.hopper_pipeline import (
    PRODUCER_REGISTERS,
    TORCH_DTYPES,
    WEIGHT_ROWS,
    allocate_boxes,
    apply_gate,
    descriptor,
    make_barriers,
    rows_are_aligned,
    scale_layout,
    tiles_of_item,
)
from aioinfer.kernels.launch import is_hopper, multiprocessors
from aioinfer.kernels.products import product_output
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

RUNS = gl.constexpr(4)  # runs of 64 inputs whose integers lie in the same words
SCALE_BOX = 256  # scales of one load: of the 192 rows of a tile, and of the next
#: Rows for which `use_hopper` prefers this kernel, measured on an H200, of weights of at least
#: `MIN_WEIGHTS` integers: smaller ones have too few tiles.
MIN_ROWS, MIN_GATED_ROWS, MAX_ROWS = 65, 33, 512
MIN_WEIGHTS = 20 * 2**20


@gluon.jit
def _share(item, units, splits):
    """Returns the units of work item `item`: from the first to before the second."""
    share = (units + splits - 1) // splits
    begin = item % splits * share
    return begin, gl.minimum(begin + share, units)


@gluon.jit
def _produce_words(
    GROUP: gl.constexpr, SIZE: gl.constexpr, packed, scales, scale_smem, w_smem, w_full, w_empty,
    items, token_tiles, weight_tiles, units, splits
):  # fmt: skip
    """Loads words and scales of every work item as stages become free. The kernel before does not
    write them, so it is not waited for."""
    STAGES: gl.constexpr = w_full.shape[0]
    SCALES: gl.constexpr = scale_smem.shape[0] // STAGES
    TILES: gl.constexpr = packed.block_type.shape[0]
    ROWS: gl.constexpr = CONSUMERS * TILES * packed.block_type.shape[2]
    INPUTS: gl.constexpr = RUNS * packed.block_type.shape[3]
    NBYTES: gl.constexpr = CONSUMERS * packed.block_type.nbytes + SCALES * scales.block_type.nbytes
    loaded = gl.program_id(0) * 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, weight_tile = tiles_of_item(item // splits, token_tiles, weight_tiles, GROUP)
        begin, end = _share(item, units, splits)
        for unit in range(begin, end):
            stage = loaded % STAGES
            mbarrier.wait(w_empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
            mbarrier.expect(w_full.index(stage), NBYTES)
            for part in gl.static_range(CONSUMERS):
                tile = (weight_tile * CONSUMERS + part) * TILES
                tma.async_copy_global_to_shared(
                    packed, [tile, unit, 0, 0], w_full.index(stage),
                    w_smem.index(stage * CONSUMERS + part)
                )  # fmt: skip
            for part in gl.static_range(SCALES):
                group = (unit * INPUTS + part * (INPUTS // SCALES)) // SIZE
                tma.async_copy_global_to_shared(
                    scales, [group, weight_tile * ROWS], w_full.index(stage),
                    scale_smem.index(stage * SCALES + part)
                )  # fmt: skip
            loaded += 1


@gluon.jit
def _produce_x(
    PDL: gl.constexpr, GROUP: gl.constexpr, x, x_smem, full, empty, items, token_tiles,
    weight_tiles, units, splits
):  # fmt: skip
    """Loads x for every work item as stages become free, after the kernel before.

    The consumers need not wait for that kernel: they read its results and write their own only
    after a product with an x that was loaded behind the wait.
    """
    STAGES: gl.constexpr = x_smem.shape[0]
    TOKENS: gl.constexpr = x_smem.shape[1]
    STEP: gl.constexpr = x_smem.shape[2]
    if PDL:
        gdc_wait()
    loaded = gl.program_id(0) * 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token_tile, _ = tiles_of_item(item // splits, token_tiles, weight_tiles, GROUP)
        begin, end = _share(item, units, splits)
        for run in range(begin * RUNS, end * RUNS):
            stage = loaded % STAGES
            mbarrier.wait(empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), x.block_type.nbytes)
            tma.async_copy_global_to_shared(
                x, [token_tile * TOKENS, run * STEP], full.index(stage), x_smem.index(stage)
            )
            loaded += 1
    if PDL:
        gdc_launch_dependents()


@gluon.jit
def _place_of_run(used, RUN: gl.constexpr, STAGES: gl.constexpr):
    """Returns the stage of run `RUN` of x in the unit after `used` others, and its phase."""
    if STAGES % RUNS == 0:  # needs fewer instructions
        UNITS: gl.constexpr = STAGES // RUNS
        stage, phase = used % UNITS * RUNS + RUN, (used // UNITS) & 1
    else:
        taken = used * RUNS + RUN
        stage, phase = taken % STAGES, (taken // STAGES) & 1
    return stage, phase


@gluon.jit
def _take_words(
    PART: gl.constexpr, used, there, scale_smem, w_smem, w_full, w_empty, operand: gl.constexpr
):  # fmt: skip
    """Returns the words of a unit, as the left operand lies in registers, and its elements of
    `PackedGroups.scales`, and frees the stage. Where data is not `there`, the values are
    arbitrary."""
    STAGES: gl.constexpr = w_full.shape[0]
    SCALES: gl.constexpr = scale_smem.shape[0] // STAGES
    ROWS: gl.constexpr = w_smem.shape[1] * w_smem.shape[3]
    STEP: gl.constexpr = w_smem.shape[4]
    stage = used % STAGES
    mbarrier.wait(w_full.index(stage), (used // STAGES) & 1, pred=there)
    words = w_smem.index(stage * CONSUMERS + PART).reshape([ROWS, STEP]).load(operand)
    kept = ()
    for part in gl.static_range(SCALES):
        scales = scale_smem.index(stage * SCALES + part).reshape([scale_smem.shape[2]])
        kept = kept + (scales.slice(PART * ROWS, ROWS).load(gl.SliceLayout(1, operand)),)
    fence_async_shared()  # the next writes of TMA must not overtake the loads
    gl.thread_barrier()  # until all warps have read the stage
    mbarrier.arrive(w_empty.index(stage), pred=there)
    return words, kept


@gluon.jit
def _sums(
    PART: gl.constexpr, HAS_ZEROS: gl.constexpr, count, used, scale_smem, w_smem, w_full, w_empty,
    x_smem, full, empty, layout: gl.constexpr
):  # fmt: skip
    """Returns the sums of a tile [ROWS, TOKENS] over `count` units, of which `used` were taken from
    the rings before."""
    SCALES: gl.constexpr = scale_smem.shape[0] // w_full.shape[0]
    STAGES: gl.constexpr = x_smem.shape[0]
    TOKENS: gl.constexpr = x_smem.shape[1]
    ROWS: gl.constexpr = w_smem.shape[1] * w_smem.shape[3]
    dtype: gl.constexpr = x_smem.dtype
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    acc = gl.zeros([ROWS, TOKENS], gl.float32, layout)
    words, kept = _take_words(PART, used, True, scale_smem, w_smem, w_full, w_empty, operand)
    for index in range(count):
        for run in gl.static_range(RUNS):
            zero, scale = scale_of(kept[run * SCALES // RUNS], HAS_ZEROS, dtype)
            values = expand(words, zero, scale, run)
            stage, phase = _place_of_run(used, run, STAGES)
            mbarrier.wait(full.index(stage), phase)
            acc = warpgroup_mma(values, x_smem.index(stage).permute((1, 0)), acc, is_async=True)
            # This product stays under way while the next run is expanded, the last one while the
            # next words are read. Under way over the end of the loop, it would need more registers
            # than there are, and ptxas would wait for each.
            if run + 1 == RUNS:
                words, kept = _take_words(
                    PART, used + 1, index + 1 < count, scale_smem, w_smem, w_full, w_empty, operand
                )
            acc = warpgroup_mma_wait(1 if run + 1 < RUNS else 0, [acc])
            if run > 0:
                mbarrier.arrive(empty.index(_place_of_run(used, run - 1, STAGES)[0]))
            if run + 1 == RUNS:
                mbarrier.arrive(empty.index(stage))
        used += 1
    return acc


@gluon.jit
def _is_last(acc, partials, counter, split, splits):
    """Writes a program's sums; returns whether all others of the tile have been written. Then the
    counter is reset."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))
    place = row[:, None] * TOKENS + token[None, :]
    gl.store(partials + split * (ROWS * TOKENS) + place, acc)
    gl.thread_barrier()
    last = gl.atomic_add(counter, 1, sem="acq_rel") == splits - 1
    if last:
        gl.store(counter, 0)
    return last


@gluon.jit
def _total(partials, splits, ROWS: gl.constexpr, TOKENS: gl.constexpr, layout: gl.constexpr):
    """Returns the sum of all programs' sums of a tile, in the order of the inputs."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))
    place = row[:, None] * TOKENS + token[None, :]
    acc = gl.load(partials + place, cache_modifier=".cg")
    for split in range(1, splits):
        acc += gl.load(partials + split * (ROWS * TOKENS) + place, cache_modifier=".cg")
    return acc


@gluon.jit
def _write(
    acc, place, turn, PART: gl.constexpr, GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr, out,
    residual, mine, added
):  # fmt: skip
    """Applies the gate or adds the residual to the sums of a tile and writes them."""
    layout: gl.constexpr = acc.type.layout
    tma.store_wait(0)  # until the store of the preceding tile has read `mine`
    gl.thread_barrier()
    if HAS_RESIDUAL:
        mbarrier.expect(added.index(PART), out.block_type.nbytes)
        tma.async_copy_global_to_shared(residual, place, added.index(PART), mine)
        mbarrier.wait(added.index(PART), turn & 1)
        acc += mine.permute((1, 0)).load(layout).to(gl.float32)
        gl.thread_barrier()
    value = acc
    if GATED:
        value = apply_gate(acc)
    mine.permute((1, 0)).store(value.to(out.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out, place, mine)


@gluon.jit
def _consume(
    PART: gl.constexpr, GROUP: gl.constexpr, SHARED: gl.constexpr, HAS_ZEROS: gl.constexpr,
    GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr, out, residual, partials, counters, staging,
    added, scale_smem, w_smem, w_full, w_empty, x_smem, full, empty, items, token_tiles,
    weight_tiles, units, splits
):  # fmt: skip
    """Computes the part of consumer `PART` of every work item: 64 weight rows."""
    TOKENS: gl.constexpr = x_smem.shape[1]
    ROWS: gl.constexpr = w_smem.shape[1] * w_smem.shape[3]
    OUTPUTS: gl.constexpr = ROWS // 2 if GATED else ROWS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    mine = staging.index(PART)
    used = gl.program_id(0) * 0
    turn = gl.program_id(0) * 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile = item // splits
        token_tile, weight_tile = tiles_of_item(tile, token_tiles, weight_tiles, GROUP)
        begin, end = _share(item, units, splits)
        acc = _sums(
            PART, HAS_ZEROS, end - begin, used, scale_smem, w_smem, w_full, w_empty, x_smem, full,
            empty, layout
        )  # fmt: skip
        used += end - begin
        place = [token_tile * TOKENS, (weight_tile * CONSUMERS + PART) * OUTPUTS]
        if SHARED:
            part = tile * CONSUMERS + PART
            sums = partials + part * (splits * ROWS * TOKENS)
            if _is_last(acc, sums, counters + part, item % splits, splits):
                total = _total(sums, splits, ROWS, TOKENS, layout)
                _write(total, place, turn, PART, GATED, HAS_RESIDUAL, out, residual, mine, added)
                turn += 1
        else:
            _write(acc, place, turn, PART, GATED, HAS_RESIDUAL, out, residual, mine, added)
            turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["items", "token_tiles", "weight_tiles", "units", "splits"])
def _kernel(
    x, packed, scales, out, residual, partials, counters, items, token_tiles, weight_tiles, units,
    splits, STAGES: gl.constexpr, WORD_STAGES: gl.constexpr, SCALES: gl.constexpr,
    SIZE: gl.constexpr, SHARED: gl.constexpr, GROUP: gl.constexpr, HAS_ZEROS: gl.constexpr,
    GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    x_smem = allocate_boxes(x, STAGES)
    w_smem = gl.allocate_shared_memory(
        gl.int16,
        [WORD_STAGES * CONSUMERS, packed.block_type.shape[0], 1, packed.block_type.shape[2],
         packed.block_type.shape[3]],
        packed.layout,
    )  # fmt: skip
    scale_smem = gl.allocate_shared_memory(
        gl.int32, [WORD_STAGES * SCALES, 1, scales.block_type.shape[1]], scales.layout
    )
    staging = allocate_boxes(out, CONSUMERS)
    w_full, w_empty = make_barriers(WORD_STAGES, CONSUMERS)
    full, empty = make_barriers(STAGES, CONSUMERS)
    added = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(CONSUMERS):
        mbarrier.init(added.index(part), 1)
    fence_async_shared()
    gl.thread_barrier()
    counts = (items, token_tiles, weight_tiles, units, splits)
    words = (scale_smem, w_smem, w_full, w_empty)
    inputs = (x_smem, full, empty)
    rest = (out, residual, partials, counters, staging, added) + words + inputs + counts
    # constants must be named in each tuple: in a variable they would become constants of constants
    gl.warp_specialize(
        [
            (_consume, (0, GROUP, SHARED, HAS_ZEROS, GATED, HAS_RESIDUAL) + rest),
            (_consume, (1, GROUP, SHARED, HAS_ZEROS, GATED, HAS_RESIDUAL) + rest),
            (_consume, (2, GROUP, SHARED, HAS_ZEROS, GATED, HAS_RESIDUAL) + rest),
            (_produce_words, (GROUP, SIZE, packed, scales) + words + counts),
            (_produce_x, (PDL, GROUP, x) + inputs + counts),
        ],
        [4, 4, 1, 1],
        [REGISTERS, REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


def supports(
    x: torch.Tensor,
    weight: PackedGroups,
    *,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
) -> bool:
    """Whether `grouped_hopper` takes these: on Hopper, bf16 or fp16, 4 bits in groups of 64 or of a
    multiple of 128 inputs or in whole rows, outputs a multiple of 8.

    TMA needs the rows of x, of a residual and of the result to be contiguous and to begin at
    multiples of 16 bytes; the rows of a residual must not be one row repeated.
    """
    outputs = weight.features // 2 if gated else weight.features
    return (
        is_hopper(x.device)
        and x.dtype in TORCH_DTYPES
        and weight.bits == 4
        and weight.run == MAX_RUN
        and outputs % 8 == 0
        and (residual is None or residual.stride(0) > 0)
        and all(rows_are_aligned(t) for t in (x, residual, out) if t is not None)
    )


def use_hopper(
    x: torch.Tensor,
    weight: PackedGroups,
    *,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
) -> bool:
    """Whether `grouped_hopper` should compute this product, rather than `grouped_product` or a
    dequantization followed by cuBLAS."""
    is_large = weight.features * weight.inputs >= MIN_WEIGHTS
    least = MIN_GATED_ROWS if gated else MIN_ROWS
    return (
        is_large
        and least <= len(x) <= MAX_ROWS
        and supports(x, weight, residual=residual, gated=gated, out=out)
    )


def grouped_hopper(
    x: torch.Tensor,
    weight: PackedGroups,
    *,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    config: GroupedHopperConfig | None = None,
) -> torch.Tensor:
    """Returns x @ weight.T for a weight of 4-bit integers in groups, accumulated in float32; the
    arguments are `grouped_product`'s, and `supports` must accept them.

    Args:
        x: [M, K].
        weight: [N, K], or with `gated` [2 * N, K]; read before the preceding kernel has ended.
        residual: [M, N], may be `out`.
        gated, pdl: see `grouped_product`.
        out: [M, N] to write to; by default a new tensor.
        config: instead of `grouped_hopper_config`'s (for tests and tuning).

    Raises:
        ValueError: the shapes do not fit, or `supports` returns false.
    """
    rows = len(x)
    out = product_output(x, (weight.features, weight.inputs), out, gated=gated)
    if not supports(x, weight, residual=residual, gated=gated, out=out):
        raise ValueError(
            f"supports() rejects x {tuple(x.shape)} of {x.dtype}, {weight.bits} bits in groups of "
            f"{weight.group}, or the rows of a residual or result"
        )
    if not rows:
        return out
    programs = multiprocessors(x.device)
    config = config or grouped_hopper_config(rows, weight, programs, gated=gated)
    token_tiles, weight_tiles = -(-rows // config.tokens), weight_tiles_of(weight)
    items = token_tiles * weight_tiles * config.splits
    partials = weight.counters if config.splits == 1 else _partials(x, weight, config, items)
    tile = [config.tokens, WEIGHT_ROWS // 2 if gated else WEIGHT_ROWS]
    target = descriptor(out, tile)
    _kernel[(min(items, programs),)](
        descriptor(x, [config.tokens, MAX_RUN]), _word_descriptor(weight),
        _scale_descriptor(weight), target,
        target if residual is None else descriptor(residual, tile), partials, weight.counters,
        items, token_tiles, weight_tiles, weight.units, config.splits,
        STAGES=config.stages, WORD_STAGES=config.word_stages, SCALES=scales_of_unit(weight.group),
        SIZE=weight.group, SHARED=config.splits > 1, GROUP=config.group, HAS_ZEROS=weight.has_zeros,
        GATED=gated, HAS_RESIDUAL=residual is not None, REGISTERS=REGISTERS, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _partials(
    x: torch.Tensor, weight: PackedGroups, config: GroupedHopperConfig, items: int
) -> torch.Tensor:
    """Returns memory for the sums of programs that share a tile."""
    if not shares(weight, items // config.splits, config.splits):
        raise ValueError(f"{config} leaves programs without inputs, or tiles without counters")
    size = items * CONSUMERS.value * WEIGHT_ROWS * config.tokens
    return torch.empty(size, dtype=torch.float32, device=x.device)


def scales_of_unit(group: int) -> int:
    """Returns how many scales of a weight row are loaded for a unit of 256 inputs: one for each run
    in groups of 64, one for two runs in larger ones."""
    return RUNS.value if group == MAX_RUN else RUNS.value // 2


def word_layout() -> gl.NVMMASharedLayout:
    """Returns the layout of a consumer's words of a unit in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([WEIGHT_ROWS // TILE, 1, TILE, MAX_RUN], gl.int16)


def _word_descriptor(weight: PackedGroups) -> TensorDescriptor:
    t, block = weight.integers, [WEIGHT_ROWS // TILE, 1, TILE, MAX_RUN]
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block, word_layout())


def _scale_descriptor(weight: PackedGroups) -> TensorDescriptor:
    t = weight.scales  # one group alone may have any stride
    strides = [t.shape[1], 1]
    return TensorDescriptor(t, list(t.shape), strides, [1, SCALE_BOX], scale_layout())
