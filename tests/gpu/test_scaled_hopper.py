"""The float8 products of many rows in Gluon against float64 references, on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels.block_hopper import select_config
from aioinfer.kernels.quantize import GROUP, InputFormat, quantize
from aioinfer.kernels.scaled_hopper import hopper_product, supports
from aioinfer.kernels.scaled_tiles import CONFIGS, HopperConfig
from cases import error, normal, poisoned
from references import product_reference
from scaled_cases import FP8, ScaledCase, activations, matrix

DEVICE, BF16 = "cuda", torch.bfloat16
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


def product(case: ScaledCase, config: HopperConfig, *, residual: bool) -> float:
    """Returns the normwise error of one product; with a residual, the result is written over it."""
    inputs, weight = activations(case), matrix(case)
    assert supports(inputs, weight, case.dtype)
    shape = case.rows, case.features
    added = normal(*shape, dtype=case.dtype, device=DEVICE) if residual else None
    expected = product_reference(inputs, weight, residual=added, gated=case.gated)
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
    [
        (64, 64, 128),
        (65, 320, 256),
        (301, 1000, 384),  # an odd number of steps, and one of more than a ring
        (130, 200, 1152),
        (128, 4096, 4096),
        (2051, 6144, 4096),
        (8192, 512, 12288),
    ],
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


@pytest.mark.parametrize(("gated", "grouped"), CONFIGS)
@pytest.mark.parametrize("rows_per_scale", [1, 8, GROUP])
def test_runs_of_rows_with_a_scale(gated: bool, grouped: bool, rows_per_scale: int) -> None:
    """As a rank has them whose rows begin within a block; the number of rows is no multiple of a
    tile's, so that the last tile has rows without scales."""
    for config in CONFIGS[gated, grouped]:
        case = ScaledCase(
            190, 1008, 1408, FP8, BF16, DEVICE, grouped, rows_per_scale if grouped else 1, gated
        )
        assert error_limit(grouped) > product(case, config, residual=False), config


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("gated", "grouped"), CONFIGS)
def test_in_a_chain_of_launches(gated: bool, grouped: bool, residual: bool) -> None:
    """Each kernel begins while the one before runs: activations that are quantized again and again
    give the same products, bit for bit, added to a residual in place or not."""
    case = ScaledCase(515, 2048, 2048, FP8, BF16, DEVICE, grouped, 1, gated)
    weight, format = matrix(case), InputFormat(FP8, grouped)
    x = normal(case.rows, case.inputs, dtype=BF16, device=DEVICE)
    added = normal(case.rows, case.features, dtype=BF16, device=DEVICE)

    def launch(config: HopperConfig, pdl: bool) -> torch.Tensor:
        out = added.clone()
        inputs = quantize(x, format, pdl=pdl)
        return hopper_product(
            inputs, weight, BF16, residual=out if residual and not gated else None, gated=gated,
            out=out, pdl=pdl, config=config
        )  # fmt: skip

    for config in CONFIGS[gated, grouped]:
        expected = launch(config, False)
        torch.cuda.synchronize()
        assert all(torch.equal(launch(config, True), expected) for _ in range(20)), config


def test_configurations_where_the_arguments_allow_them() -> None:
    """A residual that is one bias for all tokens, or rows that TMA cannot read, are left to the
    Triton kernel."""
    case = ScaledCase(512, 6144, 4096, FP8, BF16, DEVICE)
    inputs = quantize(normal(512, 4096, dtype=BF16, device=DEVICE), InputFormat(FP8))
    weight = matrix(case)
    wide = torch.zeros(512, 6150, dtype=BF16, device=DEVICE)
    assert select_config(inputs, weight, BF16) is not None
    assert select_config(inputs, weight, BF16, residual=wide[:, :6144].contiguous()) is not None
    assert select_config(inputs, weight, BF16, residual=wide[0, :6144].expand(512, -1)) is None
    assert select_config(inputs, weight, BF16, out=wide[:, :6144]) is None
    assert select_config(wide[:, :4096], weight, BF16) is None


def error_limit(grouped: bool) -> float:
    """Sums over all inputs are kept to about 14 bits by the tensor cores; those of blocks are added
    in float32."""
    return 3e-3 if grouped else 1e-2
