"""The products of a mixture of experts: each token with the weights of its own experts, for any
number of tokens, in a grid that depends on the number of tokens alone.

Called by `layers.kernel_experts` with what `expert_routing.route` found. The weights of all experts
are one tensor, and a program computes a tile of Y^T = W X^T for rows of one expert: the weight is
the left operand, so that a tile has as few rows as an expert has (8 or more), while the tensor
cores get 64 output features. Every expert's weights are read once where its rows fit a tile.

The first product gathers its rows from x and applies the gate: rows of gate and up are interleaved
(`gated_product.interleave`), so that both are in one thread. The second multiplies by the routing
weights, and `sum_pairs` adds up a token's experts in a fixed order, with the residual stream.

Which rows a program has:
- with buckets, tiles are numbered expert by expert, and a program finds the expert of its tile by a
  scan over the counters. What the first product writes is sorted by expert, so that the second one
  reads whole tiles;
- for a few tokens a program belongs to a pair, looks for its expert among all pairs, and leaves if
  an earlier pair has the same one; otherwise it takes all of them. That needs neither counters nor
  a sort;
- for one token there is nothing to look for (`_vector_kernel`), and multiply-adds in float32 read
  the weights as fast as memory gives them (see `linear`).

A rank may have some of the experts alone (`RoutedTokens.local`): the weights are those of these,
their tiles are numbered as if there were no others, the pairs of others are left out of what lies
between the products and of their results, and `sum_pairs` skips them.

Programs beyond the last tile end at once, or there are as many programs as the GPU runs at a time,
and each takes tile after tile. Programs of one tile of rows are neighbours, so that their rows, and
the weights of the few experts in flight, are in the L2 cache.
"""
# ruff: noqa: N803, N806  (compile-time constants are written in capitals)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from aioinfer.kernels.activation import GATE_RUN, gated_activation_reference
from aioinfer.kernels.expert_configs import (
    SCANNED_TOKENS,
    ExpertConfig,
    VectorConfig,
    expert_config,
    vector_config,
)
from aioinfer.kernels.expert_routing import RoutedTokens
from aioinfer.kernels.expert_tiles import FLOATS, INTEGERS, PLAIN, SCALED, activate, multiply
from aioinfer.kernels.expert_weights import ExpertWeights, PackedExperts, ScaledExperts
from aioinfer.kernels.grouped_weight import TILE
from aioinfer.kernels.quantize import GROUP, ScaledInputs
from aioinfer.kernels.scaled_linear import RUN_OF_INPUTS, _row_sums
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

#: Output features of a program of `sum_pairs`.
SUM_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Activation:
    """What the first product makes of gate and up: silu(gate) * up, or, with `alpha`, gate *
    sigmoid(alpha * gate) * (up + 1) of a gate of at most `limit` and of up within -limit .. limit
    (gpt-oss)."""

    alpha: float = 0.0
    limit: float = 0.0


SILU = Activation()


@triton.jit
def _ends(
    counts, tokens, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Returns how many tiles, times 2 ** 32, and rows there are up to each expert, inclusive."""
    number = tl.arange(0, EXPERTS_PAD)
    sizes = tl.minimum(tl.load(counts + number, number < EXPERTS, 0), tokens)
    tiles = (sizes + ROWS - 1) // ROWS
    return tl.cumsum((tiles.to(tl.int64) << 32) + sizes, 0)


@triton.jit
def _expert_of_tile(ends, counts, item, tokens, ROWS: tl.constexpr):
    """Returns of the tile `item`, which there is: its expert, its first row in the expert's bucket,
    the rows of the expert, and the rows of all experts before it."""
    is_before = (ends >> 32) <= item
    expert = tl.sum(is_before.to(tl.int32), 0)
    begin = tl.max(tl.where(is_before, ends, 0), 0)
    size = tl.minimum(tl.load(counts + expert), tokens)
    return expert, (item - (begin >> 32).to(tl.int32)) * ROWS, size, begin.to(tl.int32)


@triton.jit
def _pairs_like(
    experts, item, pairs, PAIRS_PAD: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Returns the expert of pair `item`, its first pair, the pairs [ROWS] that have it, and how
    many they are."""
    number = tl.arange(0, PAIRS_PAD)
    every = tl.load(experts + number, number < pairs, -1)
    expert = tl.load(experts + item)
    is_same = every == expert
    first = tl.min(tl.where(is_same, number, PAIRS_PAD), 0)
    rank = tl.cumsum(is_same.to(tl.int32), 0) - 1
    place = tl.arange(0, ROWS)[:, None]
    is_here = is_same[None, :] & (rank[None, :] == place)
    pair = tl.sum(tl.where(is_here, number[None, :], 0), 1)
    return expert, first, pair, tl.sum(is_same.to(tl.int32), 0)


@triton.jit
def _multiply_bucket(
    x, weight, x_scales, w_scales, bias, factors, out, expert, line_tile, bucket, left, first,
    x_stride, factor,
    FEATURES: tl.constexpr, INPUTS: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, RUN: tl.constexpr,
    TMA: tl.constexpr, TMA_ROWS: tl.constexpr, FORMAT: tl.constexpr, X_SCALES: tl.constexpr,
    GROUPED: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, WORDS: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, TILE: tl.constexpr, HAS_BIAS: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, HAS_FACTOR: tl.constexpr,
):  # fmt: skip
    """Computes a tile for the first ROWS, or the `left`, pairs of a bucket."""
    place = tl.arange(0, ROWS)
    is_row = place < left
    pair = tl.load(bucket + place, is_row, 0)
    multiply(
        x, weight, x_scales, w_scales, bias, factors, out, expert, line_tile, pair, first + place,
        first, is_row, x_stride, factor, FEATURES, INPUTS, LINES, ROWS, STEP, TOP_K, GATED, RUN,
        TMA, TMA_ROWS, FORMAT, X_SCALES, GROUPED, ROWS_PER_SCALE, WORDS, GROUP, HAS_ZEROS, TILE,
        HAS_BIAS, ALPHA, LIMIT, HAS_FACTOR,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "first_expert", "x_stride", "factor"])
def _expert_kernel(
    x, row_tiles, weight, x_scales, w_scales, bias, factors, experts, counts, buckets, out, tokens,
    first_expert, x_stride, factor,
    FEATURES: tl.constexpr, INPUTS: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    PAIRS_PAD: tl.constexpr, GATED: tl.constexpr, RUN: tl.constexpr, TMA: tl.constexpr,
    TMA_ROWS: tl.constexpr, TAIL: tl.constexpr, FORMAT: tl.constexpr, X_SCALES: tl.constexpr,
    GROUPED: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, WORDS: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, TILE: tl.constexpr, HAS_BIAS: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, HAS_FACTOR: tl.constexpr, PARTIAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """FEATURES are weight rows of an expert; PAIRS_PAD is 0 with buckets. `row_tiles` is a
    descriptor of x with TMA_ROWS. There are weights of EXPERTS experts from `first_expert` on; with
    PARTIAL there are others."""
    LINE_TILES: tl.constexpr = (FEATURES + LINES - 1) // LINES
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if PAIRS_PAD > 0:
        item, line_tile = tl.program_id(0) // LINE_TILES, tl.program_id(0) % LINE_TILES
        expert, first_pair, pair, size = _pairs_like(experts, item, tokens * TOP_K, PAIRS_PAD, ROWS)
        is_mine = first_pair == item
        if PARTIAL:
            expert -= first_expert
            is_mine = is_mine & (expert >= 0) & (expert < EXPERTS)
        if is_mine:
            multiply(
                x, weight, x_scales, w_scales, bias, factors, out, expert, line_tile, pair, pair, 0,
                tl.arange(0, ROWS) < size, x_stride, factor, FEATURES, INPUTS, LINES, ROWS, STEP,
                TOP_K, GATED, RUN, TMA, TMA_ROWS, FORMAT, X_SCALES, GROUPED, ROWS_PER_SCALE, WORDS,
                GROUP, HAS_ZEROS, TILE, HAS_BIAS, ALPHA, LIMIT, HAS_FACTOR,
            )  # fmt: skip
    else:
        if PARTIAL:
            counts += first_expert
            buckets += first_expert * tokens
        ends = _ends(counts, tokens, EXPERTS, EXPERTS_PAD, ROWS)
        tiles = (tl.max(ends, 0) >> 32).to(tl.int32) * LINE_TILES
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            item, line_tile = tile // LINE_TILES, tile % LINE_TILES
            expert, begin, size, before = _expert_of_tile(ends, counts, item, tokens, ROWS)
            bucket, left = buckets + expert * tokens + begin, size - begin
            if TAIL == 0:
                _multiply_bucket(
                    row_tiles, weight, x_scales, w_scales, bias, factors, out, expert, line_tile,
                    bucket, left, before + begin, x_stride, factor, FEATURES, INPUTS, LINES, ROWS,
                    STEP, TOP_K, GATED, RUN, TMA, TMA_ROWS, FORMAT, X_SCALES, GROUPED,
                    ROWS_PER_SCALE, WORDS, GROUP, HAS_ZEROS, TILE, HAS_BIAS, ALPHA, LIMIT,
                    HAS_FACTOR,
                )  # fmt: skip
            else:
                if left <= TAIL:
                    _multiply_bucket(
                        x, weight, x_scales, w_scales, bias, factors, out, expert, line_tile,
                        bucket, left, before + begin, x_stride, factor, FEATURES, INPUTS, LINES,
                        TAIL, STEP, TOP_K, GATED, RUN, TMA, False, FORMAT, X_SCALES, GROUPED,
                        ROWS_PER_SCALE, WORDS, GROUP, HAS_ZEROS, TILE, HAS_BIAS, ALPHA, LIMIT,
                        HAS_FACTOR,
                    )  # fmt: skip
                else:
                    _multiply_bucket(
                        row_tiles, weight, x_scales, w_scales, bias, factors, out, expert,
                        line_tile, bucket, left, before + begin, x_stride, factor, FEATURES, INPUTS,
                        LINES, ROWS, STEP, TOP_K, GATED, RUN, TMA, TMA_ROWS, FORMAT, X_SCALES,
                        GROUPED, ROWS_PER_SCALE, WORDS, GROUP, HAS_ZEROS, TILE, HAS_BIAS, ALPHA,
                        LIMIT, HAS_FACTOR,
                    )  # fmt: skip


@triton.jit(do_not_specialize=["first_expert"])
def _vector_kernel(
    x, weight, w_scales, bias, factors, experts, norm, norm_factors, out, first_expert,
    FEATURES: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
    EXPERTS: tl.constexpr, GATED: tl.constexpr, RUN: tl.constexpr, SCALED: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, RUN_OF_INPUTS: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, HAS_NORM: tl.constexpr, PARTIAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token; a program computes OUTPUTS features of one of its experts. `first_expert` and
    PARTIAL as in `_expert_kernel`. Weights as they are, or SCALED; a row has GROUPS scales. With
    HAS_NORM x is multiplied by the norm's weight, and the sums by its factor."""
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
            up_total += _row_sums(
                up.to(tl.float32) * value, scales, line + RUN, begin, is_line, GROUPS, OUTPUTS,
                STEP, GROUPED, GROUP, RUN_OF_INPUTS, ROWS_PER_SCALE,
            )  # fmt: skip
        total += _row_sums(
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
    config: ExpertConfig | VectorConfig | None = None,
) -> torch.Tensor:
    """Returns the product of each pair's row with its expert's weight.

    With `gated`, the first product: activation(x @ gate.T, x @ up.T) of the token's row, in the
    order that the second one wants. Without, the second: row @ weight.T times the pair's routing
    weight, by pairs. Rows of pairs of experts that are not in `routed.local` are not written, and
    those of the first product are then fewer.

    Args:
        x: [T, K] with `gated`, else [T * top_k, K], the result of the first product with the same
            `routed`; contiguous; bf16, fp16 or fp32; for float8 weights, and more than one token,
            quantized as well (with scales of groups only if the weights have them).
        weight: [E, N, K] of the experts `routed.local`, contiguous; unquantized of x's dtype. With
            `gated` [E, 2 * N, K], the rows of each expert interleaved, N a multiple of 8.
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
    tokens, top_k = routed.experts.shape
    num_local, lines, _ = weight.shape
    num_experts = num_local if routed.counts is None else len(routed.counts)
    values = x if isinstance(x, torch.Tensor) else x.values
    width = lines // 2 if gated else lines
    _check(x, weight, routed, gated, config)
    if out is None:
        dtype = dtype or values.dtype
        out = torch.empty(tokens * top_k, width, dtype=dtype, device=values.device)
    is_one = routed.counts is None and tokens == 1 and isinstance(x, torch.Tensor)
    if config is None and is_one and not isinstance(weight, PackedExperts):
        config = vector_config(gated=gated, itemsize=_parts(weight)[0].element_size())
    if norm_weight is not None and not (
        gated and routed.norm_factors is not None and isinstance(config, VectorConfig)
    ):
        raise ValueError("the first product of one token does the norm, if the routing did it")
    given = _Product(weight, routed, gated, bias, activation, norm_weight, pdl)
    if isinstance(config, VectorConfig):
        assert isinstance(x, torch.Tensor)
        _launch_vector(x, given, out, config)
    else:
        if config is None:
            size = values.element_size()
            format = format_name(weight, quantized=isinstance(x, ScaledInputs))
            config = expert_config(tokens, top_k, num_experts, size, format)
        _launch_tiles(x, given, out, config)
    return out


@dataclass(frozen=True, slots=True)
class _Product:
    """The arguments of `expert_product` that both kernels take."""

    weight: ExpertWeights
    routed: RoutedTokens
    gated: bool
    bias: torch.Tensor | None
    activation: Activation
    norm_weight: torch.Tensor | None
    pdl: bool

    def constants(self) -> dict[str, Any]:
        """Returns what both kernels are compiled for."""
        experts, lines, inputs = self.weight.shape
        weight, activation = self.weight, self.activation
        return {
            "FEATURES": lines, "INPUTS": inputs, "EXPERTS": experts, "GATED": self.gated,
            "RUN": GATE_RUN, "HAS_BIAS": self.bias is not None, "ALPHA": activation.alpha,
            "LIMIT": activation.limit, "PARTIAL": self.routed.local is not None, "GROUP": GROUP,
            "ROWS_PER_SCALE": weight.rows_per_scale if isinstance(weight, ScaledExperts) else 1,
            "PDL": self.pdl,
        }  # fmt: skip


def _parts(weight: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what is multiplied, and its scales, or anything if there are none."""
    if isinstance(weight, torch.Tensor):
        return weight, weight
    values = weight.values if isinstance(weight, ScaledExperts) else weight.words
    return values, weight.scales


def format_name(weight: ExpertWeights, *, quantized: bool = True) -> str:
    """Returns the format by which a configuration is selected, a key of `TABLES`; `quantized` says
    whether activations are, where weights have one byte."""
    if isinstance(weight, torch.Tensor):
        return "plain"
    if isinstance(weight, ScaledExperts):
        if not quantized:
            return "weights alone"
        return "blocks" if weight.is_grouped else "scaled"
    return "mxfp4" if weight.is_float else "integers"


def _launch_vector(
    x: torch.Tensor, given: _Product, out: torch.Tensor, config: VectorConfig
) -> None:
    """Launches the product of one token."""
    weight, routed = given.weight, given.routed
    values, scales = _parts(weight)
    is_scaled, norm = isinstance(weight, ScaledExperts), given.norm_weight
    _vector_kernel[(triton.cdiv(out.shape[1], config.features), routed.experts.shape[1])](
        x, values, scales, values if given.bias is None else given.bias, routed.weights,
        routed.experts, *((x, x) if norm is None else (norm, routed.norm_factors)), out,
        _first_expert(routed), HAS_NORM=norm is not None, OUTPUTS=config.features, STEP=config.step,
        SCALED=is_scaled, GROUPS=scales.shape[2] if is_scaled else 1, RUN_OF_INPUTS=RUN_OF_INPUTS,
        num_warps=config.num_warps, launch_pdl=given.pdl, **given.constants(),
    )  # fmt: skip


def _launch_tiles(
    x: torch.Tensor | ScaledInputs, given: _Product, out: torch.Tensor, config: ExpertConfig
) -> None:
    """Launches the product of tiles."""
    weight, routed, gated = given.weight, given.routed, given.gated
    (tokens, top_k), (num_local, lines, inputs) = routed.experts.shape, weight.shape
    rows = x if isinstance(x, torch.Tensor) else x.values
    values, scales = _parts(weight)
    is_packed, is_scanned = isinstance(weight, PackedExperts), routed.counts is None
    is_grouped = isinstance(weight, ScaledExperts) and weight.is_grouped
    items = tokens * top_k if is_scanned else max_tiles(tokens, top_k, num_local, config.rows)
    step = GROUP if is_grouped else config.step
    by_tma = config.tma and not is_packed and inputs * values.element_size() % 16 == 0
    rows_by_tma = by_tma and not gated and not is_scanned
    flat = values if is_packed else values.view(-1, inputs)
    grid = items * triton.cdiv(lines, config.lines)
    if config.programs and not is_scanned:
        grid = min(grid, config.programs * _multiprocessors(rows.device))
    x_scales = rows if isinstance(x, torch.Tensor) else x.scales
    constants = given.constants() | _packing(weight)
    _expert_kernel[(grid,)](
        rows, TensorDescriptor.from_tensor(rows, [config.rows, step]) if rows_by_tma else rows,
        TensorDescriptor.from_tensor(flat, [config.lines, step]) if by_tma else flat,
        x_scales, scales, rows if given.bias is None else given.bias, routed.weights,
        routed.experts, routed.experts if routed.counts is None else routed.counts,
        routed.experts if routed.rows is None else routed.rows, out, tokens, _first_expert(routed),
        x_scales.stride(1) if _scaling(x) == 2 else len(rows),
        2.0**weight.shift if isinstance(weight, PackedExperts) else 1.0,
        LINES=config.lines, ROWS=config.rows, STEP=step, TOP_K=top_k,
        EXPERTS_PAD=triton.next_power_of_2(num_local),
        PAIRS_PAD=scanned_pairs(config, top_k) if is_scanned else 0, TMA=by_tma,
        TMA_ROWS=rows_by_tma, TAIL=config.tail, X_SCALES=_scaling(x), GROUPED=is_grouped,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=given.pdl,
        **constants,
    )  # fmt: skip


def _packing(weight: ExpertWeights) -> dict[str, Any]:
    """Returns what a kernel of tiles is compiled for by the format of weights."""
    if isinstance(weight, PackedExperts):
        return {
            "FORMAT": FLOATS if weight.is_float else INTEGERS, "WORDS": weight.run,
            "GROUP": weight.group, "HAS_ZEROS": weight.has_zeros, "TILE": TILE,
            "HAS_FACTOR": weight.shift != 0,
        }  # fmt: skip
    format = PLAIN if isinstance(weight, torch.Tensor) else SCALED
    return {"FORMAT": format, "WORDS": 1, "HAS_ZEROS": False, "TILE": TILE, "HAS_FACTOR": False}


def _scaling(x: torch.Tensor | ScaledInputs) -> int:
    """Returns the kernel's X_SCALES."""
    if isinstance(x, torch.Tensor):
        return 0
    return 2 if x.scales.shape[1] > 1 else 1


def _first_expert(routed: RoutedTokens) -> int:
    return 0 if routed.local is None else routed.local.start


def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def max_tiles(tokens: int, top_k: int, num_experts: int, rows: int) -> int:
    """Returns how many tiles of `rows` rows there are at most, however tokens are routed."""
    pairs = tokens * top_k
    return min(num_experts, pairs) + pairs // rows


def scanned_pairs(config: ExpertConfig, top_k: int) -> int:
    """Returns the pairs, a power of two, that a program without buckets looks through: those of as
    many tokens as a tile has rows."""
    return config.rows * triton.next_power_of_2(top_k)


def _check(
    x: torch.Tensor | ScaledInputs, weight: ExpertWeights, routed: RoutedTokens, gated: bool,
    config: ExpertConfig | VectorConfig | None,
) -> None:  # fmt: skip
    tokens, top_k = routed.experts.shape
    num_local, lines, inputs = weight.shape
    rows = tokens if gated else tokens * top_k
    values = x if isinstance(x, torch.Tensor) else x.values
    is_contiguous = values.is_contiguous() and all(part.is_contiguous() for part in _parts(weight))
    if values.shape != (rows, inputs) or not is_contiguous:
        raise ValueError(
            f"x must be [{rows}, K] and weight [E, N, K], contiguous, not {tuple(values.shape)} "
            f"and {tuple(weight.shape)}"
        )
    if routed.local is not None and len(routed.local) != num_local:
        raise ValueError(f"weight must be of the experts {routed.local}, not of {num_local}")
    if gated and lines % (2 * GATE_RUN):
        raise ValueError(
            f"a gated weight must have 2 * N rows, N a multiple of {GATE_RUN}, not {lines}"
        )
    if not isinstance(x, torch.Tensor) and not isinstance(weight, ScaledExperts):
        raise ValueError("quantized activations are for float8 weights")
    if isinstance(weight, ScaledExperts) and _scaling(x) == 2 and not weight.is_grouped:
        raise ValueError("x has scales of groups, and the weight has none")
    if isinstance(config, VectorConfig) and (tokens > 1 or isinstance(weight, PackedExperts)):
        raise ValueError(f"{config} is for one token, and not for weights in four bits")
    if routed.counts is None and tokens > SCANNED_TOKENS:
        raise ValueError(f"{tokens} tokens need buckets")
    if routed.counts is None and isinstance(config, ExpertConfig) and tokens > config.rows:
        raise ValueError(f"{tokens} tokens need a tile of as many rows, or buckets")


@triton.jit(do_not_specialize=["first_expert"])
def _sum_kernel(
    pairs, residual, added, out, experts, counts, first_expert, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, TOP_K: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_ADDED: tl.constexpr,
    LOCAL: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Pairs are those of LOCAL experts from `first_expert` on, of all with LOCAL = 0."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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
    """Returns the sum over each token's experts, in their order, of those in `routed.local` alone,
    accumulated in float32; sets the counters of `routed` to 0 for the next `route`.

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
        routed.experts, routed.experts if counts is None else counts, _first_expert(routed),
        WIDTH=width, BLOCK=SUM_BLOCK, TOP_K=top_k, HAS_RESIDUAL=residual is not None,
        HAS_ADDED=added is not None, LOCAL=local, EXPERTS=experts,
        EXPERTS_PAD=triton.next_power_of_2(max(1, experts)), PDL=pdl, num_warps=2, launch_pdl=pdl,
    )  # fmt: skip
    return out


def activation_reference(gate_up: torch.Tensor, activation: Activation = SILU) -> torch.Tensor:
    """Returns the activations [..., I] of interleaved columns [..., 2 * I], in plain torch."""
    if not activation.alpha:
        return gated_activation_reference(gate_up)
    gate, up = gate_up.unflatten(-1, (-1, 2, GATE_RUN)).unbind(-2)
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return (gate * torch.sigmoid(activation.alpha * gate) * (up + 1)).flatten(-2)


def experts_reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    *,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    activation: Activation = SILU,
    rounded: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
) -> torch.Tensor:
    """Returns the weighted sum of the experts' outputs [T, H], expert by expert in plain torch and
    in x's dtype, for interleaved `gate_up` [E, 2 * I, H], `down` [E, H, I], and the `weights` and
    `experts` [T, top_k] of each token of x [T, H].

    Args:
        biases: of both products, [E, 2 * I] and [E, H].
        activation: of the first product.
        rounded: what the inputs of both products go through.
    """
    total = torch.zeros_like(x)
    for expert in experts.unique().tolist():
        token, place = (experts == expert).nonzero(as_tuple=True)
        both = rounded(x[token]) @ gate_up[expert].to(x.dtype).T
        both = both if biases is None else both + biases[0][expert].to(x.dtype)
        output = rounded(activation_reference(both, activation)) @ down[expert].to(x.dtype).T
        output = output if biases is None else output + biases[1][expert].to(x.dtype)
        total.index_add_(0, token, output * weights[token, place].to(x.dtype).unsqueeze(1))
    return total
