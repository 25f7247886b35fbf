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
# ruff: noqa: N803, N806  (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
RUN_OF_INPUTS = tl.constexpr(16)


@dataclass(frozen=True, slots=True)
class FewRowsConfig:
    """The compile-time configuration of a kernel: output features a program, inputs a step, warps,
    pipeline stages (tensor cores only)."""

    features: int
    step: int
    num_warps: int
    num_stages: int = 1


class FewRowsSpec(NamedTuple):
    """What the kernels are compiled for.

    Attributes:
        inputs, lines, step: inputs; output features of a program; inputs of a step.
        gated, has_residual: the operations after the product.
        scaled, grouped: whether the weight has scales, and whether these are of blocks.
        rows_per_scale, group: rows of the weight and inputs that share a scale of blocks.
        run: rows of a run of the gate.
    """

    inputs: int
    lines: int
    step: int
    gated: bool
    has_residual: bool
    scaled: bool = False
    grouped: bool = False
    rows_per_scale: int = 1
    group: int = GROUP
    run: int = GATE_RUN


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
def _load_rows(place, ahead, begin, mask, GATED: tl.constexpr):
    """Returns the rows of a matrix at `place`, from column `begin` on, and with a gate the rows of
    its second half, `ahead` elements further; without a gate the first rows twice."""
    rows = tl.load(place + begin, mask, 0.0)
    up_rows = rows
    if GATED:
        up_rows = tl.load(place + ahead + begin, mask, 0.0)
    return rows, up_rows


@triton.jit
def row_sums(products, scales, lines, begin, inside, groups, S: tl.constexpr):
    """Returns the sums [S.lines] of `products` [S.lines, S.step]; with scales of blocks, the scaled
    sums. S is a `FewRowsSpec` or an `ExpertSpec`."""
    if S.grouped:
        runs: tl.constexpr = S.step // RUN_OF_INPUTS
        group = (begin + RUN_OF_INPUTS * tl.arange(0, runs)) // S.group
        place = scales + (lines // S.rows_per_scale * groups)[:, None] + group[None, :]
        scale = tl.load(place, inside[:, None] & (group < groups)[None, :], 0.0)
        parts = tl.sum(tl.reshape(products, [S.lines, runs, RUN_OF_INPUTS]), axis=2)
        sums = tl.sum(parts * scale, axis=1)
    else:
        sums = tl.sum(products, axis=1)
    return sums


@triton.jit
def scale_rows(total, up_total, scales, lines, inside, GATED: tl.constexpr, S: tl.constexpr):
    """Returns the sums [S.lines] of rows `lines`, and with a gate those of its second half, times
    the scales of the rows."""
    total *= tl.load(scales + lines // S.rows_per_scale, inside, 0.0)
    if GATED:
        up_total *= tl.load(scales + (lines + S.run) // S.rows_per_scale, inside, 0.0)
    return total, up_total


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
    BLOCK: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Returns the sums [S.lines, ROWS], and those of a gate's second half, with the adapters."""
    for index in range(1, tl.load(blocks) + 1):
        column = tl.load(blocks + index) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(
            shrunk + row[None, :] * shrunk_stride + column[:, None], (row < rows)[None, :], 0.0
        )
        place = up + lines.to(tl.int64)[:, None] * up_stride + column[None, :]
        w = tl.load(place, inside[:, None], 0.0)
        totals = tl.dot(w, value, totals, input_precision="ieee")
        if S.gated:
            up_w = tl.load(place + S.run * up_stride, inside[:, None], 0.0)
            up_totals = tl.dot(up_w, value, up_totals, input_precision="ieee")
    return totals, up_totals


@triton.jit
def _load_inputs(x, norm, begin, HAS_NORM: tl.constexpr, S: tl.constexpr):
    """Returns the inputs of a step, and the norm's weights, or the inputs again."""
    k = tl.arange(0, S.step)
    value = tl.load(x + begin + k, begin + k < S.inputs, 0.0)
    scale = value
    if HAS_NORM:
        scale = tl.load(norm + begin + k, begin + k < S.inputs, 0.0)
    return value, scale


@triton.jit
def _vector_sums(
    x, norm, place, rows, inputs, scales, lines, inside, groups,
    HAS_NORM: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Returns the products [S.lines] of x and the rows at `place`, and at a gate's second half, and
    the sum of x's squares. The first step's rows (`_load_rows`) and inputs (`_load_inputs`) have
    been loaded."""
    INPUTS: tl.constexpr = S.inputs
    LINES: tl.constexpr = S.lines
    STEP: tl.constexpr = S.step
    k = tl.arange(0, STEP)
    total = tl.zeros([LINES], tl.float32)
    up_total = tl.zeros([LINES], tl.float32)
    square = 0.0
    for begin in tl.static_range(0, INPUTS, STEP):
        if begin > 0:
            mask = inside[:, None] & (begin + k < INPUTS)[None, :]
            rows = _load_rows(place, S.run * INPUTS, begin, mask, S.gated)
            inputs = _load_inputs(x, norm, begin, HAS_NORM, S)
        value = inputs[0].to(tl.float32)
        if HAS_NORM:
            square += tl.sum(value * value)
            value = value * inputs[1].to(tl.float32)
        products = rows[0].to(tl.float32) * value[None, :]
        total += row_sums(products, scales, lines, begin, inside, groups, S)
        if S.gated:
            products = rows[1].to(tl.float32) * value[None, :]
            up_total += row_sums(products, scales, lines + S.run, begin, inside, groups, S)
    return total, up_total, square


@triton.jit
def _load_adapter(
    B, words, lines, inside, slot, width, b_stride, WIDTH: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """Returns rows [S.lines, WIDTH] of B (`_load_rows`) in the columns of the adapter in `slot`, or
    zeros; which columns it has; and the words of the shrunk x, as far as they are written."""
    column = tl.arange(0, WIDTH)
    has = column < tl.where(slot < 0, 0, width)
    own = slot * width + column
    place = B + lines.to(tl.int64)[:, None] * b_stride + own[None, :]
    rows = _load_rows(place, S.run * b_stride, 0, inside[:, None] & has[None, :], S.gated)
    return rows, has, tl.load(words + column, has, 0, volatile=True)


@triton.jit
def _vector_kernel(
    x, weight, scales, norm, residual, out, features, groups, eps,
    A, B, words, others, slots, ranks, modules, width, b_stride, a_stride, slot_stride,
    HAS_NORM: tl.constexpr, PDL: tl.constexpr, EARLY_TRIGGER: tl.constexpr, ADAPTED: tl.constexpr,
    WIDTH: tl.constexpr, MISSING: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if ADAPTED:
        slot = tl.load(slots)
        if program < width:
            if slot >= 0:
                of_rank = shrink_rank(
                    x, A, norm, slot, ranks, program, modules, a_stride, slot_stride, eps, S.inputs,
                    S.step, HAS_NORM, PDL,
                )  # fmt: skip
                put_word(words, others, program, of_rank.to(x.dtype.element_ty), MISSING)
            return
        program -= width
    n = program * S.lines + tl.arange(0, S.lines)
    k = tl.arange(0, S.step)
    inside = n < features
    lines = n + n // S.run * S.run if S.gated else n
    place = weight + lines.to(tl.int64)[:, None] * S.inputs + k[None, :]
    mask = inside[:, None] & (k < S.inputs)[None, :]
    rows = _load_rows(place, S.run * S.inputs, 0, mask, S.gated)
    if PDL:
        gdc_wait()
        if EARLY_TRIGGER:
            gdc_launch_dependents()
    inputs = _load_inputs(x, norm, 0, HAS_NORM, S)
    if ADAPTED:  # behind the loads of x: the addresses wait for the slot
        adapter = _load_adapter(B, words, lines, inside, slot, width, b_stride, WIDTH, S)
    total, up_total, square = _vector_sums(
        x, norm, place, rows, inputs, scales, lines, inside, groups, HAS_NORM, S
    )
    if PDL and not EARLY_TRIGGER:
        gdc_launch_dependents()
    if S.scaled and not S.grouped:
        total, up_total = scale_rows(total, up_total, scales, lines, inside, S.gated, S)
    if HAS_NORM:
        factor = tl.rsqrt(square / S.inputs + eps)
        total *= factor
        up_total *= factor
    if ADAPTED:
        b_rows, has, word = adapter
        word = wait_for_words(words, tl.arange(0, WIDTH), has, word, MISSING)
        own = word.to(x.dtype.element_ty, bitcast=True).to(tl.float32)[None, :]
        total += tl.sum(b_rows[0].to(tl.float32) * own, 1)
        if S.gated:
            up_total += tl.sum(b_rows[1].to(tl.float32) * own, 1)
    if S.gated:
        total = total / (1.0 + tl.exp(-total)) * up_total
    _finish(total, out, residual, 0, n, inside, 0, 0, S.has_residual)


@triton.jit
def _add_step(totals, w, value, scales, lines, group, inside, groups, S: tl.constexpr):
    """Returns totals [S.lines, ROWS] plus the product of one step, scaled where steps are
    blocks."""
    if S.grouped:
        scale = tl.load(scales + lines // S.rows_per_scale * groups + group, inside, 0.0)
        totals += tl.dot(w, value, input_precision="ieee") * scale[:, None]
    else:
        totals = tl.dot(w, value, totals, input_precision="ieee")
    return totals


@triton.jit(do_not_specialize=["rows"])
def _tensor_kernel(
    x, weight, scales, residual, out, rows, features, groups, x_stride, residual_stride, out_stride,
    shrunk, up, blocks, shrunk_stride, up_stride,
    ROWS_PAD: tl.constexpr, PDL: tl.constexpr, ADAPTED: tl.constexpr, BLOCK: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    INPUTS: tl.constexpr = S.inputs
    LINES: tl.constexpr = S.lines
    STEP: tl.constexpr = S.step
    n = tl.program_id(0) * LINES + tl.arange(0, LINES)
    k = tl.arange(0, STEP)
    row = tl.arange(0, ROWS_PAD)
    inside = n < features
    lines = n + n // S.run * S.run if S.gated else n
    place = weight + lines.to(tl.int64)[:, None] * INPUTS + k[None, :]
    up_place = place + S.run * INPUTS
    wait_for_kernel(PDL)
    totals = tl.zeros([LINES, ROWS_PAD], tl.float32)
    up_totals = tl.zeros([LINES, ROWS_PAD], tl.float32)
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
            totals, w.to(value.dtype), value, scales, lines, begin // S.group, inside, groups, S
        )
        if S.gated:
            up_w = tl.load(up_place + begin, mask, 0.0)
            up_totals = _add_step(
                up_totals, up_w.to(value.dtype), value, scales, lines + S.run, begin // S.group,
                inside, groups, S,
            )  # fmt: skip
    if S.scaled and not S.grouped:
        totals *= tl.load(scales + lines // S.rows_per_scale, inside, 0.0)[:, None]
        if S.gated:
            up_totals *= tl.load(scales + (lines + S.run) // S.rows_per_scale, inside, 0.0)[:, None]
    if ADAPTED:
        totals, up_totals = _add_adapters(
            totals, up_totals, shrunk, up, blocks, lines, inside, row, rows, shrunk_stride,
            up_stride, BLOCK, S,
        )  # fmt: skip
    if S.gated:
        totals = totals / (1.0 + tl.exp(-totals)) * up_totals
    _finish(
        totals, out, residual, row[None, :], n[:, None], inside[:, None] & (row < rows)[None, :],
        out_stride, residual_stride, S.has_residual,
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
    spec = FewRowsSpec(
        inputs, config.features, config.step, gated, residual is not None, scales is not None,
        groups > 1, rows_per_scale,
    )  # fmt: skip
    constants = {"PDL": pdl, "ADAPTED": operand is not None, "S": spec}
    programs = triton.cdiv(features, config.features)
    if rows == 1:
        assert not isinstance(operand, AdapterOperand)
        width = 0 if operand is None else operand.adapters.width
        columns = adapter_columns(width, config.num_warps) if width else 1
        _vector_kernel[(programs + width,)](
            *given, x if norm_weight is None else norm_weight, added, out, features, groups, eps,
            *row_arguments(operand, x), **constants, HAS_NORM=norm_weight is not None,
            WIDTH=columns, MISSING=MISSING,
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
