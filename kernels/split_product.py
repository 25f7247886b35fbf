"""A product of up to 128 rows on Hopper GPUs, whole or divided along its inputs into parts that are
left to be summed (split-K), in Triton's Gluon dialect.

Called for the dense layers of decode steps where it was the fastest (`kernel_timing`). Parts are
for layers whose product is added to the residual stream and normed: they are float32, and the
kernel of the norm sums them (`norm.add_parts_rms_norm`). A weight of 4096 outputs has 64 tiles of
64 rows, which occupy half of a card's multiprocessors; divided into two parts it occupies all. A
sum within the product would keep the memory idle while parts are written, counted and read again
(notes/products.md).

The weight is wgmma's left operand, 64 rows for each consumer warpgroup, and tokens are its columns.
One warp loads both with TMA through a ring of shared-memory stages that takes nearly all of a
multiprocessor's shared memory: as soon as a program of the preceding kernel ends, a program of this
one loads weights in its place, and x when that kernel has ended (programmatic dependent launch).
"""
# ruff: noqa: N803, N806, RUF005  (compile-time constants are written in capitals; Triton does not
# unpack tuples)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from aioinfer.kernels.adapters import AdapterOperand
from aioinfer.kernels.hopper_pipeline import (
    PRODUCER_REGISTERS,
    STEP,
    WEIGHT_ROWS,
    adapter_descriptors,
    adapter_steps,
    allocate_boxes,
    consumer_registers,
    descriptor,
    few_registers,
    load_adapter_step,
    load_rows,
    make_barriers,
    supports_product,
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MIN_TOKENS, MAX_ROWS = 16, 128  # columns of a tile are a power of two
#: Bytes of shared memory that the ring takes at most, of 227 KiB.
RING_BYTES = 208 * 1024
MAX_PARTS = 8


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """The compile-time configuration of the kernel.

    Attributes:
        consumers: warpgroups, each for 64 weight rows of a tile: 1 or 2.
        parts: into how many parts the inputs are divided.
    """

    consumers: int
    parts: int


def split_config(features: int, inputs: int, programs: int, consumers: int) -> SplitConfig:
    """Returns the configuration with as many parts as let all programs, a part of a tile each, run
    at the same time on `programs` multiprocessors; one part if there are more tiles."""
    tiles = -(-features // (WEIGHT_ROWS * consumers))
    return SplitConfig(consumers, max(1, min(programs // tiles, MAX_PARTS, inputs // STEP)))


@gluon.jit
def _produce(
    PDL: gl.constexpr, ADAPTED: gl.constexpr, x, weight, shrunk, up, blocks, steps, x_smem, w_smem,
    full, empty, tile, begin, end
):  # fmt: skip
    """Loads the stages of a part; with PDL, the first weights before the preceding kernel, which
    writes x, has ended. The steps from `steps` on are those of adapters."""
    STAGES: gl.constexpr = x_smem.shape[0]
    CONSUMERS: gl.constexpr = w_smem.shape[0] // STAGES
    STEP: gl.constexpr = x_smem.shape[2]
    NBYTES: gl.constexpr = x.block_type.nbytes + CONSUMERS * weight.block_type.nbytes
    row = tile * CONSUMERS * w_smem.shape[1]
    own = gl.minimum(end, steps) - begin  # negative in a part that has steps of adapters alone
    early = begin * 0
    if PDL:
        early = gl.minimum(own, STAGES)
        for stage in range(early):
            mbarrier.expect(full.index(stage), NBYTES)
            load_rows(weight, w_smem, full, stage, row, (begin + stage) * STEP, True)
        gdc_wait()
    for loaded in range(own):
        stage = loaded % STAGES
        column = (begin + loaded) * STEP
        mbarrier.wait(empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), NBYTES, pred=loaded >= early)
        tma.async_copy_global_to_shared(x, [0, column], full.index(stage), x_smem.index(stage))
        load_rows(weight, w_smem, full, stage, row, column, loaded >= early)
    if ADAPTED:
        for loaded in range(gl.maximum(own, 0), end - begin):
            stage = loaded % STAGES
            mbarrier.wait(empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
            load_adapter_step(
                shrunk, up, blocks, begin + loaded - steps, x_smem, w_smem, full, stage, 0, row,
                NBYTES,
            )  # fmt: skip
    if PDL:
        gdc_launch_dependents()


@gluon.jit
def _consume(
    PART: gl.constexpr, HAS_BIAS: gl.constexpr, out, bias, rows, features, out_stride, x_smem,
    w_smem, full, empty, tile, begin, end,
):  # fmt: skip
    """Multiplies 64 weight rows with all tokens, and writes the sums [rows, features]."""
    STAGES: gl.constexpr = x_smem.shape[0]
    TOKENS: gl.constexpr = x_smem.shape[1]
    CONSUMERS: gl.constexpr = w_smem.shape[0] // STAGES
    ROWS: gl.constexpr = w_smem.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    acc = warpgroup_mma_init(gl.zeros([ROWS, TOKENS], gl.float32, layout))
    for used in range(end - begin):
        stage = used % STAGES
        mbarrier.wait(full.index(stage), (used // STAGES) & 1)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES), pred=used > 0)
        acc = warpgroup_mma(
            w_smem.index(stage * CONSUMERS + PART), x_smem.index(stage).permute((1, 0)), acc,
            is_async=True,
        )  # fmt: skip
    acc = warpgroup_mma_wait(0, [acc])
    feature = (tile * CONSUMERS + PART) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    if HAS_BIAS:
        acc += gl.load(bias + feature, feature < features, 0.0).to(gl.float32)[:, None]
    place = out + token[None, :] * out_stride + feature[:, None]
    inside = (feature < features)[:, None] & (token < rows)[None, :]
    gl.store(place, acc.to(out.dtype.element_ty), inside)


@gluon.jit(do_not_specialize=["rows", "features", "out_stride", "steps"])
def _split_kernel(
    x, weight, bias, out, shrunk, up, blocks, rows, features, out_stride, steps,
    PARTS: gl.constexpr, CONSUMERS: gl.constexpr, HAS_BIAS: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, ADAPTED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    tile, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    total = steps + adapter_steps(ADAPTED, blocks)
    begin, end = total * part // PARTS, total * (part + 1) // PARTS
    x_smem = allocate_boxes(x, STAGES)
    w_smem = allocate_boxes(weight, STAGES * CONSUMERS)
    full, empty = make_barriers(STAGES, CONSUMERS)
    fence_async_shared()
    gl.thread_barrier()
    out += part.to(gl.int64) * rows * out_stride
    ring = (x_smem, w_smem, full, empty, tile, begin, end)
    ends = (out, bias, rows, features, out_stride) + ring
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (0, HAS_BIAS) + ends),
                (_produce, (PDL, ADAPTED, x, weight, shrunk, up, blocks, steps) + ring),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, HAS_BIAS) + ends),
                (_consume, (1, HAS_BIAS) + ends),
                (_produce, (PDL, ADAPTED, x, weight, shrunk, up, blocks, steps) + ring),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )


def split_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: SplitConfig,
    *,
    pdl: bool = False,
    operand: AdapterOperand | None = None,
) -> torch.Tensor:
    """Returns parts, float32 [P, T, N], of x @ weight.T, whose sum over the first dimension is the
    product.

    Args:
        x: [T, K], T <= 128, bf16 or fp16; rows may be strided.
        weight: [N, K] of x's dtype.
        config: how many parts, and the tiles.
        pdl: launch as a programmatic dependent of the preceding kernel; `weight` is read before
            that kernel ends, so that kernel must not write it.
        operand: added to the product.

    Raises:
        ValueError: the shapes do not fit, or `supports_product` returns false.
    """
    shape = config.parts, len(x), len(weight)
    out = torch.empty(shape, dtype=torch.float32, device=x.device)
    _launch(x, weight, None, out, config, pdl, operand)
    return out


def whole_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: SplitConfig,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    operand: AdapterOperand | None = None,
) -> torch.Tensor:
    """Returns x @ weight.T + bias [T, N].

    Args:
        x, weight, pdl, operand: as for `split_product`.
        config: with one part.
        bias: [N] of x's dtype, if there is one.
        out: [T, N] to write to, of x's dtype; by default a new tensor.

    Raises:
        ValueError: as `split_product`, or there are several parts.
    """
    shape = len(x), len(weight)
    out = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
    if config.parts != 1 or out.shape != shape or out.stride(1) != 1:
        raise ValueError(
            f"a product of one part goes to {shape} with contiguous rows, not {config.parts} to "
            f"{tuple(out.shape)}"
        )
    _launch(x, weight, bias, out[None], config, pdl, operand)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: SplitConfig,
    pdl: bool,
    operand: AdapterOperand | None,
) -> None:
    """Writes the product to `out` [P, T, N]."""
    (rows, inputs), features = x.shape, len(weight)
    if not 0 < rows <= MAX_ROWS or weight.shape[1] != inputs or not supports_product(x, weight):
        raise ValueError(
            f"x must be [T, K] and weight [N, K] that supports_product() accepts, T from 1 to "
            f"{MAX_ROWS}, not {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    tokens = max(MIN_TOKENS, triton.next_power_of_2(rows))
    stage_bytes = (WEIGHT_ROWS * config.consumers + tokens) * STEP * x.element_size()
    tiles = -(-features // (WEIGHT_ROWS * config.consumers))
    registers = few_registers(tokens)
    _split_kernel[(tiles * config.parts,)](
        descriptor(x, [tokens, STEP]), descriptor(weight, [WEIGHT_ROWS, STEP]),
        x if bias is None else bias, out, *adapter_descriptors(operand, x, tokens), rows, features,
        out.stride(1), inputs // STEP,
        PARTS=config.parts, CONSUMERS=config.consumers, HAS_BIAS=bias is not None,
        STAGES=RING_BYTES // stage_bytes,
        REGISTERS=consumer_registers(registers, config.consumers), ADAPTED=operand is not None,
        PDL=pdl,
        num_warps=4, maxnreg=registers, launch_pdl=pdl,
    )  # fmt: skip
