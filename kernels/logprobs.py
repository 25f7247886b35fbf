"""Log-probabilities of the chosen tokens and of the likeliest ones, on the GPU, without a sort.

Called after `sampling` in steps with rows that ask for them, on the model's own logits (before
penalties). Where ranks share the vocabulary, each finds what
`aioinfer.worker.vocab_parallel.merge_logprobs` makes them of.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals; l is the softmax's sum)

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 4096
MAX_TOP = 20


@triton.jit(
    do_not_specialize=["first"], do_not_specialize_on_alignment=["wanted", "maxima", "sums"]
)
def _chunk_kernel(
    logits, wanted, values, tokens, maxima, sums, vocab, stride, first,
    TOP: tl.constexpr, TOP_PAD: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if tl.load(wanted + row) == 0:
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
    do_not_specialize_on_alignment=["chosen", "wanted", "maxima", "sums", "totals", "logprobs"],
)
def _merge_kernel(
    logits, chosen, wanted, values, tokens, maxima, sums, totals, logprobs, top_tokens,
    top_logprobs, vocab, stride, first,
    TOP: tl.constexpr, TOP_PAD: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    ranks = tl.arange(0, TOP_PAD)
    if tl.load(wanted + row) == 0:
        if SHARED:
            tl.store(totals + row, float("nan"))
        tl.store(logprobs + row, float("nan"))
        tl.store(top_tokens + row * TOP + ranks, -1, ranks < TOP)
        tl.store(top_logprobs + row * TOP + ranks, float("nan"), ranks < TOP)
        return
    c = tl.arange(0, CHUNKS_PAD)
    most = tl.load(maxima + row * CHUNKS + c, c < CHUNKS, float("-inf"))
    largest = tl.max(most)
    share = tl.where(most == float("-inf"), 0.0, tl.exp(most - largest))
    total = largest + tl.log(tl.sum(tl.load(sums + row * CHUNKS + c, c < CHUNKS, 0.0) * share))
    if SHARED:
        tl.store(totals + row, total)
        total = 0.0
    column = tl.maximum(tl.load(chosen + row), 0) - first
    here = (column >= 0) & (column < vocab)
    tl.store(
        logprobs + row,
        tl.load(logits + row.to(tl.int64) * stride + column, here, float("-inf")).to(tl.float32)
        - total,
    )
    index = tl.arange(0, CHUNKS_PAD * TOP_PAD)
    held = (index < CHUNKS * TOP_PAD) & (index % TOP_PAD < TOP)
    x = tl.load(values + row * CHUNKS * TOP_PAD + index, held, float("-inf"))
    ids = tl.load(tokens + row * CHUNKS * TOP_PAD + index, held, 0)
    for i in range(TOP):
        best, at = tl.max(x, axis=0, return_indices=True)
        tl.store(top_tokens + row * TOP + i, tl.sum(tl.where(index == at, ids, 0)))
        tl.store(top_logprobs + row * TOP + i, best - total)
        x = tl.where(index == at, float("-inf"), x)


def token_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, wanted: torch.Tensor, top: int = MAX_TOP
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the log-probability of each chosen token, and the likeliest tokens with theirs.

    Args:
        logits: [S, V], fp32, bf16 or fp16; rows may be strided.
        chosen: int32 [S]; -1 is read as token 0.
        wanted: int32 [S], 0 for rows that do not ask; they get NaN and -1.
        top: how many of the likeliest, up to 20 and to V.

    Returns:
        logprobs: float32 [S]. top_tokens: int32 [S, top], likeliest first, the lower id among
        equals. top_logprobs: float32 [S, top].
    """
    if not 0 < top <= min(MAX_TOP, logits.shape[1]):
        raise ValueError(f"top must be between 1 and {MAX_TOP}, not {top}")
    return _launch(logits, chosen, wanted, top, 0, None)


def shard_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, wanted: torch.Tensor, top: int, first: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns what a rank with the tokens from `first` on contributes: logits in place of
    log-probabilities.

    Args:
        logits: [S, V], fp32, bf16 or fp16; rows may be strided.
        chosen, wanted: as in `token_logprobs`.
        top: how many of the likeliest, up to 20; what exceeds V is minus infinity, with ids that
            mean nothing.

    Returns:
        totals: float32 [S], the logarithm of the sum of exp(logit). own: float32 [S], the chosen
        token's, minus infinity where it is another rank's. top_values: float32 [S, top] and
        top_tokens: int32 [S, top], likeliest first.
    """
    totals = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    own, top_tokens, top_values = _launch(logits, chosen, wanted, top, first, totals)
    return totals, own, top_values, top_tokens


def _launch(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    wanted: torch.Tensor,
    top: int,
    first: int,
    totals: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches the kernels; log-probabilities come without the softmax's sum, if its logarithm is
    to be written to `totals`."""
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
            logits, wanted, values, tokens, maxima, sums, vocab, logits.stride(0), first,
            TOP=top, TOP_PAD=top_pad, CHUNK=CHUNK, CHUNKS=count, num_warps=4,
        )  # fmt: skip
        _merge_kernel[(rows,)](
            logits, chosen, wanted, values, tokens, maxima, sums,
            logprobs if totals is None else totals, logprobs, top_tokens,
            top_logprobs, vocab, logits.stride(0), first, TOP=top, TOP_PAD=top_pad, CHUNKS=count,
            CHUNKS_PAD=triton.next_power_of_2(count), SHARED=totals is not None, num_warps=4,
        )  # fmt: skip
    return logprobs, top_tokens, top_logprobs


def token_logprobs_reference(
    logits: torch.Tensor, chosen: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`token_logprobs` in plain torch, for rows that all ask."""
    logprobs = logits.log_softmax(-1)
    best = logprobs.sort(dim=-1, descending=True, stable=True)
    return (
        logprobs.gather(1, chosen.long()[:, None])[:, 0],
        best.indices[:, :top].int(),
        best.values[:, :top],
    )
