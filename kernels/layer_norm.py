"""LayerNorm of a sum, of the residual stream and what a part of a layer adds to it. Called on GPUs
by encoders, whose layers are normed behind their parts, and by towers, which are normed before
them.

Source of the operation: Ba et al., "Layer Normalization", 2016.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_HIDDEN = 16384  # one program keeps a whole row in its registers


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
    `out` the sum, and the norm of the rounded sum in `out`.

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
