"""Products with weights of one byte, and the quantization of activations, at tiny sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from aioinfer.kernels.few_rows_dense import FewRowsConfig
from aioinfer.kernels.few_rows_scaled import ScaledMatrix, few_rows_scaled
from aioinfer.kernels.quantize import GROUP, InputFormat, quantize
from aioinfer.kernels.scaled_product import ProductConfig, product_config, scaled_product
from cases import error
from scaled_cases import (
    FP8,
    INT8,
    ScaledCase,
    cublas,
    few_rows,
    many_rows,
    quantization_error,
    quantized,
)

from tests.pairs import pairwise


@pairwise(
    gated__normed=[(True, True), (False, False)],
    rows=[1, 7, 16],
    kind__grouped=[(FP8, False), (FP8, True), (INT8, False)],
)
def test_few_rows(kind: torch.dtype, grouped: bool, rows: int, gated: bool, normed: bool) -> None:
    """Inputs that are no multiple of a step; blocks of rows of eight, as interleaving leaves
    them."""
    config = FewRowsConfig(4, GROUP, 4) if rows == 1 else FewRowsConfig(16, GROUP, 2, 2)
    features = 24 if gated else 21
    case = ScaledCase(
        rows, features, 208, kind, torch.float32, "cpu", grouped, 8 if grouped else 1, gated
    )
    assert error(few_rows(case, normed=normed, config=config)) < 1e-5


@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_in_float16_with_blocks_of_128_rows(rows: int) -> None:
    case = ScaledCase(rows, 160, 272, FP8, torch.float16, "cpu", True, 128)
    assert error(few_rows(case, normed=False)) < 1e-2


TILE = ProductConfig(32, 16, 64, 4, 2, group=2)


@pytest.mark.parametrize(
    ("kind", "grouped", "groups"),
    [
        (FP8, False, False), (FP8, False, None), (FP8, True, True), (FP8, True, False),
        (FP8, True, None), (INT8, False, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("gated", [True, False])
def test_many_rows(kind: torch.dtype, grouped: bool, groups: bool | None, gated: bool) -> None:
    """Rows, features and inputs that are no multiples of a tile; more token tiles than a group."""
    features = 40 if gated else 45
    case = ScaledCase(
        37, features, 208, kind, torch.float32, "cpu", grouped, 8 if grouped else 1, gated
    )
    residual = None if gated else "sum"
    assert error(many_rows(case, groups=groups, config=TILE, residual=residual)) < 1e-5


def test_sums_of_steps_are_added_apart() -> None:
    case = ScaledCase(19, 40, 208, FP8, torch.float32, "cpu")
    config = replace(TILE, exact_sums=True)
    assert error(many_rows(case, groups=False, config=config)) < 1e-5


@pytest.mark.parametrize("splits", [2, 3, 16])
@pytest.mark.parametrize("grouped", [False, True])
def test_programs_that_share_inputs(splits: int, grouped: bool) -> None:
    """More programs than steps are not launched; the counters are zero again afterwards."""
    config = ProductConfig(16, 16, 128, 4, 2, splits=splits)
    case = ScaledCase(20, 48, 640, INT8, torch.float32, "cpu", grouped=grouped)
    out, expected = many_rows(case, groups=grouped, config=config, residual="sum")
    assert error((out, expected)) < 1e-5


@pytest.mark.parametrize("groups", [True, None])
def test_a_tile_within_a_block(groups: bool | None) -> None:
    case = ScaledCase(19, 150, 272, FP8, torch.float32, "cpu", True, 128)
    assert error(many_rows(case, groups=groups, config=TILE, residual="bias")) < 1e-5


@pytest.mark.parametrize("rows", [2, 33])
def test_the_configurations_of_the_table(rows: int) -> None:
    case = ScaledCase(rows, 72, 144, FP8, torch.float16, "cpu")
    assert error(many_rows(case, groups=False)) < 1e-2
    assert error(many_rows(case, groups=None)) < 1e-2


@pytest.mark.parametrize("grouped", [False, True])
def test_every_number_of_rows_has_a_configuration(grouped: bool) -> None:
    """Up to 128 rows are one tile, so that the weight is read once."""
    for rows in (2, 16, 17, 64, 65, 128, 129, 8192):
        for lines in (4096, 24576):
            assert product_config(rows, lines, 4096, grouped=grouped).tokens >= min(rows, 128)


def test_inputs_are_shared_where_tiles_are_few() -> None:
    few, many = (product_config(100, lines, 12288, grouped=False) for lines in (4096, 24576))
    assert (few.splits, many.splits) == (2, 1)
    assert product_config(100, 4096, 4096, grouped=False).splits == 1
    assert product_config(100, 4096, 4096, grouped=True).splits == 4


def test_torch_takes_the_operands_of_cublas() -> None:
    """Its product on CPUs has the same checks."""
    case = ScaledCase(20, 48, 64, FP8, torch.bfloat16, "cpu")
    assert error(cublas(case)) < 1e-2


def test_no_rows() -> None:
    matrix = ScaledMatrix(torch.zeros(16, 32, dtype=INT8), torch.ones(16, 1))
    x = quantize(torch.zeros(0, 32), InputFormat(INT8))
    assert scaled_product(x, matrix, torch.float32).shape == (0, 16)


@pairwise(
    before=["", "norm"], width=[96, 304], kind__grouped=[(FP8, False), (FP8, True), (INT8, False)]
)
def test_quantization(kind: torch.dtype, grouped: bool, width: int, before: str) -> None:
    """Tokens of zeros; groups that are not whole."""
    pair = quantized(5, width, InputFormat(kind, grouped), torch.float32, "cpu", before=before)
    assert quantization_error(*pair) < 1e-3


@pytest.mark.parametrize("kind", [FP8, INT8])
def test_static_scales(kind: torch.dtype) -> None:
    """What is beyond the largest value of the type is clamped."""
    format = InputFormat(kind, static_scale=torch.tensor(0.004))
    ours, theirs = quantized(5, 96, format, torch.float32, "cpu")
    assert quantization_error(ours, theirs) < 1e-3
    assert (ours.values.float().abs() == (448 if kind == FP8 else 127)).any()
    assert torch.equal(ours.scales, torch.full((5, 1), 0.004))


def test_what_does_not_fit_is_refused() -> None:
    matrix = ScaledMatrix(torch.zeros(24, 8, dtype=INT8), torch.ones(24, 1))
    with pytest.raises(ValueError, match="x must be"):
        few_rows_scaled(torch.zeros(17, 8), matrix)
    with pytest.raises(ValueError, match="multiple of 8"):
        few_rows_scaled(torch.zeros(1, 8), matrix, gated=True)
    with pytest.raises(ValueError, match="multiple of 16"):
        scaled_product(torch.zeros(20, 8), matrix, torch.float32)
    with pytest.raises(ValueError, match="the weight has none"):
        scaled_product(
            quantize(torch.zeros(20, 256), InputFormat(INT8, is_grouped=True)),
            ScaledMatrix(torch.zeros(16, 256, dtype=INT8), torch.ones(16, 1)),
            torch.float32,
        )
    with pytest.raises(ValueError, match="contiguous rows"):
        quantize(torch.zeros(24, 2).T, InputFormat(INT8))
