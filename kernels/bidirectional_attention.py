"""Attention of whole texts, each token to all tokens of its text, without a KV cache: the texts of
a step stand one behind the other, without padding.

FlashAttention-2 (Dao, 2023). A program computes one head of one tile of queries. Which tile that is
it finds by itself, as vLLM's unified attention does: if every text has one tile more than it fills,
the first tile of text r is `query_starts[r] // ROWS + r`, and the last text whose first tile is not
behind the program's number is its text. So the grid depends on the numbers of tokens and texts
alone, and nothing of a step has to be known on the host.
"""
# ruff: noqa: E741, N803  (compile-time constants are written in capitals; l is the softmax's sum)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from aioinfer.kernels.attention_tiles import softmax_weights

LOG2_E = 1.4426950408889634


@triton.jit
def _find_text(query_starts, num_texts, index, ROWS: tl.constexpr):
    """Returns the last text whose first tile is not behind tile `index`."""
    low, high = 0, num_texts
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(query_starts + middle) // ROWS + middle
        low = tl.where(first <= index, middle, low)
        high = tl.where(first <= index, high, middle)
    return low


@triton.jit
def _load_tile(at, own, d, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Returns keys or values [TILE, PAD] at their addresses, zeros where a token is not `own`."""
    if MASKED:
        return tl.load(at, own[:, None] & (d < SIZE)[None, :], 0.0)
    if d.shape[0] > SIZE:
        return tl.load(at, (d < SIZE)[None, :], 0.0)
    return tl.load(at)


@triton.jit
def _attend(
    query, keys, stride, row, length, begin, end, m, l, acc, scale, biases, BEHIND: tl.constexpr,
    SIZE: tl.constexpr, TILE: tl.constexpr, REACH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Returns the maxima, sums and outputs with the keys from `begin` to `end`, in tiles.

    Args:
        keys: of the text's first token; its values are BEHIND channels behind.
        m, l, acc: maxima, sums and outputs before.
        biases: of the head, at distance 0, or None.
        MASKED: whether there are keys that are not attended to, or biases.
    """
    d, offsets = tl.arange(0, query.shape[1]), tl.arange(0, TILE)
    at = keys + (begin + offsets).to(tl.int64)[:, None] * stride + d[None, :]
    for position in range(begin, end, TILE):
        column = position + offsets
        is_own = column < length
        key = _load_tile(at, is_own, d, SIZE, MASKED)
        value = _load_tile(at + BEHIND, is_own, d, SIZE, MASKED)
        at += TILE * stride
        s = tl.dot(query, tl.trans(key), input_precision="ieee")
        if MASKED:
            visible = is_own[None, :]  # rows behind the text are not stored
            distance = column[None, :] - row[:, None]
            if REACH > 0:
                visible = visible & (distance <= REACH) & (distance >= -REACH)
            s *= scale
            if biases is not None:
                s += tl.load(biases + distance, visible & (row < length)[:, None], 0.0)
            p, m, old = softmax_weights(s, visible, None, m, None, None)
        else:
            new_m = tl.maximum(m, tl.max(s, axis=1) * scale)
            p, old = tl.exp2(s * scale - new_m[:, None]), tl.exp2(m - new_m)
            m = new_m
        acc = tl.dot(p.to(query.dtype), value, acc * old[:, None], input_precision="ieee")
        l = l * old + tl.sum(p, axis=1)
    return m, l, acc


@triton.jit(do_not_specialize=["num_texts"], do_not_specialize_on_alignment=["query_starts"])
def _attention_kernel(
    qkv, qkv_stride, out, query_starts, num_texts, scale, biases, bias_stride, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    head, index = tl.program_id(0), tl.program_id(1)
    text = _find_text(query_starts, num_texts, index, ROWS)
    start = tl.load(query_starts + text)
    length = tl.load(query_starts + text + 1) - start
    first = (index - start // ROWS - text) * ROWS
    if first >= length:
        return
    d = tl.arange(0, PAD)
    row = first + tl.arange(0, ROWS)
    own = (row < length)[:, None] & (d < SIZE)[None, :]
    line = (start + row).to(tl.int64)
    query = tl.load(qkv + line[:, None] * qkv_stride + head * SIZE + d[None, :], own, 0.0)
    kv_head = head // (HEADS // KV_HEADS)
    keys = qkv + start.to(tl.int64) * qkv_stride + (HEADS + kv_head) * SIZE
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PAD], tl.float32)
    begin, whole, end = 0, 0, length
    if REACH > 0:
        begin = tl.maximum(first - REACH, 0) // TILE * TILE
        whole, end = begin, tl.minimum(length, first + ROWS + REACH)
    of_head = biases
    if biases is not None:
        of_head = biases + head * bias_stride + bias_stride // 2
    elif REACH == 0:  # all but the last tile are of keys of the text alone
        whole = length // TILE * TILE
        m, l, acc = _attend(
            query, keys, qkv_stride, row, length, begin, whole, m, l, acc, scale, None,
            KV_HEADS * SIZE, SIZE, TILE, REACH, False,
        )  # fmt: skip
    m, l, acc = _attend(
        query, keys, qkv_stride, row, length, whole, end, m, l, acc, scale, of_head,
        KV_HEADS * SIZE, SIZE, TILE, REACH, True,
    )  # fmt: skip
    attended = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    place = out + line[:, None] * (HEADS * SIZE) + head * SIZE + d[None, :]
    tl.store(place, attended.to(out.dtype.element_ty), own)


def bidirectional_attention(
    qkv: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    scale: float,
    reach: int = 0,
    biases: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns attention [T, num_heads * head_size] within each of R texts.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * head_size], the heads of queries, keys and values,
            contiguous in a token.
        query_starts: int32 [R + 1], the first token of each text, and T.
        scale: of the scores.
        reach: how far behind or before a token the tokens are that it attends to; 0: any distance.
        biases: float32 [num_heads, 2 * N - 1], contiguous, added to scaled scores in base 2 (which
            are multiplied by log2(e)): entry N - 1 + d of a head where the key is d tokens behind
            the query, for texts of up to N tokens; or none.
    """
    tokens, texts, size = len(qkv), len(query_starts) - 1, head_size
    out = torch.empty(tokens, num_heads * size, dtype=qkv.dtype, device=qkv.device)
    is_wide = qkv.element_size() == 4 or size > 128
    rows, tile = (32, 32) if is_wide else (128, 64)
    bias_stride = 0 if biases is None else biases.stride(0)
    # three stages of more than this do not fit the shared memory of all cards
    num_stages = 2 if is_wide or size > 64 or biases is not None else 3
    # heads of a tile at the same time: their channels are lines of memory that follow one another
    _attention_kernel[(num_heads, tokens // rows + texts)](
        qkv, qkv.stride(0), out, query_starts, texts, scale * LOG2_E, biases, bias_stride,
        HEADS=num_heads, KV_HEADS=num_kv_heads, SIZE=size, PAD=triton.next_power_of_2(size),
        ROWS=rows, TILE=tile, REACH=reach, num_warps=4 if is_wide else 8,
        num_stages=num_stages,
    )  # fmt: skip
    return out
