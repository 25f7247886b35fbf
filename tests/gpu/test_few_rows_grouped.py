"""Products of 1 to 8 rows with 4-bit weights in groups on Hopper, at Qwen3-8B's shapes and at
others, with all that is fused with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from aioinfer.kernels.few_rows_grouped import (
    FewRowsGroupedConfig,
    few_rows_grouped,
    few_rows_grouped_config,
    fuses_norm,
    supports,
)
from aioinfer.kernels.grouped_weight import PackedGroups
from cases import Pair, error, normal
from grouped_cases import QWEN3_8B, grouped, random_groups
from references import product_reference

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="the kernel is for Hopper",
)
SHAPES = QWEN3_8B | {"one unit": (48, 72, True)}
ROWS = (1, 2, 5, 8)
CONFIGS = [
    FewRowsGroupedConfig(warps, depth, programs)
    for warps, depth, programs in (
        (16, 1, 1), (16, 2, 1), (16, 3, 1), (8, 4, 1), (8, 2, 2), (4, 3, 4),
    )
]  # fmt: skip


def few_rows(weight: PackedGroups, rows: int, dtype: torch.dtype, **given: Any) -> Pair:
    """Runs the kernel and its reference in float64."""
    return grouped(weight, rows, dtype, multiply=few_rows_grouped, **given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_zeros", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_products(shape: str, has_zeros: bool, dtype: torch.dtype) -> None:
    features, inputs, gated = SHAPES[shape]
    weight = random_groups(features, inputs, has_zeros=has_zeros, device=DEVICE)
    for rows in ROWS:
        for normed in (False, True):
            assert error(few_rows(weight, rows, dtype, normed=normed, gated=gated)) < 1e-2


@pytest.mark.parametrize("group", [32, 64, 128, 256, 384, None])
@pytest.mark.parametrize("has_zeros", [True, False])
def test_groups(group: int | None, has_zeros: bool) -> None:
    for inputs in (2176, 9000):
        weight = random_groups(2048, inputs, group=group, has_zeros=has_zeros, device=DEVICE)
        for rows in (1, 5):
            for dtype in (torch.bfloat16, torch.float16):
                assert error(few_rows(weight, rows, dtype, pdl=True)) < 5e-3


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_configurations(config: FewRowsGroupedConfig, shape: str) -> None:
    features, inputs, gated = SHAPES[shape]
    weight = random_groups(features, inputs, device=DEVICE)
    for rows in (1, 8):
        result = few_rows(weight, rows, torch.bfloat16, gated=gated, config=config)
        assert error(result) < 5e-3


def test_large_values_lose_nothing_by_the_offset() -> None:
    """The sums of integers enlarged by an offset are an order of magnitude above the product."""
    weight = random_groups(512, 4096, device=DEVICE)
    x = 100 + normal(2, 4096, dtype=torch.bfloat16, device=DEVICE)
    x[:, 7] = 20000.0
    assert error((few_rows_grouped(x, weight), product_reference(x, weight))) < 5e-3


def test_products_are_the_same_every_time_and_in_a_graph() -> None:
    weight = random_groups(4096, 4096, device=DEVICE)
    x = normal(1, 4096, dtype=torch.bfloat16, device=DEVICE)
    first = few_rows_grouped(x, weight)
    chained = few_rows_grouped(first, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inner = few_rows_grouped(x, weight, pdl=True)
        outer = few_rows_grouped(inner, weight, pdl=True)
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(inner, first)
        assert torch.equal(outer, chained)


def test_the_residual_is_added_in_place() -> None:
    weight = random_groups(4096, 12288, device=DEVICE)
    x = normal(3, 12288, dtype=torch.bfloat16, device=DEVICE)
    total = normal(3, 4096, dtype=torch.bfloat16, device=DEVICE)
    expected = few_rows_grouped(x, weight, residual=total.clone())
    assert torch.equal(few_rows_grouped(x, weight, residual=total, out=total), expected)


def test_what_is_supported() -> None:
    weight = random_groups(48, 4096, device=DEVICE)
    x = normal(9, 4104, dtype=torch.bfloat16, device=DEVICE)
    assert supports(x[:8, :4096], weight)
    assert not supports(x[:9, :4096], weight)
    assert not supports(x[:8, 1:4097], weight)
    assert not supports(x[:8, :4096].float(), weight)
    assert not supports(x[:1, :4096], random_groups(48, 4096, bits=8, device=DEVICE))
    with pytest.raises(ValueError, match="supports"):
        few_rows_grouped(x[:8, 1:4097], weight)
    assert fuses_norm(1, weight)
    assert not fuses_norm(2, weight)
    wide = random_groups(48, 12288, device=DEVICE)
    assert few_rows_grouped_config(wide).warps * few_rows_grouped_config(wide).depth >= 32
