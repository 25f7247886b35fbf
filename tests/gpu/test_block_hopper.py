"""The float8 products with scales of blocks, tokens as rows, against float64 references, on a
Hopper GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels.block_hopper import block_product, select_config, supports
from aioinfer.kernels.few_rows_scaled import ScaledMatrix
from aioinfer.kernels.quantize import GROUP, InputFormat, quantize
from aioinfer.kernels.scaled_tiles import BLOCK_CONFIGS, GATED_BLOCK_CONFIGS, BlockConfig
from cases import error, normal, poisoned
from references import product_reference
from scaled_cases import FP8, ScaledCase, activations, block_matrix

DEVICE, BF16 = "cuda", torch.bfloat16
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
CONFIGS = {False: BLOCK_CONFIGS, True: GATED_BLOCK_CONFIGS}
#: Normwise: results in bf16, sums of a block of 128 inputs to about 14 bits.
LIMIT = 3e-3


def block_case(rows: int, features: int, inputs: int, gated: bool) -> ScaledCase:
    return ScaledCase(rows, features, inputs, FP8, BF16, DEVICE, True, 8 if gated else GROUP, gated)


def check(case: ScaledCase, config: BlockConfig, *, residual: bool, wide: int = 0) -> None:
    """Compares one product with the reference, and repeats it: other results are a race. With
    `wide` the result is a part of rows that are longer by so much, which stay as they are."""
    inputs, weight = activations(case), block_matrix(case)
    assert supports(inputs, weight, case.dtype)
    shape = case.rows, case.features
    added = normal(*shape, dtype=BF16, device=DEVICE) if residual else None
    expected = product_reference(inputs, weight, residual=added, gated=case.gated)
    first = None
    for _ in range(4):
        whole = poisoned(case.rows, case.features + wide, dtype=BF16, device=DEVICE)
        out, beyond = whole[:, : case.features], whole[:, case.features :]
        before = beyond.clone()
        if added is not None:
            out.copy_(added)
        block_product(
            inputs, weight, BF16, residual=out if residual else None, gated=case.gated, out=out,
            config=config,
        )  # fmt: skip
        first = out.clone() if first is None else first
        assert torch.equal(out, first)
        assert torch.equal(beyond.view(torch.int16), before.view(torch.int16))
    assert first is not None
    assert error((first, expected)) < LIMIT


@pytest.mark.parametrize(
    ("config", "gated"), [(config, gated) for gated in (False, True) for config in CONFIGS[gated]]
)
@pytest.mark.parametrize(
    ("rows", "features", "inputs"),
    [
        (2, 64, 256),
        (33, 144, 384),
        (64, 64, 256),
        (65, 320, 512),
        (130, 208, 1152),  # an odd number of steps
        (301, 1008, 1408),
        (128, 4096, 4096),
        (256, 6144, 4096),
        (2051, 6144, 4096),
        (8192, 512, 12288),
    ],
)
def test_every_configuration(
    config: BlockConfig, gated: bool, rows: int, features: int, inputs: int
) -> None:
    """Rows and features that are no multiples of a tile; fewer and more tiles than programs; fewer
    steps than stages."""
    case = block_case(rows, features, inputs, gated)
    for residual in (False,) if gated else (False, True):
        check(case, config, residual=residual, wide=24)


@pytest.mark.parametrize("config", GATED_BLOCK_CONFIGS)
def test_a_gate_of_whole_blocks(config: BlockConfig) -> None:
    """Rows that a gate multiplies may share one scale as well."""
    case = ScaledCase(190, 1024, 1408, FP8, BF16, DEVICE, True, GROUP, True)
    check(case, config, residual=False)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [48, 515])
def test_in_a_chain_of_launches(gated: bool, residual: bool, rows: int) -> None:
    """Each kernel begins while the one before runs: activations that are quantized again and again
    give the same products, bit for bit, added to a residual in place or not."""
    if gated and residual:
        pytest.skip("a gate has no residual")
    case = block_case(rows, 2048, 2048, gated)
    weight, format = block_matrix(case), InputFormat(FP8, True)
    xs = [normal(rows, 2048, dtype=BF16, device=DEVICE) for _ in range(2)]
    added = normal(rows, 2048, dtype=BF16, device=DEVICE)

    def launch(config: BlockConfig, pdl: bool, x: torch.Tensor) -> torch.Tensor:
        out = added.clone()
        inputs = quantize(x, format, pdl=pdl)
        return block_product(
            inputs, weight, BF16, residual=out if residual else None, gated=gated, out=out, pdl=pdl,
            config=config,
        )  # fmt: skip

    for config in CONFIGS[gated]:
        expected = [launch(config, False, x) for x in xs]
        torch.cuda.synchronize()
        for turn in range(40):
            found = launch(config, True, xs[turn % 2])
            assert torch.equal(found, expected[turn % 2]), (config, turn)


def test_configurations_where_the_arguments_allow_them() -> None:
    """Rows of weights whose scales differ within 128 rows are left to the other kernels."""
    case = block_case(256, 6144, 4096, False)
    inputs = quantize(normal(256, 4096, dtype=BF16, device=DEVICE), InputFormat(FP8, True))
    weight = block_matrix(case)
    assert isinstance(select_config(inputs, weight, BF16), BlockConfig)
    scales = weight.scales.repeat_interleave(16, 0)
    other = ScaledMatrix(weight.values, scales, 8, weight.counters)
    assert not supports(inputs, other, BF16)
    assert not isinstance(select_config(inputs, other, BF16), BlockConfig)
    with pytest.raises(ValueError, match="supports"):
        block_product(inputs, other, BF16)
