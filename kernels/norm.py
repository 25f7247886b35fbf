"""RMSNorm, alone and after the residual add, also of a product's parts (`split_product`), and
LayerNorm of a sum. Called by the layers of every model on GPUs.

Sources of the operations: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; Ba et
al., "Layer Normalization", 2016.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals; l is the softmax's sum)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from aioinfer.kernels.launch import wait_for_kernel
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_HIDDEN = 16384  # one program keeps a whole row in its registers


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, hidden, x_stride, residual_stride, out_stride, eps,
    BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    w = tl.load(weight + columns, mask, 0.0).to(tl.float32)
    wait_for_kernel(PDL)
    value = tl.load(x + row * x_stride + columns, mask, 0.0).to(tl.float32)
    if HAS_RESIDUAL:
        place = residual + row * residual_stride + columns
        # The norm is taken of the rounded sum, which the next layers read.
        total = (value + tl.load(place, mask, 0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(place, total, mask)
        value = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / hidden + eps)
    tl.store(out + row * out_stride + columns, (value * scale * w).to(out.dtype.element_ty), mask)


@triton.jit
def _add_parts_kernel(
    parts, residual, weight, out, hidden, part_stride, residual_stride, out_stride, eps,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    if HAS_NORM:
        w = tl.load(weight + columns, mask, 0.0).to(tl.float32)
    if PDL:
        # before the wait: the next product may load its first weights while the one that this norm
        # follows ends (notes/gpu-step.md)
        gdc_launch_dependents()
        gdc_wait()
    place = residual + row * residual_stride + columns
    total = tl.load(place, mask, 0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * part_stride + row * hidden + columns, mask, 0.0)
    # as in `_rms_norm_kernel`, the norm is that of the rounded sum
    rounded = total.to(residual.dtype.element_ty)
    tl.store(place, rounded, mask)
    if HAS_NORM:
        value = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value) / hidden + eps)
        normed = (value * scale * w).to(out.dtype.element_ty)
        tl.store(out + row * out_stride + columns, normed, mask)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Returns x / rms(x) * weight, computed in float32.

    Args:
        x: [T, H], bf16, fp16 or fp32; rows may be strided.
        weight: [H].
        eps: added to the mean square.
        out: [T, H] to write to; by default a new tensor.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).
    """
    return _launch(x, None, weight, eps, out, pdl)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Adds x to `residual` in place and returns the norm of the sum, as `rms_norm` does.

    Args:
        x, residual: [T, H] of one dtype; `residual` becomes the sum.
        weight, eps, out, pdl: as for `rms_norm`.
    """
    if residual.shape != x.shape:
        raise ValueError(f"residual is {tuple(residual.shape)}, x {tuple(x.shape)}")
    return _launch(x, residual, weight, eps, out, pdl)


def add_parts(parts: torch.Tensor, residual: torch.Tensor, *, pdl: bool = False) -> None:
    """Adds the sum of `parts` over the first dimension to `residual` in place, with one rounding;
    arguments as for `add_parts_rms_norm`."""
    _launch_parts(parts, residual, None, 0.0, residual, pdl)


def add_parts_rms_norm(
    parts: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Adds the sum of `parts` over the first dimension to `residual` in place, with one rounding,
    and returns the norm of the sum, as `rms_norm` does.

    Args:
        parts: float32 [P, T, H], contiguous.
        residual: [T, H], bf16, fp16 or fp32; becomes the sum.
        weight, eps, out, pdl: as for `rms_norm`.
    """
    out = torch.empty_like(residual) if out is None else out
    _launch_parts(parts, residual, weight, eps, out, pdl)
    return out


def _launch_parts(
    parts: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    pdl: bool,
) -> None:
    count, rows, hidden = parts.shape
    fits = residual.shape == out.shape == (rows, hidden) and hidden <= MAX_HIDDEN
    is_dense = parts.is_contiguous() and residual.stride(1) == out.stride(1) == 1
    if not fits or not is_dense or parts.dtype != torch.float32:
        raise ValueError(
            f"parts must be float32 [P, T, H <= {MAX_HIDDEN}] and residual [T, H], with contiguous "
            f"rows, not {parts.dtype} {tuple(parts.shape)} and {tuple(residual.shape)}"
        )
    if rows == 0:
        return
    block = triton.next_power_of_2(hidden)
    _add_parts_kernel[(rows,)](
        parts, residual, parts if weight is None else weight, out, hidden, rows * hidden,
        residual.stride(0), out.stride(0), eps,
        PARTS=count, BLOCK=block, HAS_NORM=weight is not None, PDL=pdl,
        num_warps=min(16, max(1, block // 512)), launch_pdl=pdl,
    )  # fmt: skip


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
    pdl: bool,
) -> torch.Tensor:
    rows, hidden = x.shape
    if x.stride(1) != 1 or weight.shape != (hidden,) or hidden > MAX_HIDDEN:
        raise ValueError(
            f"x must be [T, H <= {MAX_HIDDEN}] with contiguous rows and weight [H], not "
            f"{tuple(x.shape)} and {tuple(weight.shape)}"
        )
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device) if out is None else out
    if rows == 0:
        return out
    block = triton.next_power_of_2(hidden)
    other = x if residual is None else residual
    _rms_norm_kernel[(rows,)](
        x, other, weight, out, hidden, x.stride(0), other.stride(0), out.stride(0), eps,
        BLOCK=block, HAS_RESIDUAL=residual is not None, PDL=pdl,
        num_warps=min(16, max(1, block // 512)), launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def _add_layer_norm_kernel(
    stream, addend, weight, bias, out, hidden, eps, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * hidden
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    total = tl.load(stream + row + columns, mask, 0.0).to(tl.float32)
    total += tl.load(addend + row + columns, mask, 0.0).to(tl.float32)
    place = stream
    if out is not None:
        tl.store(stream + row + columns, total.to(stream.dtype.element_ty), mask)
        total = total.to(stream.dtype.element_ty).to(tl.float32)
        place = out
    centred = tl.where(mask, total - tl.sum(total) / hidden, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred) / hidden + eps)
    normed = centred * scale * tl.load(weight + columns, mask, 0.0).to(tl.float32)
    if HAS_BIAS:
        normed += tl.load(bias + columns, mask, 0.0).to(tl.float32)
    tl.store(place + row + columns, normed.to(stream.dtype.element_ty), mask)


def add_layer_norm(
    stream: torch.Tensor,
    addend: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None = None,
) -> None:
    """Puts the LayerNorm of `stream + addend` in the place of `stream`, with one rounding; with
    `out` the sum, and the norm of the rounded sum in `out`. The residual stream and what a part of
    a layer adds to it are summed so: by encoders, which are normed behind their parts, and by
    towers, which are normed before them.

    Args:
        stream, addend, out: [T, H], contiguous, bf16, fp16 or fp32.
        weight, bias: [H], or no bias.
        eps: added to the variance.

    Raises:
        ValueError: the shapes differ, or rows are too long.
    """
    tokens, hidden = stream.shape
    if addend.shape != stream.shape or hidden > MAX_HIDDEN:
        raise ValueError(f"stream is {tuple(stream.shape)}, addend {tuple(addend.shape)}")
    if tokens:
        block = triton.next_power_of_2(hidden)
        _add_layer_norm_kernel[(tokens,)](
            stream, addend, weight, bias, out, hidden, eps, BLOCK=block, HAS_BIAS=bias is not None,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
