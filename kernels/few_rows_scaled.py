"""Linear layers with weights of one byte for one to sixteen rows, whose time is that of reading the
weights.

The counterpart of `few_rows_dense`, with the same two kernels and fusions: float8 or int8 weights
are read once, 16 bytes a thread, converted in registers and multiplied with 16-bit activations. A
scale of an output feature is applied to its sum; scales of blocks are applied to the sums of 16
inputs, the ones that a thread has, or of one tensor-core step. More rows are left to
`scaled_product`.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from aioinfer.kernels.activation import GATE_RUN
from aioinfer.kernels.few_rows_dense import EARLY_TRIGGER_BYTES, MAX_ROWS, FewRowsConfig, _finish
from aioinfer.kernels.norm import rms_norm
from aioinfer.kernels.product_arguments import check_product
from aioinfer.kernels.quantize import GROUP
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: Inputs of a thread's 16 bytes: their sum is scaled at once.
RUN_OF_INPUTS = 16


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """A weight of one byte: value * scale.

    Attributes:
        values: float8_e4m3fn or int8 [N, K], contiguous.
        scales: float32 [N / rows_per_scale, groups], contiguous. One group holds all inputs;
            several hold `GROUP` inputs each.
        rows_per_scale: neighbouring rows that share scales.
        counters: int32 [C], zeros between launches, for products whose inputs are divided over
            several programs; without it they are not.
        is_paired: of each 128 rows, every other eight (gate rows) share scales, and so do the eight
            between them (up rows); `rows_per_scale` is 8.
    """

    values: torch.Tensor
    scales: torch.Tensor
    rows_per_scale: int = 1
    counters: torch.Tensor | None = None
    is_paired: bool = False

    @property
    def is_grouped(self) -> bool:
        """Whether scales belong to `GROUP` inputs, instead of to a row."""
        return self.scales.shape[1] > 1


def few_rows_scaled_config(
    rows: int, features: int, inputs: int, *, normed: bool, gated: bool, grouped: bool,
    itemsize: int = 2,
) -> FewRowsConfig:  # fmt: skip
    """Returns the configuration for x [rows, inputs] and `features` output features.

    Derived from `few_rows_dense_config`: a tile holds twice the weights, for as many bytes. With
    scales of blocks a tensor-core step is one block of inputs. Those of one row are measured on an
    H200; more rows come here only with activations that are not quantized, and are not tuned.

    Args:
        itemsize: bytes of an activation; float32 (for tests) takes the smallest tile.
    """
    if rows > 1 and itemsize > 2:
        return FewRowsConfig(16, GROUP, 4, 3)
    if rows > MAX_ROWS // 2:  # 64 features would be a wgmma of 16 columns, which loads single bytes
        if features >= 12288 or gated:
            return FewRowsConfig(32, GROUP if grouped else 256, 4, 5)
        return FewRowsConfig(16, GROUP, 1, 8) if grouped else FewRowsConfig(16, 256, 2, 6)
    if rows > 1:
        if features >= 12288:
            return FewRowsConfig(64, GROUP, 4, 6) if grouped else FewRowsConfig(64, 256, 4, 4)
        if gated:
            return FewRowsConfig(32, GROUP if grouped else 256, 4, 5)
        return FewRowsConfig(16, GROUP, 1, 8) if grouped else FewRowsConfig(16, 512, 2, 6)
    step = max(GROUP, min(4096 if gated and not grouped else 2048, triton.next_power_of_2(inputs)))
    return FewRowsConfig(8 if grouped else 4, step, 4)


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
def _vector_kernel(
    x, weight, scales, norm, residual, out, features, groups, eps,
    INPUTS: tl.constexpr, FEATURES: tl.constexpr, STEP: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, RUN: tl.constexpr, GROUPED: tl.constexpr,
    GROUP: tl.constexpr, RUN_OF_INPUTS: tl.constexpr, ROWS_PER_SCALE: tl.constexpr,
    PDL: tl.constexpr, EARLY_TRIGGER: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
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
        value = tl.load(x + begin + k, begin + k < INPUTS, 0.0).to(tl.float32)
        if HAS_NORM:
            square += tl.sum(value * value)
            value = value * tl.load(norm + begin + k, begin + k < INPUTS, 0.0).to(tl.float32)
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
    if not GROUPED:
        total *= tl.load(scales + lines // ROWS_PER_SCALE, inside, 0.0)
        if GATED:
            up_total *= tl.load(scales + (lines + RUN) // ROWS_PER_SCALE, inside, 0.0)
    if HAS_NORM:
        factor = tl.rsqrt(square / INPUTS + eps)
        total *= factor
        up_total *= factor
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
    ROWS_PAD: tl.constexpr, INPUTS: tl.constexpr, FEATURES: tl.constexpr, STEP: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, RUN: tl.constexpr, GROUPED: tl.constexpr,
    GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    k = tl.arange(0, STEP)
    row = tl.arange(0, ROWS_PAD)
    inside = n < features
    lines = n + n // RUN * RUN if GATED else n
    place = weight + lines.to(tl.int64)[:, None] * INPUTS + k[None, :]
    up_place = place + RUN * INPUTS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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
    if not GROUPED:
        totals *= tl.load(scales + lines // ROWS_PER_SCALE, inside, 0.0)[:, None]
        if GATED:
            up_totals *= tl.load(scales + (lines + RUN) // ROWS_PER_SCALE, inside, 0.0)[:, None]
    if GATED:
        totals = totals / (1.0 + tl.exp(-totals)) * up_totals
    _finish(
        totals, out, residual, row[None, :], n[:, None], inside[:, None] & (row < rows)[None, :],
        out_stride, residual_stride, HAS_RESIDUAL,
    )  # fmt: skip


def few_rows_scaled(
    x: torch.Tensor,
    weight: ScaledMatrix,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    config: FewRowsConfig | None = None,
) -> torch.Tensor:
    """Returns x @ weight.T, for few rows of x, accumulated in float32.

    Args:
        x: [M, K], M <= 16; bf16, fp16 or fp32; rows may be strided.
        weight: [N, K]; with `gated` [2 * N, K], interleaved, N a multiple of 8.
        norm_weight: [K] of the RMSNorm (with `eps`) that x passes through first; None for no norm.
        residual: [M, N], added to the product; may be `out`.
        gated: weight holds two projections: eight rows of the gate, then the matching eight of up,
            and so on; returns silu(x @ gate.T) * (x @ up.T).
        out: [M, N] to write to; by default a new tensor.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later); `weight` is
            read before that kernel ends, so that kernel must not write it.
        config: instead of `few_rows_scaled_config`'s (for tests and tuning).

    Returns:
        [M, N] in x's dtype.

    Raises:
        ValueError: the shapes do not fit, or there are more than 16 rows.
    """
    rows, inputs = x.shape
    values, scales = weight.values, weight.scales
    features = check_product(
        x,
        (values.shape[0], values.shape[1]),
        gated=gated,
        max_rows=MAX_ROWS,
        stored=(values, scales),
    )
    grouped = weight.is_grouped
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device) if out is None else out
    if norm_weight is not None and rows > 1:  # fused, every program would repeat it
        x = rms_norm(x, norm_weight, eps, pdl=pdl)
    added = x if residual is None else residual
    config = config or few_rows_scaled_config(
        rows, features, inputs, normed=norm_weight is not None, gated=gated, grouped=grouped,
        itemsize=x.element_size(),
    )  # fmt: skip
    if grouped and (config.step != GROUP if rows > 1 else config.step % GROUP):
        raise ValueError(f"steps must be of {GROUP} inputs, not of {config.step}")
    flags = {
        "HAS_RESIDUAL": residual is not None, "GATED": gated, "RUN": GATE_RUN, "GROUPED": grouped,
        "GROUP": GROUP, "ROWS_PER_SCALE": weight.rows_per_scale, "PDL": pdl,
    }  # fmt: skip
    grid, groups = (triton.cdiv(features, config.features),), weight.scales.shape[1]
    if rows == 1:
        norm = x if norm_weight is None else norm_weight
        _vector_kernel[grid](
            x, weight.values, weight.scales, norm, added, out, features, groups, eps,
            INPUTS=inputs, FEATURES=config.features, STEP=config.step, **flags,
            HAS_NORM=norm_weight is not None, RUN_OF_INPUTS=RUN_OF_INPUTS,
            EARLY_TRIGGER=weight.values.nbytes < EARLY_TRIGGER_BYTES,
            num_warps=config.num_warps, launch_pdl=pdl,
        )  # fmt: skip
    else:
        _tensor_kernel[grid](
            x, weight.values, weight.scales, added, out, rows, features, groups, x.stride(0),
            added.stride(0), out.stride(0),
            ROWS_PAD=8 if rows <= 8 else 16, INPUTS=inputs, FEATURES=config.features,
            STEP=config.step, **flags,
            num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
        )  # fmt: skip
    return out
