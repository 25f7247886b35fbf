"""The second product of a mixture of experts for one token, summed over its experts in the same
launch, with the residual stream added. `expert_product.expert_product` and `sum_pairs` take two
launches for the same.

Called by `layers.kernel_experts` in decode steps of one row. A program has the same output features
of all of the token's experts: each thread multiplies and adds up over the experts first, so that
the threads of a program add up once, as they do for one expert in `expert_vector`.
"""
# ruff: noqa: N803, N806  (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from aioinfer.kernels.expert_arguments import first_expert
from aioinfer.kernels.expert_configs import VectorConfig
from aioinfer.kernels.expert_routing import RoutedTokens
from aioinfer.kernels.expert_weights import (
    ExpertWeights,
    PackedExperts,
    ScaledExperts,
    values_and_scales,
)
from aioinfer.kernels.launch import wait_for_kernel

#: Output features of a program, each of all experts, and inputs of a step: the fastest of nine on
#: an H200 for 8 of 128 experts of 2048 x 768 (notes/experts.md).
CONFIG = VectorConfig(4, 1024, 4)


def supports(weight: ExpertWeights) -> bool:
    """Whether `summed_product` takes a weight: as it is, or with a scale for each row."""
    if isinstance(weight, ScaledExperts):
        return not weight.is_grouped
    return not isinstance(weight, PackedExperts)


@triton.jit(do_not_specialize=["first_expert"])
def _sum_vector_kernel(
    x, weight, scales, bias, factors, experts, residual, added, out, first_expert,
    FEATURES: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, SCALED: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_ADDED: tl.constexpr, PARTIAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program computes OUTPUTS features. With PARTIAL there are weights of EXPERTS experts from
    `first_expert` on, and others."""
    SCALE_ROWS: tl.constexpr = (FEATURES + ROWS_PER_SCALE - 1) // ROWS_PER_SCALE
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, STEP)
    is_line = n < FEATURES
    wait_for_kernel(PDL)
    products = tl.zeros([OUTPUTS, STEP], tl.float32)
    total = tl.zeros([OUTPUTS], tl.float32)
    for j in tl.static_range(TOP_K):
        expert, factor = tl.load(experts + j), tl.load(factors + j)
        here = is_line
        if PARTIAL:
            expert -= first_expert
            is_here = (expert >= 0) & (expert < EXPERTS)
            # experts of other ranks are not read: the rows of their pairs have not been written
            expert, here = tl.where(is_here, expert, 0), is_line & is_here
        place = weight + (expert * FEATURES + n).to(tl.int64)[:, None] * INPUTS + k[None, :]
        scale = tl.zeros([OUTPUTS], tl.float32) + factor
        if SCALED:
            scale *= tl.load(scales + expert * SCALE_ROWS + n // ROWS_PER_SCALE, here, 0.0)
        for begin in tl.static_range(0, INPUTS, STEP):
            inside = begin + k < INPUTS
            mask = here[:, None] & inside[None, :]
            w = tl.load(place + begin, mask, 0.0).to(tl.float32)
            is_read = inside
            if PARTIAL:
                is_read = inside & is_here
            value = tl.load(x + j * INPUTS + begin + k, is_read, 0.0).to(tl.float32)
            products += w * (scale[:, None] * value[None, :])
        if HAS_BIAS:
            total += factor * tl.load(bias + expert * FEATURES + n, here, 0.0).to(tl.float32)
    total += tl.sum(products, 1)
    if HAS_ADDED:
        total += tl.load(added + n, is_line, 0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + n, is_line, 0.0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), is_line)


def summed_product(
    x: torch.Tensor,
    weight: ExpertWeights,
    routed: RoutedTokens,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    config: VectorConfig = CONFIG,
) -> torch.Tensor:
    """Returns the weighted sum [1, N] over the experts of one token in `routed.local`, accumulated
    in float32.

    Args:
        x: [top_k, K], the result of the first product with the same `routed`; contiguous; bf16,
            fp16 or fp32.
        weight: [E, N, K] of the experts `routed.local` that `supports` takes, contiguous.
        routed: of one token, without buckets.
        bias: [E, N], of any dtype.
        residual, added: [1, N], added to the sum if given.
        out: [1, N] to write to; may be `residual`; by default a new tensor.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).
        config: how the kernel is compiled (for tests and tuning).

    Raises:
        ValueError: the shapes do not fit, or the weight is not supported.
    """
    (tokens, top_k), (num_experts, features, inputs) = routed.experts.shape, weight.shape
    values, scales = values_and_scales(weight)
    others = [tensor for tensor in (residual, added, out) if tensor is not None]
    if tokens != 1 or routed.counts is not None or not supports(weight):
        raise ValueError("only one token without buckets, of weights with a scale for each row")
    if x.shape != (top_k, inputs) or any(tensor.shape != (1, features) for tensor in others):
        raise ValueError(f"x must be [{top_k}, {inputs}], and the others [1, {features}]")
    if not all(tensor.is_contiguous() for tensor in (x, values, *others)):
        raise ValueError("all must be contiguous")
    if routed.local is not None and len(routed.local) != num_experts:
        raise ValueError(f"weight must be of the experts {routed.local}, not of {num_experts}")
    if out is None:
        out = torch.empty(1, features, dtype=x.dtype, device=x.device)
    is_scaled = isinstance(weight, ScaledExperts)
    _sum_vector_kernel[(triton.cdiv(features, config.features),)](
        x, values, scales, values if bias is None else bias, routed.weights, routed.experts,
        x if residual is None else residual, x if added is None else added, out,
        first_expert(routed), FEATURES=features, INPUTS=inputs, OUTPUTS=config.features,
        STEP=min(config.step, triton.next_power_of_2(inputs)), TOP_K=top_k, EXPERTS=num_experts,
        SCALED=is_scaled, ROWS_PER_SCALE=weight.rows_per_scale if is_scaled else 1,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        HAS_ADDED=added is not None, PARTIAL=routed.local is not None, PDL=pdl,
        num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
