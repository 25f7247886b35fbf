"""The activation of a gated MLP, activation(gate) * up, computed on GPUs between its gate-and-up
projection and its down projection; and the gates of attention's outputs.

The merged gate-and-up weight has the rows of its two projections interleaved
(`gated_product.interleave`), and so are the columns of the product: `GATE_RUN` columns of the gate,
then the `GATE_RUN` columns of up that they are multiplied with. A run is 16 bytes of bf16, the
bytes that a thread reads at once.

Sources: Shazeer, "GLU Variants Improve Transformer", 2020; Hendrycks and Gimpel, "Gaussian Error
Linear Units", 2016, for GELU and its approximation by tanh.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from aioinfer.kernels.launch import wait_for_kernel

BLOCK = 1024
#: Neighbouring rows of one projection in the interleaved weight. The gate of output n is row
#: n + n // GATE_RUN * GATE_RUN.
GATE_RUN = 8
#: Activations of the gate, by the names that configurations have for them.
KINDS = ("silu", "gelu", "gelu_pytorch_tanh")


@triton.jit
def activated(x, KIND: tl.constexpr):
    """Returns activation(x), float32."""
    if KIND == "silu":
        result = x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))  # 1 / sqrt(2)
    else:
        # (1 + tanh z) / 2 is the sigmoid of 2 z, here for z = sqrt(2 / pi) (x + 0.044715 x^3)
        result = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return result


@triton.jit
def _gated_activation_kernel(
    gate_up, out, width, in_stride, out_stride,
    BLOCK: tl.constexpr, RUN: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    wait_for_kernel(PDL)
    place = gate_up + row * in_stride + columns + columns // RUN * RUN
    gate = tl.load(place, mask, 0.0).to(tl.float32)
    up = tl.load(place + RUN, mask, 0.0).to(tl.float32)
    tl.store(
        out + row * out_stride + columns,
        (activated(gate, KIND) * up).to(out.dtype.element_ty),
        mask,
    )


def gated_activation(
    gate_up: torch.Tensor,
    *,
    kind: str = "silu",
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Returns activation(gate) * up, computed in float32.

    Args:
        gate_up: [T, 2 * I], interleaved: eight columns of the gate, then the matching eight of up,
            and so on; I a multiple of 8; bf16, fp16 or fp32; rows may be strided.
        kind: of `KINDS`.
        out: [T, I] to write to; by default a new tensor.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).

    Raises:
        ValueError: for another kind or shape, or strided columns.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be in {KINDS}, not {kind!r}")
    rows, double = gate_up.shape
    if double % (2 * GATE_RUN) or gate_up.stride(1) != 1:
        raise ValueError(
            f"gate_up must be [T, 2 * I] with contiguous rows, I a multiple of "
            f"{GATE_RUN}, not {tuple(gate_up.shape)}"
        )
    width = double // 2
    out = (
        torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
        if out is None
        else out
    )
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        _gated_activation_kernel[grid](
            gate_up, out, width, gate_up.stride(0), out.stride(0),
            BLOCK=BLOCK, RUN=GATE_RUN, KIND=kind, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return out


@triton.jit
def _gate_kernel(
    x, gates, width, x_stride, gate_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    wait_for_kernel(PDL)
    gate = tl.load(gates + row * gate_stride + columns, mask, 0.0).to(tl.float32)
    place = x + row * x_stride + columns
    value = tl.load(place, mask, 0.0).to(tl.float32) * tl.sigmoid(gate)
    tl.store(place, value.to(x.dtype.element_ty), mask)


def gate_in_place(x: torch.Tensor, gates: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Multiplies x with the sigmoid of `gates`, in float32, and returns it.

    Args:
        x, gates: [T, N]; bf16, fp16 or fp32; rows may be strided.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).

    Raises:
        ValueError: shapes differ, or columns are strided.
    """
    if x.shape != gates.shape or x.stride(1) != 1 or gates.stride(1) != 1:
        raise ValueError(f"x is {tuple(x.shape)}, gates are {tuple(gates.shape)}, or strided")
    rows, width = x.shape
    if rows:
        _gate_kernel[(rows, triton.cdiv(width, BLOCK))](
            x, gates, width, x.stride(0), gates.stride(0), BLOCK=BLOCK, PDL=pdl, num_warps=4,
            launch_pdl=pdl,
        )  # fmt: skip
    return x
