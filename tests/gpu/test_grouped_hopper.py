"""The products of many rows with 4-bit weights in Gluon against float64 references, on a Hopper
GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels.grouped_hopper import MAX_ROWS, grouped_hopper, supports
from aioinfer.kernels.grouped_hopper_configs import (
    GroupedHopperConfig,
    configs,
    grouped_hopper_config,
)
from aioinfer.kernels.grouped_weight import PackedGroups, pack_groups
from cases import error, normal, poisoned
from grouped_cases import QWEN3_8B, random_groups
from references import product_reference

DEVICE, BF16 = "cuda", torch.bfloat16
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
SHAPES = QWEN3_8B | {"a small gate": (48, 256, True)}
ROWS = (1, 17, 64, 129, 256, 513)


def product(
    weight: PackedGroups,
    rows: int,
    dtype: torch.dtype = BF16,
    *,
    gated: bool = False,
    residual: bool = False,
    config: GroupedHopperConfig | None = None,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a product and its reference; with a residual, the result is written over it."""
    features = weight.features // 2 if gated else weight.features
    # rows with a stride: those of a part of a wider tensor, which holds NaN beside them
    x = poisoned(rows, weight.inputs + 8, dtype=dtype, device=DEVICE)[:, : weight.inputs]
    x.copy_(normal(rows, weight.inputs, dtype=dtype, device=DEVICE))
    added = normal(rows, features, dtype=dtype, device=DEVICE) if residual else None
    expected = product_reference(x, weight, residual=added, gated=gated)
    out = poisoned(rows, features, dtype=dtype, device=DEVICE) if added is None else added
    assert supports(x, weight, residual=added, gated=gated, out=out)
    grouped_hopper(x, weight, residual=added, gated=gated, out=out, pdl=pdl, config=config)
    assert not weight.counters.any()
    return out, expected


@pytest.mark.parametrize(
    ("dtype", "has_zeros"), [(BF16, False), (BF16, True), (torch.float16, False)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_products(shape: str, has_zeros: bool, dtype: torch.dtype) -> None:
    """Odd numbers of rows with a residual, unless they are gated, to compile fewer kernels."""
    features, inputs, gated = SHAPES[shape]
    weight = random_groups(features, inputs, has_zeros=has_zeros, device=DEVICE)
    for rows in ROWS:
        residual = rows % 2 == 1 and not gated
        assert error(product(weight, rows, dtype, gated=gated, residual=residual)) < 1e-2, rows


@pytest.mark.parametrize("shape", SHAPES)
def test_every_configuration(shape: str) -> None:
    features, inputs, gated = SHAPES[shape]
    weight = random_groups(features, inputs, device=DEVICE)
    for config in configs(200, weight, gated):
        for rows in (17, 200):
            assert error(product(weight, rows, gated=gated, config=config)) < 1e-2, config


@pytest.mark.parametrize("group", [64, 128, 256, 384, None])
@pytest.mark.parametrize("has_zeros", [True, False])
def test_groups(group: int | None, has_zeros: bool) -> None:
    weight = random_groups(2048, 2176, group=group, has_zeros=has_zeros, device=DEVICE)
    for rows in (17, 129):
        for dtype in (BF16, torch.float16):
            assert error(product(weight, rows, dtype)) < 1e-2


def test_integers_and_scales_that_16_bits_hold_are_exact() -> None:
    """With powers of two as scales and small integers in x, sums are exact in float32: each input's
    place and each group's scale shows."""
    integers = torch.randint(0, 16, (400, 1024), device=DEVICE)
    scales = 2.0 ** torch.randint(-3, 3, (400, 8), device=DEVICE)
    zeros = torch.randint(0, 16, (400, 8), device=DEVICE)
    weight = pack_groups(integers, scales, zeros, 4, 128)
    x = torch.zeros(100, 1024, dtype=BF16, device=DEVICE)
    for row in range(100):
        x[row, torch.randint(0, 1024, (3,), device=DEVICE)] = 1.0
    expected = product_reference(x, weight)
    for splits in (1, 2):
        config = GroupedHopperConfig(64, 3, 5, splits=splits)
        assert torch.equal(grouped_hopper(x, weight, config=config), expected.to(BF16))


def test_large_products() -> None:
    """More tiles than programs, in several groups of token tiles."""
    weight = random_groups(3072, 1024, device=DEVICE)
    assert error(product(weight, 8192)) < 1e-2
    weight = random_groups(6144, 1024, device=DEVICE)
    assert error(product(weight, 8192, gated=True)) < 1e-2


@pytest.mark.parametrize("tokens", [64, 128])
@pytest.mark.parametrize("splits", [1, 2, 3, 6])
def test_split_products_are_the_same_every_time(splits: int, tokens: int) -> None:
    """Parts are summed in a fixed order, whichever program comes last."""
    weight = random_groups(1024, 8192, device=DEVICE)
    config = GroupedHopperConfig(tokens, 3, 5, splits=splits)
    results = []
    for _ in range(5):
        torch.manual_seed(1)
        results.append(product(weight, 128, config=config, pdl=True, residual=True)[0])
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("config", [GroupedHopperConfig(128, 3, 6), GroupedHopperConfig(64, 4, 8)])
def test_launches_that_fill_the_gpu_agree(config: GroupedHopperConfig) -> None:
    """Stages are loaded again as soon as they are released: what was released before all warps had
    read it shows in most launches."""
    weight = random_groups(24576, 4096, device=DEVICE)
    x = normal(512, 4096, dtype=BF16, device=DEVICE)
    expected = grouped_hopper(x, weight, config=config)
    differing = [(grouped_hopper(x, weight, config=config) != expected).any() for _ in range(100)]
    assert not torch.stack(differing).any()


def test_chains_of_dependent_launches() -> None:
    """Each product reads what the one before wrote, which may be running still; split products and
    others take turns at the counters of one weight."""
    weight = random_groups(2048, 2048, device=DEVICE)
    values = 0.5 * normal(100, 2048, dtype=BF16, device=DEVICE)
    results = {}
    for pdl in (False, True):
        x = values
        for turn in range(20):
            config = GroupedHopperConfig(64, 3, 5, splits=4 if turn % 3 else 1)
            x = grouped_hopper(x, weight, pdl=pdl, config=config)
            if not pdl:
                torch.cuda.synchronize()
        results[pdl] = x
    assert results[True].isfinite().all()
    assert torch.equal(results[False], results[True])


def test_every_number_of_rows_that_it_is_used_for() -> None:
    weight = random_groups(4096, 2048, device=DEVICE)
    for rows in range(1, MAX_ROWS + 1, 13):
        config = grouped_hopper_config(rows, weight, 132, gated=False)
        assert error(product(weight, rows, config=config)) < 1e-2


def test_what_it_rejects() -> None:
    weight = random_groups(1024, 1024, device=DEVICE)
    x = normal(64, 1024, dtype=BF16, device=DEVICE)
    bias = normal(1024, dtype=BF16, device=DEVICE).expand(64, -1)
    assert supports(x, weight)
    assert not supports(x, weight, residual=bias)
    assert not supports(x.float(), weight)
    assert not supports(x, random_groups(1024, 1024, bits=8, device=DEVICE))
    assert not supports(x, random_groups(1024, 1024, group=32, device=DEVICE))
    assert not supports(x, random_groups(1001, 1024, device=DEVICE))
    with pytest.raises(ValueError, match="rejects"):
        grouped_hopper(x, weight, residual=bias)
