"""Linear layers before and after they are prepared for the CPU, and what a target says of a
checkpoint."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from aioinfer.layers.linear import Linear, RowParallelLinear, Target, pack_weight
from aioinfer.layers.parallel import ParallelGroup

CPU = torch.device("cpu")


def filled(layer: Linear) -> tuple[Linear, torch.Tensor, torch.Tensor | None]:
    """Returns the layer with random parameters, and copies of them."""
    torch.manual_seed(0)
    assert layer.weight is not None
    layer.weight.normal_()
    if layer.bias is not None:
        layer.bias.normal_()
    return layer, layer.weight.clone(), layer.bias if layer.bias is None else layer.bias.clone()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 8, 33, 200])
def test_preparing_changes_no_result(rows: int, dtype: torch.dtype, bias: bool):
    layer, weight, offset = filled(Linear(96, 40, bias=bias, dtype=dtype, device=CPU))
    x = torch.randn(rows, 96).to(dtype)
    expected = F.linear(x, weight, offset)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
    layer.finalize()
    assert layer(x).dtype == dtype
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    wide = torch.randn(rows, 2, 192).to(dtype)[..., ::2]  # more dimensions, and not contiguous
    torch.testing.assert_close(layer(wide), F.linear(wide, weight, offset), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(16, 8), (8, 16), (18, 9), (9, 18), (7, 5), (5, 7)]
)
@pytest.mark.parametrize("rows", [1, 2])
def test_every_layout_gives_the_product(
    threads: int, out_features: int, in_features: int, rows: int
):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weight, bias, x = (
            torch.randn(out_features, in_features),
            torch.randn(out_features),
            torch.randn(rows, in_features),
        )
        packed = pack_weight(weight)
        assert packed is not None
        torch.testing.assert_close(
            packed.multiply(x, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(
            packed.multiply(x, None), F.linear(x, weight), rtol=1e-5, atol=1e-5
        )
    finally:
        torch.set_num_threads(before)


def test_float32_on_a_cpu_alone_is_packed():
    weight = torch.randn(16, 8)
    assert pack_weight(weight.bfloat16()) is None
    assert pack_weight(weight.to("meta")) is None
    assert pack_weight(None) is None


def test_a_packed_layer_lets_the_given_weight_go():
    layer, _, _ = filled(Linear(8, 16, bias=False, dtype=torch.float32, device=CPU))
    layer.finalize()
    assert layer.weight is None


@pytest.mark.parametrize("prepared", [True, False])
def test_row_parallel_parts_sum_to_the_whole_with_one_bias(prepared: bool):
    whole, weight, bias = filled(Linear(24, 10, bias=True, dtype=torch.float32, device=CPU))
    x = torch.randn(5, 24)
    products: list[torch.Tensor] = []

    class Group(ParallelGroup):
        """Collects what the ranks bring; the last one gets the sum."""

        def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
            products.append(values)
            return torch.stack(products).sum(0)

    for rank in range(3):
        part = RowParallelLinear(24, 10, Group(rank, 3), bias=True, dtype=torch.float32, device=CPU)
        assert part.weight is not None
        assert part.bias is not None
        part.weight.copy_(weight[:, rank * 8 : rank * 8 + 8])
        part.bias.copy_(bias)
        if prepared:
            part.finalize()
        total = part(x[:, rank * 8 : rank * 8 + 8])
    torch.testing.assert_close(total, whole(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("target", "shape"),
    [
        (Target(torch.empty(4, 6)), [4, 6]),
        (Target(torch.empty(4, 6), 0, 4, 12), [12, 6]),
        (Target(torch.empty(4, 6), 1, 6, 18), [4, 18]),
        (Target(torch.empty(0, 6), 0, 5, 5), [5, 6]),
        (Target(torch.empty(4), 0, 8, 12), [12]),
    ],
    ids=["whole", "rows", "columns", "none", "bias"],
)
def test_a_target_says_what_shape_the_checkpoint_must_have(target: Target, shape: list[int]):
    assert target.checkpoint_shape == shape
