"""The float8 products of few rows in Gluon against float64 references, on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels.few_rows_float8 import FewRowsFloat8Config, few_rows_float8, supports
from cases import normal, poisoned
from references import product_reference
from scaled_cases import FP8, ScaledCase, matrix

DEVICE, BF16 = "cuda", torch.bfloat16
LIMIT = 1e-2
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
ROWS = (1, 2, 5, 8)
#: Output features, inputs, and whether gate and up are computed together.
SHAPES = [
    (6144, 4096, False), (4096, 4096, False), (12288, 4096, True), (4096, 12288, False),
    (3072, 1024, True), (1024, 3072, False), (1536, 576, True), (576, 1536, False),
    (96, 272, False),
]  # fmt: skip
CONFIGS = [
    FewRowsFloat8Config(features, warps, depth, 1)
    for features in (16, 32)
    for warps in (4, 8)
    for depth in (1, 4)
]


def product(
    case: ScaledCase, *, normed: bool = False, residual: bool = False, magnitude: float = 1.0,
    config: FewRowsFloat8Config | None = None, pdl: bool = False,
) -> float:  # fmt: skip
    """Returns the largest normwise error of a row; with a residual the result is written over
    it. Rows differ in magnitude, and lie apart in memory."""
    x = normal(case.rows, 2 * case.inputs, dtype=case.dtype, device=DEVICE)[:, : case.inputs]
    x *= magnitude * torch.logspace(0, -3, case.rows, device=DEVICE).to(case.dtype)[:, None]
    weight = matrix(case)
    assert supports(x, weight)
    norm = normal(case.inputs, dtype=case.dtype, device=DEVICE) if normed else None
    shape = case.rows, case.features
    added = normal(*shape, dtype=case.dtype, device=DEVICE) * magnitude if residual else None
    wide = [None if t is None else t.double() for t in (norm, added)]
    expected = product_reference(
        x.double(), weight, norm_weight=wide[0], residual=wide[1], gated=case.gated
    )
    out = poisoned(*shape, dtype=case.dtype, device=DEVICE) if added is None else added
    few_rows_float8(
        x, weight, norm_weight=norm, residual=added, gated=case.gated, out=out, config=config,
        pdl=pdl,
    )  # fmt: skip
    return float(((out.double() - expected).norm(dim=1) / expected.norm(dim=1)).max())


def case(rows: int, features: int, inputs: int, gated: bool, run: int = 0) -> ScaledCase:
    """`run`: rows that share scales of blocks; 0 for scales of channels."""
    return ScaledCase(rows, features, inputs, FP8, BF16, DEVICE, run > 0, max(run, 1), gated)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("features", "inputs", "gated"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_the_tables_configurations(
    rows: int, features: int, inputs: int, gated: bool, blocks: bool
) -> None:
    run = (8 if gated else 128) if blocks else 0
    one = case(rows, features, inputs, gated, run)
    for normed, residual, pdl in (
        (True, False, True),
        (False, not gated, True),
        (False, False, False),
    ):
        assert product(one, normed=normed, residual=residual, pdl=pdl) < LIMIT, (normed, residual)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rows", [1, 3])
def test_every_configuration(config: FewRowsFloat8Config, rows: int) -> None:
    """More tiles than programs, and inputs that are no whole steps."""
    for features, inputs, gated, run in (
        (4800, 1552, False, 0),
        (2400, 1552, True, 8),
        (4800, 576, False, 1),
        (4096, 4096, False, 128),
    ):
        result = product(case(rows, features, inputs, gated, run), normed=gated, config=config)
        assert result < LIMIT, (features, inputs, gated, run)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e5, 1e30])
def test_activations_beyond_the_range_of_float16(magnitude: float) -> None:
    for rows in (1, 3):
        assert product(case(rows, 512, 4096, False), magnitude=magnitude) < LIMIT
        assert product(case(rows, 512, 4096, False, 128), magnitude=magnitude) < LIMIT


def test_zeros_and_infinities() -> None:
    weight = matrix(case(2, 64, 512, False))
    x = torch.zeros(2, 512, dtype=BF16, device=DEVICE)
    assert not few_rows_float8(x, weight).any()
    x[1, 3] = float("inf")
    result = few_rows_float8(x, weight)
    assert not result[0].any()
    assert not result[1].isfinite().any()


def test_launches_one_after_the_other_with_pdl() -> None:
    """Each reads what the one before writes: the results are those of launches that wait."""
    weights = [matrix(case(1, 4096, 4096, False)) for _ in range(2)]
    x = normal(1, 4096, dtype=BF16, device=DEVICE)
    results = []
    for pdl in (False, True):
        total = x.clone()
        for _ in range(10):
            middle = few_rows_float8(total, weights[0], pdl=pdl)
            few_rows_float8(middle, weights[1], residual=total, out=total, pdl=pdl)
        results.append(total)
    assert torch.equal(*results)
