"""The operations between the fused qkv projection and attention in one kernel: norm of q and k,
RoPE, KV cache write.

Called once a layer on GPUs. Rotary embeddings: Su et al., "RoFormer", 2021, in the half-split order
of GPT-NeoX, which Llama and Qwen checkpoints use. The optional norm of q and k over a head is
Qwen3's.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from aioinfer.kernels.attention_tiles import FLOAT8_MAX as _FLOAT8_MAX
from aioinfer.kernels.attention_tiles import (
    load_angles,
    load_with_pairs,
    pairs,
    rotated_heads,
    to_cache_dtype,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FLOAT8_MAX = _FLOAT8_MAX.value
#: A program computes so many heads of a token, even where there are fewer KV heads: twice as many
#: programs take twice as long.
_HEADS = 8


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _qk_norm_rope_cache_kernel(
    qkv, positions, cos_sin, q_weight, k_weight, slot_mapping, q_out, k_cache, v_cache, eps,
    scales, key_shifts,
    qkv_stride, cos_sin_stride, q_stride, k_block_stride, k_token_stride, k_head_stride,
    v_block_stride, v_token_stride, v_head_stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_SHIFTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_groups: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    kv_groups: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    d = tl.arange(0, HEAD_PAD)
    heads = tl.arange(0, HEADS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slot_mapping + token)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    is_q = group < q_groups
    is_v = group >= q_groups + kv_groups
    if is_q:
        head = group * HEADS + heads
        mask = (head < Q_HEADS)[:, None] & (d < HEAD_SIZE)[None, :]
        source = head
    else:
        head = (group - q_groups) % kv_groups * HEADS + heads
        mask = (head < KV_HEADS)[:, None] & (d < HEAD_SIZE)[None, :]
        source = head + Q_HEADS
    if is_v:
        rows = qkv + token * qkv_stride + (source + KV_HEADS)[:, None] * HEAD_SIZE
        value = tl.load(rows + d[None, :], mask & (slot >= 0), 0.0).to(tl.float32)
        if HAS_SCALES:
            value *= tl.load(scales + 3 * KV_HEADS + head, head < KV_HEADS, 1.0)[:, None]
        place = (
            v_cache
            + block * v_block_stride
            + offset * v_token_stride
            + head[:, None] * v_head_stride
            + d[None, :]
        )
        tl.store(place, to_cache_dtype(value, v_cache), mask & (slot >= 0))
    else:
        rows = qkv + token * qkv_stride + source[:, None] * HEAD_SIZE
        channel, pair = d[None, :], pairs(d, ROTARY)[None, :]
        x, other = load_with_pairs(rows, channel, pair, mask)
        weight, other_weight = load_with_pairs(
            q_weight if is_q else k_weight, channel, pair, channel < HEAD_SIZE
        )
        cos, sin = load_angles(
            cos_sin + tl.load(positions + token).to(tl.int64) * cos_sin_stride, channel, ROTARY
        )
        x = rotated_heads(x, other, weight, other_weight, cos, sin, eps, HEAD_SIZE, HAS_NORM)
        if is_q:
            tl.store(
                q_out + token * q_stride + head[:, None] * HEAD_SIZE + d[None, :],
                x.to(q_out.dtype.element_ty),
                mask,
            )
        else:
            place = (
                k_cache
                + block * k_block_stride
                + offset * k_token_stride
                + head[:, None] * k_head_stride
                + d[None, :]
            )
            if HAS_SHIFTS:
                x -= tl.load(key_shifts + head[:, None] * HEAD_SIZE + d[None, :], mask, 0.0)
            if HAS_SCALES:
                x *= tl.load(scales + 2 * KV_HEADS + head, head < KV_HEADS, 1.0)[:, None]
            tl.store(place, to_cache_dtype(x, k_cache), mask & (slot >= 0))


def qk_norm_rope_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    num_q_heads: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    scales: torch.Tensor | None = None,
    key_shifts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Applies RMSNorm (if weights are given) and RoPE to q and k, writes k and v to the cache and
    returns q.

    Args:
        qkv: [T, (Hq + 2 * Hkv) * D], q's heads, then k's, then v's; bf16, fp16 or fp32; rows may be
            strided.
        positions: int32 or int64 [T].
        cos_sin: float32 [max_pos, R], R <= D the rotated part of a head: R / 2 cosines, then R / 2
            sines.
        slot_mapping: int64 or int32 [T], block * block_size + offset; -1 writes nothing (padding).
        k_cache, v_cache: [num_blocks, block_size, Hkv, D], the head contiguous; any floating dtype.
            Numbers beyond the range of float8 are written as its largest number.
        num_q_heads: Hq.
        q_weight, k_weight: [D] of the norms, both or neither.
        eps: of the norms.
        scales: float32 [4, Hkv], contiguous, of caches in float8: by KV head the factors of keys
            and of values, by which cached numbers are multiplied when they are read, and the
            reciprocals of both. None: 1.
        key_shifts: float32 [Hkv, D], contiguous, subtracted from keys before they are multiplied
            with the reciprocal of their scale; None: nothing.
        out: [T, Hq, D] to write to; by default a new tensor.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).

    Returns:
        q: [T, Hq, D] in qkv's dtype.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
    """
    tokens = qkv.shape[0]
    block_size, kv_heads, head_size = k_cache.shape[1:]
    rotary = cos_sin.shape[1]
    if qkv.shape[1] != (num_q_heads + 2 * kv_heads) * head_size or qkv.stride(1) != 1:
        raise ValueError(
            f"qkv must be [T, {(num_q_heads + 2 * kv_heads) * head_size}] with "
            f"contiguous rows, not {tuple(qkv.shape)}"
        )
    if cos_sin.dtype != torch.float32 or rotary % 2 or rotary > head_size or cos_sin.stride(1) != 1:
        raise ValueError(
            f"cos_sin must be float32 [max_pos, R <= {head_size}], not "
            f"{cos_sin.dtype} {tuple(cos_sin.shape)}"
        )
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1 or (q_weight is None) != (k_weight is None):
        raise ValueError(
            "heads of the caches must be contiguous, and the norms come both or not at all"
        )
    out = (
        torch.empty((tokens, num_q_heads, head_size), dtype=qkv.dtype, device=qkv.device)
        if out is None
        else out
    )
    if tokens == 0:
        return out
    heads = min(_HEADS, triton.next_power_of_2(num_q_heads))
    grid = (tokens, triton.cdiv(num_q_heads, heads) + 2 * triton.cdiv(kv_heads, heads))
    _qk_norm_rope_cache_kernel[grid](
        qkv, positions, cos_sin, q_weight if q_weight is not None else cos_sin,
        k_weight if k_weight is not None else cos_sin,
        slot_mapping, out, k_cache, v_cache, eps, cos_sin if scales is None else scales,
        cos_sin if key_shifts is None else key_shifts,
        qkv.stride(0), cos_sin.stride(0), out.stride(0), *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        Q_HEADS=num_q_heads, KV_HEADS=kv_heads, HEAD_SIZE=head_size,
        HEAD_PAD=triton.next_power_of_2(head_size), ROTARY=rotary,
        BLOCK_SIZE=block_size, HEADS=heads, HAS_NORM=q_weight is not None,
        HAS_SCALES=scales is not None, HAS_SHIFTS=key_shifts is not None,
        PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return out
