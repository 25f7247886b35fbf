"""Log-probabilities of the sampled tokens and of the most likely ones, on the GPU, without a sort.

Called after `sampling` in steps with rows that request them, on the model's own logits (before
penalties). With a vocabulary-parallel head each rank computes `shard_logprobs`, which
`aioinfer.worker.logprobs.merge_logprobs` merges.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals; l is the softmax's sum)

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 4096
MAX_TOP = 20


@triton.jit(
    do_not_specialize=["first"], do_not_specialize_on_alignment=["requested", "maxima", "sums"]
)
def _chunk_kernel(
    logits, requested, values, tokens, maxima, sums, vocab, stride, first,
    TOP: tl.constexpr, TOP_PAD: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if tl.load(requested + row) == 0:
        return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + ids, ids < vocab, float("-inf")).to(tl.float32)
    largest = tl.max(x)
    tl.store(maxima + row * CHUNKS + chunk, largest)
    tl.store(
        sums + row * CHUNKS + chunk,
        tl.sum(tl.exp(x - tl.where(largest == float("-inf"), 0.0, largest))),
    )
    for i in range(TOP):
        best, at = tl.max(x, axis=0, return_indices=True)
        place = (row * CHUNKS + chunk) * TOP_PAD + i
        tl.store(values + place, best)
        tl.store(tokens + place, first + chunk * CHUNK + at)
        x = tl.where(ids == chunk * CHUNK + at, float("-inf"), x)


@triton.jit(
    do_not_specialize=["first"],
    do_not_specialize_on_alignment=["sampled", "requested", "maxima", "sums", "totals", "logprobs"],
)
def _merge_kernel(
    logits, sampled, requested, values, tokens, maxima, sums, totals, logprobs, top_tokens,
    top_logprobs, vocab, stride, first,
    TOP: tl.constexpr, TOP_PAD: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    ranks = tl.arange(0, TOP_PAD)
    if tl.load(requested + row) == 0:
        if SHARED:
            tl.store(totals + row, float("nan"))
        tl.store(logprobs + row, float("nan"))
        tl.store(top_tokens + row * TOP + ranks, -1, ranks < TOP)
        tl.store(top_logprobs + row * TOP + ranks, float("nan"), ranks < TOP)
        return
    c = tl.arange(0, CHUNKS_PAD)
    chunk_maxima = tl.load(maxima + row * CHUNKS + c, c < CHUNKS, float("-inf"))
    largest = tl.max(chunk_maxima)
    scale = tl.where(chunk_maxima == float("-inf"), 0.0, tl.exp(chunk_maxima - largest))
    total = largest + tl.log(tl.sum(tl.load(sums + row * CHUNKS + c, c < CHUNKS, 0.0) * scale))
    if SHARED:
        tl.store(totals + row, total)
        total = 0.0
    column = tl.maximum(tl.load(sampled + row), 0) - first
    here = (column >= 0) & (column < vocab)
    tl.store(
        logprobs + row,
        tl.load(logits + row.to(tl.int64) * stride + column, here, float("-inf")).to(tl.float32)
        - total,
    )
    index = tl.arange(0, CHUNKS_PAD * TOP_PAD)
    valid = (index < CHUNKS * TOP_PAD) & (index % TOP_PAD < TOP)
    x = tl.load(values + row * CHUNKS * TOP_PAD + index, valid, float("-inf"))
    ids = tl.load(tokens + row * CHUNKS * TOP_PAD + index, valid, 0)
    for i in range(TOP):
        best, at = tl.max(x, axis=0, return_indices=True)
        tl.store(top_tokens + row * TOP + i, tl.sum(tl.where(index == at, ids, 0)))
        tl.store(top_logprobs + row * TOP + i, best - total)
        x = tl.where(index == at, float("-inf"), x)


def token_logprobs(
    logits: torch.Tensor, sampled: torch.Tensor, requested: torch.Tensor, top: int = MAX_TOP
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the log-probability of each sampled token, and the most likely tokens with their
    log-probabilities.

    Args:
        logits: [S, V], fp32, bf16 or fp16; rows may be strided.
        sampled: int32 [S]; -1 (no token) is read as token 0.
        requested: int32 [S], 0 for rows without log-probabilities; they get NaN and -1.
        top: how many of the most likely tokens, at most 20 and at most V.

    Returns:
        logprobs: float32 [S]. top_tokens: int32 [S, top], most likely first, the lower id among
        equals. top_logprobs: float32 [S, top].

    Raises:
        ValueError: `top` is out of range.
    """
    if not 0 < top <= min(MAX_TOP, logits.shape[1]):
        raise ValueError(f"top must be between 1 and {MAX_TOP}, not {top}")
    return _launch(logits, sampled, requested, top, 0, None)


def shard_logprobs(
    logits: torch.Tensor, sampled: torch.Tensor, requested: torch.Tensor, top: int, first: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns this rank's part of `token_logprobs` for a shard of the vocabulary: logits instead of
    log-probabilities.

    Args:
        logits: [S, V], fp32, bf16 or fp16, the columns of the shard; rows may be strided.
        sampled, requested: as in `token_logprobs`; `sampled` are ids of the whole vocabulary.
        top: how many of the most likely tokens, at most 20; beyond V the values are minus infinity
            and the ids undefined.
        first: the first token id of the shard.

    Returns:
        totals: float32 [S], the logarithm of the sum of exp(logit). own: float32 [S], the logit of
        the sampled token, minus infinity where it is out of shard. top_values: float32 [S, top] and
        top_tokens: int32 [S, top], most likely first.
    """
    totals = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    own, top_tokens, top_values = _launch(logits, sampled, requested, top, first, totals)
    return totals, own, top_values, top_tokens


def _launch(
    logits: torch.Tensor,
    sampled: torch.Tensor,
    requested: torch.Tensor,
    top: int,
    first: int,
    totals: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches the kernels. With `totals` they write the logarithm of the softmax's sum there, and
    return logits instead of log-probabilities."""
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("rows of logits must be contiguous")
    device, count, top_pad = (
        logits.device,
        max(1, triton.cdiv(vocab, CHUNK)),
        triton.next_power_of_2(top),
    )
    values, tokens = (
        torch.empty(rows, count, top_pad, dtype=t, device=device)
        for t in (torch.float32, torch.int32)
    )
    maxima, sums = torch.empty(2, rows, count, dtype=torch.float32, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    top_tokens = torch.empty(rows, top, dtype=torch.int32, device=device)
    top_logprobs = torch.empty(rows, top, dtype=torch.float32, device=device)
    if rows:
        _chunk_kernel[(rows, count)](
            logits, requested, values, tokens, maxima, sums, vocab, logits.stride(0), first,
            TOP=top, TOP_PAD=top_pad, CHUNK=CHUNK, CHUNKS=count, num_warps=4,
        )  # fmt: skip
        _merge_kernel[(rows,)](
            logits, sampled, requested, values, tokens, maxima, sums,
            logprobs if totals is None else totals, logprobs, top_tokens,
            top_logprobs, vocab, logits.stride(0), first, TOP=top, TOP_PAD=top_pad, CHUNKS=count,
            CHUNKS_PAD=triton.next_power_of_2(count), SHARED=totals is not None, num_warps=4,
        )  # fmt: skip
    return logprobs, top_tokens, top_logprobs
