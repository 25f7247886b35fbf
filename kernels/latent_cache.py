"""The operations between the first projections and latent attention in one kernel: norm of the
latent vector, RoPE of the shared key and of the queries, cache write.

Called once a layer on GPUs. The latent vector is DeepSeek-V2's (DeepSeek-AI 2024), the rotation
RoPE's (Su et al. 2021) in the half-split order of GPT-NeoX.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from aioinfer.kernels.attention_tiles import load_angles, load_with_pairs, pairs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: Heads of one token that a program rotates.
_HEADS = 16


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _latent_cache_kernel(
    latents, queries, positions, cos_sin, weight, slot_mapping, cache, eps,
    latent_stride, query_stride, query_head_stride, cos_sin_stride, block_stride, token_stride,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr,
    ROTARY: tl.constexpr, ROTARY_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    d, r = tl.arange(0, LATENT_PAD), tl.arange(0, ROTARY_PAD)
    pair = pairs(r, ROTARY)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * cos_sin_stride
    cos, sin = load_angles(angles, r, ROTARY)
    if part == 0:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        source = latents + token * latent_stride
        latent = tl.load(source + d, d < LATENT, 0.0).to(tl.float32)
        w = tl.load(weight + d, d < LATENT, 0.0).to(tl.float32)
        normed = latent * tl.rsqrt(tl.sum(latent * latent) / LATENT + eps) * w
        key, key_pair = load_with_pairs(source + LATENT, r, pair, r < ROTARY)
        line = cache + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
        stored: tl.constexpr = cache.dtype.element_ty
        tl.store(line + d, normed.to(stored), (d < LATENT) & (slot >= 0))
        turned_key = (key * cos + key_pair * sin).to(stored)
        tl.store(line + LATENT + r, turned_key, (r < ROTARY) & (slot >= 0))
    else:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)
        place = queries + token * query_stride + head[:, None] * query_head_stride
        mask = (head < NUM_HEADS)[:, None] & (r < ROTARY)[None, :]
        query, query_pair = load_with_pairs(place, r[None, :], pair[None, :], mask)
        # a channel is written in place when every thread has read its pair
        tl.debug_barrier()
        turned = query * cos[None, :] + query_pair * sin[None, :]
        tl.store(place + r[None, :], turned.to(queries.dtype.element_ty), mask)


def latent_cache(
    latents: torch.Tensor,
    queries: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    pdl: bool = False,
) -> None:
    """Writes the normed latent vector and the rotated key of each token to the cache, and rotates
    the queries in place.

    Args:
        latents: [T, L + P], as projected; bf16, fp16 or fp32; rows may be strided.
        queries: [T, H, P], the part of the queries that is rotated; channels contiguous.
        positions: int32 or int64 [T].
        cos_sin: float32 [max_pos, P]: P / 2 cosines, then P / 2 sines.
        slot_mapping: int64 or int32 [T], block * block_size + offset; -1 writes nothing (padding).
        cache: [num_blocks, block_size, L + P], channels contiguous.
        weight: [L] of the norm. eps: of the norm.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    tokens, num_heads, rotary = queries.shape
    latent = len(weight)
    if latents.shape != (tokens, latent + rotary) or cos_sin.shape[1] != rotary:
        raise ValueError(
            f"latents must be [{tokens}, {latent + rotary}] and angles of {rotary} channels, not "
            f"{tuple(latents.shape)} and {cos_sin.shape[1]}"
        )
    if cache.shape[2] != latent + rotary:
        raise ValueError(f"the cache must have {latent + rotary} channels, not {cache.shape[2]}")
    if not 1 == latents.stride(1) == queries.stride(2) == cache.stride(2):
        raise ValueError("channels must be contiguous")
    if tokens == 0:
        return
    heads = min(_HEADS, triton.next_power_of_2(num_heads))
    _latent_cache_kernel[(tokens, 1 + triton.cdiv(num_heads, heads))](
        latents, queries, positions, cos_sin, weight, slot_mapping, cache, eps,
        latents.stride(0), *queries.stride()[:2], cos_sin.stride(0), *cache.stride()[:2],
        NUM_HEADS=num_heads, HEADS=heads, LATENT=latent, LATENT_PAD=triton.next_power_of_2(latent),
        ROTARY=rotary, ROTARY_PAD=triton.next_power_of_2(rotary), BLOCK_SIZE=cache.shape[1],
        PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
