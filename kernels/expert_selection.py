"""The selection of a token's experts by integer keys, and a low-latency routing kernel for few
tokens. Both are variants of the kernel of `expert_routing`, selected by its configurations.

**Keys.** `expert_routing` finds the best expert by a reduction of pairs of score and index, which
takes two shuffles and several comparisons for each of its five steps, and its score by another
reduction. Here a score becomes an integer of the same order, of which the best is found by one
instruction of the warp (`redux.sync`), and the first expert that has it by another.

**Few tokens.** A program of one warp computes the logits of one token for a few experts: all its
loads are in flight at a time, the loads of weights before the preceding kernel has ended, so that
the products are one memory round trip instead of eight steps of a pipeline. The last program of a
token selects its experts, with a warp's reductions and no barriers. The RMSNorm before the router
may be part of it: the logits are scaled by the norm's factor, which is left for the products.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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
def best_by_keys(
    preferred, scores, TOKENS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr,
    K_PAD: tl.constexpr, IS_SCORE: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """Returns the scores and the numbers [TOKENS, K_PAD] of the TOP_K experts with the largest
    `preferred` [TOKENS, EXPERTS_PAD], which are `scores` themselves with IS_SCORE. `preferred` is
    not NaN, but LOWEST instead, and -inf where there is no expert."""
    expert = tl.arange(0, EXPERTS_PAD)[None, :]
    place = tl.arange(0, K_PAD)[None, :]
    # below all others, where an expert is taken
    taken: tl.constexpr = -(2**31)
    keys = _ordered(preferred)
    experts = tl.zeros([TOKENS, K_PAD], tl.int32)
    weights = tl.zeros([TOKENS, K_PAD], tl.float32)
    for j in tl.static_range(TOP_K):
        largest = tl.max(keys, 1)
        best = tl.min(tl.where(keys == largest[:, None], expert, EXPERTS_PAD), 1)
        is_best = expert == best[:, None]
        if IS_SCORE:
            bits = largest ^ ((largest >> 31) & 0x7FFFFFFF)
            weight = bits.to(tl.float32, bitcast=True)
            weight = tl.where(weight > LOWEST, weight, float("nan"))
        else:
            weight = tl.sum(tl.where(is_best, scores, 0.0), 1)
        keys = tl.where(is_best, taken, keys)
        experts = tl.where(place == j, best[:, None], experts)
        weights = tl.where(place == j, weight[:, None], weights)
    return weights, experts


@triton.jit
def few_logits(
    x, weight, norm, logits, norm_factors, tickets, x_stride, eps,
    HIDDEN: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, PART: tl.constexpr,
    STEP: tl.constexpr, PARTS: tl.constexpr, HAS_NORM: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Writes the logits of token `program_id(1)` for PART experts, and with HAS_NORM its norm's
    factor; returns whether the logits of all experts are there."""
    token = tl.program_id(1)
    expert = tl.program_id(0) * PART + tl.arange(0, PART)
    k = tl.arange(0, STEP)
    place = weight + expert[:, None] * HIDDEN + k[None, :]
    is_expert = (expert < EXPERTS)[:, None]
    if EARLY:
        w = tl.load(place, is_expert & (k < HIDDEN)[None, :], 0.0)
        if HAS_NORM:
            norm_w = tl.load(norm + k, k < HIDDEN, 0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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
    tl.store(logits + token * EXPERTS_PAD + expert, total)
    # every thread has written its logits before one thread counts them
    tl.debug_barrier()
    is_last = tl.atomic_add(tickets + token, 1, sem="acq_rel") == PARTS - 1
    if is_last:
        tl.store(tickets + token, 0)
    return is_last
