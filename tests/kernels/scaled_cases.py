"""Random weights of one byte and activations for the kernels that multiply them, and the results
beside those of the references: for the interpreter's tests and the tests on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from aioinfer.kernels.few_rows_dense import FewRowsConfig
from aioinfer.kernels.few_rows_scaled import ScaledMatrix, few_rows_scaled
from aioinfer.kernels.quantize import GROUP, MAXIMA, SCALE_ROWS, InputFormat, ScaledInputs, quantize
from aioinfer.kernels.scaled_product import ProductConfig, cublas_product, scaled_product
from cases import Pair, normal, poisoned
from references import dequantized, product_reference, quantize_reference

FP8, INT8 = torch.float8_e4m3fn, torch.int8


@dataclass(slots=True)
class ScaledCase:
    """One product.

    Attributes:
        rows, features, inputs: of the product; with `gated`, the weight has twice the features.
        kind: of the weight's values.
        rows_per_scale: neighbouring rows of the weight that share scales.
        grouped: whether each `GROUP` inputs have scales of their own.
        dtype: of 16-bit (or 32-bit) activations and of the result.
    """

    rows: int
    features: int
    inputs: int
    kind: torch.dtype
    dtype: torch.dtype
    device: str
    grouped: bool = False
    rows_per_scale: int = 1
    gated: bool = False


def matrix(case: ScaledCase) -> ScaledMatrix:
    """Returns a weight whose scales differ by up to a factor of 4."""
    rows = case.features * (1 + case.gated)
    maximum = MAXIMA[case.kind]
    values = torch.randn(rows, case.inputs, device=case.device) * (maximum / 4)
    values = values.clamp(-maximum, maximum).to(case.kind)
    groups = -(-case.inputs // GROUP) if case.grouped else 1
    shape = -(-rows // case.rows_per_scale), groups
    scales = (0.5 + 1.5 * torch.rand(shape, device=case.device)) * 4 / maximum / case.inputs**0.5
    counters = torch.zeros(64, dtype=torch.int32, device=case.device)
    return ScaledMatrix(values, scales, case.rows_per_scale, counters)


def activations(case: ScaledCase) -> ScaledInputs:
    """Returns random activations in float8 whose scales differ, stored as `quantize` does: what
    pads the tokens of a group is NaN."""
    x = torch.randn(case.rows, case.inputs, device=case.device)
    x *= 0.1 + 10 * torch.rand(case.rows, 1, device=case.device)
    values = quantize_reference(x.to(case.dtype), InputFormat(FP8, case.grouped))
    padding = (0, -case.rows % SCALE_ROWS if case.grouped else 0)
    scales = torch.nn.functional.pad(values.scales.t(), padding, value=float("nan"))
    return ScaledInputs(values.values, scales[:, : case.rows].t())


def block_matrix(case: ScaledCase) -> ScaledMatrix:
    """Returns a weight with scales of 128 x 128 blocks; with `gated` and runs of eight, those of
    the gate and of up, interleaved."""
    weight = matrix(case)
    if not case.gated or case.rows_per_scale == GROUP:
        return weight
    runs = torch.arange(len(weight.scales), device=case.device)
    per_block = GROUP // case.rows_per_scale
    scales = weight.scales[runs // per_block * per_block + runs % 2].contiguous()
    return ScaledMatrix(weight.values, scales, case.rows_per_scale, weight.counters, True)


def few_rows(case: ScaledCase, *, normed: bool, config: FewRowsConfig | None = None) -> Pair:
    """Runs `few_rows_scaled`: with a residual where it is not gated."""
    x = normal(case.rows, case.inputs, dtype=case.dtype, device=case.device)
    weight = matrix(case)
    norm = normal(case.inputs, dtype=case.dtype, device=case.device) if normed else None
    shape = case.rows, case.features
    residual = None if case.gated else normal(*shape, dtype=case.dtype, device=case.device)
    out = few_rows_scaled(
        x, weight, norm_weight=norm, residual=residual, gated=case.gated, config=config,
        out=poisoned(*shape, dtype=case.dtype, device=case.device),
    )  # fmt: skip
    wide = [None if t is None else t.double() for t in (norm, residual)]
    return out, product_reference(
        x.double(), weight, norm_weight=wide[0], residual=wide[1], gated=case.gated
    )


def inputs_of(case: ScaledCase, *, groups: bool | None) -> torch.Tensor | ScaledInputs:
    """Returns activations: quantized with a scale for each token (`groups` is false) or for each
    token and group, or, for None, as they are. Tokens differ in magnitude."""
    x = torch.randn(case.rows, case.inputs, device=case.device)
    x = (x * (0.1 + 10 * torch.rand(case.rows, 1, device=case.device))).to(case.dtype)
    return x if groups is None else quantize_reference(x, InputFormat(case.kind, groups))


def many_rows(
    case: ScaledCase, *, groups: bool | None, config: ProductConfig | None = None,
    residual: str | None = None,
) -> Pair:  # fmt: skip
    """Runs `scaled_product`; `residual` is "sum" or "bias"."""
    x, weight = inputs_of(case, groups=groups), matrix(case)
    shape = case.rows, case.features
    added = None
    if residual is not None:
        added = normal(*shape, dtype=case.dtype, device=case.device)
        added = added[:1].expand(shape) if residual == "bias" else added
    out = poisoned(*shape, dtype=case.dtype, device=case.device)
    scaled_product(x, weight, case.dtype, residual=added, gated=case.gated, out=out, config=config)
    return out, product_reference(x, weight, residual=added, gated=case.gated)


def cublas(case: ScaledCase) -> Pair:
    """Runs `cublas_product`."""
    x, weight = inputs_of(case, groups=False), matrix(case)
    assert isinstance(x, ScaledInputs)
    out = poisoned(case.rows, case.features, dtype=case.dtype, device=case.device)
    return cublas_product(x, weight, out), product_reference(x, weight)


def quantized(
    rows: int, width: int, format: InputFormat, dtype: torch.dtype, device: str, *, before: str = ""
) -> tuple[ScaledInputs, ScaledInputs]:
    """Runs `quantize` after "norm" or nothing; returns the result and the reference."""
    x = normal(rows, width, dtype=dtype, device=device)
    x *= torch.arange(1, rows + 1, device=device)[:, None] / rows
    if rows > 2:
        x[2] = 0
    norm = normal(width, dtype=dtype, device=device) if before == "norm" else None
    return (quantize(x, format, norm_weight=norm), quantize_reference(x, format, norm_weight=norm))


def check_quantized_sums(ours: ScaledInputs, theirs: ScaledInputs) -> None:
    """Compares what an all-reduce quantized with what `quantize` makes of the same sums: a value
    between two may be rounded to either."""
    torch.testing.assert_close(ours.scales, theirs.scales, rtol=1e-5, atol=0.0)
    differ = ours.values.float() != theirs.values.float()
    assert int(differ.sum()) <= 0.01 * differ.numel()


def quantization_error(ours: ScaledInputs, theirs: ScaledInputs) -> float:
    """Returns the larger normwise error, of the scales and of the activations. A value between two
    may be rounded to either: less than one in 500 may differ."""
    scales = (ours.scales - theirs.scales).norm() / theirs.scales.norm()
    values, expected = ours.values.float(), theirs.values.float()
    assert (values != expected).float().mean() < 1 / 500
    wide, reference = dequantized(ours), dequantized(theirs)
    return max(float(scales), float((wide - reference).norm() / reference.norm()))
