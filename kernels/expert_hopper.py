"""The second product of a mixture of experts for many tokens, as a kernel for Hopper GPUs in
Triton's Gluon dialect.

Launched by `expert_product` where `pipelined_config` returns a configuration; elsewhere
`expert_matrix` computes the same. Buckets and the order of rows are those of `expert_matrix`, the
weight is the left operand, and programs are persistent. The first product gathers its rows, which
TMA cannot do on Hopper: `expert_matrix` computes it everywhere.

A tile has 256 weight rows, 128 for each of two consumer warpgroups, and up to 128 tokens of an
expert; where no more than 64 are left, it computes 64. One warp finds the tiles and reads their
pairs ahead; another one loads both operands with TMA through a ring of shared-memory stages. So the
loads of a tile are under way while the one before it is written, and a consumer that writes leaves
the tensor cores to the other one. Results go through shared memory, and rows are written 128 bytes
at a time. The schedule is CUTLASS's cooperative one (Thakkar et al., 2023).
"""
# ruff: noqa: N803, N806, RUF005  (compile-time constants are written in capitals; Triton does not
# unpack tuples)

from __future__ import annotations

import torch
import triton
from aioinfer.kernels.expert_arguments import ExpertArguments, first_expert
from aioinfer.kernels.expert_configs import PipelinedConfig
from aioinfer.kernels.expert_matrix import max_tiles
from aioinfer.kernels.expert_weights import ExpertWeights
from aioinfer.kernels.hopper_pipeline import (
    STEP,
    TORCH_DTYPES,
    WEIGHT_ROWS,
    all_registers,
    allocate_boxes,
    consumer_registers,
    descriptor,
    load_rows,
    make_barriers,
)
from aioinfer.kernels.launch import is_hopper, multiprocessors
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: Average rows of an expert from which the kernel is used.
MIN_ROWS = 64
CONSUMERS = 2
#: Weight rows of a tile, and its tokens at most.
LINES = CONSUMERS * 2 * WEIGHT_ROWS
TOKENS = 128
#: Tiles that are found ahead.
FOUND = gl.constexpr(2)
#: Registers of a thread that loads, or that finds tiles by the counts of all experts.
LOADER_REGISTERS = 56


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _sizes(counts, tokens, EXPERTS: gl.constexpr, PAD: gl.constexpr):
    """Returns the rows [PAD] of each expert; every warp has all of them."""
    number = gl.arange(0, PAD, gl.BlockedLayout([PAD // 32], [32], [gl.num_warps()], [0]))
    return gl.minimum(gl.load(counts + number, number < EXPERTS, 0), tokens)


@gluon.jit
def _count_tiles(
    counts, tokens, EXPERTS: gl.constexpr, PAD: gl.constexpr, TOKENS: gl.constexpr,
    LINE_TILES: gl.constexpr
):  # fmt: skip
    """Returns the number of tiles."""
    return gl.sum((_sizes(counts, tokens, EXPERTS, PAD) + TOKENS - 1) // TOKENS, 0) * LINE_TILES


@gluon.jit
def _find_tiles(
    EXPERTS: gl.constexpr, PAD: gl.constexpr, LINE_TILES: gl.constexpr, LINES: gl.constexpr, counts,
    buckets, factors, pairs, row_factors, places, known, free, tokens, lines
):  # fmt: skip
    """Writes where the tiles of this program are, which pairs are their rows, and what these are
    multiplied by."""
    TOKENS: gl.constexpr = pairs.shape[1]
    gdc_wait()  # does nothing where the launch is not a dependent one
    sizes = _sizes(counts, tokens, EXPERTS, PAD)
    ends = gl.associative_scan((sizes + TOKENS - 1) // TOKENS, 0, _add)
    tiles = gl.max(ends, 0) * LINE_TILES
    row = gl.arange(0, TOKENS, gl.BlockedLayout([TOKENS // 32], [32], [1], [0]))
    number = gl.arange(0, 4, gl.BlockedLayout([4], [32], [1], [0]))
    found = gl.program_id(0) * 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        item, line_tile = tile // LINE_TILES, tile % LINE_TILES
        is_before = ends <= item
        expert = gl.sum(is_before.to(gl.int32), 0)
        begin = (item - gl.max(gl.where(is_before, ends, 0), 0)) * TOKENS
        before = gl.sum(gl.where(is_before, sizes, 0), 0)
        left = gl.minimum(gl.load(counts + expert), tokens) - begin
        place = gl.where(
            number < 2,
            gl.where(number == 0, left, line_tile),
            gl.where(number == 2, before + begin, expert * lines + line_tile * LINES),
        )
        pair = gl.load(buckets + expert.to(gl.int64) * tokens + begin + row, row < left, -1)
        factor = gl.load(factors + pair, row < left, 0.0)
        slot = found % FOUND
        mbarrier.wait(free.index(slot), ((found // FOUND) & 1) ^ 1)
        pairs.index(slot).store(pair)
        row_factors.index(slot).store(factor)
        places.index(slot).store(place)
        gl.thread_barrier()
        mbarrier.arrive(known.index(slot))
        found += 1


@gluon.jit
def _read(places, slot, WHICH: gl.constexpr):
    """Returns a number of the tile in a slot: 0, the rows that its expert has from there on; 1, the
    number of its tile of weight rows; 2 and 3, its first row among the sorted rows, and among the
    weight rows of all experts."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    return gl.sum(gl.where(gl.arange(0, 4, layout) == WHICH, places.index(slot).load(layout), 0), 0)


@gluon.jit
def _load(
    PDL: gl.constexpr, EXPERTS: gl.constexpr, PAD: gl.constexpr, LINE_TILES: gl.constexpr,
    STEPS: gl.constexpr, x, weight, x_smem, w_smem, full, empty, counts, places, known, free, tokens
):  # fmt: skip
    """Loads the stages of every tile of this program as they become free."""
    STAGES: gl.constexpr = x_smem.shape[0]
    TOKENS: gl.constexpr = x_smem.shape[1]
    STEP: gl.constexpr = x_smem.shape[2]
    BOXES: gl.constexpr = w_smem.shape[0] // STAGES
    NBYTES: gl.constexpr = x.block_type.nbytes + BOXES * weight.block_type.nbytes
    gdc_wait()
    tiles = _count_tiles(counts, tokens, EXPERTS, PAD, TOKENS, LINE_TILES)
    loaded = gl.program_id(0) * 0
    found = gl.program_id(0) * 0
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        slot = found % FOUND
        mbarrier.wait(known.index(slot), (found // FOUND) & 1)
        row, line = _read(places, slot, 2), _read(places, slot, 3)
        gl.thread_barrier()  # every thread has read them
        mbarrier.arrive(free.index(slot))
        found += 1
        for index in range(STEPS):
            stage = loaded % STAGES
            mbarrier.wait(empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), NBYTES)
            tma.async_copy_global_to_shared(
                x, [row, index * STEP], full.index(stage), x_smem.index(stage)
            )
            load_rows(weight, w_smem, full, stage, line, index * STEP, True)
            loaded += 1
    if PDL:
        gdc_launch_dependents()


@gluon.jit
def _write_rows(value, pair, factor, mine, out, column, WIDTH: gl.constexpr):
    """Multiplies sums [64, tokens] by the tokens' factors and writes them to the rows `pair` of
    `out`, those of -1 left out, by way of shared memory."""
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    scaled = value * factor.load(gl.SliceLayout(0, value.type.layout))[None, :]
    gl.thread_barrier()  # the rows before these are read
    mine.permute((1, 0)).store(scaled.to(out.dtype.element_ty))
    gl.thread_barrier()
    target = pair.load(gl.SliceLayout(1, by_row))
    columns = column + gl.arange(0, mine.shape[1], gl.SliceLayout(0, by_row))
    mask = (target >= 0)[:, None] & (columns < WIDTH)[None, :]
    rows = out + target.to(gl.int64)[:, None] * WIDTH + columns[None, :]
    gl.store(rows, mine.load(by_row), mask)


@gluon.jit
def _multiply(
    PART: gl.constexpr, TOKENS: gl.constexpr, WIDTH: gl.constexpr, STEPS: gl.constexpr, x_smem,
    w_smem, staging, full, empty, pairs, row_factors, places, out, slot, used
):  # fmt: skip
    """Computes consumer `PART` of a tile for its first TOKENS rows. Returns how many stages are
    used by now."""
    STAGES: gl.constexpr = x_smem.shape[0]
    ROWS: gl.constexpr = w_smem.shape[1]
    BOXES: gl.constexpr = w_smem.shape[0] // STAGES
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    low = warpgroup_mma_init(gl.zeros([ROWS, TOKENS], gl.float32, layout))
    high = warpgroup_mma_init(gl.zeros([ROWS, TOKENS], gl.float32, layout))
    for index in range(STEPS):
        stage = used % STAGES
        mbarrier.wait(full.index(stage), (used // STAGES) & 1)
        low, high = warpgroup_mma_wait(0, [low, high])
        mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES), pred=index > 0)
        right = x_smem.index(stage).slice(0, TOKENS, 0).permute((1, 0))
        box = stage * BOXES + PART * 2
        low = warpgroup_mma(w_smem.index(box), right, low, is_async=True)
        high = warpgroup_mma(w_smem.index(box + 1), right, high, is_async=True)
        used += 1
    low, high = warpgroup_mma_wait(0, [low, high])
    mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES))
    mine = staging.index(PART).slice(0, TOKENS, 0)
    pair, factor = pairs.index(slot).slice(0, TOKENS), row_factors.index(slot).slice(0, TOKENS)
    column = (_read(places, slot, 1) * BOXES + PART * 2) * ROWS
    _write_rows(low, pair, factor, mine, out, column, WIDTH)
    _write_rows(high, pair, factor, mine, out, column + ROWS, WIDTH)
    return used


@gluon.jit
def _consume(
    PART: gl.constexpr, WIDTH: gl.constexpr, EXPERTS: gl.constexpr, PAD: gl.constexpr,
    LINE_TILES: gl.constexpr, STEPS: gl.constexpr, x_smem, w_smem, staging, full, empty, counts,
    pairs, row_factors, places, known, free, out, tokens
):  # fmt: skip
    """Computes the part of consumer `PART` of every tile of this program: 128 of its weight
    rows."""
    TOKENS: gl.constexpr = x_smem.shape[1]
    gdc_wait()
    tiles = _count_tiles(counts, tokens, EXPERTS, PAD, TOKENS, LINE_TILES)
    used = gl.program_id(0) * 0
    found = gl.program_id(0) * 0
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        slot = found % FOUND
        mbarrier.wait(known.index(slot), (found // FOUND) & 1)
        if _read(places, slot, 0) <= TOKENS // 2:
            used = _multiply(
                PART, TOKENS // 2, WIDTH, STEPS, x_smem, w_smem, staging, full, empty, pairs,
                row_factors, places, out, slot, used,
            )  # fmt: skip
        else:
            used = _multiply(
                PART, TOKENS, WIDTH, STEPS, x_smem, w_smem, staging, full, empty, pairs,
                row_factors, places, out, slot, used,
            )  # fmt: skip
        gl.thread_barrier()  # every thread has read the tile's pairs
        mbarrier.arrive(free.index(slot))
        found += 1


@gluon.jit(do_not_specialize=["tokens", "first_expert", "lines"])
def _expert_hopper_kernel(
    x, weight, factors, counts, buckets, out, tokens, first_expert, lines, STEPS: gl.constexpr,
    WIDTH: gl.constexpr, LINE_TILES: gl.constexpr, EXPERTS: gl.constexpr, PAD: gl.constexpr,
    STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Computes the product. x are the sorted rows; there are weights of EXPERTS experts from
    `first_expert` on, `lines` rows of each."""
    TOKENS: gl.constexpr = x.block_type.shape[0]
    LINES: gl.constexpr = 4 * weight.block_type.shape[0]
    counts += first_expert
    buckets += first_expert.to(gl.int64) * tokens
    x_smem = allocate_boxes(x, STAGES)
    w_smem = allocate_boxes(weight, STAGES * 4)
    staging = allocate_boxes(x, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pairs = gl.allocate_shared_memory(gl.int32, [FOUND, TOKENS], flat)
    row_factors = gl.allocate_shared_memory(gl.float32, [FOUND, TOKENS], flat)
    places = gl.allocate_shared_memory(gl.int32, [FOUND, 4], flat)
    full, empty = make_barriers(STAGES, 2)
    known, free = make_barriers(FOUND, 3)  # two consumers and the loading warp
    fence_async_shared()
    gl.thread_barrier()
    # constants must be named in each tuple: in a variable they would become constants of constants
    shared = (
        x_smem, w_smem, staging, full, empty, counts, pairs, row_factors, places, known, free, out,
        tokens,
    )  # fmt: skip
    loads = x, weight, x_smem, w_smem, full, empty, counts, places, known, free, tokens
    finds = counts, buckets, factors, pairs, row_factors, places, known, free, tokens, lines
    gl.warp_specialize(
        [
            (_consume, (0, WIDTH, EXPERTS, PAD, LINE_TILES, STEPS) + shared),
            (_consume, (1, WIDTH, EXPERTS, PAD, LINE_TILES, STEPS) + shared),
            (_load, (PDL, EXPERTS, PAD, LINE_TILES, STEPS) + loads),
            (_find_tiles, (EXPERTS, PAD, LINE_TILES, LINES) + finds),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
    )


def supports_weight(weight: ExpertWeights, bias: torch.Tensor | None) -> bool:
    """Whether this kernel can compute the second product with weights [E, N, K]: on Hopper, in bf16
    or fp16, K a multiple of 64 and N of 8, without a bias."""
    return (
        isinstance(weight, torch.Tensor)
        and bias is None
        and is_hopper(weight.device)
        and weight.dtype in TORCH_DTYPES
        and weight.shape[1] % 8 == 0
        and weight.shape[2] % STEP == 0
    )


def pipelined_config(given: ExpertArguments) -> PipelinedConfig | None:
    """Returns the configuration of a product, or None where other kernels compute it: the first
    product, without buckets, without `supports_weight`, and experts with few rows on average."""
    counts = given.routed.counts
    if given.gated or counts is None or not supports_weight(given.weight, given.bias):
        return None
    return PipelinedConfig() if given.routed.experts.numel() >= MIN_ROWS * len(counts) else None


def padded(experts: int) -> int:
    """Returns the number of experts that the kernel is compiled for: of a whole warp's threads."""
    return max(32, triton.next_power_of_2(experts))


def launch_pipelined(
    x: torch.Tensor, given: ExpertArguments, out: torch.Tensor, config: PipelinedConfig
) -> None:
    """Launches the second product.

    Raises:
        ValueError: it is the first product, there are no buckets, or `supports_weight` is false.
    """
    weight, routed = given.weight, given.routed
    if given.gated or routed.counts is None or not supports_weight(weight, given.bias):
        raise ValueError(
            "the pipelined kernel computes second products with buckets and without a bias, of "
            f"16-bit weights on Hopper, not of {tuple(weight.shape)} of {type(weight).__name__}"
        )
    assert isinstance(weight, torch.Tensor)
    assert routed.rows is not None
    (tokens, top_k), (experts, lines, inputs) = routed.experts.shape, weight.shape
    line_tiles = -(-lines // LINES)
    tiles = max_tiles(tokens, top_k, experts, TOKENS) * line_tiles
    launched = all_registers(CONSUMERS)
    _expert_hopper_kernel[(min(tiles, multiprocessors(x.device)),)](
        descriptor(x, [TOKENS, STEP]), descriptor(weight.view(-1, inputs), [WEIGHT_ROWS, STEP]),
        routed.weights, routed.counts, routed.rows, out, tokens, first_expert(routed), lines,
        STEPS=inputs // STEP, WIDTH=out.shape[1], LINE_TILES=line_tiles, EXPERTS=experts,
        PAD=padded(experts), STAGES=config.stages,
        CONSUMER_REGISTERS=consumer_registers(launched, CONSUMERS, LOADER_REGISTERS),
        LOADER_REGISTERS=LOADER_REGISTERS, PDL=given.pdl, num_warps=4, maxnreg=launched,
        launch_pdl=given.pdl,
    )  # fmt: skip
