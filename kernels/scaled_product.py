"""Products of one-byte weights with many rows: of quantized activations on the tensor cores for
float8 or int8, or of 16-bit activations with weights that are converted in registers.

Called by linear layers with weights of one byte (`layers.formats.kernel_scaled`) for more rows than
`few_rows_scaled` takes. A program computes a tile of Y^T = W X^T, the weight as the left operand
(with 16-bit activations it is converted between shared memory and the tensor cores), and loads both
with TMA. Sums of blocks of 128 inputs are scaled and added in float32 (DeepSeek-V3, DeepSeek-AI
2024), which also bounds the error of the tensor cores' accumulators; scales of tokens and output
features are applied at the end. The epilogue, a residual sum or the gate of an MLP, is part of the
tile. Rows of a gated weight are interleaved, so that the gate and its partner are in the same
thread.

Where each output feature has a scale, cuBLASLt is the alternative (`use_cublas`); for float8 on
Hopper, a kernel in Gluon (`scaled_hopper`).
"""
# ruff: noqa: N803, N806  (compile-time constants are written in capitals)

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from aioinfer.kernels.few_rows_scaled import ScaledMatrix
from aioinfer.kernels.launch import first_bound, is_last_of, wait_for_kernel
from aioinfer.kernels.products import product_output
from aioinfer.kernels.quantize import GROUP, ScaledInputs
from triton.tools.tensor_descriptor import TensorDescriptor

Inputs = torch.Tensor | ScaledInputs
#: TMA reads rows that begin at multiples of so many bytes.
ALIGNMENT = 16
#: From so many rows on cuBLASLt multiplies where nothing follows the product: with a gate or a
#: residual sum after it, it takes longer than `scaled_product`.
CUBLAS_ROWS = 1024


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """The compile-time configuration of the kernel.

    Attributes:
        features, tokens: of a tile: weight rows and columns of the output's transpose.
        step: inputs of a stage.
        num_warps, num_stages: as Triton has them.
        group: token tiles that are computed with a weight tile before the next weight tile.
        exact_sums: add the float8 sums of each step in float32; Hopper's tensor cores keep about
            14 bits. Always so with scales of blocks.
        splits: programs that share the inputs of a tile (split-K); the last to finish sums their
            parts in a fixed order.
    """

    features: int
    tokens: int
    step: int
    num_warps: int
    num_stages: int
    group: int = 8
    exact_sums: bool = False
    splits: int = 1


#: The rows up to which each pair is used: the second for `WIDE_LINES` weight rows and more.
#: Measured on an H200 at the shapes of Qwen3-8B (notes/quantized-products.md).
CONFIGS = (
    (16, (ProductConfig(64, 16, 256, 4, 6), ProductConfig(64, 32, 128, 4, 6))),
    (32, (ProductConfig(64, 32, 256, 4, 5), ProductConfig(64, 32, 128, 4, 6))),
    (64, (ProductConfig(64, 64, 256, 4, 4, splits=2), ProductConfig(128, 64, 128, 4, 4))),
    (128, (ProductConfig(64, 128, 128, 4, 6, splits=2), ProductConfig(256, 128, 128, 8, 4))),
    (256, (ProductConfig(64, 128, 128, 4, 6), ProductConfig(128, 128, 128, 8, 6))),
    (None, (ProductConfig(128, 256, 128, 8, 3), ProductConfig(128, 256, 128, 8, 3))),
)
#: For scales of blocks: the sums of a block stand beside the total, for which the registers of the
#: widest tile do not suffice. Two programs of four warps fit a multiprocessor: one can multiply
#: while the other scales.
BLOCK_CONFIGS = (
    (16, (ProductConfig(64, 16, 128, 4, 6, splits=4), ProductConfig(64, 16, 128, 4, 6))),
    (32, (ProductConfig(64, 32, 128, 4, 5, splits=4), ProductConfig(64, 32, 128, 4, 5))),
    (64, (ProductConfig(64, 64, 128, 4, 6, splits=4), ProductConfig(64, 64, 128, 4, 6))),
    (128, (ProductConfig(64, 128, 128, 4, 4, splits=4), ProductConfig(64, 128, 128, 4, 4))),
    (None, (ProductConfig(64, 128, 128, 4, 4), ProductConfig(64, 128, 128, 4, 4))),
)
WIDE_LINES = 8192
#: Activations that are not quantized: the weight's tile goes through registers to be converted.
PLAIN_CONFIG = ProductConfig(64, 64, 128, 4, 4)
#: For activations of 32 bits, which only tests have.
WIDE_CONFIG = ProductConfig(64, 32, 32, 4, 2)
#: Programs share the inputs of a tile only if each has so many of them; with scales of blocks each
#: input costs more instructions, so that fewer pay.
_MIN_SHARE, _MIN_BLOCK_SHARE = 4096, 1024
#: And only if that gives no more programs than run at a time.
MAX_PROGRAMS = 264


def product_config(rows: int, lines: int, inputs: int, *, grouped: bool) -> ProductConfig:
    """Returns the configuration for quantized activations [rows, inputs] and a weight of `lines`
    rows; `grouped` for scales of blocks."""
    table = BLOCK_CONFIGS if grouped else CONFIGS
    narrow, wide = first_bound(table, rows)
    config = wide if lines >= WIDE_LINES else narrow
    share = _MIN_BLOCK_SHARE if grouped else _MIN_SHARE
    tiles = -(-lines // config.features) * -(-rows // config.tokens)
    splits = config.splits
    while splits > 1 and (inputs < splits * share or tiles * splits > MAX_PROGRAMS):
        splits //= 2
    return replace(config, splits=splits)


@triton.jit
def _place(item, token_tiles, weight_tiles, GROUP_SIZE: tl.constexpr):
    """Returns the token tile and the weight tile of program `item`."""
    first = item // (GROUP_SIZE * weight_tiles) * GROUP_SIZE
    size = tl.minimum(token_tiles - first, GROUP_SIZE)
    rest = item % (GROUP_SIZE * weight_tiles)
    return first + rest % size, rest // size


@triton.jit
def _scaled_part(
    part, x_scales, w_scales, tokens, is_token, first, lines, is_line, group, token_stride, groups,
    FEATURES: tl.constexpr, X_GROUPED: tl.constexpr, ROWS_PER_SCALE: tl.constexpr,
):  # fmt: skip
    """Returns the sums of one block of inputs [FEATURES, TOKENS] times their scales. Where a tile's
    rows share the weight's scale, it is multiplied with the tokens' scales first."""
    if ROWS_PER_SCALE % FEATURES == 0:
        scale = tl.load(w_scales + first // ROWS_PER_SCALE * groups + group)
        if X_GROUPED:
            factors = tl.load(x_scales + group * token_stride + tokens, is_token, 0.0) * scale
            part *= factors[None, :]
        else:
            part *= scale
    else:
        scales = tl.load(w_scales + lines // ROWS_PER_SCALE * groups + group, is_line, 0.0)
        part *= scales[:, None]
        if X_GROUPED:
            part *= tl.load(x_scales + group * token_stride + tokens, is_token, 0.0)[None, :]
    return part


@triton.jit
def _gate(totals, FEATURES: tl.constexpr, TOKENS: tl.constexpr):
    """Returns silu(gate) * up [FEATURES / 2, TOKENS] of interleaved rows [FEATURES, TOKENS]."""
    pairs = tl.reshape(totals, [FEATURES // 16, 2, 8, TOKENS])
    gate, up = tl.split(tl.permute(pairs, [0, 2, 3, 1]))
    return tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, [FEATURES // 2, TOKENS])


@triton.jit
def _sum_of_parts(totals, partials, counters, SPLITS: tl.constexpr):
    """Returns the sum of all programs' parts of a tile [FEATURES, TOKENS] in the order of the
    programs, and whether this one is the last to finish: the sum is wrong in others."""
    index, split = tl.program_id(0), tl.program_id(1)
    size: tl.constexpr = totals.shape[0] * totals.shape[1]
    rows = tl.arange(0, totals.shape[0])[:, None]
    place = partials + index * (SPLITS * size) + rows * totals.shape[1]
    place += tl.arange(0, totals.shape[1])[None, :]
    tl.store(place + split * size, totals)
    is_last = is_last_of(counters + index, SPLITS)
    if is_last:
        totals = tl.load(place)
        for other in range(1, SPLITS):
            totals += tl.load(place + other * size)
    return totals, is_last


@triton.jit(do_not_specialize=["rows", "token_tiles", "weight_tiles", "token_stride"])
def _product_kernel(
    x, weight, x_scales, w_scales, residual, out, partials, counters, rows, features, token_tiles,
    weight_tiles, token_stride, groups, residual_stride, out_stride,
    INPUTS: tl.constexpr, FEATURES: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr,
    GROUP_SIZE: tl.constexpr, X_SCALES: tl.constexpr, GROUPED: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    SUM: tl.constexpr, EXACT_SUMS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes a product with one-byte weights. `features` are weight rows; X_SCALES is 0 for
    16-bit activations, 1 for scales of tokens and 2 for scales of tokens and groups."""
    token_tile, weight_tile = _place(tl.program_id(0), token_tiles, weight_tiles, GROUP_SIZE)
    tokens = token_tile * TOKENS + tl.arange(0, TOKENS)
    lines = weight_tile * FEATURES + tl.arange(0, FEATURES)
    is_token, is_line = tokens < rows, lines < features
    wait_for_kernel(PDL)
    totals = tl.zeros([FEATURES, TOKENS], SUM)
    STEPS: tl.constexpr = (INPUTS + STEP - 1) // STEP
    SHARE: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    begin = tl.program_id(1) * SHARE if SPLITS > 1 else 0
    for step in range(begin, min(begin + SHARE, STEPS)):
        w = weight.load([weight_tile * FEATURES, step * STEP])
        value = x.load([token_tile * TOKENS, step * STEP])
        if X_SCALES == 0:
            w = w.to(value.dtype)
        if GROUPED:
            part = tl.dot(w, tl.trans(value), input_precision="ieee", out_dtype=tl.float32)
            totals += _scaled_part(
                part, x_scales, w_scales, tokens, is_token, weight_tile * FEATURES, lines, is_line,
                step, token_stride, groups, FEATURES, X_SCALES == 2, ROWS_PER_SCALE,
            )  # fmt: skip
        elif EXACT_SUMS:
            totals += tl.dot(w, tl.trans(value), input_precision="ieee", out_dtype=SUM)
        else:
            totals = tl.dot(w, tl.trans(value), totals, input_precision="ieee", out_dtype=SUM)
    totals = totals.to(tl.float32)
    if SPLITS > 1:
        totals, is_last = _sum_of_parts(totals, partials, counters, SPLITS)
        if not is_last:
            return
    if X_SCALES == 1:
        totals *= tl.load(x_scales + tokens, is_token, 0.0)[None, :]
    if not GROUPED:
        totals *= tl.load(w_scales + lines // ROWS_PER_SCALE, is_line, 0.0)[:, None]
    columns = lines
    if GATED:
        totals = _gate(totals, FEATURES, TOKENS)
        columns = weight_tile * (FEATURES // 2) + tl.arange(0, FEATURES // 2)
        features = features // 2
    mask = (columns < features)[:, None] & is_token[None, :]
    if HAS_RESIDUAL:
        place = residual + tokens.to(tl.int64)[None, :] * residual_stride + columns[:, None]
        totals += tl.load(place, mask, 0.0).to(tl.float32)
    place = out + tokens.to(tl.int64)[None, :] * out_stride + columns[:, None]
    tl.store(place, totals.to(out.dtype.element_ty), mask)


def scaled_product(
    x: Inputs,
    weight: ScaledMatrix,
    dtype: torch.dtype,
    *,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    config: ProductConfig | None = None,
) -> torch.Tensor:
    """Returns x @ weight.T.

    Args:
        x: [M, K]; quantized to the dtype of the weight's values (with scales of groups only if the
            weight has them), or bf16, fp16 or fp32. K is a multiple of 16.
        weight: [N, K]; with `gated` [2 * N, K], interleaved, N a multiple of 8.
        dtype: of the result.
        residual: [M, N], added to the product; may be `out`; rows may be strided, by 0 for a bias.
        gated: returns silu(x @ gate.T) * (x @ up.T), as `few_rows_scaled` does.
        out: [M, N] to write to; by default a new tensor.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later).
        config: instead of `product_config`'s (for tests and tuning).

    Raises:
        ValueError: the shapes do not fit.
    """
    values, x_scales, scaling = _parts(x)
    assert x_scales is None or len(x_scales) == 0 or x_scales.stride(0) == 1
    (rows, inputs), lines, grouped = values.shape, len(weight.values), weight.is_grouped
    out = product_output(
        values, weight.values.shape, out, gated=gated, stored=(weight.values,), dtype=dtype
    )  # fmt: skip
    if inputs * weight.values.element_size() % ALIGNMENT:
        raise ValueError(f"K must be a multiple of {ALIGNMENT}, not {inputs}")
    if scaling == 2 and not grouped:
        raise ValueError("x has scales of groups, and the weight has none")
    if not rows:
        return out
    config = config or _select_config(values, scaling, lines, grouped=grouped)
    step = GROUP if grouped else config.step
    token_tiles, weight_tiles = -(-rows // config.tokens), -(-lines // config.features)
    added = out if residual is None else residual
    splits = _num_splits(config, weight, token_tiles * weight_tiles, -(-inputs // step))
    partials = out
    if splits > 1:
        size = token_tiles * weight_tiles * splits * config.features * config.tokens
        partials = torch.empty(size, dtype=torch.float32, device=values.device)
    counters = weight.scales if weight.counters is None else weight.counters
    _product_kernel[(token_tiles * weight_tiles, splits)](
        TensorDescriptor.from_tensor(values, [config.tokens, step]),
        TensorDescriptor.from_tensor(weight.values, [config.features, step]),
        weight.scales if x_scales is None else x_scales, weight.scales, added, out, partials,
        counters, rows, lines, token_tiles, weight_tiles,
        x_scales.stride(1) if scaling == 2 else rows, weight.scales.shape[1],
        added.stride(0), out.stride(0),
        INPUTS=inputs, FEATURES=config.features, TOKENS=config.tokens, STEP=step,
        GROUP_SIZE=config.group, X_SCALES=scaling, GROUPED=grouped,
        ROWS_PER_SCALE=weight.rows_per_scale, HAS_RESIDUAL=residual is not None, GATED=gated,
        SUM=tl.int32 if values.dtype == torch.int8 else tl.float32, EXACT_SUMS=config.exact_sums,
        SPLITS=splits, PDL=pdl, num_warps=config.num_warps, num_stages=config.num_stages,
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def _select_config(
    values: torch.Tensor, scaling: int, lines: int, *, grouped: bool
) -> ProductConfig:
    """Returns the configuration for values [M, K] and a weight of so many lines."""
    if values.element_size() > 2:
        return WIDE_CONFIG
    if scaling == 0:
        return PLAIN_CONFIG
    return product_config(len(values), lines, values.shape[1], grouped=grouped)


def _num_splits(config: ProductConfig, weight: ScaledMatrix, tiles: int, steps: int) -> int:
    """Returns how many programs share the inputs of a tile: as many as the configuration has, where
    there are counters for all tiles and steps for all programs."""
    if weight.counters is None or tiles > len(weight.counters):
        return 1
    return min(config.splits, steps)


def _parts(x: Inputs) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Returns the values, their scales, and the kernel's X_SCALES."""
    if isinstance(x, torch.Tensor):
        return x, None, 0
    return x.values, x.scales, 2 if x.scales.shape[1] > 1 else 1


def use_cublas(
    x: Inputs, weight: ScaledMatrix, dtype: torch.dtype, min_rows: int = CUBLAS_ROWS
) -> bool:
    """Whether `cublas_product` takes these, and is meant to: on Hopper and later, float8 with a
    scale for each token and each output feature, bf16 out, `min_rows` rows or more."""
    return (
        isinstance(x, ScaledInputs)
        and x.values.is_cuda
        and len(x) >= min_rows
        and x.values.dtype == torch.float8_e4m3fn
        and dtype == torch.bfloat16
        and x.scales.shape[1] == 1
        and weight.scales.shape == (len(weight.values), 1)
        and len(weight.values) % ALIGNMENT == 0
        and torch.cuda.get_device_capability(x.values.device) >= (9, 0)
    )


def cublas_product(
    x: ScaledInputs, weight: ScaledMatrix, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns x @ weight.T in bf16, computed by cuBLASLt; `use_cublas` must accept the arguments.

    Args:
        out: [M, N] to write to; by default a new tensor.
    """
    token_scales = x.scales[:, 0].unsqueeze(1)  # whose strides torch accepts
    arguments = (x.values, weight.values.t(), token_scales, weight.scales.t())
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    if out is None:
        return torch._scaled_mm(*arguments, **options)
    return torch._scaled_mm(*arguments, **options, out=out)
