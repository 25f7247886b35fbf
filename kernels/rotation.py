"""Rotation of queries and keys in place, behind the merged projection of a tower.

Source of the operation: Su et al., "RoFormer", 2021; channels i and i + size / 2 are a pair. What
goes into a KV cache is rotated by `qk_norm_rope_cache`.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rotate_kernel(
    x, stride, cos, sin, heads, HEADS_PAD: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, HEADS_PAD), tl.arange(0, PAD)
    mask = (head < heads)[:, None] & (d < HALF)[None, :]
    factors = token * (2 * HALF) + HALF + d  # of the second half, whose sines have no sign
    c, s = tl.load(cos + factors, d < HALF, 0.0)[None, :], tl.load(sin + factors, d < HALF, 0.0)
    at = x + token * stride + head[:, None] * (2 * HALF) + d[None, :]
    first = tl.load(at, mask, 0.0).to(tl.float32)
    second = tl.load(at + HALF, mask, 0.0).to(tl.float32)
    tl.store(at, (first * c - second * s[None, :]).to(x.dtype.element_ty), mask)
    tl.store(at + HALF, (second * c + first * s[None, :]).to(x.dtype.element_ty), mask)


def rotate_heads(x: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates the first heads of tokens in place, computed in float32.

    Args:
        x: [T, H, size], contiguous in a token.
        heads: how many are rotated, at most H.
        cos, sin: float32 [T, 1, size], contiguous: the factors of `vision.tower.rotation`.

    Raises:
        ValueError: the shapes do not go together.
    """
    tokens, max_heads, size = x.shape
    if heads > max_heads or size % 2 or cos.shape != (tokens, 1, size) or sin.shape != cos.shape:
        raise ValueError(f"x is {tuple(x.shape)}, with {heads} heads, and cos {tuple(cos.shape)}")
    if tokens:
        _rotate_kernel[(tokens,)](
            x, x.stride(0), cos, sin, heads, HEADS_PAD=triton.next_power_of_2(heads),
            HALF=size // 2, PAD=triton.next_power_of_2(size // 2), num_warps=4,
        )  # fmt: skip
