"""The selection of a token's experts by integer keys, a low-latency routing kernel for few tokens,
and the weight of an expert that all tokens take. The first two are variants of the kernel of
`expert_routing`, selected by its configurations.

**Keys.** `expert_routing` finds the best expert by a reduction of pairs of score and index, which
takes two shuffles and several comparisons for each of its five steps, and its score by another
reduction. Here a score becomes an integer of the same order, of which the best is found by one
instruction of the warp (`redux.sync`), and the first expert that has it by another.

**Few tokens.** A program of one warp computes the logits of one token for a few experts: all its
loads are in flight at a time, the loads of weights before the preceding kernel has ended, so that
the products are one memory round trip instead of eight steps of a pipeline. The last program of a
token selects its experts, with a warp's reductions and no barriers. The RMSNorm before the router
may be part of it: the logits are scaled by the norm's factor, which is left for the products.

**An expert that all tokens take** needs no selection: a program beside the others gives its weight.
"""
# ruff: noqa: N803, N806  (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from aioinfer.kernels.launch import is_last_of, wait_for_kernel


@dataclass(frozen=True, slots=True)
class FewTokensConfig:
    """The compile-time configuration of the kernel for few tokens.

    Attributes:
        experts: of a program. step: inputs that are loaded at a time.
        num_warps: of a program; with more than one, reductions take barriers.
        early_weights: whether the router's weight is asked for before the kernel before has ended.
    """

    experts: int = 1
    step: int = 2048
    num_warps: int = 1
    early_weights: bool = True


@triton.jit
def _ordered(values):
    """Returns int32 in the order of float32; applied twice, the bits of the values."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def best_by_keys(preferred, scores, TOKENS: tl.constexpr, S: tl.constexpr):
    """Returns the scores and the numbers [TOKENS, S.k_padded] of the S.top_k experts with the
    largest `preferred` [TOKENS, S.padded], which are `scores` themselves without a bias.
    `preferred` is not NaN, but S.lowest instead, and -inf where there is no expert."""
    TOP_K: tl.constexpr = S.top_k
    K_PAD: tl.constexpr = S.k_padded
    expert = tl.arange(0, S.padded)[None, :]
    place = tl.arange(0, K_PAD)[None, :]
    # below all others, where an expert is taken
    taken: tl.constexpr = -(2**31)
    keys = _ordered(preferred)
    experts = tl.zeros([TOKENS, K_PAD], tl.int32)
    weights = tl.zeros([TOKENS, K_PAD], tl.float32)
    for j in tl.static_range(TOP_K):
        largest = tl.max(keys, 1)
        best = tl.min(tl.where(keys == largest[:, None], expert, S.padded), 1)
        is_best = expert == best[:, None]
        if not S.has_bias:
            bits = largest ^ ((largest >> 31) & 0x7FFFFFFF)
            weight = bits.to(tl.float32, bitcast=True)
            weight = tl.where(weight > S.lowest, weight, float("nan"))
        else:
            weight = tl.sum(tl.where(is_best, scores, 0.0), 1)
        keys = tl.where(is_best, taken, keys)
        experts = tl.where(place == j, best[:, None], experts)
        weights = tl.where(place == j, weight[:, None], weights)
    return weights, experts


@triton.jit
def few_logits(
    x, weight, norm, logits, norm_factors, tickets, x_stride, eps,
    HIDDEN: tl.constexpr, PART: tl.constexpr, STEP: tl.constexpr, HAS_NORM: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Writes the logits of token `program_id(1)` for PART experts, and with HAS_NORM its norm's
    factor; returns whether the logits of all experts are there."""
    token = tl.program_id(1)
    expert = tl.program_id(0) * PART + tl.arange(0, PART)
    k = tl.arange(0, STEP)
    place = weight + expert[:, None] * HIDDEN + k[None, :]
    is_expert = (expert < S.experts)[:, None]
    if EARLY:
        w = tl.load(place, is_expert & (k < HIDDEN)[None, :], 0.0)
        if HAS_NORM:
            norm_w = tl.load(norm + k, k < HIDDEN, 0.0)
    wait_for_kernel(PDL)
    if not EARLY:
        w = tl.load(place, is_expert & (k < HIDDEN)[None, :], 0.0)
        if HAS_NORM:
            norm_w = tl.load(norm + k, k < HIDDEN, 0.0)
    row = x + token.to(tl.int64) * x_stride + k
    value = tl.load(row, k < HIDDEN, 0.0).to(tl.float32)
    square = 0.0
    if HAS_NORM:
        square = tl.sum(value * value)
        value = value * norm_w.to(tl.float32)
    total = tl.sum(w.to(tl.float32) * value[None, :], 1)
    for begin in tl.static_range(STEP, HIDDEN, STEP):
        inside = begin + k < HIDDEN
        w = tl.load(place + begin, is_expert & inside[None, :], 0.0)
        value = tl.load(row + begin, inside, 0.0).to(tl.float32)
        if HAS_NORM:
            square += tl.sum(value * value)
            value = value * tl.load(norm + begin + k, inside, 0.0).to(tl.float32)
        total += tl.sum(w.to(tl.float32) * value[None, :], 1)
    if HAS_NORM:
        factor = tl.rsqrt(square / HIDDEN + eps)
        total *= factor
        if tl.program_id(0) == 0:
            tl.store(norm_factors + token, factor)
    tl.store(logits + token * S.padded + expert, total)
    PARTS: tl.constexpr = S.padded // PART
    return is_last_of(tickets + token, PARTS)


@triton.jit
def take_shared(
    x, gate, norm, weights, experts, counts, rows, token, tokens, x_stride, eps,
    HIDDEN: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, HAS_NORM: tl.constexpr,
    PDL: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Writes the weight of the expert that all tokens take, number S.experts, for tokens [TOKENS],
    and enters their pairs into its bucket."""
    k = tl.arange(0, STEP)
    is_token = token < tokens
    row = x + token.to(tl.int64)[:, None] * x_stride + k[None, :]
    wait_for_kernel(PDL)
    share = tl.zeros([TOKENS], tl.float32) + 1.0
    if S.is_shared_gated:
        total = tl.zeros([TOKENS], tl.float32)
        square = tl.zeros([TOKENS], tl.float32)
        for begin in range(0, HIDDEN, STEP):
            inside = begin + k < HIDDEN
            factor = tl.load(gate + begin + k, inside, 0.0).to(tl.float32)
            value = tl.load(row + begin, is_token[:, None] & inside[None, :], 0.0).to(tl.float32)
            if HAS_NORM:
                square += tl.sum(value * value, 1)
                factor *= tl.load(norm + begin + k, inside, 0.0).to(tl.float32)
            total += tl.sum(value * factor[None, :], 1)
        if HAS_NORM:
            total *= tl.rsqrt(square / HIDDEN + eps)
        share = tl.sigmoid(total)
    pair = token * S.pairs + S.top_k
    tl.store(weights + pair, share, is_token)
    tl.store(experts + pair, tl.zeros([TOKENS], tl.int32) + S.experts, is_token)
    if S.buckets:
        tl.store(rows + S.experts * tokens + token, pair, is_token)
        tl.store(counts + S.experts, tokens)
