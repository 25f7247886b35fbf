"""Linear layers before and after they are prepared for the CPU, and what a weight shard knows of a
checkpoint."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.dense import DenseWeight, pack_weight, padded_rows
from aioinfer.layers.formats.quantized import make_dense
from aioinfer.layers.linear import ColumnParallelLinear, RowParallelLinear
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.shards import Shard, Source, WeightShard
from tests.pairs import pairwise

CPU = torch.device("cpu")


def backend(dtype: torch.dtype = torch.float32, group: ParallelGroup | None = None) -> Backend:
    return Backend(CPU, dtype, group or ParallelGroup.single())


def column(in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype = torch.float32):
    sources = [Source("x", Shard.whole(out_features))]
    weight = make_dense(sources, Shard.whole(in_features), backend(dtype))
    return ColumnParallelLinear(sources, weight, bias=bias, backend=backend(dtype))


def filled(
    layer: ColumnParallelLinear,
) -> tuple[ColumnParallelLinear, torch.Tensor, torch.Tensor | None]:
    """Returns the layer with random parameters, and copies of them."""
    torch.manual_seed(0)
    weight = dense_weight(layer)
    weight.normal_()
    if layer.bias is not None:
        layer.bias.normal_()
    return layer, weight.clone(), layer.bias if layer.bias is None else layer.bias.clone()


def dense_weight(layer: ColumnParallelLinear | RowParallelLinear) -> torch.Tensor:
    assert isinstance(layer.weight, DenseWeight)
    assert layer.weight.weight is not None
    return layer.weight.weight


@pairwise(bias=[True, False], dtype=[torch.float32, torch.bfloat16], rows=[1, 2, 8, 33, 200])
def test_preparing_changes_no_result(rows: int, dtype: torch.dtype, bias: bool):
    layer, weight, offset = filled(column(96, 40, bias=bias, dtype=dtype))
    x = torch.randn(rows, 96).to(dtype)
    expected = F.linear(x, weight, offset)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
    layer.finalize()
    assert layer(x).dtype == dtype
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    wide = torch.randn(rows, 2, 192).to(dtype)[..., ::2]  # more dimensions, and not contiguous
    torch.testing.assert_close(layer(wide), F.linear(wide, weight, offset), rtol=1e-4, atol=1e-4)


@pairwise(
    threads=[1, 2, 3],
    out_features__in_features=[(16, 8), (8, 16), (18, 9), (9, 18), (7, 5), (5, 7)],
    rows=[1, 2],
)
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


def test_products_are_computed_with_few_numbers_of_rows():
    padded = [padded_rows(rows) for rows in range(1, 8193)]
    assert padded[:20] == [*range(1, 17), 18, 18, 20, 20]
    assert all(rows <= more <= rows * 9 / 8 for rows, more in enumerate(padded, 1))
    assert len(set(padded)) == 16 + 8 * 9
    assert all(padded_rows(2**power) == 2**power for power in range(14))


def test_float32_on_a_cpu_alone_is_packed():
    weight = torch.randn(16, 8)
    assert pack_weight(weight) is not None
    assert pack_weight(weight.bfloat16()) is None
    assert pack_weight(weight.to("meta")) is None
    assert pack_weight(None) is None


def test_a_packed_layer_lets_the_given_weight_go():
    layer, _, _ = filled(column(8, 16, bias=False))
    layer.finalize()
    assert isinstance(layer.weight, DenseWeight)
    assert layer.weight.weight is None


@pytest.mark.parametrize("prepared", [True, False])
def test_row_parallel_parts_sum_to_the_whole_with_one_bias(prepared: bool):
    whole, weight, bias = filled(column(24, 10, bias=True))
    x = torch.randn(5, 24)
    products: list[torch.Tensor] = []

    class Group(ParallelGroup):
        """Collects what the ranks bring; the last one gets the sum."""

        def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
            products.append(values)
            return torch.stack(products).sum(0)

    for rank in range(3):
        ranks = backend(group=Group(rank, 3))
        columns = Shard.of_rank(24, rank, 3)
        dense = make_dense([Source("x", Shard.whole(10))], columns, ranks)
        part = RowParallelLinear("x", dense, 10, bias=True, backend=ranks)
        assert part.bias is not None
        dense_weight(part).copy_(weight[:, rank * 8 : rank * 8 + 8])
        part.bias.copy_(bias)
        if prepared:
            part.finalize()
        total = part(x[:, rank * 8 : rank * 8 + 8])
    torch.testing.assert_close(total, whole(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("normed", [False, True])
def test_what_a_row_parallel_layer_adds_to_the_stream(normed: bool, scale: float):
    layer, weight, bias = filled(column(6, 4, bias=True))
    row = RowParallelLinear("x", layer.weight, 4, bias=True, backend=backend())
    assert row.bias is not None
    assert bias is not None
    row.bias.copy_(bias)
    norm = RMSNorm("n", 4, 1e-5, backend())
    x, hidden = torch.randn(3, 6), torch.randn(3, 4)
    product = F.linear(x, weight, bias)
    expected = hidden + scale * (norm(product) if normed else product)
    stream = ResidualStream(hidden, backend())
    row.add_to(stream, x, norm=norm if normed else None, scale=scale)
    torch.testing.assert_close(stream.hidden, expected, rtol=1e-5, atol=1e-5)
    assert stream.hidden is hidden


def test_merged_modules_are_loaded_one_after_the_other():
    """Of a checkpoint that holds them apart, and of one that holds them in one tensor."""
    apart = [Source("a", Shard(2, 2, 4)), Source("b", Shard(0, 3, 3))]
    merged = [Source("ab", Shard(2, 2, 7)), Source("ab", Shard(4, 3, 7))]
    for sources in (apart, merged):
        weight = make_dense(sources, Shard.whole(5), backend())
        layer = ColumnParallelLinear(sources, weight, bias=True, backend=backend())
        checkpoint = {"a": torch.randn(4, 5), "b": torch.randn(3, 5)}
        biases = {"a": torch.randn(4), "b": torch.randn(3)}
        for tensors in (checkpoint, biases):
            tensors["ab"] = torch.cat([tensors["a"], tensors["b"]])
        for name, shard in layer.weight_shards():
            module, _, kind = name.partition(".")
            tensor = (checkpoint if kind == "weight" else biases)[module]
            assert shard.checkpoint_shape == list(tensor.shape)
            shard.destination.copy_(tensor[shard.start : shard.start + len(shard.destination)])
        x = torch.randn(2, 5)
        expected = F.linear(x, checkpoint["ab"][2:], biases["ab"][2:])
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shard", "shape"),
    [
        (WeightShard(torch.empty(4, 6)), [4, 6]),
        (WeightShard(torch.empty(4, 6), 0, 4, 12), [12, 6]),
        (WeightShard(torch.empty(4, 6), 1, 6, 18), [4, 18]),
        (WeightShard(torch.empty(0, 6), 0, 5, 5), [5, 6]),
        (WeightShard(torch.empty(4), 0, 8, 12), [12]),
    ],
    ids=["whole", "rows", "columns", "none", "bias"],
)
def test_a_weight_shard_knows_the_shape_of_the_checkpoint_tensor(
    shard: WeightShard, shape: list[int]
):
    assert shard.checkpoint_shape == shape
