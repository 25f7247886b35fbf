"""The routing of a mixture of experts in one launch: the router's product, scores, the best experts
of each token, and the tokens of each expert.

Called by `layers.kernel_experts` before the products of `expert_product`. A program computes the
logits of a tile of tokens for some of the experts; where several programs share a tile, the last of
them to finish (an atomic ticket) selects. Then each (token, expert) pair takes the next free place
in its expert's bucket by an atomic counter. There is neither a sort nor a prefix sum over pairs:
the products' programs find their expert by a scan over the counters, which costs each of them less
than a list of work, made by the last program, would delay all of them, and lets every product have
tiles of its own. The places of pairs in a bucket differ from one launch to the next; no result
depends on them.

For a few tokens there are no buckets either (`counts` is None): a product's program compares its
expert with the experts of all pairs.

An expert that all tokens take (`SharedRoute`) is one more of a token's: a program of its own writes
its weight, a sigmoid of the token, beside those of the selected experts.

Where experts have copies, places (see `ipc.expert_placement`) take the part of experts behind the
selection: token t takes copy t modulo their number. The tokens of each place are counted in the
same launch.

Of experts with equal scores the one with the lower number is taken, of groups likewise. A token
with NaN among its scores gets distinct experts and weights of NaN: it spoils no other token.
"""
# ruff: noqa: N803, N806  (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from aioinfer.kernels.expert_selection import FewTokensConfig, best_by_keys, few_logits, take_shared
from aioinfer.kernels.launch import is_last_of, wait_for_kernel

#: Below every score of an expert that may be taken, above -inf for those that are taken already.
_LOWEST = -1e38
#: Keeps the sum of scores from being zero, as DeepSeek-V3's published code does.
SMALLEST = 1e-20
#: Token tiles whose experts may be divided over several programs.
MAX_SHARED_TILES = 64
#: Up to so many tokens each has its programs (`expert_selection`).
FEW_TOKENS = 32
#: With more experts, programs of other sizes are the fastest.
_MANY_EXPERTS = 128


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How the experts of a token are selected; see `layers.mixture.Routing`.

    Attributes:
        num_experts, top_k: of all, and of a token.
        is_sigmoid: scores are sigmoids; else a softmax over all experts.
        is_normalized: the weights of a token's experts are divided by their sum.
        scale: multiplied with the weights.
        num_groups, top_groups: experts come from the `top_groups` groups whose best scores have
            the largest sums.
        group_best: so many scores of a group are summed: 1 or 2.
    """

    num_experts: int
    top_k: int
    is_sigmoid: bool = False
    is_normalized: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """The experts of tokens. A pair is token * top_k + j, j being the place among its experts; an
    expert that all tokens take is the last of each token's and of all, and counts in both numbers.

    Attributes:
        weights: float32 [T, top_k].
        experts: int32 [T, top_k], best first; with copies, their places, as in all that follows.
        counts: int32 [num_experts], the pairs of each expert, or None for a few tokens.
        rows: int32 [num_experts, T], the pairs of each expert, in no particular order.
        local: the experts whose products are computed on this rank, at least one; None for all.
        norm_factors: float32 [T], by which the norm that the routing did scales each token; None if
            it did none.
    """

    weights: torch.Tensor
    experts: torch.Tensor
    counts: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    local: range | None = None
    norm_factors: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class CopyTable:
    """The places of each expert's copies, among which its tokens are divided.

    Attributes:
        places: int32 [num_experts, most], the places of each expert, from the left; contiguous.
        counts: int32 [num_experts], how many each has, at least 1.
    """

    places: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, slots=True)
class SharedRoute:
    """An expert that all tokens take.

    Attributes:
        gate: [H] of x's dtype; the weight of the expert is the sigmoid of its product with the
            token. None for a weight of 1.
    """

    gate: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """The compile-time configuration of the kernel.

    Attributes:
        tokens: of a tile. experts: of a program. step: inputs of a stage.
        by_keys: select as `expert_selection.best_by_keys` does.
    """

    tokens: int
    experts: int
    step: int
    num_warps: int
    num_stages: int
    by_keys: bool = False


class RoutingSpec(NamedTuple):
    """What the kernels are compiled for beside their tiles, from a `RoutingRule` and the arguments
    of `route`. `padded` are the columns of logits, `k_padded` is a power of two of at least
    `top_k`, and `copies` the width of `CopyTable.places`, 0 without. `pairs` are the experts of a
    token, one that all tokens take included; `has_shared`, `is_shared_gated` describe that.
    `has_scales`: each expert has a scale."""

    experts: int
    padded: int
    top_k: int
    k_padded: int
    is_sigmoid: bool
    is_normalized: bool
    has_bias: bool
    has_logit_bias: bool
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    buckets: bool = True
    copies: int = 0
    counted: bool = False
    pairs: int = 0
    has_shared: bool = False
    is_shared_gated: bool = False
    has_scales: bool = False
    smallest: float = SMALLEST
    lowest: float = _LOWEST


def routing_config(
    tokens: int, num_experts: int, itemsize: int = 2
) -> RoutingConfig | FewTokensConfig:
    """Returns the configuration for a number of tokens, measured on an H200 with 128 and with 256
    experts.

    Args:
        itemsize: bytes of an activation; float32 takes smaller stages.
    """
    if tokens <= FEW_TOKENS:
        if itemsize > 2:
            return FewTokensConfig(1, 1024)
        is_many = tokens > 1 and num_experts > _MANY_EXPERTS
        return FewTokensConfig(4, 1024) if is_many else FewTokensConfig(2)
    return tile_config(tokens, num_experts, itemsize)


def tile_config(tokens: int, num_experts: int, itemsize: int = 2) -> RoutingConfig:
    """Returns the configuration for tiles of tokens. Up to a thousand tokens the experts are
    divided over programs, so that one token has sixteen of them.

    Args:
        itemsize: as for `routing_config`.
    """
    padded = max(16, triton.next_power_of_2(num_experts))
    wide = itemsize > 2
    if tokens <= 64:
        part = 16 if wide else max(16, padded // 16)
        return RoutingConfig(16, part, 64 if wide else 256, 4, 4, by_keys=True)
    is_many = num_experts > _MANY_EXPERTS
    if tokens <= 256:
        # measured for 128 experts within a step, where their weight is read from memory; for 256
        # as a kernel alone
        is_large = tokens <= 128 if is_many else tokens > 128
        step, stages = (64, 4) if wide else (512, 3) if is_large else (256, 4)
        return RoutingConfig(16, 16, step, 4, stages, by_keys=True)
    if tokens <= 16 * MAX_SHARED_TILES:
        return RoutingConfig(16, min(padded, 32), 64 if wide else 128, 4, 4, by_keys=is_many)
    tile = 64 if padded <= 128 and not wide else 32 if padded <= 256 else 16
    return RoutingConfig(tile, padded, 32 if wide else 64, 8 if padded >= 128 else 4, 3)


@triton.jit
def _of_best_groups(scores, TOKENS: tl.constexpr, S: tl.constexpr):
    """Returns scores [TOKENS, S.padded], set to S.lowest for experts outside the best groups.
    Groups beyond the last, whose scores are S.lowest, come after all others."""
    SIZE: tl.constexpr = S.experts // S.num_groups
    TOP_GROUPS: tl.constexpr = S.top_groups
    grouped = tl.reshape(scores, [TOKENS, S.padded // SIZE, SIZE])
    total, place = tl.max(grouped, 2, return_indices=True, return_indices_tie_break_left=True)
    if S.group_best == 2:
        is_best = tl.arange(0, SIZE)[None, None, :] == place[:, :, None]
        total += tl.max(tl.where(is_best, float("-inf"), grouped), 2)
    number = tl.arange(0, S.padded // SIZE)[None, :]
    is_in = number < 0
    for _ in tl.static_range(TOP_GROUPS):
        _, group = tl.max(
            tl.where(is_in, float("-inf"), total), 1,
            return_indices=True, return_indices_tie_break_left=True,
        )  # fmt: skip
        is_in = is_in | (number == group[:, None])
    return tl.reshape(tl.where(is_in[:, :, None], grouped, S.lowest), [TOKENS, S.padded])


@triton.jit
def _select(logits, bias, TOKENS: tl.constexpr, BY_KEYS: tl.constexpr, S: tl.constexpr):
    """Returns the weights (not yet scaled) and the experts [TOKENS, S.k_padded] for logits
    [TOKENS, S.padded]."""
    TOP_K: tl.constexpr = S.top_k
    K_PAD: tl.constexpr = S.k_padded
    expert = tl.arange(0, S.padded)[None, :]
    is_expert = expert < S.experts
    if S.is_sigmoid:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        logits = tl.where(is_expert, logits, float("-inf"))
        powers = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = powers / tl.sum(powers, 1)[:, None]
    preferred = scores
    if S.has_bias:
        preferred += tl.load(bias + expert, is_expert, 0.0).to(tl.float32)
    preferred = tl.where(
        (preferred > S.lowest) & is_expert, preferred, S.lowest
    )  # NaN is not above
    if S.top_groups < S.num_groups:
        preferred = _of_best_groups(preferred, TOKENS, S)
    preferred = tl.where(is_expert, preferred, float("-inf"))
    place = tl.arange(0, K_PAD)[None, :]
    experts = tl.zeros([TOKENS, K_PAD], tl.int32)
    weights = tl.zeros([TOKENS, K_PAD], tl.float32)
    if BY_KEYS:
        weights, experts = best_by_keys(preferred, scores, TOKENS, S)
    for j in tl.static_range(0 if BY_KEYS else TOP_K):
        _, best = tl.max(preferred, 1, return_indices=True, return_indices_tie_break_left=True)
        is_best = expert == best[:, None]
        weight = tl.sum(tl.where(is_best, scores, 0.0), 1)
        preferred = tl.where(is_best, float("-inf"), preferred)
        experts = tl.where(place == j, best[:, None], experts)
        weights = tl.where(place == j, weight[:, None], weights)
    if S.is_normalized:
        weights = weights / (tl.sum(weights, 1)[:, None] + S.smallest)
    return weights, experts


@triton.jit
def _finish(
    found, bias, scales, weights, experts, counts, rows, copy_places, copy_counts, place_totals,
    slot_mapping, token, tokens, scale, slot_stride,
    TOKENS: tl.constexpr, BY_KEYS: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Selects the experts of tokens [TOKENS] by logits `found` [TOKENS, S.padded], writes them and
    their weights, enters the pairs into their buckets, and counts them."""
    chosen_weights, chosen = _select(found, bias, TOKENS, BY_KEYS, S)
    j = tl.arange(0, S.k_padded)[None, :]
    pair = token[:, None] * S.pairs + j
    is_token = token < tokens
    mask = is_token[:, None] & (j < S.top_k)
    if S.has_scales:
        chosen_weights *= tl.load(scales + chosen, mask, 0.0)
    tl.store(weights + pair, chosen_weights * scale, mask)
    if S.copies > 0:
        number = token[:, None] % tl.load(copy_counts + chosen, mask, 1)
        chosen = tl.load(copy_places + chosen * S.copies + number, mask, 0)
    tl.store(experts + pair, chosen, mask)
    if S.buckets:
        rank = tl.atomic_add(counts + chosen, 1, mask, sem="relaxed")
        # after a step that failed between two launches, counters are too high
        tl.store(rows + chosen * tokens + rank, pair, mask & (rank < tokens))
    if S.counted:
        is_real = tl.load(slot_mapping + token * slot_stride, is_token, -1) >= 0
        tl.atomic_add(place_totals + chosen, 1, mask & is_real[:, None], sem="relaxed")


@triton.jit(do_not_specialize=["tokens", "scale", "slot_stride"])
def _few_tokens_kernel(
    x, weight, bias, logit_bias, scales, logits, weights, experts, counts, rows, tickets,
    copy_places, copy_counts, place_totals, slot_mapping, gate, tokens, x_stride, scale,
    slot_stride, norm, norm_factors, eps,
    HIDDEN: tl.constexpr, PART: tl.constexpr, STEP: tl.constexpr, HAS_NORM: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """See `expert_selection`."""
    if S.has_shared:  # noqa: SIM102  (known when it is compiled)
        if tl.program_id(0) == S.padded // PART:
            take_shared(
                x, gate, norm, weights, experts, counts, rows,
                tl.program_id(1) + tl.arange(0, 1), tokens, x_stride, eps, HIDDEN, 1, STEP,
                HAS_NORM, PDL, S,
            )  # fmt: skip
            return
    is_last = few_logits(
        x, weight, norm, logits, norm_factors, tickets, x_stride, eps, HIDDEN, PART, STEP, HAS_NORM,
        EARLY, PDL, S,
    )  # fmt: skip
    if is_last:
        token = tl.program_id(1) + tl.arange(0, 1)
        every = tl.arange(0, S.padded)[None, :]
        found = tl.load(logits + token[:, None] * S.padded + every)
        if S.has_logit_bias:
            found += tl.load(logit_bias + every, every < S.experts, 0.0).to(tl.float32)
        _finish(
            found, bias, scales, weights, experts, counts, rows, copy_places, copy_counts,
            place_totals, slot_mapping, token, tokens, scale, slot_stride, 1, True, S,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "scale", "slot_stride"])
def _routing_kernel(
    x, weight, bias, logit_bias, scales, logits, weights, experts, counts, rows, tickets,
    copy_places, copy_counts, place_totals, slot_mapping, gate, tokens, x_stride, scale,
    slot_stride,
    HIDDEN: tl.constexpr, TOKENS: tl.constexpr, PART: tl.constexpr, STEP: tl.constexpr,
    BY_KEYS: tl.constexpr, PDL: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = S.padded // PART
    part, tile = tl.program_id(0), tl.program_id(1)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    if S.has_shared:  # noqa: SIM102  (known when it is compiled)
        if part == PARTS:
            take_shared(
                x, gate, x, weights, experts, counts, rows, token, tokens, x_stride, 0.0, HIDDEN,
                TOKENS, STEP, False, PDL, S,
            )  # fmt: skip
            return
    expert = part * PART + tl.arange(0, PART)
    k = tl.arange(0, STEP)
    is_token, is_expert = token < tokens, expert < S.experts
    row_place = x + token.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_place = weight + expert[:, None] * HIDDEN + k[None, :]
    wait_for_kernel(PDL)
    totals = tl.zeros([TOKENS, PART], tl.float32)
    for begin in range(0, HIDDEN, STEP):
        inside = (begin + k < HIDDEN)[None, :]
        value = tl.load(row_place + begin, is_token[:, None] & inside, 0.0)
        w = tl.load(weight_place + begin, is_expert[:, None] & inside, 0.0)
        totals = tl.dot(value, tl.trans(w), totals, input_precision="ieee")
    if PARTS == 1:
        found = totals
    else:
        place = logits + token[:, None] * S.padded
        tl.store(place + expert[None, :], totals, is_token[:, None])
        if not is_last_of(tickets + tile, PARTS):
            return
        found = tl.load(place + tl.arange(0, S.padded)[None, :], is_token[:, None], 0.0)
    if S.has_logit_bias:  # of one dimension: else the selection takes its layout, across warps
        every = tl.arange(0, S.padded)
        found += tl.load(logit_bias + every, every < S.experts, 0.0).to(tl.float32)[None, :]
    _finish(
        found, bias, scales, weights, experts, counts, rows, copy_places, copy_counts,
        place_totals, slot_mapping, token, tokens, scale, slot_stride, TOKENS, BY_KEYS, S,
    )  # fmt: skip


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    rule: RoutingRule,
    counters: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    logit_bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    buckets: bool = True,
    local: range | None = None,
    copies: CopyTable | None = None,
    totals: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    shared: SharedRoute | None = None,
    pdl: bool = False,
    config: RoutingConfig | FewTokensConfig | None = None,
) -> RoutedTokens:
    """Returns the experts of each token.

    Args:
        x: [T, H], T > 0; bf16, fp16 or fp32; rows may be strided.
        weight: [num_experts, H] of the router, of x's dtype; products are accumulated in float32.
        rule: how experts are selected.
        counters: from `make_counters`, for as many places as there are, and one more for an expert
            that all tokens take; the `counts` of the result
            are a view of it, and the last kernel that reads them sets them to 0
            (`expert_product.sum_pairs`).
        bias: [num_experts], added to the scores for the selection alone.
        logit_bias: [num_experts], added to the logits.
        scales: float32 [num_experts], multiplied with the weights of each expert.
        buckets: whether to fill `counts` and `rows`, of all experts.
        local: see `RoutedTokens`.
        copies: the places of each expert; by default an expert is a place.
        totals: int32 [places]; the tokens of each place are added, modulo 2 ** 32.
        slots: int64 [T], negative for tokens that are padding, which are routed and not counted; by
            default none is.
        norm_weight: [H] of the RMSNorm (with `eps`) that x passes through first; for `FEW_TOKENS`
            tokens at most, and for products that take `RoutedTokens.norm_factors`.
        shared: an expert that all tokens take, behind the others; without `copies`, of a rank that
            has all experts. Its tokens are not added to `totals`.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).
        config: instead of `routing_config`'s (for tests and tuning).

    Raises:
        ValueError: the shapes do not fit, or `supports_rule` returns false.
    """
    (tokens, hidden), experts = x.shape, rule.num_experts
    config = config or routing_config(tokens, experts, x.element_size())
    if shared is not None and (copies is not None or local is not None):
        raise ValueError("an expert that all tokens take has neither copies nor other ranks")
    _check_route(x, weight, rule)
    padded, is_few = padded_experts(experts), isinstance(config, FewTokensConfig)
    if norm_weight is not None and not is_few:
        raise ValueError(f"{config} does no norm")
    parts, tiles = _grid(tokens, experts, config)
    size = tokens * padded if parts > 1 or is_few else 1
    logits = x.new_empty(size, dtype=torch.float32)
    pairs = rule.top_k + (shared is not None)
    weights = x.new_empty(tokens, pairs, dtype=torch.float32)
    chosen = x.new_empty(tokens, pairs, dtype=torch.int32)
    tickets, counts = counters[:MAX_SHARED_TILES], counters[MAX_SHARED_TILES:]
    rows = x.new_empty(len(counts) if buckets else 0, tokens, dtype=torch.int32)
    # of tokens without slots one stands for all: two tickets, which are never negative
    slot_mapping = tickets[:2].view(torch.int64) if slots is None else slots
    constants = _configured(config)
    gate = None if shared is None else shared.gate
    spec = RoutingSpec(
        experts, padded, rule.top_k, triton.next_power_of_2(rule.top_k), rule.is_sigmoid,
        rule.is_normalized, bias is not None, logit_bias is not None, rule.num_groups,
        rule.top_groups, rule.group_best, buckets,
        0 if copies is None else copies.places.shape[1], totals is not None, pairs,
        shared is not None, gate is not None, scales is not None,
    )  # fmt: skip
    norm_factors = None if norm_weight is None else x.new_empty(tokens, dtype=torch.float32)
    norm = ()
    if is_few:
        norm = (weight, logits, eps) if norm_factors is None else (norm_weight, norm_factors, eps)
        constants["HAS_NORM"] = norm_factors is not None
    kernel = _few_tokens_kernel if is_few else _routing_kernel
    kernel[(parts + (shared is not None), tiles)](
        x, weight, weight if bias is None else bias, weight if logit_bias is None else logit_bias,
        weight if scales is None else scales, logits, weights, chosen, counts, rows, tickets,
        *((counts, counts) if copies is None else (copies.places, copies.counts)),
        counts if totals is None else totals, slot_mapping, weight if gate is None else gate,
        tokens, x.stride(0), rule.scale, 0 if slots is None else 1, *norm,
        HIDDEN=hidden, PDL=pdl, S=spec, launch_pdl=pdl, **constants,
    )  # fmt: skip
    filled = (counts, rows) if buckets else (None, None)
    return RoutedTokens(weights, chosen, *filled, local, norm_factors)


def _check_route(x: torch.Tensor, weight: torch.Tensor, rule: RoutingRule) -> None:
    """Raises ValueError where these arguments of `route` do not fit."""
    experts = rule.num_experts
    if weight.shape != (experts, x.shape[1]) or x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(
            f"x must be [T, H] with contiguous rows and weight [{experts}, H], not "
            f"{tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if not supports_rule(rule):
        raise ValueError(f"{rule} is not supported")


def _grid(tokens: int, experts: int, config: RoutingConfig | FewTokensConfig) -> tuple[int, int]:
    """Returns among how many programs the experts are divided, and how many tiles of tokens there
    are. Raises ValueError if there are too many tokens for the configuration."""
    parts = padded_experts(experts) // config.experts
    if isinstance(config, FewTokensConfig):
        tiles, is_shared = tokens, True
    else:
        tiles, is_shared = triton.cdiv(tokens, config.tokens), parts > 1
    if is_shared and tiles > MAX_SHARED_TILES:
        raise ValueError(f"{tokens} tokens are too many for {config}")
    return parts, tiles


def _configured(config: RoutingConfig | FewTokensConfig) -> dict[str, Any]:
    """Returns the compile-time constants of a kernel for its configuration."""
    values = {"PART": config.experts, "STEP": config.step, "num_warps": config.num_warps}
    if isinstance(config, FewTokensConfig):
        return values | {"EARLY": config.early_weights}
    tile = {"TOKENS": config.tokens, "BY_KEYS": config.by_keys, "num_stages": config.num_stages}
    return values | tile


def supports_rule(rule: RoutingRule) -> bool:
    """Whether the kernel selects by a rule: the sizes of groups must be powers of two."""
    size = rule.num_experts // rule.num_groups if rule.top_groups < rule.num_groups else 1
    return size & (size - 1) == 0 and rule.top_k <= rule.num_experts and 1 <= rule.group_best <= 2


def padded_experts(num_experts: int) -> int:
    """Returns the columns that logits of so many experts have."""
    return max(16, triton.next_power_of_2(num_experts))


def make_counters(num_places: int, device: torch.device) -> torch.Tensor:
    """Returns the counters of `route`, zeros. `route` leaves them 0 but for the counters of places,
    which are experts where experts have no copies."""
    return torch.zeros(MAX_SHARED_TILES + num_places, dtype=torch.int32, device=device)
