"""The float8 products of many rows in Gluon against float64 references, on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels.quantize import GROUP, InputFormat, ScaledInputs, quantize_reference
from aioinfer.kernels.scaled_hopper import hopper_product, supports
from aioinfer.kernels.scaled_product import scaled_product_reference
from aioinfer.kernels.scaled_tiles import CONFIGS, HopperConfig
from cases import error, normal, poisoned
from scaled_cases import FP8, ScaledCase, matrix

DEVICE, BF16 = "cuda", torch.bfloat16
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


def product(case: ScaledCase, config: HopperConfig, *, residual: bool) -> float:
    """Returns the normwise error of one product; with a residual, the result is written over it."""
    x = torch.randn(case.rows, case.inputs, device=DEVICE)
    x *= 0.1 + 10 * torch.rand(case.rows, 1, device=DEVICE)
    values = quantize_reference(x.to(case.dtype), InputFormat(FP8, case.grouped))
    scales = values.scales.t().contiguous().t()  # as `quantize` gives them
    inputs, weight = ScaledInputs(values.values, scales), matrix(case)
    assert supports(inputs, weight, case.dtype)
    shape = case.rows, case.features
    added = normal(*shape, dtype=case.dtype, device=DEVICE) if residual else None
    expected = scaled_product_reference(inputs, weight, residual=added, gated=case.gated)
    out = poisoned(*shape, dtype=case.dtype, device=DEVICE) if added is None else added
    hopper_product(
        inputs, weight, case.dtype, residual=added, gated=case.gated, out=out, config=config
    )
    return error((out, expected))


@pytest.mark.parametrize(
    ("config", "gated", "grouped"),
    [(config, *kind) for kind, configs in CONFIGS.items() for config in configs],
)
@pytest.mark.parametrize(
    ("rows", "features", "inputs"),
    [(64, 64, 128), (300, 1000, 1024), (128, 4096, 4096), (2052, 6144, 4096), (8192, 512, 12288)],
)
def test_every_configuration(
    config: HopperConfig, gated: bool, grouped: bool, rows: int, features: int, inputs: int
) -> None:
    """Rows and features that are no multiples of a tile; as many tiles as programs, and more."""
    run = (8 if gated else GROUP) if grouped else 1
    features += -features % 16
    case = ScaledCase(rows, features, inputs, FP8, BF16, DEVICE, grouped, run, gated)
    for residual in (False,) if gated else (False, True):
        assert error_limit(grouped) > product(case, config, residual=residual), residual


def error_limit(grouped: bool) -> float:
    """Sums over all inputs are kept to about 14 bits by the tensor cores; those of blocks are added
    in float32."""
    return 3e-3 if grouped else 1e-2
