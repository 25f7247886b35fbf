"""The gated product of an MLP, silu(x @ gate.T) * (x @ up.T), as one kernel on Hopper GPUs, in
Triton's Gluon dialect.

Called by the gated MLP on GPUs where `supports` returns true and for as many rows as `use_fused`
accepts; elsewhere `few_rows_dense`, or cuBLAS and `gated_activation`, compute the same. All of them
read the weight as `interleave` orders it: eight rows of the gate, then the matching eight rows of
up, and so on. wgmma gives rows r and r + 8 of sixteen to the same thread, so SiLU and the product
are computed in the registers of the accumulator.

The weight is the left operand: a tile of the output is 64 weight rows for each consumer warpgroup,
times the tile's tokens as columns. One warp loads both with TMA through a ring of shared-memory
stages. TMA reads zeros beyond the edges of x and weight and writes nothing beyond the edges of the
output, so tiles need not divide the shapes. Programs are persistent: while the consumers write a
tile, the loads of the next one are under way. Tiles are ordered so that the weights that a group of
token tiles has in common stay in the L2 cache (Tillet et al., "Triton", 2019). The schedule is
CUTLASS's cooperative one (Thakkar et al., 2023).
"""
# ruff: noqa: N803, N806, RUF005  (compile-time constants are written in capitals; Triton does not
# unpack tuples)

from __future__ import annotations

from dataclasses import dataclass

import torch
from aioinfer.kernels.activation import GATE_RUN
from aioinfer.kernels.adapters import AdapterOperand
from aioinfer.kernels.hopper_pipeline import (
    PRODUCER_REGISTERS,
    STEP,
    WEIGHT_ROWS,
    adapter_descriptors,
    adapter_steps,
    all_registers,
    allocate_boxes,
    apply_gate,
    consumer_registers,
    descriptor,
    few_registers,
    make_barriers,
    produce,
    rows_are_aligned,
    supports_product,
    tiles_of_item,
)
from aioinfer.kernels.launch import multiprocessors
from aioinfer.kernels.products import product_output
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

#: Bytes of shared memory for the ring and the results, of 227 KiB.
SHARED_BYTES = 226 * 1024
#: Columns of the tile for up to so many rows: reading the weight bounds products of so few.
FEW_TOKENS = 32, 64, 128


@dataclass(frozen=True, slots=True)
class GatedConfig:
    """The compile-time configuration of the kernel.

    Attributes:
        tokens: columns of a tile: 32, 64, 128 or 256.
        consumers: warpgroups, each for 64 weight rows of a tile: 1, 2 or 3.
        group: token tiles that are computed with a weight tile before the next weight tile.
    """

    tokens: int
    consumers: int = 3
    group: int = 8

    @property
    def stages(self) -> int:
        """Stages of the ring, as many as there is room for; each holds 64 input features of the
        tile's tokens and weight rows."""
        results = self.consumers * self.tokens * WEIGHT_ROWS  # half as many features, of two bytes
        stage = (self.tokens + self.consumers * WEIGHT_ROWS) * STEP * 2
        return (SHARED_BYTES - results) // stage

    @property
    def registers(self) -> int:
        """Registers of a thread at the launch; tiles of 256 tokens take all that there are."""
        if self.tokens > FEW_TOKENS[-1]:
            return all_registers(self.consumers)
        return few_registers(self.tokens)


#: Microseconds that a tile of 4096 input features takes when every multiprocessor computes one:
#: measured on an H200 with Qwen3-8B's weight and 256 rows or more, where arithmetic is the bound
#: (with fewer rows it is reading the weight).
TILE_TIMES = {GatedConfig(256): 70.0, GatedConfig(128): 37.2, GatedConfig(64): 19.8}
#: All configurations.
CONFIGS = tuple(
    dict.fromkeys(
        [*TILE_TIMES, *(GatedConfig(tokens, count) for tokens in FEW_TOKENS for count in (3, 2, 1))]
    )
)
SMALL_WEIGHT, LARGE_WEIGHT = 32 * 2**20, 128 * 2**20  # bytes: see `use_fused`


def gated_config(tokens: int, features: int, programs: int) -> GatedConfig:
    """Returns the configuration with the shortest time for `features` outputs of `tokens` rows.

    Tiles are computed in waves of one for each program, and a last wave that occupies few programs
    takes as long as a full one (wave quantization). With many rows every tile takes `TILE_TIMES`.
    With few rows of a weight that keeps all programs busy, a tile takes as long as its reads: its
    weight rows, and its tokens, of which one counts a quarter since x is in the L2 cache. That
    quarter fits measurements on an H200 with the weights of Qwen3-8B, Llama-3.1-8B, Qwen2.5-7B and
    Qwen3-32B (notes/products.md).
    """

    def waves(config: GatedConfig) -> int:
        return -(-_count_tiles(tokens, features, config) // programs)

    if tokens <= FEW_TOKENS[-1] and 2 * features >= 0.9 * programs * 3 * WEIGHT_ROWS:
        return min(
            candidates(tokens),
            key=lambda each: waves(each) * (each.consumers * WEIGHT_ROWS + each.tokens / 4),
        )
    return min(TILE_TIMES, key=lambda config: waves(config) * TILE_TIMES[config])


def candidates(tokens: int) -> list[GatedConfig]:
    """Returns the configurations that may be the fastest for so many rows: with few, tiles of 64,
    128 and 192 weight rows, which leave last waves of different sizes."""
    for columns in FEW_TOKENS:
        if tokens <= columns:
            return [config for config in CONFIGS if config.tokens == columns]
    return list(TILE_TIMES)


def _count_tiles(tokens: int, features: int, config: GatedConfig) -> int:
    return -(-tokens // config.tokens) * -(-2 * features // (WEIGHT_ROWS * config.consumers))


def use_fused(rows: int, weight: torch.Tensor) -> bool:
    """Whether this kernel is faster than cuBLAS's product followed by `gated_activation`.

    Measured on an H200 for 9 rows and more, with the weights of Qwen3-0.6B (12 MB) and of Qwen3-8B
    on two GPUs (100 MB) and on one (201 MB). With a small weight it was always faster, since it
    starts while the preceding kernel is still running; 2 to 8 rows, not measured, are assumed to be
    like 9. With a large weight and few rows, both are bound by reading the weight. A little more
    than 256 rows take a last wave that occupies few programs, which cuBLAS's smaller tiles avoid.
    From 129 to 239 rows of the largest weight this kernel needs its small tiles of 64 tokens, which
    are no faster than cuBLAS. Up to 128 rows of weights as large it was faster in chains of layers
    of four models (notes/products.md), as it loads weights while the norm before it runs.

    Args:
        rows: tokens of x.
        weight: [2 * N, K], on this rank.
    """
    if weight.nbytes <= SMALL_WEIGHT:
        return rows > 1
    if weight.nbytes <= LARGE_WEIGHT:
        return 64 <= rows <= 256 or rows > 320
    return 1 < rows <= 128 or 240 <= rows <= 256 or rows > 320


@gluon.jit
def _consume(
    PART: gl.constexpr, GROUP: gl.constexpr, ADAPTED: gl.constexpr, blocks, out, staging, x_smem,
    w_smem, full, empty, items, token_tiles, weight_tiles, steps
):  # fmt: skip
    """Computes the part of consumer `PART` of every work item: 64 weight rows, which are 32 outputs
    of each token."""
    STAGES: gl.constexpr = x_smem.shape[0]
    TOKENS: gl.constexpr = x_smem.shape[1]
    ROWS: gl.constexpr = w_smem.shape[1]
    OUTPUTS: gl.constexpr = ROWS // 2
    CONSUMERS: gl.constexpr = w_smem.shape[0] // STAGES
    # With 512 threads the kernel is assembled for 128 registers a thread, too few for a wgmma of
    # 256 columns: two wgmmas of 128 columns instead.
    COLUMNS: gl.constexpr = TOKENS if TOKENS < 128 else 128
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    mine = staging.index(PART)
    used = gl.program_id(0) * 0
    steps += adapter_steps(ADAPTED, blocks)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token_tile, weight_tile = tiles_of_item(item, token_tiles, weight_tiles, GROUP)
        acc = warpgroup_mma_init(gl.zeros([ROWS, TOKENS], gl.float32, layout))
        for index in range(steps):
            stage = used % STAGES
            mbarrier.wait(full.index(stage), (used // STAGES) & 1)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES), pred=index > 0)
            acc = warpgroup_mma(
                w_smem.index(stage * CONSUMERS + PART),
                x_smem.index(stage).permute((1, 0)),
                acc,
                is_async=True,
            )
            used += 1
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES))
        value = apply_gate(acc).to(out.dtype)
        tma.store_wait(0)  # until the store of the preceding tile has read `mine`
        gl.thread_barrier()
        mine.permute((1, 0)).store(value)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(
            out, [token_tile * TOKENS, (weight_tile * CONSUMERS + PART) * OUTPUTS], mine
        )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["items", "token_tiles", "weight_tiles", "steps"])
def _gated_kernel(
    x, weight, out, shrunk, up, blocks, items, token_tiles, weight_tiles, steps,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, REGISTERS: gl.constexpr,
    ADAPTED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    x_smem = allocate_boxes(x, STAGES)
    w_smem = allocate_boxes(weight, STAGES * CONSUMERS)
    staging = allocate_boxes(out, CONSUMERS)
    full, empty = make_barriers(STAGES, CONSUMERS)
    fence_async_shared()
    gl.thread_barrier()
    ring = (x_smem, w_smem, full, empty, items, token_tiles, weight_tiles, steps)
    loads = (x, weight, x, shrunk, up, blocks, x_smem)  # x in the place of scales
    # constants must be named in each tuple: in a variable they would become constants of constants
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (0, GROUP, ADAPTED, blocks, out, staging) + ring),
                (produce, (PDL, False, GROUP, ADAPTED) + loads + ring),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, GROUP, ADAPTED, blocks, out, staging) + ring),
                (_consume, (1, GROUP, ADAPTED, blocks, out, staging) + ring),
                (produce, (PDL, False, GROUP, ADAPTED) + loads + ring),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, GROUP, ADAPTED, blocks, out, staging) + ring),
                (_consume, (1, GROUP, ADAPTED, blocks, out, staging) + ring),
                (_consume, (2, GROUP, ADAPTED, blocks, out, staging) + ring),
                (produce, (PDL, False, GROUP, ADAPTED) + loads + ring),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )


def supports(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether this kernel can compute x [T, K] times weight [2 * N, K]: `supports_product` must
    accept them, and N be a multiple of 8."""
    return supports_product(x, weight) and weight.shape[0] % (2 * GATE_RUN) == 0


def gated_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    config: GatedConfig | None = None,
    operand: AdapterOperand | None = None,
) -> torch.Tensor:
    """Returns silu(x @ gate.T) * (x @ up.T), accumulated in float32.

    Args:
        x: [T, K], bf16 or fp16; rows may be strided.
        weight: [2 * N, K], gate and up as ordered by `interleave`; of x's dtype.
        out: [T, N] to write to; rows may be strided by multiples of 16 bytes; by default a new
            tensor.
        pdl: launch as a programmatic dependent of the preceding kernel; `weight` is read before
            that kernel ends, so that kernel must not write it.
        config: instead of `gated_config`'s (for tests and tuning).
        operand: added to the product, before the gate.

    Raises:
        ValueError: the shapes do not fit, or `supports` returns false.
    """
    out = product_output(x, weight.shape, out, gated=True)
    (rows, inputs), features = x.shape, weight.shape[0] // 2
    if not supports(x, weight):
        raise ValueError(f"supports() rejects x {tuple(x.shape)} of {x.dtype} with this weight")
    if out.shape != (rows, features) or out.dtype != x.dtype or not rows_are_aligned(out):
        raise ValueError(
            f"out must be [{rows}, {features}] of {x.dtype} with aligned rows, not "
            f"{tuple(out.shape)} of {out.dtype}"
        )
    if not rows:
        return out
    programs = multiprocessors(x.device)
    config = config or gated_config(rows, features, programs)
    items, token_tiles = _count_tiles(rows, features, config), -(-rows // config.tokens)
    waves = -(-items // programs)
    if rows <= FEW_TOKENS[-1]:  # where reading the weight is the bound: equally many tiles for each
        programs = -(-items // waves)
    _gated_kernel[(min(items, programs),)](
        descriptor(x, [config.tokens, STEP]), descriptor(weight, [WEIGHT_ROWS, STEP]),
        descriptor(out, [config.tokens, WEIGHT_ROWS // 2]),
        *adapter_descriptors(operand, x, config.tokens),
        items, token_tiles, items // token_tiles, inputs // STEP,
        CONSUMERS=config.consumers,
        STAGES=config.stages if operand is None else config.stages - 1,  # room for `shrink`
        GROUP=config.group,
        REGISTERS=consumer_registers(config.registers, config.consumers),
        ADAPTED=operand is not None, PDL=pdl, num_warps=4, maxnreg=config.registers,
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def interleave(weight: torch.Tensor) -> torch.Tensor:
    """Returns the rows of gate and up, alternating in runs of eight (`GATE_RUN`).

    Args:
        weight: [2 * N, ...], the gate's N rows first (or its bias [2 * N]); N a multiple of 8.

    Raises:
        ValueError: N is not a multiple of 8.
    """
    if weight.shape[0] % (2 * GATE_RUN):
        raise ValueError(
            f"weight must have 2 * N rows, N a multiple of {GATE_RUN}, not {weight.shape[0]}"
        )
    return weight.unflatten(0, (2, -1, GATE_RUN)).transpose(0, 1).flatten(0, 2).contiguous()
