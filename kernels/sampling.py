"""Sampling of tokens on the GPU: greedy or Gumbel-max, with min-p, top-k and top-p computed by
search instead of a sort.

Called at the end of a step, for its sampled rows; captured in the step's CUDA graph. The rules are
the same as in `aioinfer.worker.host_sampling`, which documents them: the noise is a pure function
of seed, position and token id (the uniforms are equal to the CPU's bit for bit), each filter keeps
the tokens above some logit, and a row whose logits contain NaN or infinity gets -1.
Penalties and biases have been applied by `penalties`; log-probabilities are computed by
`logprobs`.

Two launches: all chunks of all rows at once (`_chunk_kernel`), then one program a row
(`_sample_kernel`). For a row without filters it only merges the chunks. Otherwise the k-th largest
logit is found by bisection over those chunks whose maximum is large enough to contribute. min-p and
top-p need no search. The token of the best score (logit plus noise), if the filters keep it, is the
result. If it is not in the nucleus of top-p, the nucleus consists of larger logits, and the best
score among these is tried next (rejection by pivots is FlashInfer's idea, Ye et al. 2025; with
fixed noise it gives exactly the best token of the nucleus).

With a vocabulary-parallel head each rank has the logits of its shard only. The programs of a row
all-gather every maximum, count, sum and best token over an LL buffer and continue with the result
for the whole vocabulary: so they take the same branches and sample the same token. Every condition
and loop bound has to depend on such a value only.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals; l is the softmax's sum)

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from aioinfer.kernels.launch import wait_for_kernel
from aioinfer.kernels.symmetric_memory import (
    LLBuffers,
    all_gather,
    as_bits,
    as_floats,
    is_rank,
    max_of_ranks,
    open_ll_buffer,
    sum_of_ranks,
)

CHUNK = 2048
GATHERED = 4  # chunks that the program of a row loads at a time
GREEDY_TEMPERATURE = tl.constexpr(1e-5)  # as in aioinfer.sampling_params


@dataclass(frozen=True, slots=True)
class SamplingState:
    """The sampling parameters of each slot's request; tensors [num_slots] on the GPU.

    Attributes:
        seeds: int64, the 64 bits that key the noise.
        temperature: float32; under 1e-5 is greedy, and the filters are ignored.
        top_k: int32, 0 keeps all. top_p: float32, 1 keeps all. min_p: float32, 0 keeps all.
    """

    seeds: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


@dataclass(frozen=True, slots=True)
class VocabShard:
    """A rank's shard of the vocabulary.

    Attributes:
        first: the token id of the first column of logits.
        vocab_size: tokens of all shards together.
        ll_buffers: for at least as many rows as the logits have.
    """

    first: int
    vocab_size: int
    ll_buffers: LLBuffers


@triton.jit
def _mix(h):
    h = h ^ (h >> 16)
    h = h * 0x7FEB352D
    h = h ^ (h >> 15)
    h = h * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def uniform_noise(seed, position, tokens):
    """Returns uniform random numbers (float32, between 0 and 1) for token ids, a seed (int64
    scalar) and a position (int32 scalar)."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    at = position.to(tl.uint32)
    key0 = _mix(high ^ _mix(low ^ _mix(at + 0x9E3779B9)))
    key1 = _mix(high ^ _mix(low ^ _mix(at + 0x7F4A7C15)))
    h = tokens.to(tl.uint32) ^ key0
    h = h ^ (h >> 16)
    h = h * 0x7FEB352D
    h = h ^ key1
    h = h ^ (h >> 15)
    h = h * 0x846CA68B
    h = h ^ (h >> 16)
    return ((h >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23


@triton.jit
def _gumbel(seed, position, tokens):
    return -tl.log(-tl.log(uniform_noise(seed, position, tokens)))


@triton.jit(
    do_not_specialize=["first"],
    do_not_specialize_on_alignment=[
        "slot_ids", "positions", "best_scores", "best_tokens", "maxima", "sums",
    ],
)  # fmt: skip
def _chunk_kernel(
    logits, slot_ids, positions, seeds, temperatures, top_ps, best_scores, best_tokens, maxima,
    sums, vocab, stride, first,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    wait_for_kernel(PDL)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + columns, columns < vocab, float("-inf")).to(
        tl.float32
    )
    x = tl.where(x != x, float("inf"), x)  # NaN becomes a maximum that valid logits never have
    slot = tl.load(slot_ids + row)
    temperature = tl.load(temperatures + slot)
    place = row * CHUNKS + chunk
    if temperature >= GREEDY_TEMPERATURE:
        x = tl.div_rn(x, tl.zeros_like(x) + temperature)
        largest = tl.max(x)
        if tl.load(top_ps + slot) < 1.0:
            tl.store(
                sums + place, tl.sum(tl.exp(x - tl.where(largest == float("-inf"), 0.0, largest)))
            )
        x += _gumbel(tl.load(seeds + slot), tl.load(positions + row), first + columns)
        best = tl.max(x)
    else:
        best = tl.max(x)
        largest = best
    tl.store(best_scores + place, best)
    # fewer instructions than a maximum with its index
    tl.store(best_tokens + place, first + tl.min(tl.where(x == best, columns, 2147483647)))
    tl.store(maxima + place, largest)


class _Row(NamedTuple):
    """A row that is sampled with filters.

    Attributes:
        logits: of this rank.
        chunks: int32, where the chunks that the filters read are listed.
        vocab, first: how many logits there are, and the token id of the first.
        temperature: what logits are divided by.
        seed, position: of the noise.
        to, here: of the exchange between ranks (`all_gather`).
    """

    logits: tl.tensor
    chunks: tl.tensor
    vocab: tl.tensor
    first: tl.tensor
    temperature: tl.tensor
    seed: tl.tensor
    position: tl.tensor
    to: tl.tensor
    here: tl.tensor


@triton.jit
def _load_chunks(row, begin, count, CHUNK: tl.constexpr, GATHERED: tl.constexpr):
    """Returns logits over temperature and their columns, both [GATHERED, CHUNK], of the `count`
    listed chunks from `begin` on."""
    entry = begin + tl.arange(0, GATHERED)
    listed = entry < count
    columns = tl.load(row.chunks + entry, listed, 0)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    places = row.logits + columns
    x = tl.load(places, listed[:, None] & (columns < row.vocab), float("-inf")).to(tl.float32)
    return tl.div_rn(x, tl.zeros_like(x) + row.temperature), columns


@triton.jit
def _as_key(x):
    """Returns int32 in the same order as the float32 x. Applied to their bits it is its own
    inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _kth_largest(
    row, count, k, low, high, epoch,
    CHUNK: tl.constexpr, GATHERED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Returns the k-th largest value of all ranks' listed chunks, which lies between `low` and
    `high`, and the epoch.

    Bisects the keys (`_as_key`) in between; each pass moves both bounds to values that occur, so
    that the search ends soon with many equal values.
    """
    bottom = _as_key(low)
    top = _as_key(high) + 1  # fewer than k values are at or above
    while top > bottom + 1:
        middle = (bottom & top) + ((bottom ^ top) >> 1)  # their average, without overflow
        counts = tl.zeros([GATHERED, CHUNK], tl.int32)
        smallest_above = tl.zeros([GATHERED, CHUNK], tl.int32) + top
        largest_below = tl.zeros([GATHERED, CHUNK], tl.int32) + bottom
        for begin in range(0, count, GATHERED):
            x, _ = _load_chunks(row, begin, count, CHUNK, GATHERED)
            key = _as_key(x)
            counts += (key >= middle).to(tl.int32)
            smallest_above = tl.minimum(smallest_above, tl.where(key >= middle, key, top))
            largest_below = tl.maximum(largest_below, tl.where(key < middle, key, bottom))
        above = tl.sum(counts)
        if SIZE > 1:
            smallest, largest = tl.min(smallest_above), tl.max(largest_below)
            aboves, smallest_above, largest_below, _, epoch = all_gather(
                row.to, row.here, epoch, above, smallest, largest, 0, SIZE
            )
            above = tl.sum(tl.where(is_rank(SIZE), aboves, 0))
        if above >= k:
            bottom = tl.min(smallest_above)
            if above == k:
                top = bottom + 1
        else:
            top = tl.max(largest_below) + 1
    return _as_key(bottom.to(tl.float32, bitcast=True)).to(tl.float32, bitcast=True), epoch


@triton.jit
def _mass_above(
    row, count, border, excluded, largest, epoch,
    CHUNK: tl.constexpr, GATHERED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Returns the sum of exp(logit - largest) over the tokens with border <= logit and
    excluded < logit, and the epoch."""
    mass = tl.zeros([GATHERED, CHUNK], tl.float32)
    for begin in range(0, count, GATHERED):
        x, _ = _load_chunks(row, begin, count, CHUNK, GATHERED)
        mass += tl.where((x >= border) & (x > excluded), tl.exp(x - largest), 0.0)
    mass = tl.sum(mass)
    if SIZE > 1:
        mass, epoch = sum_of_ranks(row.to, row.here, epoch, mass, SIZE)
    return mass, epoch


@triton.jit
def _best_of_ranks(to, here, epoch, largest, score, token, value, SIZE: tl.constexpr):
    """Returns the maximum of the ranks' `largest`, the token of the best score (the lowest id among
    equals) with its value, and the epoch."""
    all_largest, scores, tokens, values, epoch = all_gather(
        to, here, epoch, as_bits(largest), as_bits(score), token, as_bits(value), SIZE
    )  # fmt: skip
    winner = tl.min(tl.where(as_floats(scores) == tl.max(as_floats(scores)), tokens, 2147483647))
    value = tl.max(tl.where(tokens == winner, as_floats(values), float("-inf")))
    return tl.max(as_floats(all_largest)), winner, value, epoch


@triton.jit
def _best_above(
    row, count, border, excluded, epoch,
    CHUNK: tl.constexpr, GATHERED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Returns the token of the best score among those with border <= logit and excluded < logit
    (the lowest id among equals), its logit, and the epoch."""
    best = tl.full([GATHERED, CHUNK], float("-inf"), tl.float32)
    token = tl.full([GATHERED, CHUNK], 2147483647, tl.int32)
    value = tl.full([GATHERED, CHUNK], float("-inf"), tl.float32)
    for begin in range(0, count, GATHERED):
        x, columns = _load_chunks(row, begin, count, CHUNK, GATHERED)
        tokens = row.first + columns
        is_kept = (x >= border) & (x > excluded)
        score = tl.where(is_kept, x + _gumbel(row.seed, row.position, tokens), float("-inf"))
        better = score > best
        best = tl.where(better, score, best)
        token = tl.where(better, tokens, token)
        value = tl.where(better, x, value)
    # No argmax over the flattened tile: for a reduction Triton 3.6 reorders the flattened values,
    # but not their indices.
    score = tl.max(best)
    winner = tl.min(tl.where(best == score, token, 2147483647))
    value = tl.max(tl.where(token == winner, value, float("-inf")))
    if SIZE > 1:
        _, winner, value, epoch = _best_of_ranks(
            row.to, row.here, epoch, value, score, winner, value, SIZE
        )
    return winner, value, epoch


@triton.jit
def _scaled_logit(logits, column, temperature, vocab):
    return tl.div_rn(
        tl.load(logits + column, column < vocab, float("-inf")).to(tl.float32), temperature
    )


@triton.jit
def _list_chunks(chunks, chunk_maxima, border, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr):
    """Lists the chunks whose maxima [CHUNKS_PAD] are at least `border`, and returns their
    number."""
    c = tl.arange(0, CHUNKS_PAD)
    matters = (chunk_maxima >= border) & (c < CHUNKS)
    tl.store(chunks + tl.cumsum(matters.to(tl.int32)) - 1, c, matters)
    count = tl.sum(matters.to(tl.int32))
    tl.debug_barrier()  # the list is read by other threads than those that wrote it
    return count


@triton.jit
def _best_of_nucleus(
    row, count, token, value, border, largest, top_p, total, epoch,
    CHUNK: tl.constexpr, GATHERED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Returns the token of the best score in the nucleus of top-p, and the epoch.

    Of the tokens with border <= logit, `total` is the sum of exp(logit - largest), `token` has the
    best score, and `value` is its logit.
    """
    # The largest logit alone has the mass 1: the mass above a token is 0 or at least 1.
    nucleus_mass = tl.maximum(top_p * total, 1e-9)
    mass, epoch = _mass_above(row, count, border, value, largest, epoch, CHUNK, GATHERED, SIZE)
    while mass >= nucleus_mass:
        token, value, epoch = _best_above(row, count, border, value, epoch, CHUNK, GATHERED, SIZE)
        mass, epoch = _mass_above(row, count, border, value, largest, epoch, CHUNK, GATHERED, SIZE)
    return token, epoch


@triton.jit
def _sample_filtered(
    row, maxima, sums, largest, token, value, top_k, top_p, min_p, vocab_size, epoch,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, GATHERED: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Returns the token of the best score among those that min-p, top-k and top-p keep, applied in
    this order, and the epoch.

    `largest` is the largest logit over temperature, `token` the token of the best score without
    filters and `value` its logit over temperature.
    """
    c = tl.arange(0, CHUNKS_PAD)
    chunk_maxima = tl.load(maxima + c, c < CHUNKS, float("-inf"))
    border = float("-inf")
    if min_p > 0.0:
        border = largest + tl.log(min_p)
    filters_k = (top_k > 0) & (top_k < vocab_size)
    low = float("-inf")
    if filters_k & (top_k <= CHUNKS):  # the k-th largest is no less than the k-th largest maximum
        rank = tl.sum((chunk_maxima[None, :] > chunk_maxima[:, None]).to(tl.int32), axis=1)
        low = tl.min(tl.where(rank < top_k, chunk_maxima, float("inf")))
    if SIZE > 1 and filters_k:  # a bound of one rank's logits is one of all ranks' as well
        low, epoch = max_of_ranks(row.to, row.here, epoch, low, SIZE)
    count = _list_chunks(row.chunks, chunk_maxima, tl.maximum(low, border), CHUNKS, CHUNKS_PAD)
    if filters_k:
        kth, epoch = _kth_largest(row, count, top_k, low, largest, epoch, CHUNK, GATHERED, SIZE)
        border = tl.maximum(border, kth)
    if value < border:
        token, value, epoch = _best_above(
            row, count, border, float("-inf"), epoch, CHUNK, GATHERED, SIZE
        )
    if top_p < 1.0:
        if border > float("-inf"):
            total, epoch = _mass_above(
                row, count, border, float("-inf"), largest, epoch, CHUNK, GATHERED, SIZE
            )
        else:
            mass = tl.load(sums + c, c < CHUNKS, 0.0) * tl.exp(chunk_maxima - largest)
            total = tl.sum(tl.where(c < CHUNKS, mass, 0.0))
            if SIZE > 1:
                total, epoch = sum_of_ranks(row.to, row.here, epoch, total, SIZE)
        token, epoch = _best_of_nucleus(
            row, count, token, value, border, largest, top_p, total, epoch, CHUNK, GATHERED, SIZE
        )
    return token, epoch


@triton.jit(
    do_not_specialize=["first", "rank"],
    do_not_specialize_on_alignment=[
        "slot_ids", "positions", "best_scores", "best_tokens", "maxima", "sums", "chunks", "out",
        "addresses", "epochs",
    ],
)  # fmt: skip
def _sample_kernel(
    logits, slot_ids, positions, seeds, temperatures, top_ks, top_ps, min_ps, best_scores,
    best_tokens, maxima, sums, chunks, out,
    vocab, stride, first, vocab_size, addresses, epochs, rank,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, GATHERED: tl.constexpr,
    SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    wait_for_kernel(PDL)
    slot = tl.load(slot_ids + row)
    logits += row.to(tl.int64) * stride
    c = tl.arange(0, CHUNKS_PAD)
    place = row * CHUNKS + c
    largest = tl.max(tl.load(maxima + place, c < CHUNKS, float("-inf")))
    score, at = tl.max(
        tl.load(best_scores + place, c < CHUNKS, float("-inf")), axis=0, return_indices=True
    )
    token = tl.load(best_tokens + row * CHUNKS + at)
    to, here, epoch = addresses, addresses, row
    if SIZE > 1:
        to, here, epoch = open_ll_buffer(addresses, epochs, row, rank, SIZE)
        value = _scaled_logit(logits, token - first, tl.load(temperatures + slot), vocab)
        largest, token, value, epoch = _best_of_ranks(
            to, here, epoch, largest, score, token, value, SIZE
        )
    if (largest == float("inf")) | (largest == float("-inf")):
        token = -1
    else:
        temperature = tl.load(temperatures + slot)
        top_k = tl.load(top_ks + slot)
        top_p = tl.load(top_ps + slot)
        min_p = tl.load(min_ps + slot)
        if (temperature >= GREEDY_TEMPERATURE) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
            if SIZE == 1:
                value = _scaled_logit(logits, token, temperature, vocab)
            of_row = _Row(
                logits, chunks + row * CHUNKS, vocab, first, temperature, tl.load(seeds + slot),
                tl.load(positions + row), to, here,
            )  # fmt: skip
            token, epoch = _sample_filtered(
                of_row, maxima + row * CHUNKS, sums + row * CHUNKS, largest, token, value, top_k,
                top_p, min_p, vocab_size, epoch, CHUNK, CHUNKS, CHUNKS_PAD, GATHERED, SIZE,
            )  # fmt: skip
    tl.store(out + row, token)
    if SIZE > 1:
        tl.store(epochs + row, epoch)


def sample_tokens(
    logits: torch.Tensor,
    slot_ids: torch.Tensor,
    positions: torch.Tensor,
    state: SamplingState,
    *,
    shard: VocabShard | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Samples a token for each row. With a vocabulary shard every rank has to call this with the
    same rows; all ranks return the same tokens.

    Args:
        logits: [S, V], fp32, bf16 or fp16, the columns of this rank's shard; rows may be strided.
            Not changed.
        slot_ids: int32 [S], the slot in `state` of each row.
        positions: int32 [S], the position of each sampled token, counted from the beginning of the
            prompt.
        shard: this rank's shard of the vocabulary; None if the rank has all of it.
        out: int32 [S] to write to; by default a new tensor.
        pdl: launch as programmatic dependents of the kernel before (Hopper and later).

    Returns:
        tokens: int32 [S], -1 where the logits contain NaN or infinity, or are all minus infinity.

    Raises:
        ValueError: rows that are not contiguous, or more rows than LL buffers.
    """
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("rows of logits must be contiguous")
    count = max(1, triton.cdiv(vocab, CHUNK))  # with few tokens a rank's shard may be empty
    out = torch.empty(rows, dtype=torch.int32, device=logits.device) if out is None else out
    if rows == 0:
        return out
    first, vocab_size = (0, vocab) if shard is None else (shard.first, shard.vocab_size)
    addresses, epochs, rank, size = _exchange_of(shard, rows, slot_ids)
    best_scores, maxima, sums = torch.empty(
        3, rows, count, dtype=torch.float32, device=logits.device
    )
    best_tokens, chunks = torch.empty(2, rows, count, dtype=torch.int32, device=logits.device)
    _chunk_kernel[(rows, count)](
        logits, slot_ids, positions, state.seeds, state.temperature, state.top_p, best_scores,
        best_tokens, maxima, sums,
        vocab, logits.stride(0), first, CHUNK=CHUNK, CHUNKS=count, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    _sample_kernel[(rows,)](
        logits, slot_ids, positions, state.seeds, state.temperature, state.top_k, state.top_p,
        state.min_p,
        best_scores, best_tokens, maxima, sums, chunks, out, vocab, logits.stride(0), first,
        vocab_size, addresses, epochs, rank,
        CHUNK=CHUNK, CHUNKS=count, CHUNKS_PAD=triton.next_power_of_2(count), GATHERED=GATHERED,
        SIZE=size, PDL=pdl,
        num_warps=16, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _exchange_of(
    shard: VocabShard | None, rows: int, unused: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Returns addresses, epochs, rank and size of the exchange between ranks; `unused` in the place
    of tensors that one rank alone does not need. Raises ValueError for more rows than LL
    buffers."""
    buffers = None if shard is None else shard.ll_buffers
    if buffers is None:
        return unused, unused, 0, 1
    if rows > len(buffers.epochs):
        raise ValueError(f"{rows} rows of logits, but LL buffers for {len(buffers.epochs)}")
    return buffers.addresses, buffers.epochs, buffers.rank, buffers.size
