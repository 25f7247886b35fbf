"""Linear layers for one to sixteen rows, whose time is that of reading the weights. More rows are
left to cuBLAS.

Called by the linear layers in decode steps of small batches. Two kernels: for one row plain
multiply-adds, where each thread reads 16 bytes of weights at a time; for more rows a tensor-core
product with the weights as the left operand, whose 16 to 64 rows are output features.

The operations around the product can be fused into it: the gate of the MLP or the residual add
after it, and for one row the RMSNorm of the input before it (by scaling the sums). The rows of a
gated weight are interleaved by `gated_product.interleave`. With programmatic dependent launch a
program loads its first weights before it waits for the preceding kernel.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals; l is the softmax's sum)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from aioinfer.kernels.activation import GATE_RUN
from aioinfer.kernels.adapter_tiles import BLOCK, MISSING
from aioinfer.kernels.adapters import (
    AdapterOperand,
    RowOperand,
    operand_arguments,
    put_word,
    row_arguments,
    shrink_rank,
    wait_for_words,
)
from aioinfer.kernels.launch import wait_for_kernel
from aioinfer.kernels.norm import rms_norm
from aioinfer.kernels.products import product_output
from aioinfer.kernels.quantize import GROUP
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_ROWS = 16
#: With fewer bytes of weights the following kernel may be launched as soon as this one has started;
#: with more it would only take bandwidth from this one.
EARLY_TRIGGER_BYTES = 16 * 2**20
#: Inputs of a thread's 16 bytes, in one byte each: their sum is scaled at once.
RUN_OF_INPUTS = 16


@dataclass(frozen=True, slots=True)
class FewRowsConfig:
    """The compile-time configuration of a kernel: output features a program, inputs a step, warps,
    pipeline stages (tensor cores only)."""

    features: int
    step: int
    num_warps: int
    num_stages: int = 1


def few_rows_dense_config(
    rows: int, features: int, inputs: int, *, normed: bool, gated: bool, itemsize: int = 2
) -> FewRowsConfig:
    """Returns the configuration for x [rows, inputs] and `features` output features, measured on an
    H200 with 2-byte weights.

    Wider weights (float32, for tests) take the smallest tile, since the others would not fit into
    shared memory.
    """
    if rows > 1 and itemsize > 2:
        return FewRowsConfig(16, 128, 4, 3)
    if rows > 1:
        if gated:
            return FewRowsConfig(32, 256, 4, 4)
        if features >= 12288:
            return FewRowsConfig(64, 256, 4, 3)
        return FewRowsConfig(16, 512, 2, 4) if inputs >= features else FewRowsConfig(16, 256, 1, 5)
    step = min(4096, triton.next_power_of_2(inputs))
    if gated or normed:
        return FewRowsConfig(1 if gated else 2, step, 4)
    if features >= 4096:
        return FewRowsConfig(4, step, 8) if inputs > step else FewRowsConfig(4, min(2048, step), 4)
    return FewRowsConfig(1, step, 8 if step == 4096 else 4)


def other_configs(
    rows: int, features: int, inputs: int, *, normed: bool, gated: bool, itemsize: int = 2
) -> list[FewRowsConfig]:
    """Returns configurations that may be faster than `few_rows_dense_config`'s with other shapes or
    on other cards; arguments as there. They are few, since each takes a compilation."""
    if rows > MAX_ROWS // 2 or (rows > 1 and (gated or itemsize > 2)):
        return []
    if rows > 1:
        configs = [FewRowsConfig(16, 512, 2, 4), FewRowsConfig(32, 256, 4, 4)]
    elif gated:
        step = min(4096, triton.next_power_of_2(inputs))
        configs = [FewRowsConfig(1, step, 4), FewRowsConfig(2, step, 8)]
    else:
        step = min(4096, triton.next_power_of_2(inputs))
        configs = [FewRowsConfig(4, step, 8), FewRowsConfig(1, step, 8 if step == 4096 else 4)]
        if not normed:
            configs.append(FewRowsConfig(4, min(2048, step), 4))
    exact = inputs & -inputs  # no thread is idle in the last step
    if rows == 1 and 512 <= exact < step:
        configs.append(FewRowsConfig(1 if gated else 2, exact, exact // 256))
    default = few_rows_dense_config(
        rows, features, inputs, normed=normed, gated=gated, itemsize=itemsize
    )
    return [config for config in configs if config != default]


@triton.jit
def row_sums(
    products, scales, lines, begin, inside, groups,
    FEATURES: tl.constexpr, STEP: tl.constexpr, GROUPED: tl.constexpr, GROUP: tl.constexpr,
    RUN_OF_INPUTS: tl.constexpr, ROWS_PER_SCALE: tl.constexpr,
):  # fmt: skip
    """Returns the sums [FEATURES] of `products` [FEATURES, STEP]; with scales of blocks, the scaled
    sums."""
    if GROUPED:
        runs: tl.constexpr = STEP // RUN_OF_INPUTS
        group = (begin + RUN_OF_INPUTS * tl.arange(0, runs)) // GROUP
        place = scales + (lines // ROWS_PER_SCALE * groups)[:, None] + group[None, :]
        scale = tl.load(place, inside[:, None] & (group < groups)[None, :], 0.0)
        parts = tl.sum(tl.reshape(products, [FEATURES, runs, RUN_OF_INPUTS]), axis=2)
        sums = tl.sum(parts * scale, axis=1)
    else:
        sums = tl.sum(products, axis=1)
    return sums


@triton.jit
def _finish(
    total, out, residual, rows, columns, mask, out_stride, residual_stride,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Adds the residual and writes; `rows` and `columns` broadcast to total's shape."""
    if HAS_RESIDUAL:
        total += tl.load(residual + rows * residual_stride + columns, mask, 0.0).to(tl.float32)
    tl.store(out + rows * out_stride + columns, total.to(out.dtype.element_ty), mask)


@triton.jit
def _add_adapters(
    totals, up_totals, shrunk, up, blocks, lines, inside, row, rows, shrunk_stride, up_stride,
    GATED: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the sums [FEATURES, ROWS], and those of a gate's second half, with the adapters."""
    for index in range(1, tl.load(blocks) + 1):
        column = tl.load(blocks + index) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(
            shrunk + row[None, :] * shrunk_stride + column[:, None], (row < rows)[None, :], 0.0
        )
        place = up + lines.to(tl.int64)[:, None] * up_stride + column[None, :]
        w = tl.load(place, inside[:, None], 0.0)
        totals = tl.dot(w, value, totals, input_precision="ieee")
        if GATED:
            up_w = tl.load(place + RUN * up_stride, inside[:, None], 0.0)
            up_totals = tl.dot(up_w, value, up_totals, input_precision="ieee")
    return totals, up_totals


@triton.jit
def _rows_of_adapter(
    B, lines, inside, column, has, b_stride, GATED: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    """Returns rows [FEATURES, WIDTH] of B, in the columns of an adapter, and with a gate those of
    its second half, else the same."""
    place = B + lines.to(tl.int64)[:, None] * b_stride + column[None, :]
    rows = tl.load(place, inside[:, None] & has[None, :], 0.0)
    up_rows = rows
    if GATED:
        place += RUN * b_stride
        up_rows = tl.load(place, inside[:, None] & has[None, :], 0.0)
    return rows, up_rows


@triton.jit
def _vector_kernel(
    x, weight, scales, norm, residual, out, features, groups, eps,
    A, B, words, others, slots, ranks, modules, width, b_stride, a_stride, slot_stride,
    INPUTS: tl.constexpr, FEATURES: tl.constexpr, STEP: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, RUN: tl.constexpr, SCALED: tl.constexpr,
    GROUPED: tl.constexpr,
    GROUP: tl.constexpr, RUN_OF_INPUTS: tl.constexpr, ROWS_PER_SCALE: tl.constexpr,
    PDL: tl.constexpr, EARLY_TRIGGER: tl.constexpr, ADAPTED: tl.constexpr, WIDTH: tl.constexpr,
    MISSING: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if ADAPTED:
        slot = tl.load(slots)
        if program < width:
            if slot >= 0:
                of_rank = shrink_rank(
                    x, A, norm, slot, ranks, program, modules, a_stride, slot_stride, eps, INPUTS,
                    STEP, HAS_NORM, PDL,
                )  # fmt: skip
                put_word(words, others, program, of_rank.to(x.dtype.element_ty), MISSING)
            return
        program -= width
    n = program * FEATURES + tl.arange(0, FEATURES)
    k = tl.arange(0, STEP)
    inside = n < features
    lines = n + n // RUN * RUN if GATED else n
    place = weight + lines.to(tl.int64)[:, None] * INPUTS + k[None, :]
    up_place = place + RUN * INPUTS
    mask = inside[:, None] & (k < INPUTS)[None, :]
    w = tl.load(place, mask, 0.0)
    if GATED:
        up_w = tl.load(up_place, mask, 0.0)
    if PDL:
        gdc_wait()
        if EARLY_TRIGGER:
            gdc_launch_dependents()
    total = tl.zeros([FEATURES], tl.float32)
    up_total = tl.zeros([FEATURES], tl.float32)
    square = 0.0
    for begin in tl.static_range(0, INPUTS, STEP):
        if begin > 0:
            mask = inside[:, None] & (begin + k < INPUTS)[None, :]
            w = tl.load(place + begin, mask, 0.0)
            if GATED:
                up_w = tl.load(up_place + begin, mask, 0.0)
        given = tl.load(x + begin + k, begin + k < INPUTS, 0.0)
        if HAS_NORM:
            scale = tl.load(norm + begin + k, begin + k < INPUTS, 0.0)
        if begin == 0 and ADAPTED:  # behind the loads of x: the addresses wait for the slot
            column = tl.arange(0, WIDTH)
            has = column < tl.where(slot < 0, 0, width)
            of_adapter, up_of_adapter = _rows_of_adapter(
                B, lines, inside, slot * width + column, has, b_stride, GATED, RUN
            )
            word = tl.load(words + column, has, 0, volatile=True)
        value = given.to(tl.float32)
        if HAS_NORM:
            square += tl.sum(value * value)
            value = value * scale.to(tl.float32)
        total += row_sums(
            w.to(tl.float32) * value[None, :], scales, lines, begin, inside, groups,
            FEATURES, STEP, GROUPED, GROUP, RUN_OF_INPUTS, ROWS_PER_SCALE,
        )  # fmt: skip
        if GATED:
            up_total += row_sums(
                up_w.to(tl.float32) * value[None, :], scales, lines + RUN, begin, inside, groups,
                FEATURES, STEP, GROUPED, GROUP, RUN_OF_INPUTS, ROWS_PER_SCALE,
            )  # fmt: skip
    if PDL and not EARLY_TRIGGER:
        gdc_launch_dependents()
    if SCALED and not GROUPED:
        total *= tl.load(scales + lines // ROWS_PER_SCALE, inside, 0.0)
        if GATED:
            up_total *= tl.load(scales + (lines + RUN) // ROWS_PER_SCALE, inside, 0.0)
    if HAS_NORM:
        factor = tl.rsqrt(square / INPUTS + eps)
        total *= factor
        up_total *= factor
    if ADAPTED:
        word = wait_for_words(words, column, has, word, MISSING)
        own = word.to(x.dtype.element_ty, bitcast=True).to(tl.float32)
        total += tl.sum(of_adapter.to(tl.float32) * own[None, :], 1)
        if GATED:
            up_total += tl.sum(up_of_adapter.to(tl.float32) * own[None, :], 1)
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * up_total
    _finish(total, out, residual, 0, n, inside, 0, 0, HAS_RESIDUAL)


@triton.jit
def _add_step(
    totals, w, value, scales, lines, group, inside, groups,
    GROUPED: tl.constexpr, ROWS_PER_SCALE: tl.constexpr,
):  # fmt: skip
    """Returns totals [FEATURES, ROWS] plus the product of one step, scaled where steps are
    blocks."""
    if GROUPED:
        scale = tl.load(scales + lines // ROWS_PER_SCALE * groups + group, inside, 0.0)
        totals += tl.dot(w, value, input_precision="ieee") * scale[:, None]
    else:
        totals = tl.dot(w, value, totals, input_precision="ieee")
    return totals


@triton.jit(do_not_specialize=["rows"])
def _tensor_kernel(
    x, weight, scales, residual, out, rows, features, groups, x_stride, residual_stride, out_stride,
    shrunk, up, blocks, shrunk_stride, up_stride,
    ROWS_PAD: tl.constexpr, INPUTS: tl.constexpr, FEATURES: tl.constexpr, STEP: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, RUN: tl.constexpr, SCALED: tl.constexpr,
    GROUPED: tl.constexpr,
    GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, PDL: tl.constexpr,
    ADAPTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    k = tl.arange(0, STEP)
    row = tl.arange(0, ROWS_PAD)
    inside = n < features
    lines = n + n // RUN * RUN if GATED else n
    place = weight + lines.to(tl.int64)[:, None] * INPUTS + k[None, :]
    up_place = place + RUN * INPUTS
    wait_for_kernel(PDL)
    totals = tl.zeros([FEATURES, ROWS_PAD], tl.float32)
    up_totals = tl.zeros([FEATURES, ROWS_PAD], tl.float32)
    for begin in range(0, INPUTS, STEP):
        there = begin + k < INPUTS
        mask = inside[:, None] & there[None, :]
        w = tl.load(place + begin, mask, 0.0)
        value = tl.load(
            x + row[None, :] * x_stride + (begin + k)[:, None],
            (row < rows)[None, :] & there[:, None],
            0.0,
        )
        totals = _add_step(
            totals, w.to(value.dtype), value, scales, lines, begin // GROUP, inside, groups,
            GROUPED, ROWS_PER_SCALE,
        )  # fmt: skip
        if GATED:
            up_w = tl.load(up_place + begin, mask, 0.0)
            up_totals = _add_step(
                up_totals, up_w.to(value.dtype), value, scales, lines + RUN, begin // GROUP,
                inside, groups, GROUPED, ROWS_PER_SCALE,
            )  # fmt: skip
    if SCALED and not GROUPED:
        totals *= tl.load(scales + lines // ROWS_PER_SCALE, inside, 0.0)[:, None]
        if GATED:
            up_totals *= tl.load(scales + (lines + RUN) // ROWS_PER_SCALE, inside, 0.0)[:, None]
    if ADAPTED:
        totals, up_totals = _add_adapters(
            totals, up_totals, shrunk, up, blocks, lines, inside, row, rows, shrunk_stride,
            up_stride, GATED, RUN, BLOCK,
        )  # fmt: skip
    if GATED:
        totals = totals / (1.0 + tl.exp(-totals)) * up_totals
    _finish(
        totals, out, residual, row[None, :], n[:, None], inside[:, None] & (row < rows)[None, :],
        out_stride, residual_stride, HAS_RESIDUAL,
    )  # fmt: skip


def adapter_columns(width: int, num_warps: int) -> int:
    """Returns the columns of the tile of B for an adapter with `width` columns: one for each thread
    at least (`adapters.wait_for_words`)."""
    return max(triton.next_power_of_2(width), 32 * num_warps)


def launch_few_rows(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor | None,
    rows_per_scale: int,
    norm_weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    gated: bool,
    out: torch.Tensor,
    pdl: bool,
    config: FewRowsConfig,
    operand: AdapterOperand | RowOperand | None = None,
) -> None:
    """Writes a product of a weight as it is, or of one byte with scales, to `out`; the arguments
    are those of `few_rows_dense` and `few_rows_scaled.ScaledMatrix`."""
    (rows, inputs), features = x.shape, out.shape[1]
    if norm_weight is not None and rows > 1:  # fused, every program would repeat it
        x = rms_norm(x, norm_weight, eps, pdl=pdl)
    groups = 1 if scales is None else scales.shape[1]
    given = x, values, x if scales is None else scales
    added = x if residual is None else residual
    constants = {
        "INPUTS": inputs, "FEATURES": config.features, "STEP": config.step,
        "HAS_RESIDUAL": residual is not None, "GATED": gated, "RUN": GATE_RUN,
        "SCALED": scales is not None, "GROUPED": groups > 1, "GROUP": GROUP,
        "ROWS_PER_SCALE": rows_per_scale, "PDL": pdl, "ADAPTED": operand is not None,
    }  # fmt: skip
    programs = triton.cdiv(features, config.features)
    if rows == 1:
        assert not isinstance(operand, AdapterOperand)
        width = 0 if operand is None else operand.adapters.width
        columns = adapter_columns(width, config.num_warps) if width else 1
        _vector_kernel[(programs + width,)](
            *given, x if norm_weight is None else norm_weight, added, out, features, groups, eps,
            *row_arguments(operand, x), **constants, HAS_NORM=norm_weight is not None,
            RUN_OF_INPUTS=RUN_OF_INPUTS, WIDTH=columns, MISSING=MISSING,
            EARLY_TRIGGER=values.nbytes < EARLY_TRIGGER_BYTES, num_warps=config.num_warps,
            launch_pdl=pdl,
        )  # fmt: skip
    else:
        assert not isinstance(operand, RowOperand)
        _tensor_kernel[(programs,)](
            *given, added, out, rows, features, groups, x.stride(0), added.stride(0), out.stride(0),
            *operand_arguments(operand, x), **constants, ROWS_PAD=8 if rows <= 8 else 16,
            BLOCK=BLOCK, num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
        )  # fmt: skip


def few_rows_dense(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    config: FewRowsConfig | None = None,
    operand: AdapterOperand | RowOperand | None = None,
) -> torch.Tensor:
    """Returns x @ weight.T, for few rows of x, accumulated in float32.

    Args:
        x: [M, K], M <= 16; bf16, fp16 or fp32; rows may be strided.
        weight: [N, K], as in nn.Linear; with `gated` [2 * N, K], interleaved, N a multiple of 8;
            of x's dtype.
        norm_weight: [K] of the RMSNorm (with `eps`) that x passes through first; None for no norm.
        residual: [M, N], added to the product; may be `out`.
        gated: weight holds two projections: eight rows of the gate, then the matching eight of up,
            and so on; returns silu(x @ gate.T) * (x @ up.T).
        out: [M, N] to write to; by default a new tensor.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later); `weight` is
            read before that kernel ends, so that kernel must not write it.
        config: instead of `few_rows_dense_config`'s (for tests and tuning).
        operand: added to the product, before a gate: a `RowOperand` of one row, or else an
            `AdapterOperand`.

    Returns:
        [M, N] in x's dtype.

    Raises:
        ValueError: the shapes do not fit, or there are more than 16 rows.
    """
    rows, inputs = x.shape
    out = product_output(
        x, weight.shape, out, gated=gated, max_rows=MAX_ROWS, stored=(weight,)
    )  # fmt: skip
    config = config or few_rows_dense_config(
        rows, out.shape[1], inputs, normed=norm_weight is not None, gated=gated,
        itemsize=weight.element_size(),
    )  # fmt: skip
    launch_few_rows(
        x, weight, None, 1, norm_weight, eps, residual, gated, out, pdl, config, operand
    )
    return out
