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
from aioinfer.kernels.expert_tiles import activate, squared_relu
from aioinfer.kernels.expert_weights import values_and_scales
from aioinfer.kernels.few_rows_dense import row_sums, scale_rows
from aioinfer.kernels.launch import wait_for_kernel


@triton.jit(do_not_specialize=["first_expert"])
def _vector_kernel(
    x, weight, w_scales, bias, factors, experts, norm, norm_factors, out, first_expert,
    HAS_NORM: tl.constexpr, PDL: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Computes a product for one token: a program computes S.lines features of one of its experts,
    with weights as they are, or in one byte. `first_expert` and S.partial as in `expert_matrix`.
    With HAS_NORM x is multiplied by the norm's weight, and the sums by its factor."""
    INPUTS: tl.constexpr = S.inputs
    LINES: tl.constexpr = S.lines
    STEP: tl.constexpr = S.step
    HAS_GATE: tl.constexpr = S.gated and S.has_gate
    WIDTH: tl.constexpr = S.features // 2 if HAS_GATE else S.features
    GROUPS: tl.constexpr = (INPUTS + S.group - 1) // S.group if S.grouped else 1
    SCALE_ROWS: tl.constexpr = (S.features + S.rows_per_scale - 1) // S.rows_per_scale
    pair = tl.program_id(1)
    n = tl.program_id(0) * LINES + tl.arange(0, LINES)
    k = tl.arange(0, STEP)
    line = n + n // S.run * S.run if HAS_GATE else n
    is_line = n < WIDTH
    wait_for_kernel(PDL)
    expert = tl.load(experts + pair)
    if S.partial:
        expert -= first_expert
        if (expert < 0) | (expert >= S.experts):
            return
    place = weight + (expert * S.features + line).to(tl.int64)[:, None] * INPUTS + k[None, :]
    scales = w_scales + expert * (SCALE_ROWS * GROUPS)
    row = x if S.gated else x + pair * INPUTS
    total = tl.zeros([LINES], tl.float32)
    up_total = tl.zeros([LINES], tl.float32)
    for begin in tl.static_range(0, INPUTS, STEP):
        inside = begin + k < INPUTS
        mask = is_line[:, None] & inside[None, :]
        value = tl.load(row + begin + k, inside, 0.0).to(tl.float32)
        if HAS_NORM:
            value *= tl.load(norm + begin + k, inside, 0.0).to(tl.float32)
        value = value[None, :]
        w = tl.load(place + begin, mask, 0.0)
        if HAS_GATE:
            up = tl.load(place + S.run * INPUTS + begin, mask, 0.0)
            products = up.to(tl.float32) * value
            up_total += row_sums(products, scales, line + S.run, begin, is_line, GROUPS, S)
        products = w.to(tl.float32) * value
        total += row_sums(products, scales, line, begin, is_line, GROUPS, S)
    if S.format == 1 and not S.grouped:
        total, up_total = scale_rows(total, up_total, scales, line, is_line, HAS_GATE, S)
    if HAS_NORM:
        factor = tl.load(norm_factors)
        total *= factor
        up_total *= factor
    if S.has_bias:
        bias += expert * S.features + line
        total += tl.load(bias, is_line, 0.0).to(tl.float32)
        if HAS_GATE:
            up_total += tl.load(bias + S.run, is_line, 0.0).to(tl.float32)
    if HAS_GATE:
        total = activate(total, up_total, S)
    elif S.gated and not S.is_linear:
        total = squared_relu(total)
    elif not S.gated:
        total *= tl.load(factors + pair)
    tl.store(out + pair * WIDTH + n, total.to(out.dtype.element_ty), is_line)


def launch_vector(
    x: torch.Tensor, given: ExpertArguments, out: torch.Tensor, config: VectorConfig
) -> None:
    """Launches the product of one token."""
    values, scales = values_and_scales(given.weight)
    routed, norm = given.routed, given.norm_weight
    _vector_kernel[(triton.cdiv(out.shape[1], config.features), routed.experts.shape[1])](
        x, values, scales, values if given.bias is None else given.bias, routed.weights,
        routed.experts, *((x, x) if norm is None else (norm, routed.norm_factors)), out,
        first_expert(routed), HAS_NORM=norm is not None,
        PDL=given.pdl, S=given.spec(config.features, config.step), num_warps=config.num_warps,
        launch_pdl=given.pdl,
    )  # fmt: skip
