"""Device functions of the attention kernels: loading heads, norm and RoPE of a head, loading a tile
of the paged cache, a step of the online softmax, sinks.

Used inside `decode_attention`, `prefill_attention` and `qk_norm_rope_cache`. Scores are in base 2
throughout: they are scaled by log2(e).
"""
# ruff: noqa: E741, N803  (compile-time constants are written in capitals; l is the softmax's sum)

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
FLOAT8_MAX = tl.constexpr(448.0)


@triton.jit
def pairs(d, ROTARY: tl.constexpr):
    """Returns the channel with which RoPE pairs each channel, ROTARY / 2 further or back
    (GPT-NeoX's order); channels that are not rotated are paired with themselves."""
    half: tl.constexpr = ROTARY // 2
    return tl.where(d < half, d + half, tl.where(d < ROTARY, d - half, d))


@triton.jit
def load_angles(angles, d, ROTARY: tl.constexpr):
    """Returns the factors of each channel and of its pair; `angles` is one position's row of
    cos_sin: ROTARY / 2 cosines, then as many sines."""
    half: tl.constexpr = ROTARY // 2
    angle = tl.where(d < half, d, d - half)
    cos = tl.load(angles + angle, d < ROTARY, 1.0)
    sin = tl.load(angles + half + angle, d < ROTARY, 0.0)
    return cos, tl.where(d < half, -sin, sin)


@triton.jit
def load_with_pairs(rows, d, pair, mask):
    """Returns rows as float32, and the same rows with each channel replaced by its pair."""
    return tl.load(rows + d, mask, 0.0).to(tl.float32), tl.load(rows + pair, mask, 0.0).to(
        tl.float32
    )


@triton.jit
def rotated_heads(
    x, other, weight, other_weight, cos, sin, eps, HEAD_SIZE: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Returns heads of one token, float32 [N, HEAD_PAD], after their RMSNorm (with HAS_NORM) and
    RoPE. `other` are the heads with each channel replaced by its pair."""
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_SIZE + eps)[:, None]
        x = x * scale * weight
        other = other * scale * other_weight
    return x * cos + other * sin


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
def softmax_step(query, key, value, visible, m, l, acc, scale, soft_cap, SOFT_CAP: tl.constexpr):
    """One step of the online softmax (Milakov and Gimelshein, 2018): returns the new maxima, sums
    and outputs.

    The sums `l` are [rows], or [rows, TILE] and summed by the caller after the last step: where
    several warps work on one row, that saves a reduction through shared memory in each step.
    """
    s = tl.dot(query, key.to(query.dtype), input_precision="ieee") * scale
    if SOFT_CAP:
        s = capped_scores(s, soft_cap)
    s = tl.where(visible, s, float("-inf"))
    new_m = tl.maximum(m, tl.max(s, axis=1))
    # a window may hide a whole tile from a row
    safe_m = tl.where(new_m == float("-inf"), 0.0, new_m)
    p = tl.exp2(s - safe_m[:, None])
    old = tl.exp2(m - safe_m)
    acc = tl.dot(
        p.to(query.dtype), value.to(query.dtype), acc * old[:, None], input_precision="ieee"
    )
    l = l * old[:, None] + p if len(l.shape) == 2 else l * old + tl.sum(p, axis=1)
    return new_m, l, acc


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
    q_even, q_odd, key, value, visible, m, l, even, odd, scale, soft_cap, SOFT_CAP: tl.constexpr,
    BY_ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """`softmax_step` over keys [D / 2, TILE] and values [TILE, D / 2], words of `paired_channels`,
    with the queries, in float16, and the outputs as their even and odd channels. Sums are [rows,
    TILE]."""
    k_even, k_odd = paired_channels(key, BY_ASSEMBLY)
    s = tl.dot(q_odd, k_odd, tl.dot(q_even, k_even)) * scale
    if SOFT_CAP:
        s = capped_scores(s, soft_cap)
    s = tl.where(visible, s, float("-inf"))
    new_m = tl.maximum(m, tl.max(s, axis=1))
    safe_m = tl.where(new_m == float("-inf"), 0.0, new_m)
    p = tl.exp2(s - safe_m[:, None])
    old = tl.exp2(m - safe_m)[:, None]
    v_even, v_odd = paired_channels(value, BY_ASSEMBLY)
    even = tl.dot(p.to(tl.float16), v_even, even * old)
    odd = tl.dot(p.to(tl.float16), v_odd, odd * old)
    return new_m, l * old + p, even, odd


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
