"""Logits under masks on the GPU: the rows of a step that may sample only some tokens, gathered.

The sampler calls `gather_masked` for the constrained rows of a step alone, and samples from the
result; the other rows have been sampled by then. A mask is packed, a bit for each token id (see
`aioinfer.ipc.masks`). Of several ranks each has all words of a mask and the logits of its shard.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 2048


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["rows", "masks"])
def _gather_kernel(
    logits, rows, masks, out, vocab, stride, out_stride, words, first, CHUNK: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    here = columns < vocab
    row = tl.load(rows + place).to(tl.int64)
    x = tl.load(logits + row * stride + columns, here, 0.0).to(tl.float32)
    token = first + columns
    word = tl.load(masks + place * words + token // 32, here, 0)
    allowed = ((word >> (token % 32)) & 1) != 0
    # broken logits stay, so that their row gives no token
    broken = (x != x) | (x == float("inf"))
    tl.store(out + place * out_stride + columns, tl.where(allowed | broken, x, float("-inf")), here)


def gather_masked(
    logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor, *, first: int = 0
) -> torch.Tensor:
    """Returns the logits of some rows as float32 [M, V], minus infinity for the tokens that their
    masks do not allow. NaN and infinity stay.

    Args:
        logits: [S, V], fp32, bf16 or fp16, of the token ids from `first` on; rows may be strided.
            Not changed.
        rows: int32 [M], which rows; `rows[i]` has `masks[i]`.
        masks: int32 [M, words], of the whole vocabulary.
        first: the token id of the first column.
    """
    count, vocab = len(rows), logits.shape[1]
    out = torch.empty(count, vocab, dtype=torch.float32, device=logits.device)
    if count and vocab:
        _gather_kernel[(count, triton.cdiv(vocab, CHUNK))](
            logits, rows, masks, out, vocab, logits.stride(0), vocab, masks.stride(0), first,
            CHUNK=CHUNK, num_warps=4,
        )  # fmt: skip
    return out
