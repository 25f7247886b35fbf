"""The products of a mixture of experts for one token.

Launched by `expert_product`. A program has output features of one of the token's
experts, so that there is nothing to look for, and multiply-adds in float32 read the weights as fast
as memory gives them (see `few_rows_dense`).
"""
# ruff: noqa: N803, N806  (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from aioinfer.kernels.expert_arguments import ExpertArguments, first_expert
from aioinfer.kernels.expert_configs import VectorConfig
from aioinfer.kernels.expert_tiles import activate
from aioinfer.kernels.expert_weights import ScaledExperts, values_and_scales
from aioinfer.kernels.few_rows_scaled import RUN_OF_INPUTS, row_sums
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["first_expert"])
def _vector_kernel(
    x, weight, w_scales, bias, factors, experts, norm, norm_factors, out, first_expert,
    FEATURES: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
    EXPERTS: tl.constexpr, GATED: tl.constexpr, RUN: tl.constexpr, SCALED: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, RUN_OF_INPUTS: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, HAS_NORM: tl.constexpr, PARTIAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes a product for one token: a program computes OUTPUTS features of one of its experts.
    `first_expert` and PARTIAL as in `expert_matrix`. Weights as they are, or SCALED; a row has
    GROUPS scales. With HAS_NORM x is multiplied by the norm's weight, and the sums by its
    factor."""
    WIDTH: tl.constexpr = FEATURES // 2 if GATED else FEATURES
    GROUPED: tl.constexpr = GROUPS > 1
    SCALE_ROWS: tl.constexpr = (FEATURES + ROWS_PER_SCALE - 1) // ROWS_PER_SCALE
    pair = tl.program_id(1)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, STEP)
    line = n + n // RUN * RUN if GATED else n
    is_line = n < WIDTH
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(experts + pair)
    if PARTIAL:
        expert -= first_expert
        if (expert < 0) | (expert >= EXPERTS):
            return
    place = weight + (expert * FEATURES + line).to(tl.int64)[:, None] * INPUTS + k[None, :]
    scales = w_scales + expert * (SCALE_ROWS * GROUPS)
    row = x if GATED else x + pair * INPUTS
    total = tl.zeros([OUTPUTS], tl.float32)
    up_total = tl.zeros([OUTPUTS], tl.float32)
    for begin in tl.static_range(0, INPUTS, STEP):
        inside = begin + k < INPUTS
        mask = is_line[:, None] & inside[None, :]
        value = tl.load(row + begin + k, inside, 0.0).to(tl.float32)
        if HAS_NORM:
            value *= tl.load(norm + begin + k, inside, 0.0).to(tl.float32)
        value = value[None, :]
        w = tl.load(place + begin, mask, 0.0)
        if GATED:
            up = tl.load(place + RUN * INPUTS + begin, mask, 0.0)
            up_total += row_sums(
                up.to(tl.float32) * value, scales, line + RUN, begin, is_line, GROUPS, OUTPUTS,
                STEP, GROUPED, GROUP, RUN_OF_INPUTS, ROWS_PER_SCALE,
            )  # fmt: skip
        total += row_sums(
            w.to(tl.float32) * value, scales, line, begin, is_line, GROUPS, OUTPUTS, STEP, GROUPED,
            GROUP, RUN_OF_INPUTS, ROWS_PER_SCALE,
        )  # fmt: skip
    if SCALED and not GROUPED:
        total *= tl.load(scales + line // ROWS_PER_SCALE, is_line, 0.0)
        if GATED:
            up_total *= tl.load(scales + (line + RUN) // ROWS_PER_SCALE, is_line, 0.0)
    if HAS_NORM:
        factor = tl.load(norm_factors)
        total *= factor
        up_total *= factor
    if HAS_BIAS:
        total += tl.load(bias + expert * FEATURES + line, is_line, 0.0).to(tl.float32)
        if GATED:
            up_total += tl.load(bias + expert * FEATURES + line + RUN, is_line, 0.0).to(tl.float32)
    if GATED:
        total = activate(total, up_total, ALPHA, LIMIT)
    else:
        total *= tl.load(factors + pair)
    tl.store(out + pair * WIDTH + n, total.to(out.dtype.element_ty), is_line)


def launch_vector(
    x: torch.Tensor, given: ExpertArguments, out: torch.Tensor, config: VectorConfig
) -> None:
    """Launches the product of one token."""
    weight, routed = given.weight, given.routed
    values, scales = values_and_scales(weight)
    is_scaled, norm = isinstance(weight, ScaledExperts), given.norm_weight
    _vector_kernel[(triton.cdiv(out.shape[1], config.features), routed.experts.shape[1])](
        x, values, scales, values if given.bias is None else given.bias, routed.weights,
        routed.experts, *((x, x) if norm is None else (norm, routed.norm_factors)), out,
        first_expert(routed), HAS_NORM=norm is not None, OUTPUTS=config.features, STEP=config.step,
        SCALED=is_scaled, GROUPS=scales.shape[2] if is_scaled else 1, RUN_OF_INPUTS=RUN_OF_INPUTS,
        num_warps=config.num_warps, launch_pdl=given.pdl, **given.constants(),
    )  # fmt: skip
