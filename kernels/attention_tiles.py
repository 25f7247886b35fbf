"""What attention kernels share: their arguments, in groups, and device functions: norm and RoPE of
a head, loading a tile of the paged cache, a step of the online softmax, sinks.

Used inside `decode_attention`, `prefill_attention` and `qk_norm_rope_cache`. Scores are in base 2
throughout: they are scaled by log2(e).
"""
# ruff: noqa: E741, N803  (compile-time constants are written in capitals; l is the softmax's sum)

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
FLOAT8_MAX = tl.constexpr(448.0)


class CacheArguments(NamedTuple):
    """The KV cache of a layer: see `qk_norm_rope_cache`. (Triton's tuples have `values` already.)

    Attributes:
        k, v: [num_blocks, block_size, Hkv, D], keys and values.
        k_strides, v_strides: of blocks, tokens and heads.
        scales: float32 [4, Hkv], or None.
        key_shifts: float32 [Hkv, D], or None.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    scales: torch.Tensor | None
    key_shifts: torch.Tensor | None

    @classmethod
    def of(
        cls,
        k: torch.Tensor,
        v: torch.Tensor,
        scales: torch.Tensor | None = None,
        key_shifts: torch.Tensor | None = None,
    ) -> CacheArguments:
        """Returns the arguments of a cache."""
        return cls(k, v, k.stride()[:3], v.stride()[:3], scales, key_shifts)


class ScoreArguments(NamedTuple):
    """What becomes of scores: see `paged_attention`.

    Attributes:
        scale: includes log2(e).
        soft_cap: or None.
        sinks, slopes: float32 [Hq], or None.
    """

    scale: float
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None


class RotationArguments(NamedTuple):
    """Norm and RoPE of queries and keys: see `Projection`.

    Attributes:
        cos_sin, stride: the table and the stride of its positions; None: no rotation.
        q_weight, k_weight, eps: of the norms; weights may be None.
        value_eps: of the norm of values; None: there is none.
    """

    cos_sin: torch.Tensor | None
    stride: int
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float
    value_eps: float | None = None


class RotationConfig(NamedTuple):
    """The compile-time part of `RotationArguments`.

    Attributes:
        size: the rotated channels of a head; 0 for none.
        sections: see `rotary.Sections`, or None.
        norm_last: whether the norms follow the rotation.
    """

    size: int
    sections: tuple[int, int, int, bool] | None
    norm_last: bool


def tile_channels(size: int) -> int:
    """Returns the channels of a tile with `size` of them: at least 16, for tensor cores."""
    return max(16, triton.next_power_of_2(size))


class HeadShape(NamedTuple):
    """The compile-time shape of heads and of their cache.

    Attributes:
        kv_heads, group: KV heads, and query heads of each.
        size: channels of a head.
        group_pad, pad: powers of two that hold the group, and the channels.
        block_size: tokens a KV block.
    """

    kv_heads: int
    group: int
    size: int
    group_pad: int
    pad: int
    block_size: int

    @classmethod
    def of(cls, num_q_heads: int, cache: torch.Tensor) -> HeadShape:
        """Returns the shape for a cache of keys [num_blocks, block_size, Hkv, D]."""
        return _shape_of(num_q_heads, cache.shape[1:])


@cache
def _shape_of(num_q_heads: int, block: torch.Size) -> HeadShape:
    """Returns the shape for KV blocks [block_size, Hkv, D]; once for each, since a launch needs it
    and Triton's powers of two take microseconds."""
    block_size, kv_heads, size = block
    group = num_q_heads // kv_heads
    pads = triton.next_power_of_2(group), triton.next_power_of_2(size)
    return HeadShape(kv_heads, group, size, *pads, block_size)


@triton.jit
def pairs(d, ROTARY: tl.constexpr):
    """Returns the channel with which RoPE pairs each channel, ROTARY / 2 further or back
    (GPT-NeoX's order); channels that are not rotated are paired with themselves."""
    half: tl.constexpr = ROTARY // 2
    return tl.where(d < half, d + half, tl.where(d < ROTARY, d - half, d))


@triton.jit
def load_angles(angles, d, ROTARY: tl.constexpr):
    """Returns the factors of each channel and of its pair; `angles` is a position's row of cos_sin
    for each channel: ROTARY / 2 cosines, then as many sines."""
    half: tl.constexpr = ROTARY // 2
    angle = tl.where(d < half, d, d - half)
    cos = tl.load(angles + angle, d < ROTARY, 1.0)
    sin = tl.load(angles + half + angle, d < ROTARY, 0.0)
    return cos, tl.where(d < half, -sin, sin)


@triton.jit
def rotary_angles(rotation, positions, axis_stride, token, place, d, ROTATION: tl.constexpr):
    """Returns the factors of each channel `d` and of its pair. Without `positions` RoPE's position
    is the token's `place` in its sequence; with sections a token has three, `axis_stride` apart."""
    position = place
    if positions is not None:
        if ROTATION.sections is not None:
            pair = d % (ROTATION.size // 2)
            height: tl.constexpr = ROTATION.sections[1]
            width: tl.constexpr = ROTATION.sections[2]
            if ROTATION.sections[3]:
                axis = tl.where(pair < 3 * tl.where(pair % 3 == 1, height, width), pair % 3, 0)
            else:
                first: tl.constexpr = ROTATION.sections[0]
                axis = (pair >= first).to(tl.int32) + (pair >= first + height).to(tl.int32)
            token = token + axis * axis_stride
        position = tl.load(positions + token)
    angles = rotation.cos_sin + position.to(tl.int64) * rotation.stride
    return load_angles(angles, d, ROTATION.size)


@triton.jit
def load_with_pairs(rows, d, pair, mask):
    """Returns rows as float32, and the same rows with each channel replaced by its pair."""
    return tl.load(rows + d, mask, 0.0).to(tl.float32), tl.load(rows + pair, mask, 0.0).to(
        tl.float32
    )


@triton.jit
def normed_values(value, eps, SHAPE: tl.constexpr):
    """Returns values [N, SHAPE.pad] after an RMSNorm of each without a weight; float32."""
    return value * tl.rsqrt(tl.sum(value * value, 1) / SHAPE.size + eps)[:, None]


@triton.jit
def rotated_heads(x, other, norm, angles, eps, SHAPE: tl.constexpr, ROTATION: tl.constexpr):
    """Returns heads of one token, float32 [N, pad], after their RMSNorm and RoPE.

    Args:
        x, other: the heads, and the heads with each channel replaced by its pair.
        norm: the weights of both, or None. eps: of the norm.
        angles: the factors of both, of `rotary_angles`; not read without rotation.
    """
    if norm is not None and not ROTATION.norm_last:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / SHAPE.size + eps)[:, None]
        x, other = x * scale * norm[0], other * scale * norm[1]
    if ROTATION.size > 0:
        x = x * angles[0] + other * angles[1]
    if norm is not None and ROTATION.norm_last:
        x = x * tl.rsqrt(tl.sum(x * x, axis=1) / SHAPE.size + eps)[:, None] * norm[0]
    return x


@triton.jit
def cached_head(block, offset, head, strides):
    """Returns the offset in a KV cache of a head of the token at `offset` within `block`; `strides`
    are the strides of blocks, tokens and heads."""
    return block * strides[0] + offset * strides[1] + head * strides[2]


@triton.jit
def to_cache_dtype(x, cache):
    """Returns float32 numbers rounded to the dtype of a KV cache. Numbers beyond the range of
    float8 become its largest number; NaN stays NaN."""
    if cache.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x, -FLOAT8_MAX, FLOAT8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(cache.dtype.element_ty)


@triton.jit
def load_tile(
    k_cache, v_cache, table, index, seq_len, head, k_strides, v_strides,
    HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Returns the keys [HEAD_PAD, TILE], values [TILE, HEAD_PAD] and positions [TILE] of KV tile
    `index` of a row.

    Positions past the row's end are loaded as zeros, whatever the cache contains there.
    """
    d = tl.arange(0, HEAD_PAD)
    position = index * TILE + tl.arange(0, TILE)
    in_row = position < seq_len
    if TILE <= BLOCK_SIZE:
        block = tl.load(table + index * TILE // BLOCK_SIZE).to(tl.int64)
        offset = index * TILE % BLOCK_SIZE + tl.arange(0, TILE)
    else:
        block = tl.load(table + position // BLOCK_SIZE, in_row, 0).to(tl.int64)
        offset = position % BLOCK_SIZE
    k_line = cached_head(block, offset, head, k_strides)
    v_line = cached_head(block, offset, head, v_strides)
    key = tl.load(
        k_cache + k_line[None, :] + d[:, None], in_row[None, :] & (d < HEAD_SIZE)[:, None], 0.0
    )
    value = tl.load(
        v_cache + v_line[:, None] + d[None, :], in_row[:, None] & (d < HEAD_SIZE)[None, :], 0.0
    )
    return key, value, position


@triton.jit
def capped_scores(s, soft_cap):
    """Returns soft_cap * tanh(s / soft_cap) for scores in base 2; tanh by way of exp."""
    return soft_cap * LOG2_E * (1.0 - 2.0 / (tl.exp2(s * (2.0 / soft_cap)) + 1.0))


@triton.jit
def softmax_weights(s, visible, distance, m, soft_cap, slopes):
    """Returns of the online softmax (Milakov and Gimelshein, 2018) the weights of scores, the new
    maxima, and the factor of the sums and outputs before.

    Args:
        s: [rows, TILE], scaled. visible: which of them count.
        distance: [rows or 1, TILE], of keys from their queries; read with `slopes` only.
        m: [rows], the maxima before.
        soft_cap: or None.
        slopes: [rows], what a score loses with a token's distance (ALiBi), or None.
    """
    if soft_cap is not None:
        s = capped_scores(s, soft_cap)
    if slopes is not None:
        s -= slopes[:, None] * distance
    s = tl.where(visible, s, float("-inf"))
    new_m = tl.maximum(m, tl.max(s, axis=1))
    # a window may hide a whole tile from a row
    safe_m = tl.where(new_m == float("-inf"), 0.0, new_m)
    return tl.exp2(s - safe_m[:, None]), new_m, tl.exp2(m - safe_m)


@triton.jit
def softmax_step(query, key, value, visible, distance, m, l, acc, scale, soft_cap, slopes):
    """One step of the online softmax: returns the new maxima, sums and outputs; arguments as in
    `softmax_weights`.

    The sums `l` are [rows], or [rows, TILE] and summed by the caller after the last step: where
    several warps work on one row, that saves a reduction through shared memory in each step.
    """
    s = tl.dot(query, key.to(query.dtype), input_precision="ieee") * scale
    p, m, old = softmax_weights(s, visible, distance, m, soft_cap, slopes)
    acc = tl.dot(
        p.to(query.dtype), value.to(query.dtype), acc * old[:, None], input_precision="ieee"
    )
    l = l * old[:, None] + p if len(l.shape) == 2 else l * old + tl.sum(p, axis=1)
    return m, l, acc


@triton.jit
def paired_channels(words, BY_ASSEMBLY: tl.constexpr):
    """Returns the even and the odd channels, in float16, of float8 numbers (e4m3) in words of 16
    bits, two channels a word.

    BY_ASSEMBLY: by instructions of NVIDIA's GPUs from Ada on, three for four numbers; the compiler
    makes three times as many of the other form, which the interpreter understands.
    """
    if BY_ASSEMBLY:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes;
            .reg .b16 evens, odds;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {evens, odds}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, evens;
            cvt.rn.f16x2.e4m3x2 $1, odds;
            }""",
            "=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        even = words.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = (words >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return even, odd


@triton.jit
def split_channels(x):
    """Returns the even and the odd channels of x [N, D], both [N, D / 2]."""
    return tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))


@triton.jit
def joined_channels(even, odd):
    """Returns [N, D] from its even and odd channels."""
    return tl.join(even, odd).reshape(even.shape[0], 2 * even.shape[1])


@triton.jit
def paired_softmax_step(
    q_even, q_odd, key, value, visible, distance, m, l, even, odd, scale, soft_cap, slopes,
    BY_ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """`softmax_step` over keys [D / 2, TILE] and values [TILE, D / 2], words of `paired_channels`,
    with the queries, in float16, and the outputs as their even and odd channels. Sums are [rows,
    TILE]."""
    k_even, k_odd = paired_channels(key, BY_ASSEMBLY)
    s = tl.dot(q_odd, k_odd, tl.dot(q_even, k_even)) * scale
    p, m, old = softmax_weights(s, visible, distance, m, soft_cap, slopes)
    v_even, v_odd = paired_channels(value, BY_ASSEMBLY)
    even = tl.dot(p.to(tl.float16), v_even, even * old[:, None])
    odd = tl.dot(p.to(tl.float16), v_odd, odd * old[:, None])
    return m, l * old[:, None] + p, even, odd


@triton.jit
def load_slopes(slopes, heads, mask):
    """Returns the slopes of query heads [rows] in base 2, like the scores."""
    return tl.load(slopes + heads, mask, 0.0) * LOG2_E


@triton.jit
def add_sinks(m, l, sinks, heads, mask):
    """Returns the sums of the online softmax, all keys seen, with the weights of sinks: learned
    logits, one a query head, that take part in the sum and have no value (gpt-oss, OpenAI 2025).

    Args:
        m, l: [rows], maxima and sums.
        sinks: float32, natural logits. heads: [rows], which of them. mask: [rows], or False for 0.
    """
    sink = tl.load(sinks + heads, mask, float("-inf")) * LOG2_E
    return l + tl.exp2(sink - tl.where(m == float("-inf"), 0.0, m))
