"""Linear layers whose weights are 4-bit or 8-bit integers in groups (`grouped_weight`), for
activations of 16 bits; accumulated in float32.

Called by the linear layers in decode steps; for more than `MAX_FUSED_ROWS` the weight is
dequantized by a launch of its own and multiplied by cuBLAS. The products are the tensor cores',
also for one row, with the weights as the left operand, dequantized in registers: multiply-adds in
float32 would need more instructions for an integer than the memory leaves time for. The product of
a run of inputs is scaled afterwards, so that the integers themselves, exact in 16 bits, are
multiplied.

An integer q becomes 128 + q in bfloat16 (1024 + q in float16) by writing its bits below the bits of
128 (1024). The number subtracted then is 128 plus the zero point: Kim et al., "Who Says Elephants
Can't Run", 2022. Two words give eight 16-bit values by eleven instructions (`_expand`).

Where output features alone give too few programs, the inputs are divided over several of them
(split-K); the last to finish sums their parts in a fixed order. The gate and the residual add after
the product are fused as in `few_rows_dense`.
"""
# ruff: noqa: N803, N806  (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from aioinfer.kernels.activation import GATE_RUN
from aioinfer.kernels.grouped_weight import (
    TILE,
    PackedGroups,
    split_zero,
)
from aioinfer.kernels.launch import is_last_of, wait_for_kernel
from aioinfer.kernels.products import product_output

#: Up to so many rows the weight is read as it is; above, arithmetic is the bound, and cuBLAS with
#: the dequantized weight is faster.
MAX_FUSED_ROWS = 256


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """The compile-time configuration of the kernel.

    Attributes:
        features: rows of the weight for a program; a multiple of 16.
        rows: rows of x for a program.
        splits: programs that share the inputs.
        num_warps, num_stages: of a program; of the pipeline of loads.
    """

    features: int
    rows: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4


def grouped_config(rows: int, weight: PackedGroups, itemsize: int = 2) -> GroupedConfig:
    """Returns the configuration for a number of rows; measured on an H200 at the shapes of Qwen3-8B
    (notes/quantized-4bit.md).

    Wider activations (float32, for tests) take the smallest tile, since the others would not fit
    into shared memory.
    """
    if itemsize > 2:
        return GroupedConfig(16, 8, num_stages=2)
    if rows > 128 and weight.width >= 16384 and not weight.has_zeros:  # whose stages are larger
        return GroupedConfig(128, 128, 1, 8, 3)
    columns = min(64, max(8, triton.next_power_of_2(rows)))
    row_tiles = -(-rows // columns)
    features = 32 if columns == 8 and weight.width <= 8192 else 64
    tiles = -(-weight.width // features) * row_tiles
    splits = 1
    while tiles <= len(weight.counters) and tiles * splits < 200 and weight.units >= 8 * splits:
        splits *= 2
    return GroupedConfig(features, columns, splits, 2 if columns == 8 else 4, 3)


@triton.jit
def _expand(words, zero_0, zero_1, zero_2, zero_3, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """Returns the 4-bit integers of words [N, R], in `dtype` and less their zero points: of each
    run a tensor [N, R].

    Zero points are [N, 1]; with an OFFSET they are as `_subtrahend` returns them, and two words are
    taken at a time.
    """
    if OFFSET == 128:
        run_0, run_1, run_2, run_3 = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, one;
            mov.b32 one, 0x3F803F80;
            shr.u32 b, $4, 4;
            shr.u32 c, $4, 8;
            shr.u32 d, $4, 12;
            lop3.b32 a, $4, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 d, d, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, a, one, $5;
            fma.rn.bf16x2 $1, b, one, $6;
            fma.rn.bf16x2 $2, c, one, $7;
            fma.rn.bf16x2 $3, d, one, $8;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [words, zero_0, zero_1, zero_2, zero_3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif OFFSET == 1024:
        run_0, run_1, run_2, run_3 = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            shr.u32 b, $4, 4;
            shr.u32 c, $4, 8;
            shr.u32 d, $4, 12;
            lop3.b32 a, $4, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 b, b, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 c, c, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 d, d, 0x000F000F, 0x64006400, 0xEA;
            add.rn.f16x2 $0, a, $5;
            add.rn.f16x2 $1, b, $6;
            add.rn.f16x2 $2, c, $7;
            add.rn.f16x2 $3, d, $8;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [words, zero_0, zero_1, zero_2, zero_3],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        run_0 = (words & 15).to(dtype) - zero_0
        run_1 = ((words >> 4) & 15).to(dtype) - zero_1
        run_2 = ((words >> 8) & 15).to(dtype) - zero_2
        run_3 = ((words >> 12) & 15).to(dtype) - zero_3
    return run_0, run_1, run_2, run_3


@triton.jit
def _subtrahend(kept, BITS: tl.constexpr, HAS_ZEROS: tl.constexpr, OFFSET: tl.constexpr,
                dtype: tl.constexpr):  # fmt: skip
    """Returns [N, 1] zero points as `_expand` takes them; with an OFFSET negative and larger by it,
    made of their bits."""
    if not HAS_ZEROS:
        middle: tl.constexpr = 2 ** (BITS - 1)
        zero = tl.zeros(kept.shape, tl.float32) + (-OFFSET - middle if OFFSET else middle)
        zero = zero.to(dtype)
    elif OFFSET == 128:
        zero = ((kept & 255) | 0xC300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif OFFSET == 1024:
        zero = ((kept & 255) | 0xE400).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        zero = (kept & 255).to(dtype)
    return zero[:, None]


@triton.jit
def _split_gate(totals, FEATURES: tl.constexpr, RUN: tl.constexpr, ROWS: tl.constexpr):
    """Returns silu(gate) * up [FEATURES / 2, ROWS] of sums [FEATURES, ROWS] of interleaved rows."""
    by_run = totals.reshape(FEATURES // (2 * RUN), 2, RUN, ROWS).permute(0, 2, 3, 1)
    gate, up = tl.split(by_run)
    return (gate / (1.0 + tl.exp(-gate)) * up).reshape(FEATURES // 2, ROWS)


@triton.jit
def _finish(
    totals, residual, out, tile, row, rows, features, residual_stride, out_stride,
    FEATURES: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """Applies the gate or adds the residual to sums [FEATURES, ROWS] and writes them."""
    if GATED:
        totals = _split_gate(totals, FEATURES, GATE, ROWS)
    OUTPUTS: tl.constexpr = FEATURES // 2 if GATED else FEATURES
    n = tile * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    row = row[None, :]
    mask = (n < features) & (row < rows)
    if HAS_RESIDUAL:
        totals += tl.load(residual + row * residual_stride + n, mask, 0.0).to(tl.float32)
    tl.store(out + row * out_stride + n, totals.to(out.dtype.element_ty), mask)


@triton.jit
def _load_unit(
    place, scales, unit, n, width, there, RUN: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, OFFSET: tl.constexpr, HAS_ZEROS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Returns the runs of a unit less their zero points, tensors [N, R] in `dtype`, and the element
    of `PackedGroups.scales` of each run. Runs come in pairs of one group, unless a group is one
    run: then each load of a pair's scales is another."""
    words = tl.load(place, there[:, None], 0)
    NEXT: tl.constexpr = RUN if GROUP == RUN else 0
    first = unit * (16 // BITS * RUN)
    kept_0 = tl.load(scales + first // GROUP * width + n, there, 0)
    kept_1 = tl.load(scales + (first + NEXT) // GROUP * width + n, there, 0)
    zero_0 = _subtrahend(kept_0, BITS, HAS_ZEROS, OFFSET, dtype)
    zero_1 = _subtrahend(kept_1, BITS, HAS_ZEROS, OFFSET, dtype)
    if BITS == 8:
        runs = (words & 255).to(dtype) - zero_0, ((words >> 8) & 255).to(dtype) - zero_1
        kept = kept_0, kept_1
    else:
        kept_2 = tl.load(scales + (first + 2 * RUN) // GROUP * width + n, there, 0)
        kept_3 = tl.load(scales + (first + 2 * RUN + NEXT) // GROUP * width + n, there, 0)
        zero_2 = _subtrahend(kept_2, BITS, HAS_ZEROS, OFFSET, dtype)
        zero_3 = _subtrahend(kept_3, BITS, HAS_ZEROS, OFFSET, dtype)
        runs = _expand(words, zero_0, zero_1, zero_2, zero_3, OFFSET, dtype)
        kept = kept_0, kept_1, kept_2, kept_3
    return runs, kept


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    x, packed, scales, residual, out, partials, counters, rows, features, width,
    x_stride, residual_stride, out_stride,
    INPUTS: tl.constexpr, UNITS: tl.constexpr, RUN: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, TILE: tl.constexpr, FEATURES: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, OFFSET: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of output features, tile of rows, part of the inputs)."""
    tile, split = tl.program_id(0), tl.program_id(2)
    n = tile * FEATURES + tl.arange(0, FEATURES)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    word = tl.arange(0, RUN)
    PARTS: tl.constexpr = 16 // BITS
    SHARE: tl.constexpr = (UNITS + SPLITS - 1) // SPLITS
    dtype: tl.constexpr = x.dtype.element_ty
    place = packed + (n // TILE).to(tl.int64)[:, None] * (UNITS * TILE * RUN)
    place += (n % TILE)[:, None] * RUN + word[None, :]
    x_place = x + row[None, :].to(tl.int64) * x_stride
    there, is_row = n < width, (row < rows)[None, :]
    wait_for_kernel(PDL)
    totals = tl.zeros([FEATURES, ROWS], tl.float32)
    end = min(split * SHARE + SHARE, UNITS)
    for unit in tl.range(split * SHARE, end, num_stages=STAGES):
        runs, kept = _load_unit(
            place + unit * (TILE * RUN), scales, unit, n, width, there, RUN, GROUP, BITS, OFFSET,
            HAS_ZEROS, dtype,
        )  # fmt: skip
        product = tl.zeros([FEATURES, ROWS], tl.float32)
        for part in tl.static_range(PARTS):
            k = ((unit * PARTS + part) * RUN + word)[:, None]
            is_there = is_row if UNITS * PARTS * RUN == INPUTS else is_row & (k < INPUTS)
            value = tl.load(x_place + k, is_there, 0.0)
            product = tl.dot(runs[part], value, product, input_precision="ieee")
            if part % 2 == 1 or GROUP == RUN:  # runs of one group are scaled together
                scale, _ = split_zero(kept[part], BITS, HAS_ZEROS)
                totals += product * scale[:, None]
                product = tl.zeros([FEATURES, ROWS], tl.float32)
    if SPLITS > 1:
        index = tile * tl.num_programs(1) + tl.program_id(1)
        size = FEATURES * ROWS
        part = partials + index * (SPLITS * size)
        place = tl.arange(0, FEATURES)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(part + split * size + place, totals)
        if not is_last_of(counters + index, SPLITS):
            return
        totals = tl.zeros([FEATURES, ROWS], tl.float32)
        for other in range(SPLITS):
            totals += tl.load(part + other * size + place)
    _finish(
        totals, residual, out, tile, row, rows, features, residual_stride, out_stride, FEATURES,
        ROWS, HAS_RESIDUAL, GATED, GATE,
    )  # fmt: skip


def grouped_product(
    x: torch.Tensor,
    weight: PackedGroups,
    *,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    config: GroupedConfig | None = None,
) -> torch.Tensor:
    """Returns x @ weight.T for a weight of integers in groups, accumulated in float32.

    Args:
        x: [M, K], bf16, fp16 or fp32; rows may be strided.
        weight: [N, K]; with `gated` [2 * N, K], its rows interleaved by `gated_product.interleave`,
            N a multiple of 8.
        residual: [M, N], added to the product; may be `out`.
        gated: returns silu(x @ gate.T) * (x @ up.T).
        out: [M, N] to write to; by default a new tensor.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later), which must
            not write `weight`.
        config: instead of `grouped_config`'s (for tests and tuning).

    Returns:
        [M, N] in x's dtype.

    Raises:
        ValueError: the shapes do not fit.
    """
    rows, inputs = x.shape
    out = product_output(x, (weight.features, weight.inputs), out, gated=gated)
    if not rows:
        return out
    config = config or grouped_config(rows, weight, x.element_size())
    tiles, row_tiles = triton.cdiv(weight.width, config.features), triton.cdiv(rows, config.rows)
    partials = out
    if config.splits > 1:
        if tiles * row_tiles > len(weight.counters):
            raise ValueError(f"{config} has more tiles than there are counters")
        size = tiles * row_tiles * config.splits * config.features * config.rows
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
    added = out if residual is None else residual
    _kernel[(tiles, row_tiles, config.splits)](
        x, weight.integers, weight.scales, added, out, partials, weight.counters, rows,
        out.shape[1], weight.width, x.stride(0), added.stride(0), out.stride(0),
        INPUTS=inputs, UNITS=weight.units, RUN=weight.run, GROUP=weight.group, BITS=weight.bits,
        TILE=TILE, FEATURES=config.features, ROWS=config.rows, SPLITS=config.splits,
        STAGES=config.num_stages, OFFSET=_offset(x, weight), HAS_ZEROS=weight.has_zeros,
        HAS_RESIDUAL=residual is not None, GATED=gated, GATE=GATE_RUN, PDL=pdl,
        num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _offset(x: torch.Tensor, weight: PackedGroups) -> int:
    """Returns the number by which `_expand`'s instructions enlarge integers; 0 to do without them,
    in float32, in 8 bits and in the interpreter."""
    if weight.bits == 8 or not x.is_cuda:
        return 0
    return {torch.bfloat16: 128, torch.float16: 1024}.get(x.dtype, 0)
