"""The products of a mixture of experts: each token with the weights of its own experts, for any
number of tokens, in a grid that depends on the number of tokens alone.

Called by `layers.kernel_experts` with the result of `expert_routing.route`. The weights of all
experts are one tensor. One token is multiplied by `expert_vector`, several by `expert_matrix`.

The first product gathers its rows from x and applies the gate: rows of gate and up are interleaved
(`gated_product.interleave`), so that both are in one thread. The second multiplies by the routing
weights, and `sum_pairs` adds up a token's experts in a fixed order, with the residual stream.

A rank may have some of the experts alone (`RoutedTokens.local`): the weights are the local experts'
own, their tiles are numbered as if there were no others, the pairs of others are left out of the
rows between the products and of the results, and `sum_pairs` skips them.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from aioinfer.kernels.expert_arguments import (
    SILU,
    Activation,
    ExpertArguments,
    check_arguments,
    first_expert,
)
from aioinfer.kernels.expert_configs import (
    ExpertConfig,
    PipelinedConfig,
    VectorConfig,
    expert_config,
    vector_config,
)
from aioinfer.kernels.expert_hopper import launch_pipelined, pipelined_config
from aioinfer.kernels.expert_matrix import launch_tiles
from aioinfer.kernels.expert_routing import RoutedTokens
from aioinfer.kernels.expert_vector import launch_vector
from aioinfer.kernels.expert_weights import (
    ExpertWeights,
    PackedExperts,
    format_name,
    values_and_scales,
)
from aioinfer.kernels.launch import wait_for_kernel
from aioinfer.kernels.quantize import ScaledInputs

#: Output features of a program of `sum_pairs`.
SUM_BLOCK = 512


def expert_product(
    x: torch.Tensor | ScaledInputs,
    weight: ExpertWeights,
    routed: RoutedTokens,
    *,
    gated: bool,
    bias: torch.Tensor | None = None,
    activation: Activation = SILU,
    norm_weight: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    config: ExpertConfig | VectorConfig | PipelinedConfig | None = None,
) -> torch.Tensor:
    """Returns the product of each pair's row with its expert's weight.

    With `gated`, the first product: activation(x @ gate.T, x @ up.T) of the token's row, in the
    order that the second one wants; of up alone for an activation without a gate. Without, the
    second: row @ weight.T times the pair's routing weight, by pairs. Rows of pairs of experts that
    are not in `routed.local` are not written, and the first product then has fewer rows.

    Args:
        x: [T, K] with `gated`, else [T * top_k, K], the result of the first product with the same
            `routed`; contiguous; bf16, fp16 or fp32; for float8 weights, and more than one token,
            quantized as well (with scales of groups only if the weights have them).
        weight: [E, N, K] of the experts `routed.local`, contiguous; unquantized of x's dtype. With
            `gated` [E, 2 * N, K], the rows of each expert interleaved, N a multiple of 8; [E, N, K]
            for an activation without a gate.
        routed: where the rows go. With buckets for more than `SCANNED_TOKENS` tokens; either way
            for fewer.
        bias: [E, N], or [E, 2 * N] in the order of the weight's rows; of any dtype.
        activation: of the first product.
        norm_weight: [K] of the RMSNorm that x passes through first; for one token whose routing did
            this norm (`RoutedTokens.norm_factors`), with a `VectorConfig`.
        dtype: of the result, if x is quantized.
        out: [T * top_k, N] to write to; by default a new tensor.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).
        config: instead of `expert_config`'s or `vector_config`'s (for tests and tuning).

    Raises:
        ValueError: the shapes do not fit.
    """
    values, lines = x if isinstance(x, torch.Tensor) else x.values, weight.shape[1]
    width = lines // 2 if gated and activation.is_gated else lines
    check_arguments(x, weight, routed, gated, activation, config)
    if out is None:
        dtype = dtype or values.dtype
        out = torch.empty(routed.experts.numel(), width, dtype=dtype, device=values.device)
    given = ExpertArguments(weight, routed, gated, bias, activation, norm_weight, pdl)
    config = config or _select_config(x, given)
    if norm_weight is not None and not (
        gated and routed.norm_factors is not None and isinstance(config, VectorConfig)
    ):
        raise ValueError("the first product of one token does the norm, if the routing did it")
    if isinstance(config, VectorConfig):
        assert isinstance(x, torch.Tensor)
        launch_vector(x, given, out, config)
    elif isinstance(config, PipelinedConfig):
        assert isinstance(x, torch.Tensor)
        launch_pipelined(x, given, out, config)
    else:
        launch_tiles(x, given, out, config)
    return out


def _select_config(
    x: torch.Tensor | ScaledInputs, given: ExpertArguments
) -> ExpertConfig | VectorConfig | PipelinedConfig:
    """Returns the configuration by the number of tokens and the format of the weight."""
    weight, routed, gated = given.weight, given.routed, given.gated
    tokens, top_k = routed.experts.shape
    is_plain = isinstance(x, torch.Tensor) and not isinstance(weight, PackedExperts)
    if routed.counts is None and tokens == 1 and is_plain:
        return vector_config(gated=gated, itemsize=values_and_scales(weight)[0].element_size())
    pipelined = pipelined_config(given)
    if pipelined is not None:
        return pipelined
    num_experts = weight.shape[0] if routed.counts is None else len(routed.counts)
    values = x if isinstance(x, torch.Tensor) else x.values
    format = format_name(weight, quantized=isinstance(x, ScaledInputs))
    return expert_config(tokens, top_k, num_experts, values.element_size(), format)


@triton.jit(do_not_specialize=["first_expert"])
def _sum_kernel(
    pairs, residual, added, out, experts, counts, first_expert, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, TOP_K: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_ADDED: tl.constexpr,
    LOCAL: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums the pairs of the LOCAL experts from `first_expert` on, of all experts with LOCAL = 0."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    wait_for_kernel(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        is_there = mask
        if LOCAL > 0:
            expert = tl.load(experts + row * TOP_K + j) - first_expert
            is_there = mask & (expert >= 0) & (expert < LOCAL)
        total += tl.load(pairs + (row * TOP_K + j) * WIDTH + column, is_there, 0.0).to(tl.float32)
    if HAS_ADDED:
        total += tl.load(added + row * WIDTH + column, mask, 0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + row * WIDTH + column, mask, 0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask)
    if EXPERTS > 0:  # noqa: SIM102  (known when it is compiled)
        if tl.program_id(0) + tl.program_id(1) == 0:
            number = tl.arange(0, EXPERTS_PAD)
            tl.store(counts + number, tl.zeros([EXPERTS_PAD], tl.int32), number < EXPERTS)


def sum_pairs(
    pairs: torch.Tensor,
    routed: RoutedTokens,
    *,
    residual: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Returns the sum over each token's experts in `routed.local`, in their order, accumulated in
    float32; sets the counters of `routed` to 0 for the next `route`.

    Args:
        pairs: [T * top_k, H], the result of the second product; contiguous.
        routed: of these pairs.
        residual, added: [T, H], added to the sum if given; contiguous.
        out: [T, H] to write to, contiguous; may be `residual`; by default a new tensor.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).

    Raises:
        ValueError: the shapes do not fit.
    """
    (tokens, top_k), width = routed.experts.shape, pairs.shape[1]
    others = [t for t in (residual, added, out) if t is not None]
    if len(pairs) != tokens * top_k or any(t.shape != (tokens, width) for t in others):
        raise ValueError(f"pairs must be [{tokens} * {top_k}, H], and the others [{tokens}, H]")
    if not all(t.is_contiguous() for t in (pairs, *others)):
        raise ValueError("all must be contiguous")
    if out is None:
        out = torch.empty(tokens, width, dtype=pairs.dtype, device=pairs.device)
    counts = routed.counts
    experts = 0 if counts is None else len(counts)
    local = 0 if routed.local is None else len(routed.local)
    _sum_kernel[(tokens, triton.cdiv(width, SUM_BLOCK))](
        pairs, pairs if residual is None else residual, pairs if added is None else added, out,
        routed.experts, routed.experts if counts is None else counts, first_expert(routed),
        WIDTH=width, BLOCK=SUM_BLOCK, TOP_K=top_k, HAS_RESIDUAL=residual is not None,
        HAS_ADDED=added is not None, LOCAL=local, EXPERTS=experts,
        EXPERTS_PAD=triton.next_power_of_2(max(1, experts)), PDL=pdl, num_warps=2, launch_pdl=pdl,
    )  # fmt: skip
    return out
