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
    CacheArguments,
    HeadShape,
    cached_head,
    load_with_pairs,
    normed_values,
    pairs,
    rotary_angles,
    rotated_heads,
    to_cache_dtype,
)
from aioinfer.kernels.projection import Projection
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FLOAT8_MAX = _FLOAT8_MAX.value
#: A program computes so many heads of a token, even where there are fewer KV heads: twice as many
#: programs take twice as long. Of wider heads than 256 channels it computes fewer.
_HEADS = 8
_MAX_CHANNELS = 2048


@triton.jit
def _rotated(
    rows, weight, positions, axis_stride, token, d, mask, rotation,
    SHAPE: tl.constexpr, ROTATION: tl.constexpr,
):  # fmt: skip
    """Returns the heads of a token at `rows` [N, 1] after norm and RoPE: float32 [N, SHAPE.pad]."""
    channel, pair = d[None, :], pairs(d, ROTATION.size)[None, :]
    x, other = load_with_pairs(rows, channel, pair, mask)
    norm = None
    if rotation.q_weight is not None:
        norm = load_with_pairs(weight, channel, pair, channel < SHAPE.size)
    angles = None
    if rotation.cos_sin is not None:
        angles = rotary_angles(rotation, positions, axis_stride, token, token, channel, ROTATION)
    return rotated_heads(x, other, norm, angles, rotation.eps, SHAPE, ROTATION)


@triton.jit
def _scaled(x, scales, INVERSE: tl.constexpr, head, SHAPE: tl.constexpr):
    """Returns heads x [N, SHAPE.pad] times their reciprocals, line INVERSE of the cache's `scales`,
    if there are any."""
    if scales is not None:
        inverse = scales + INVERSE * SHAPE.kv_heads + head
        x *= tl.load(inverse, head < SHAPE.kv_heads, 1.0)[:, None]
    return x


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _rotated_queries_kernel(
    q, q_out, q_stride, out_stride, positions, axis_stride, rotation, num_heads,
    SHAPE: tl.constexpr, ROTATION: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, SHAPE.pad)
    mask = (head < num_heads)[:, None] & (d < SHAPE.size)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = _rotated(
        q + token * q_stride + head[:, None] * SHAPE.size, rotation.q_weight, positions,
        axis_stride, token, d, mask, rotation, SHAPE, ROTATION,
    )  # fmt: skip
    place = q_out + token * out_stride + head[:, None] * SHAPE.size + d[None, :]
    tl.store(place, x.to(q_out.dtype.element_ty), mask)


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _qk_norm_rope_cache_kernel(
    qkv, q_out, qkv_stride, q_stride, positions, axis_stride, slot_mapping, cache, rotation,
    SHAPE: tl.constexpr, ROTATION: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    num_heads: tl.constexpr = SHAPE.kv_heads * SHAPE.group
    q_groups: tl.constexpr = (num_heads + HEADS - 1) // HEADS
    kv_groups: tl.constexpr = (SHAPE.kv_heads + HEADS - 1) // HEADS
    d = tl.arange(0, SHAPE.pad)
    heads = tl.arange(0, HEADS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slot_mapping + token)
    block, offset = slot // SHAPE.block_size, slot % SHAPE.block_size
    is_q = group < q_groups
    is_v = group >= q_groups + kv_groups
    if is_q:
        head = group * HEADS + heads
        mask = (head < num_heads)[:, None] & (d < SHAPE.size)[None, :]
        source = head
    else:
        head = (group - q_groups) % kv_groups * HEADS + heads
        mask = (head < SHAPE.kv_heads)[:, None] & (d < SHAPE.size)[None, :]
        source = head + num_heads
    if is_v:
        rows = qkv + token * qkv_stride + (source + SHAPE.kv_heads)[:, None] * SHAPE.size
        value = tl.load(rows + d[None, :], mask & (slot >= 0), 0.0).to(tl.float32)
        if rotation.value_eps is not None:
            value = normed_values(value, rotation.value_eps, SHAPE)
        value = _scaled(value, cache.scales, 3, head, SHAPE)
        place = cached_head(block, offset, head[:, None], cache.v_strides) + d[None, :]
        tl.store(cache.v + place, to_cache_dtype(value, cache.v), mask & (slot >= 0))
    else:
        rows = qkv + token * qkv_stride + source[:, None] * SHAPE.size
        weight = rotation.q_weight
        if rotation.k_weight is not None:
            weight = rotation.q_weight if is_q else rotation.k_weight
        x = _rotated(
            rows, weight, positions, axis_stride, token, d, mask, rotation, SHAPE, ROTATION
        )
        if is_q:
            tl.store(
                q_out + token * q_stride + head[:, None] * SHAPE.size + d[None, :],
                x.to(q_out.dtype.element_ty),
                mask,
            )
        else:
            if cache.key_shifts is not None:
                shifts = cache.key_shifts + head[:, None] * SHAPE.size + d[None, :]
                x -= tl.load(shifts, mask, 0.0)
            x = _scaled(x, cache.scales, 2, head, SHAPE)
            place = cached_head(block, offset, head[:, None], cache.k_strides) + d[None, :]
            tl.store(cache.k + place, to_cache_dtype(x, cache.k), mask & (slot >= 0))


def heads_of_program(num_heads: int, shape: HeadShape) -> int:
    """Returns how many heads of a token a program computes."""
    return min(_HEADS, triton.next_power_of_2(num_heads), max(1, _MAX_CHANNELS // shape.pad))


def qk_norm_rope_cache(
    projection: Projection,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    num_q_heads: int,
    scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Applies the norms (if there are any) and RoPE to q and k, writes k and v to the cache and
    returns q.

    Args:
        projection: of T tokens; bf16, fp16 or fp32; rows may be strided. With `positions`, where
            RoPE is applied.
        slot_mapping: int64 or int32 [T], block * block_size + offset; -1 writes nothing (padding).
        k_cache, v_cache: [num_blocks, block_size, Hkv, D], the head contiguous; any floating dtype.
            Numbers beyond the range of float8 are written as its largest number.
        num_q_heads: Hq.
        scales: float32 [4, Hkv], contiguous, of caches in float8: by KV head the factors of keys
            and of values, by which cached numbers are multiplied when they are read, and the
            reciprocals of both. None: 1.
        out: [T, Hq, D] to write to; by default a new tensor.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).

    Returns:
        q: [T, Hq, D] in qkv's dtype.

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    qkv, rotation = projection.qkv, projection.rotation
    shape = HeadShape.of(num_q_heads, k_cache)
    features = (num_q_heads + 2 * shape.kv_heads) * shape.size
    if qkv.shape[1] != features or qkv.stride(1) != 1:
        raise ValueError(
            f"qkv must be [T, {features}] with contiguous rows, not {tuple(qkv.shape)}"
        )
    if rotation.config.size > shape.size:
        raise ValueError(f"heads of {shape.size} channels have no {rotation.config.size} to rotate")
    if rotation.config.size and projection.positions is None:
        raise ValueError("RoPE needs positions")
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError("heads of the caches must be contiguous")
    tokens = len(qkv)
    if out is None:
        out = torch.empty((tokens, num_q_heads, shape.size), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return out
    heads = heads_of_program(num_q_heads, shape)
    grid = (tokens, triton.cdiv(num_q_heads, heads) + 2 * triton.cdiv(shape.kv_heads, heads))
    _qk_norm_rope_cache_kernel[grid](
        qkv, out, qkv.stride(0), out.stride(0), projection.positions, projection.axis_stride,
        slot_mapping, CacheArguments.of(k_cache, v_cache, scales, projection.key_shifts),
        rotation.arguments,
        SHAPE=shape, ROTATION=rotation.config, HEADS=heads, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return out


def rotated_queries(
    projection: Projection, k_cache: torch.Tensor, *, pdl: bool = False
) -> torch.Tensor:
    """Applies the norm (if there is one) and RoPE to queries, and returns them [T, Hq, D].

    Args:
        projection: of queries alone, [T, Hq * D] with contiguous rows; with `positions`, where RoPE
            is applied.
        k_cache: [num_blocks, block_size, Hkv, D], which the queries will be attended to.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    q, rotation, size = projection.qkv, projection.rotation, k_cache.shape[3]
    if q.shape[1] % size or q.stride(1) != 1:
        raise ValueError(f"q must be heads of {size} with contiguous rows, not {tuple(q.shape)}")
    if rotation.config.size and projection.positions is None:
        raise ValueError("RoPE needs positions")
    tokens, num_heads = len(q), q.shape[1] // size
    out = torch.empty((tokens, num_heads, size), dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    shape = HeadShape.of(num_heads, k_cache)
    heads = heads_of_program(num_heads, shape)
    _rotated_queries_kernel[(tokens, triton.cdiv(num_heads, heads))](
        q, out, q.stride(0), out.stride(0), projection.positions, projection.axis_stride,
        rotation.arguments, num_heads, SHAPE=shape, ROTATION=rotation.config,
         HEADS=heads, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return out
