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
from aioinfer.kernels.norm import rms_norm
from aioinfer.kernels.product_arguments import check_product
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_ROWS = 16
#: With fewer bytes of weights the following kernel may be launched as soon as this one has started;
#: with more it would only take bandwidth from this one.
EARLY_TRIGGER_BYTES = 16 * 2**20


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
def _finish(
    total,
    out,
    residual,
    rows,
    columns,
    mask,
    out_stride,
    residual_stride,
    HAS_RESIDUAL: tl.constexpr,
):
    """Adds the residual and writes; `rows` and `columns` broadcast to total's shape."""
    if HAS_RESIDUAL:
        total += tl.load(residual + rows * residual_stride + columns, mask, 0.0).to(tl.float32)
    tl.store(out + rows * out_stride + columns, total.to(out.dtype.element_ty), mask)


@triton.jit
def _vector_kernel(
    x, weight, norm, residual, out, features, weight_stride, eps,
    INPUTS: tl.constexpr, FEATURES: tl.constexpr, STEP: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr, RUN: tl.constexpr, PDL: tl.constexpr, EARLY_TRIGGER: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    k = tl.arange(0, STEP)
    line = n + n // RUN * RUN if GATED else n
    place = weight + line.to(tl.int64)[:, None] * weight_stride + k[None, :]
    up_place = place + RUN * weight_stride
    mask = (n < features)[:, None] & (k < INPUTS)[None, :]
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
            mask = (n < features)[:, None] & (begin + k < INPUTS)[None, :]
            w = tl.load(place + begin, mask, 0.0)
            if GATED:
                up_w = tl.load(up_place + begin, mask, 0.0)
        value = tl.load(x + begin + k, begin + k < INPUTS, 0.0).to(tl.float32)
        if HAS_NORM:
            square += tl.sum(value * value)
            value = value * tl.load(norm + begin + k, begin + k < INPUTS, 0.0).to(tl.float32)
        total += tl.sum(w.to(tl.float32) * value[None, :], axis=1)
        if GATED:
            up_total += tl.sum(up_w.to(tl.float32) * value[None, :], axis=1)
    if PDL and not EARLY_TRIGGER:
        gdc_launch_dependents()
    if HAS_NORM:
        scale = tl.rsqrt(square / INPUTS + eps)
        total *= scale
        up_total *= scale
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * up_total
    _finish(total, out, residual, 0, n, n < features, 0, 0, HAS_RESIDUAL)


@triton.jit(do_not_specialize=["rows"])
def _tensor_kernel(
    x, weight, residual, out, rows, features, x_stride, weight_stride, residual_stride, out_stride,
    ROWS_PAD: tl.constexpr, INPUTS: tl.constexpr, FEATURES: tl.constexpr, STEP: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, RUN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    k = tl.arange(0, STEP)
    row = tl.arange(0, ROWS_PAD)
    line = n + n // RUN * RUN if GATED else n
    place = weight + line.to(tl.int64)[:, None] * weight_stride + k[None, :]
    up_place = place + RUN * weight_stride
    in_features = (n < features)[:, None]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    totals = tl.zeros([FEATURES, ROWS_PAD], tl.float32)
    up_totals = tl.zeros([FEATURES, ROWS_PAD], tl.float32)
    for begin in range(0, INPUTS, STEP):
        inside = begin + k < INPUTS
        w = tl.load(place + begin, in_features & inside[None, :], 0.0)
        value = tl.load(
            x + row[None, :] * x_stride + (begin + k)[:, None],
            (row < rows)[None, :] & inside[:, None],
            0.0,
        )
        totals = tl.dot(w, value, totals, input_precision="ieee")
        if GATED:
            up_w = tl.load(up_place + begin, in_features & inside[None, :], 0.0)
            up_totals = tl.dot(up_w, value, up_totals, input_precision="ieee")
    if GATED:
        totals = totals / (1.0 + tl.exp(-totals)) * up_totals
    _finish(
        totals,
        out,
        residual,
        row[None, :],
        n[:, None],
        in_features & (row < rows)[None, :],
        out_stride,
        residual_stride,
        HAS_RESIDUAL,
    )


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

    Returns:
        [M, N] in x's dtype.

    Raises:
        ValueError: the shapes do not fit, or there are more than 16 rows.
    """
    rows, inputs = x.shape
    features = check_product(
        x, (weight.shape[0], weight.shape[1]), gated=gated, max_rows=MAX_ROWS, stored=(weight,)
    )
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device) if out is None else out
    if norm_weight is not None and rows > 1:  # fused, every program would repeat it
        x = rms_norm(x, norm_weight, eps, pdl=pdl)
    added = x if residual is None else residual
    config = config or few_rows_dense_config(
        rows,
        features,
        inputs,
        normed=norm_weight is not None,
        gated=gated,
        itemsize=weight.element_size(),
    )
    flags = {"HAS_RESIDUAL": residual is not None, "GATED": gated, "RUN": GATE_RUN, "PDL": pdl}
    grid = (triton.cdiv(features, config.features),)
    if rows == 1:
        norm = weight if norm_weight is None else norm_weight
        _vector_kernel[grid](
            x, weight, norm, added, out, features, inputs, eps, INPUTS=inputs,
            FEATURES=config.features, STEP=config.step, **flags,
            HAS_NORM=norm_weight is not None, EARLY_TRIGGER=weight.nbytes < EARLY_TRIGGER_BYTES,
            num_warps=config.num_warps, launch_pdl=pdl,
        )  # fmt: skip
    else:
        _tensor_kernel[grid](
            x, weight, added, out, rows, features, x.stride(0), inputs, added.stride(0),
            out.stride(0),
            ROWS_PAD=8 if rows <= 8 else 16, INPUTS=inputs, FEATURES=config.features,
            STEP=config.step, **flags,
            num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
        )  # fmt: skip
    return out
