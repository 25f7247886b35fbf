"""The gate of Mamba-2's outputs and their RMSNorm by group of heads, as one launch (Dao and Gu,
"Transformers are SSMs", 2024).

    gated_norm(x, gates, out, weight=..., groups=..., eps=..., gates_first=...)
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from aioinfer.kernels.delta_arguments import silu
from aioinfer.kernels.launch import wait_for_kernel

_BLOCK = 1024  # channels of a program, without a norm
MAX_GROUP = 16384  # channels of a group: one program keeps them in its registers


@triton.jit
def _gated_norm_kernel(
    x, gates, weight, out, size, channels, x_stride, gate_stride, out_stride, eps,
    BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, GATES_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    columns = tl.program_id(1) * size + place
    mask = (place < size) & (columns < channels)
    if HAS_NORM:
        w = tl.load(weight + columns, mask, 0.0).to(tl.float32)
    wait_for_kernel(PDL)
    value = tl.load(x + row * x_stride + columns, mask, 0.0).to(tl.float32)
    gate = silu(tl.load(gates + row * gate_stride + columns, mask, 0.0).to(tl.float32))
    if GATES_FIRST:
        value *= gate
    if HAS_NORM:
        value *= tl.rsqrt(tl.sum(value * value) / size + eps) * w
    if not GATES_FIRST:
        value *= gate
    tl.store(out + row * out_stride + columns, value.to(out.dtype.element_ty), mask)


def gated_norm(
    x: torch.Tensor,
    gates: torch.Tensor,
    out: torch.Tensor,
    *,
    weight: torch.Tensor | None,
    groups: int,
    eps: float,
    gates_first: bool,
    pdl: bool = False,
) -> torch.Tensor:
    """Computes norm(x silu(gates)), or norm(x) silu(gates), in float32, and returns `out`.

    Args:
        x, gates: [T, C], of any dtypes; rows may be strided.
        out: [T, C] to write to; may be x.
        weight: [C], of the norm; None for x silu(gates).
        groups: which the norm is over, each of C / groups channels, at most `MAX_GROUP`.
        eps: added to the mean square.
        gates_first: whether gates are multiplied before the norm.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).

    Raises:
        ValueError: shapes differ, columns are strided, or groups are too large or do not divide
            the channels.
    """
    rows, channels = x.shape
    size = min(_BLOCK, channels) if weight is None else channels // groups
    if not x.shape == gates.shape == out.shape or not 1 == x.stride(1) == gates.stride(1):
        raise ValueError(f"x is {tuple(x.shape)}, gates are {tuple(gates.shape)}, or strided")
    if weight is not None and (weight.shape != (channels,) or channels % groups):
        raise ValueError(f"a weight {tuple(weight.shape)} and {groups} groups of {channels}")
    if size > MAX_GROUP or out.stride(1) != 1:
        raise ValueError(f"groups of {size} channels, or out {tuple(out.shape)}, do not fit")
    if rows:
        block = max(16, triton.next_power_of_2(size))
        _gated_norm_kernel[(rows, triton.cdiv(channels, size))](
            x, gates, x if weight is None else weight, out, size, channels, x.stride(0),
            gates.stride(0), out.stride(0), eps, BLOCK=block, HAS_NORM=weight is not None,
            GATES_FIRST=gates_first, PDL=pdl, num_warps=4 if block <= 2048 else 8, launch_pdl=pdl,
        )  # fmt: skip
    return out
