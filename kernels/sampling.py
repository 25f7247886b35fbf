"""Choosing tokens on the GPU: greedy or Gumbel-max, with min-p, top-k and top-p found by search instead of a sort.

Called at the end of a step, for its sampling rows; captured in the step's graph. The rules are those of
`aioinfer.worker.sampler`, which documents them: the noise is a pure function of seed, position and token id (the
uniforms are the same bit for bit), filters keep everything down to some logit, a row whose logits hold NaN or
infinity chooses -1. Penalties and biases have been applied by `penalties`; log-probabilities are in `logprobs`.

Two launches: all chunks of all rows at once (`_chunk_kernel`), then one program a row (`_choose_kernel`). A row without
filters is only merged there. For others the k-th largest logit is found by bisection over the few chunks whose
maximum can matter. The rest needs no search: a best token that the filters keep is the best of those they keep; and
if it is not in the nucleus of top-p, the nucleus lies above it, and the best of what lies above is tried next (the idea of
rejecting by pivots is FlashInfer's, Ye et al. 2025; with fixed noise it gives exactly the best token of the nucleus).
"""
# ruff: noqa: N803  (compile-time constants are written in capitals; l is the softmax's sum)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CHUNK = 2048
GATHERED = 4  # chunks that the program of a row reads at a time
GREEDY_TEMPERATURE = tl.constexpr(1e-5)  # as in aioinfer.sampling_params


@dataclass(frozen=True, slots=True)
class SamplingState:
    """How each slot's request wants its tokens chosen; tensors [num_slots] on the GPU.

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


@triton.jit
def _mix(h):
    h = h ^ (h >> 16)
    h = h * 0x7FEB352D
    h = h ^ (h >> 15)
    h = h * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def uniform_noise(seed, position, tokens):
    """Returns the uniforms (float32) of token ids, for a seed (int64 scalar) and a position (int32 scalar)."""
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


@triton.jit(do_not_specialize_on_alignment=["slot_ids", "positions", "best_scores", "best_tokens", "maxima", "sums"])
def _chunk_kernel(
    logits, slot_ids, positions, seeds, temperatures, top_ps, best_scores, best_tokens, maxima, sums, vocab, stride,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slot_ids + row)
    temperature = tl.load(temperatures + slot)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + tokens, tokens < vocab, float("-inf")).to(tl.float32)
    broken = tl.max((x != x).to(tl.int32))
    place = row * CHUNKS + chunk
    if temperature >= GREEDY_TEMPERATURE:
        x = tl.div_rn(x, tl.zeros_like(x) + temperature)
        largest = tl.max(x)
        if tl.load(top_ps + slot) < 1.0:
            tl.store(sums + place, tl.sum(tl.exp(x - tl.where(largest == float("-inf"), 0.0, largest))))
        best, at = tl.max(x + _gumbel(tl.load(seeds + slot), tl.load(positions + row), tokens), axis=0, return_indices=True)
    else:
        best, at = tl.max(x, axis=0, return_indices=True)
        largest = best
    tl.store(best_scores + place, best)
    tl.store(best_tokens + place, chunk * CHUNK + at)
    tl.store(maxima + place, tl.where(broken > 0, float("inf"), largest))


@triton.jit
def _load_chunks(logits, chunks, begin, count, temperature, vocab, CHUNK: tl.constexpr, GATHERED: tl.constexpr):
    """Returns logits over temperature and token ids, both [GATHERED, CHUNK], of the listed chunks `begin` and following."""
    entry = begin + tl.arange(0, GATHERED)
    held = entry < count
    tokens = tl.load(chunks + entry, held, 0)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(logits + tokens, held[:, None] & (tokens < vocab), float("-inf")).to(tl.float32)
    return tl.div_rn(x, tl.zeros_like(x) + temperature), tokens


@triton.jit
def _as_key(x):
    """Returns integers that are ordered as the float32 x is (and back again)."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _kth_largest(logits, chunks, count, temperature, vocab, k, low, high, CHUNK: tl.constexpr, GATHERED: tl.constexpr):
    """Returns the k-th largest of the listed chunks, for float bounds low <= it <= high.

    Bisects the integers between; each pass moves both ends to values that occur, so that ties end the search soon.
    """
    bottom = _as_key(low)
    top = _as_key(high) + 1  # fewer than k values are at or above
    while top > bottom + 1:
        middle = (bottom & top) + ((bottom ^ top) >> 1)  # their average, without overflow
        counts = tl.zeros([GATHERED, CHUNK], tl.int32)
        least = tl.zeros([GATHERED, CHUNK], tl.int32) + top
        most = tl.zeros([GATHERED, CHUNK], tl.int32) + bottom
        for begin in range(0, count, GATHERED):
            x, _ = _load_chunks(logits, chunks, begin, count, temperature, vocab, CHUNK, GATHERED)
            key = _as_key(x)
            counts += (key >= middle).to(tl.int32)
            least = tl.minimum(least, tl.where(key >= middle, key, top))
            most = tl.maximum(most, tl.where(key < middle, key, bottom))
        above = tl.sum(counts)
        if above >= k:
            bottom = tl.min(least)
            if above == k:
                top = bottom + 1
        else:
            top = tl.max(most) + 1
    return _as_key(bottom.to(tl.float32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _mass_above(
    logits, chunks, count, temperature, vocab, border, excluded, largest, CHUNK: tl.constexpr, GATHERED: tl.constexpr
):  # fmt: skip
    """Returns the probability, relative to exp(largest), of the tokens with border <= logit and excluded < logit."""
    mass = tl.zeros([GATHERED, CHUNK], tl.float32)
    for begin in range(0, count, GATHERED):
        x, _ = _load_chunks(logits, chunks, begin, count, temperature, vocab, CHUNK, GATHERED)
        mass += tl.where((x >= border) & (x > excluded), tl.exp(x - largest), 0.0)
    return tl.sum(mass)


@triton.jit
def _best_above(
    logits, chunks, count, temperature, vocab, seed, position, border, excluded, CHUNK: tl.constexpr, GATHERED: tl.constexpr
):  # fmt: skip
    """Returns the best of the tokens with border <= logit and excluded < logit (the lowest id among equals), and its logit."""
    best = tl.full([GATHERED, CHUNK], float("-inf"), tl.float32)
    token = tl.full([GATHERED, CHUNK], 2147483647, tl.int32)
    value = tl.full([GATHERED, CHUNK], float("-inf"), tl.float32)
    for begin in range(0, count, GATHERED):
        x, tokens = _load_chunks(logits, chunks, begin, count, temperature, vocab, CHUNK, GATHERED)
        score = tl.where((x >= border) & (x > excluded), x + _gumbel(seed, position, tokens), float("-inf"))
        better = score > best
        best = tl.where(better, score, best)
        token = tl.where(better, tokens, token)
        value = tl.where(better, x, value)
    # No argmax over the flattened tile: Triton 3.6 reorders what it flattens for a reduction, though not the indices.
    winner = tl.min(tl.where(best == tl.max(best), token, 2147483647))
    return winner, tl.max(tl.where(token == winner, value, float("-inf")))


@triton.jit
def _choose_filtered(
    logits, chunks, maxima, sums, largest, token, temperature, seed, position, top_k, top_p, min_p, vocab,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """Returns the best token that min-p, top-k and top-p keep, in this order; `token` is the best of all."""
    c = tl.arange(0, CHUNKS_PAD)
    most = tl.load(maxima + c, c < CHUNKS, float("-inf"))
    border = float("-inf")
    if min_p > 0.0:
        border = largest + tl.log(min_p)
    filters_k = (top_k > 0) & (top_k < vocab)
    low = float("-inf")
    if filters_k & (top_k <= CHUNKS):  # the k-th largest is no less than the k-th largest maximum
        rank = tl.sum((most[None, :] > most[:, None]).to(tl.int32), axis=1)
        low = tl.min(tl.where(rank < top_k, most, float("inf")))
    matters = (most >= tl.maximum(low, border)) & (c < CHUNKS)
    tl.store(chunks + tl.cumsum(matters.to(tl.int32)) - 1, c, matters)
    count = tl.sum(matters.to(tl.int32))
    tl.debug_barrier()  # the list is read by other threads than wrote it
    if filters_k:
        border = tl.maximum(border, _kth_largest(logits, chunks, count, temperature, vocab, top_k, low, largest, CHUNK, GATHERED))
    value = tl.div_rn(tl.load(logits + token).to(tl.float32), temperature)
    if value < border:
        token, value = _best_above(
            logits, chunks, count, temperature, vocab, seed, position, border, float("-inf"), CHUNK, GATHERED
        )  # fmt: skip
    if top_p < 1.0:
        if border > float("-inf"):
            total = _mass_above(logits, chunks, count, temperature, vocab, border, float("-inf"), largest, CHUNK, GATHERED)
        else:
            total = tl.sum(tl.where(c < CHUNKS, tl.load(sums + c, c < CHUNKS, 0.0) * tl.exp(most - largest), 0.0))
        wanted = top_p * total
        while _mass_above(logits, chunks, count, temperature, vocab, border, value, largest, CHUNK, GATHERED) >= wanted:
            token, value = _best_above(logits, chunks, count, temperature, vocab, seed, position, border, value, CHUNK, GATHERED)
    return token


@triton.jit(do_not_specialize_on_alignment=["slot_ids", "positions", "best_scores", "best_tokens", "maxima", "sums", "chunks", "out"])
def _choose_kernel(
    logits, slot_ids, positions, seeds, temperatures, top_ks, top_ps, min_ps, best_scores, best_tokens, maxima, sums, chunks, out,
    vocab, stride, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, GATHERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slot_ids + row)
    c = tl.arange(0, CHUNKS_PAD)
    place = row * CHUNKS + c
    largest = tl.max(tl.load(maxima + place, c < CHUNKS, float("-inf")))
    _, at = tl.max(tl.load(best_scores + place, c < CHUNKS, float("-inf")), axis=0, return_indices=True)
    token = tl.load(best_tokens + row * CHUNKS + at)
    if (largest == float("inf")) | (largest == float("-inf")):
        token = -1
    else:
        temperature = tl.load(temperatures + slot)
        top_k = tl.load(top_ks + slot)
        top_p = tl.load(top_ps + slot)
        min_p = tl.load(min_ps + slot)
        if (temperature >= GREEDY_TEMPERATURE) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
            token = _choose_filtered(
                logits + row.to(tl.int64) * stride, chunks + row * CHUNKS, maxima + row * CHUNKS, sums + row * CHUNKS, largest, token,
                temperature, tl.load(seeds + slot), tl.load(positions + row), top_k, top_p, min_p, vocab,
                CHUNK, CHUNKS, CHUNKS_PAD, GATHERED,
            )  # fmt: skip
    tl.store(out + row, token)


def sample_tokens(
    logits: torch.Tensor,
    slot_ids: torch.Tensor,
    positions: torch.Tensor,
    state: SamplingState,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Chooses a token for each row.

    Args:
        logits: [S, V], fp32, bf16 or fp16; rows may be strided. Not changed.
        slot_ids: int32 [S], whose wishes in `state` apply to each row.
        positions: int32 [S], where each chosen token goes, counted from the beginning of the prompt.
        out: int32 [S] to write to; by default a new tensor.
        pdl: launch as programmatic dependents of the kernel before (Hopper and later).

    Returns:
        tokens: int32 [S], -1 where the logits held NaN or infinity, or were all minus infinity.
    """
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("rows of logits must be contiguous")
    count = triton.cdiv(vocab, CHUNK)
    out = torch.empty(rows, dtype=torch.int32, device=logits.device) if out is None else out
    if rows == 0:
        return out
    best_scores, maxima, sums = torch.empty(3, rows, count, dtype=torch.float32, device=logits.device)
    best_tokens, chunks = torch.empty(2, rows, count, dtype=torch.int32, device=logits.device)
    _chunk_kernel[(rows, count)](
        logits, slot_ids, positions, state.seeds, state.temperature, state.top_p, best_scores, best_tokens, maxima, sums,
        vocab, logits.stride(0), CHUNK=CHUNK, CHUNKS=count, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    _choose_kernel[(rows,)](
        logits, slot_ids, positions, state.seeds, state.temperature, state.top_k, state.top_p, state.min_p,
        best_scores, best_tokens, maxima, sums, chunks, out, vocab, logits.stride(0),
        CHUNK=CHUNK, CHUNKS=count, CHUNKS_PAD=triton.next_power_of_2(count), GATHERED=GATHERED, PDL=pdl, num_warps=16, launch_pdl=pdl,
    )  # fmt: skip
    return out
