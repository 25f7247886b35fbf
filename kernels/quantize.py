"""Activations of one byte: quantized as they are, or after their RMSNorm.

Called by linear layers with weights of one byte (`layers.formats.kernel_scaled`) for more rows than
`few_rows_scaled` takes. A scale belongs to a token, to a token and `GROUP` neighbouring channels
(DeepSeek-V3, DeepSeek-AI 2024), or to all (a static one). One launch computes scales and values: a
program keeps its token in registers.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from aioinfer.kernels.launch import wait_for_kernel

#: Channels that share a scale in blocks.
GROUP = 128
#: Scales of a group begin at multiples of so many, 16 bytes, as TMA reads them.
SCALE_ROWS = 4
#: A program keeps a whole token in its registers.
MAX_CHANNELS = 32768
#: The largest magnitude that is used of each dtype.
MAXIMA = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
#: Keeps the scale of zeros from being zero.
SMALLEST = 1e-12
#: Adding it to a float32 below 2 ** 22, and taking it away again, rounds to the nearest integer,
#: ties to the even one.
ROUNDER = tl.constexpr(12582912.0)


@dataclass(frozen=True, slots=True)
class InputFormat:
    """How activations are quantized for a product.

    Attributes:
        dtype: float8_e4m3fn or int8.
        is_grouped: each `GROUP` channels of a token have a scale; otherwise each token has one.
        static_scale: float32 of one element, the scale of all tokens; None to compute scales.
    """

    dtype: torch.dtype
    is_grouped: bool = False
    static_scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ScaledInputs:
    """Quantized activations: value * scale.

    Attributes:
        values: float8 or int8 [T, K].
        scales: float32 [T, 1], or [T, groups] with the tokens of a group next to one another in
            memory.
    """

    values: torch.Tensor
    scales: torch.Tensor

    def __len__(self) -> int:
        return len(self.values)


@triton.jit(do_not_specialize=["group_stride"])
def _quantize_kernel(
    x, norm, static_scale, values, scales, width, in_stride, group_stride, eps,
    BLOCK: tl.constexpr, SCALED: tl.constexpr, HAS_NORM: tl.constexpr,
    IS_STATIC: tl.constexpr, MAXIMUM: tl.constexpr, TINY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, BLOCK // SCALED)
    columns = groups[:, None] * SCALED + tl.arange(0, SCALED)[None, :]
    mask = columns < width
    if HAS_NORM:
        factors = tl.load(norm + columns, mask, 0.0).to(tl.float32)
    wait_for_kernel(PDL)
    value = tl.load(x + row * in_stride + columns, mask, 0.0).to(tl.float32)
    factor = 1.0  # of the norm, for the token: scales are multiplied by it instead of each value
    if HAS_NORM:
        square = tl.sum(tl.sum(value * value, axis=1), axis=0)
        factor = tl.rsqrt(square / width + eps)
        value = value * factors
    if IS_STATIC:
        scale = tl.zeros([BLOCK // SCALED], tl.float32) + tl.load(static_scale)
        value = tl.minimum(tl.maximum(value * (factor / scale)[:, None], -MAXIMUM), MAXIMUM)
    else:  # no value exceeds MAXIMUM but by rounding, which the conversion takes away
        largest = tl.maximum(tl.max(tl.abs(value), axis=1) * factor, TINY)
        scale = largest / MAXIMUM
        value = value * (factor * MAXIMUM / largest)[:, None]
    if values.dtype.element_ty == tl.int8:
        value = (value + ROUNDER) - ROUNDER
    tl.store(values + row * width + columns, value.to(values.dtype.element_ty), mask)
    tl.store(scales + row + groups * group_stride, scale, groups * SCALED < width)


def quantize(
    x: torch.Tensor,
    format: InputFormat,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    pdl: bool = False,
) -> ScaledInputs:
    """Returns x quantized, or its RMSNorm; computed in float32.

    Args:
        x: [T, K], bf16, fp16 or fp32; rows may be strided.
        format: of the result.
        norm_weight: [K] of the RMSNorm, with `eps`; None for no norm.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).

    Raises:
        ValueError: there are more than `MAX_CHANNELS` channels, or strided columns.
    """
    rows, width = x.shape
    if x.stride(1) != 1 or width > MAX_CHANNELS:
        raise ValueError(
            f"x must be [T, K <= {MAX_CHANNELS}] with contiguous rows, not {tuple(x.shape)}"
        )
    inputs, stride = empty_inputs(rows, width, format, x.device)
    if rows:
        block = max(GROUP, triton.next_power_of_2(width))
        static = format.static_scale
        _quantize_kernel[(rows,)](
            x, x if norm_weight is None else norm_weight,
            inputs.scales if static is None else static, inputs.values, inputs.scales, width,
            x.stride(0), stride, eps,
            BLOCK=block, SCALED=GROUP if format.is_grouped else block,
            HAS_NORM=norm_weight is not None, IS_STATIC=static is not None,
            MAXIMUM=MAXIMA[format.dtype], TINY=SMALLEST, PDL=pdl,
            num_warps=num_warps(block, is_grouped=format.is_grouped), launch_pdl=pdl,
        )  # fmt: skip
    return inputs


def num_warps(block: int, *, is_grouped: bool) -> int:
    """Returns the warps of a program for so many channels, a power of two: fewer where they wait
    for one another to find the largest of a token."""
    return min(16, max(1, block // 512)) if is_grouped else max(4, block // 2048)


def empty_inputs(
    rows: int, width: int, format: InputFormat, device: torch.device
) -> tuple[ScaledInputs, int]:
    """Returns quantized activations [rows, width] to be written to, and the elements between the
    scales of two groups."""
    groups = -(-width // GROUP) if format.is_grouped else 1
    values = torch.empty((rows, width), dtype=format.dtype, device=device)
    stride = rows if groups == 1 else rows + -rows % SCALE_ROWS
    scales = torch.empty((groups, stride), dtype=torch.float32, device=device)
    return ScaledInputs(values, scales[:, :rows].t()), stride
