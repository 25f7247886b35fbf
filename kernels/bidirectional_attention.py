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


@triton.jit(do_not_specialize=["num_texts"], do_not_specialize_on_alignment=["query_starts"])
def _attention_kernel(
    qkv, qkv_stride, out, query_starts, num_texts, scale, biases, bias_stride, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    index, head = tl.program_id(0), tl.program_id(1)
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
    keys = qkv + (HEADS + kv_head) * SIZE
    values = qkv + (HEADS + KV_HEADS + kv_head) * SIZE
    begin, end = 0, length
    if REACH > 0:
        begin = tl.maximum(first - REACH, 0) // TILE * TILE
        end = tl.minimum(length, first + ROWS + REACH)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PAD], tl.float32)
    for position in range(begin, end, TILE):
        column = position + tl.arange(0, TILE)
        there = (start + column).to(tl.int64) * qkv_stride
        is_own = column < length
        of_keys = keys + there[None, :] + d[:, None]
        key = tl.load(of_keys, is_own[None, :] & (d < SIZE)[:, None], 0.0)
        of_values = values + there[:, None] + d[None, :]
        value = tl.load(of_values, is_own[:, None] & (d < SIZE)[None, :], 0.0)
        visible = is_own[None, :]  # rows behind the text are not stored
        if REACH > 0:
            distance = row[:, None] - column[None, :]
            visible = visible & (distance <= REACH) & (distance >= -REACH)
        s = tl.dot(query, key, input_precision="ieee") * scale
        if biases is not None:
            distance = column[None, :] - row[:, None]
            of_head = biases + head * bias_stride + bias_stride // 2
            s += tl.load(of_head + distance, visible & (row < length)[:, None], 0.0)
        p, m, old = softmax_weights(s, visible, None, m, None, None)
        acc = tl.dot(p.to(query.dtype), value, acc * old[:, None], input_precision="ieee")
        l = l * old + tl.sum(p, axis=1)
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
    _attention_kernel[(tokens // rows + texts, num_heads)](
        qkv, qkv.stride(0), out, query_starts, texts, scale * LOG2_E, biases, bias_stride,
        HEADS=num_heads, KV_HEADS=num_kv_heads, SIZE=size, PAD=triton.next_power_of_2(size),
        ROWS=rows, TILE=tile, REACH=reach, num_warps=4 if is_wide or size <= 64 else 8,
        num_stages=num_stages,
    )  # fmt: skip
    return out
