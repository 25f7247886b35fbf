"""Parts shared by the Gluon kernels of products on Hopper GPUs: the order of their tiles, the ring
of stages in shared memory, the producer warp that loads them with TMA, and the descriptors of TMA.

Used by `gated_product`, `split_product`, `scaled_hopper`, `block_hopper` and `grouped_hopper`, and
in part by `expert_hopper`. A ring has two barriers for each stage: `full` completes when the loaded
data is there, `empty` when all consumer warpgroups have read it. Tiles are ordered so that the
weights that a group of token tiles has in common stay in the L2 cache (Tillet et al., "Triton",
2019).
"""
# ruff: noqa: N803, N806  (compile-time constants are written in capitals)

from __future__ import annotations

from typing import Any

import torch
from aioinfer.kernels.adapters import AdapterOperand
from aioinfer.kernels.launch import is_hopper
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# weight rows of a consumer warpgroup, gate and up together: the rows of one wgmma
WEIGHT_ROWS = 64
# input features of a stage of 16-bit operands: 128 bytes, the widest swizzle of TMA and wgmma
STEP = 64
# registers of a producer's thread, the fewest that setmaxnreg can leave
PRODUCER_REGISTERS = gl.constexpr(24)
LOG2_E = gl.constexpr(1.4426950408889634)
TORCH_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def tiles_of_item(item, token_tiles, weight_tiles, GROUP: gl.constexpr):
    """Returns the token tile and the weight tile of work item `item`."""
    first = item // (GROUP * weight_tiles) * GROUP
    size = gl.minimum(token_tiles - first, GROUP)
    rest = item % (GROUP * weight_tiles)
    return first + rest % size, rest // size


@gluon.jit
def allocate_boxes(tensor, BOXES: gl.constexpr):
    """Returns shared memory for `BOXES` boxes of a descriptor."""
    ROWS: gl.constexpr = tensor.block_type.shape[0]
    COLUMNS: gl.constexpr = tensor.block_type.shape[1]
    return gl.allocate_shared_memory(tensor.dtype, [BOXES, ROWS, COLUMNS], tensor.layout)


@gluon.jit
def make_barriers(STAGES: gl.constexpr, READERS: gl.constexpr):
    """Returns the barriers `full` and `empty` of a ring; a stage is empty when `READERS` warpgroups
    have read it. They may be used after a fence and a barrier of the threads."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(empty.index(stage), READERS)
    return full, empty


@gluon.jit
def load_rows(weight, w_smem, full, stage, row, k, pred):
    """Loads the boxes of a stage, rows of `weight` (or of x) from `row` on."""
    ROWS: gl.constexpr = weight.block_type.shape[0]
    PARTS: gl.constexpr = w_smem.shape[0] // full.shape[0]
    for part in gl.static_range(PARTS):
        place = [row + part * ROWS, k]
        tma.async_copy_global_to_shared(
            weight, place, full.index(stage), w_smem.index(stage * PARTS + part), pred=pred
        )


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Returns the stage after `stage`, and the phase of its barriers."""
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), phase ^ wraps.to(gl.int32)


@gluon.jit
def adapter_steps(ADAPTED: gl.constexpr, blocks):
    """Returns by how many steps the adapters of the tokens lengthen a product: a block of ranks
    each (`adapters.AdapterOperand`). They can be read before `gdc_wait`: the preceding kernel began
    when they had been listed."""
    return gl.load(blocks) if ADAPTED else gl.program_id(0) * 0


@gluon.jit
def load_adapter_step(
    shrunk, up, blocks, index, x_smem, w_smem, full, stage, token, row, NBYTES: gl.constexpr
):  # fmt: skip
    """Loads block number `index` of the adapters' ranks into a stage that is empty: x A^T of the
    tokens from `token` on, and rows of B from `row` on."""
    column = gl.load(blocks + 1 + index) * x_smem.shape[2]
    mbarrier.expect(full.index(stage), NBYTES)
    tma.async_copy_global_to_shared(shrunk, [token, column], full.index(stage), x_smem.index(stage))
    load_rows(up, w_smem, full, stage, row, column, True)


@gluon.jit
def produce(
    PDL: gl.constexpr, GROUPED: gl.constexpr, GROUP: gl.constexpr, ADAPTED: gl.constexpr, x, weight,
    scales, shrunk, up, blocks, scale_smem, x_smem, w_smem, full, empty, items, token_tiles,
    weight_tiles, steps
):  # fmt: skip
    """Loads the stages of every work item as they become free; with PDL, the first weights are
    loaded before waiting for the preceding kernel, which writes x. Also `scaled_hopper`'s producer:
    with GROUPED, a stage has a row of `scales`, one for each token. With ADAPTED, the steps of an
    item are followed by those of `adapter_steps`.

    The consumers need not wait for the preceding kernel: they read its results and write their own
    only after a stage whose x was loaded behind the wait.
    """
    STAGES: gl.constexpr = x_smem.shape[0]
    TOKENS: gl.constexpr = x_smem.shape[1]
    STEP: gl.constexpr = x_smem.shape[2]
    PARTS: gl.constexpr = w_smem.shape[0] // STAGES
    ROWS: gl.constexpr = PARTS * weight.block_type.shape[0]
    NBYTES: gl.constexpr = (
        x.block_type.nbytes + PARTS * weight.block_type.nbytes + GROUPED * 4 * TOKENS
    )
    early = gl.program_id(0) * 0
    if PDL:
        early = gl.minimum(steps, STAGES)
        _, weight_tile = tiles_of_item(gl.program_id(0), token_tiles, weight_tiles, GROUP)
        for stage in range(early):
            mbarrier.expect(full.index(stage), NBYTES)
            load_rows(weight, w_smem, full, stage, weight_tile * ROWS, stage * STEP, True)
        gdc_wait()
    loaded = gl.program_id(0) * 0
    extra = adapter_steps(ADAPTED, blocks)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token_tile, weight_tile = tiles_of_item(item, token_tiles, weight_tiles, GROUP)
        for index in range(steps):
            stage = loaded % STAGES
            mbarrier.wait(empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), NBYTES, pred=loaded >= early)
            tma.async_copy_global_to_shared(
                x, [token_tile * TOKENS, index * STEP], full.index(stage), x_smem.index(stage)
            )
            if GROUPED:
                tma.async_copy_global_to_shared(
                    scales, [index, token_tile * TOKENS], full.index(stage),
                    scale_smem.index(stage)
                )  # fmt: skip
            load_rows(
                weight, w_smem, full, stage, weight_tile * ROWS, index * STEP, loaded >= early
            )
            loaded += 1
        if ADAPTED:
            for index in range(extra):
                stage = loaded % STAGES
                mbarrier.wait(empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
                load_adapter_step(
                    shrunk, up, blocks, index, x_smem, w_smem, full, stage, token_tile * TOKENS,
                    weight_tile * ROWS, NBYTES,
                )  # fmt: skip
                loaded += 1
    if PDL:
        gdc_launch_dependents()


@gluon.jit
def produce_boxes(
    PDL: gl.constexpr, GROUP: gl.constexpr, x, weight, x_smem, w_smem, full, empty, items,
    token_tiles, weight_tiles, steps
):  # fmt: skip
    """Loads the stages of every work item as they become free; with PDL, the first weights are
    loaded before waiting for the preceding kernel, which writes x (see `produce`). A stage has
    several boxes of x as well, and its number and phase are counted instead of divided."""
    STAGES: gl.constexpr = full.shape[0]
    STEP: gl.constexpr = x_smem.shape[2]
    TOKENS: gl.constexpr = x_smem.shape[0] // STAGES * x_smem.shape[1]
    LINES: gl.constexpr = w_smem.shape[0] // STAGES * w_smem.shape[1]
    NBYTES: gl.constexpr = (TOKENS + LINES) * STEP
    early = gl.program_id(0) * 0
    if PDL:
        early = gl.minimum(steps, STAGES)
        _, weight_tile = tiles_of_item(gl.program_id(0), token_tiles, weight_tiles, GROUP)
        for stage in range(early):
            mbarrier.expect(full.index(stage), NBYTES)
            load_rows(weight, w_smem, full, stage, weight_tile * LINES, stage * STEP, True)
        gdc_wait()
    stage = gl.program_id(0) * 0
    phase = stage + 1
    loaded = stage
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token_tile, weight_tile = tiles_of_item(item, token_tiles, weight_tiles, GROUP)
        for index in range(steps):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), NBYTES, pred=loaded >= early)
            load_rows(x, x_smem, full, stage, token_tile * TOKENS, index * STEP, True)
            load_rows(
                weight, w_smem, full, stage, weight_tile * LINES, index * STEP, loaded >= early
            )
            stage, phase = next_stage(stage, phase, STAGES)
            loaded += 1
    if PDL:
        gdc_launch_dependents()


@gluon.jit
def apply_gate(acc):
    """Returns silu(gate) * up [ROWS / 2, TOKENS] of sums [ROWS, TOKENS] whose rows are interleaved
    (`gated_product.interleave`)."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    gate, up = gl.split(acc.reshape([ROWS // 16, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
    return (gate / (1.0 + gl.exp2(-LOG2_E * gate)) * up).reshape([ROWS // 2, TOKENS])


def all_registers(consumers: int) -> int:
    """Returns the registers of each thread of a launch that takes all registers of a
    multiprocessor, in the granularity of setmaxnreg.

    Args:
        consumers: warpgroups beside that of the producer.
    """
    return 65536 // (128 * (consumers + 1)) // 8 * 8


def few_registers(tokens: int) -> int:
    """Returns the registers of each thread of a launch with tiles of up to 128 tokens: enough for
    the sums and addresses of a consumer, so that the programs of a norm fit beside it.

    With dependent launch a norm starts while the product before it runs, and waits for its end.
    Where the product takes all registers of a multiprocessor, the norm can start there only when
    the product's program has ended (notes/products.md).
    """
    return max(72, 40 + tokens // 2)


def consumer_registers(
    launched: int, consumers: int, producer: int = PRODUCER_REGISTERS.value
) -> int:
    """Returns the registers of a consumer's thread: its share of the registers that the producer
    leaves, in the granularity of setmaxnreg.

    Args:
        launched: of each thread, as the kernel is launched.
        consumers: as for `all_registers`.
        producer: of each thread of the producer's warpgroup.
    """
    return ((consumers + 1) * launched - producer) // consumers // 8 * 8


def supports_product(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether x [T, K] and weight [N, K] can be operands in 16 bits: on Hopper, in bf16 or fp16, K
    a multiple of 64.

    TMA needs the rows of x to be contiguous and to begin at multiples of 16 bytes.
    """
    return (
        is_hopper(x.device)
        and x.dtype in TORCH_DTYPES
        and weight.dtype == x.dtype
        and x.shape[1] % STEP == 0
        and weight.is_contiguous()
        and rows_are_aligned(x)
    )


def rows_are_aligned(t: torch.Tensor) -> bool:
    """Whether TMA can load the rows of a matrix: contiguous, beginning at multiples of 16 bytes."""
    return t.stride(1) == 1 and t.stride(0) * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0


def descriptor(t: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Returns the descriptor by which boxes [rows, columns] of a matrix are loaded or stored."""
    kind = gl.float8e4nv if t.dtype == torch.float8_e4m3fn else TORCH_DTYPES[t.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, kind)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block, layout)


def adapter_descriptors(
    operand: AdapterOperand | None, x: torch.Tensor, tokens: int
) -> tuple[Any, Any, torch.Tensor]:
    """Returns the adapters of a product of x as `produce` takes them (shrunk, up, blocks), for
    tiles of `tokens` tokens; x stands for them where there are none."""
    if operand is None:
        return x, x, x
    shrunk = descriptor(operand.shrunk, [tokens, STEP])
    return shrunk, descriptor(operand.up, [WEIGHT_ROWS, STEP]), operand.blocks


def scale_layout() -> gl.NVMMASharedLayout:
    """Returns the layout of scales in shared memory: in their order."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
