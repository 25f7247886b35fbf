"""Products with weights of 4-bit and 8-bit integers in groups at tiny sizes; layers over them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from aioinfer.kernels.grouped_product import GroupedConfig, grouped_config, grouped_product
from aioinfer.kernels.grouped_weight import dequantize, pack_groups, supports_group
from cases import error, poisoned
from grouped_cases import grouped, random_groups
from references import dequantized
from safetensors.torch import save_file

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.kernel_grouped import KernelGroupedWeight
from aioinfer.layers.formats.schemes import GroupScheme
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.mlp import GatedMLP
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.shards import Shard, Source
from aioinfer.models.json_file import read_json
from aioinfer.models.loader import load_weights
from aioinfer.models.quantization import read_quantization
from benchlib.quantized_folder import Format, Groups, awq, gptq, packed, quantize_folder
from tests.kernels.bound_model import CPU, assert_close
from tests.pairs import pairwise
from tests.tiny_models import tiny_model

#: Groups, and inputs that do and do not fill the last unit of runs.
GROUPS = [(32, 128), (32, 192), (64, 320), (128, 512), (128, 300), (256, 600), (None, 200)]


@pairwise(has_zeros=[True, False], group__inputs=GROUPS, bits=[4, 8])
def test_the_order_holds_the_weight(
    bits: int, group: int | None, inputs: int, has_zeros: bool
) -> None:
    torch.manual_seed(0)
    integers = torch.randint(0, 2**bits, (21, inputs))
    shape = 21, 1 if group is None else -(-inputs // group)
    scales, zeros = torch.rand(shape).bfloat16(), torch.randint(0, 2**bits, shape)
    weight = pack_groups(integers, scales, zeros if has_zeros else None, bits, group)
    of_group = torch.arange(inputs) // (group or inputs)
    middle = torch.full_like(zeros, 2 ** (bits - 1))
    expected = integers - (zeros if has_zeros else middle)[:, of_group]
    expected = expected * scales.double()[:, of_group]
    assert torch.equal(dequantized(weight), expected)
    out = dequantize(weight, poisoned(21, inputs, dtype=torch.float32, device="cpu"))
    assert torch.equal(out, expected.float())


@pytest.mark.parametrize(
    ("bits", "group", "inputs", "has_zeros"),
    [
        (4, 32, 192, True), (4, 64, 320, False), (4, 128, 300, True), (4, None, 200, False),
        (8, 32, 100, True), (8, 128, 300, False),
    ],
)  # fmt: skip
def test_products(bits: int, group: int | None, inputs: int, has_zeros: bool) -> None:
    torch.manual_seed(1)
    weight = random_groups(24, inputs, bits=bits, group=group, has_zeros=has_zeros)
    assert error(grouped(weight, 1, torch.float32, config=GroupedConfig(16, 8))) < 1e-5
    config = GroupedConfig(32, 8, splits=2)
    assert error(grouped(weight, 5, torch.float32, config=config)) < 1e-5


@pytest.mark.parametrize(("gated", "splits"), [(True, 1), (False, 3)])
def test_one_row_of_many_inputs(gated: bool, splits: int) -> None:
    weight = random_groups(32, 600, group=128, has_zeros=True)
    config = GroupedConfig(16, 8, splits=splits)
    assert error(grouped(weight, 1, torch.float32, gated=gated, config=config)) < 1e-5


@pytest.mark.parametrize(("rows", "gated"), [(2, True), (20, False)])
def test_several_rows_in_half_precision(rows: int, gated: bool) -> None:
    """In tiles of 16 rows and 64 output features, which divide neither."""
    weight = random_groups(80, 512, group=128, has_zeros=True)
    config = GroupedConfig(64, 16, splits=2)
    result = grouped(weight, rows, torch.float16, gated=gated, config=config)
    assert error(result) < 2e-3


def test_the_table_fits_what_it_is_asked_for() -> None:
    """Programs that share the inputs have a counter for each tile, and every one has inputs."""
    for features in (16, 80, 4096):
        weight = random_groups(features, 4096)
        for rows in (1, 2, 8, 9, 33, 64, 65, 300):
            config = grouped_config(rows, weight)
            tiles = -(-weight.width // config.features) * -(-rows // config.rows)
            assert config.splits == 1 or tiles <= len(weight.counters)
            assert config.splits <= weight.units
            assert config.features % 16 == 0


def test_what_does_not_fit_is_rejected() -> None:
    assert not supports_group(16)
    assert not supports_group(96)
    weight = random_groups(24, 128)
    with pytest.raises(ValueError, match="x must be"):
        grouped_product(torch.zeros(1, 64), weight)
    with pytest.raises(ValueError, match="with contiguous rows"):
        grouped_product(torch.zeros(128, 1).T[:, ::2], random_groups(24, 64))
    with pytest.raises(ValueError, match="multiple of 8"):
        grouped_product(torch.zeros(1, 128), weight, gated=True)
    with pytest.raises(ValueError, match="more tiles than there are counters"):
        grouped_product(torch.zeros(9, 128), weight, config=GroupedConfig(16, 8, splits=2))
    with pytest.raises(ValueError, match="groups of 48"):
        pack_groups(torch.zeros(8, 96), torch.zeros(8, 2), None, 4, 48)
    with pytest.raises(ValueError, match="scales are"):
        pack_groups(torch.zeros(8, 96), torch.zeros(8, 2), None, 4, 32)
    with pytest.raises(ValueError, match="out must be"):
        dequantize(weight, torch.zeros(24, 64))


FORMATS = {
    "gptq": gptq(Groups(size=32)),
    "gptq in order of activations": gptq(Groups(size=32, is_symmetric=False, seed=3)),
    "awq": awq(64),
    "packed": packed(Groups(size=None, is_symmetric=False)),
    "packed, 8 bits": packed(Groups(bits=8, size=32)),
}


@pytest.mark.parametrize("name", FORMATS)
@torch.inference_mode()
def test_an_mlp(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row and few rows by the products, more of them by the dequantized weight, as in plain
    torch."""
    module = "aioinfer.layers.formats.kernel_grouped"
    for bound in ("MAX_FUSED_ROWS", "_MIN_DEQUANTIZED_ROWS"):
        monkeypatch.setattr(f"{module}.{bound}", 3)
    folder = quantized(tmp_path, FORMATS[name])
    over_kernels, plain = (load_mlp(folder, kernels=use) for use in (True, False))
    down = over_kernels.down.weight
    assert isinstance(down, KernelGroupedWeight)
    assert down._dense is None, "it was dequantized when it was loaded"
    assert down._input_order is None, "the rows before it are in its order"
    for rows in (1, 3, 4):
        hidden = torch.randn(rows, HIDDEN)
        streams = [ResidualStream(hidden.clone(), PLAIN) for _ in range(2)]
        for mlp, stream in zip((over_kernels, plain), streams, strict=True):
            mlp(stream, None)  # it reads nothing of a step
        assert_close(streams[0].hidden, streams[1].hidden)


HIDDEN, CHANNELS = 64, 96
PLAIN = Backend(CPU, torch.float32, ParallelGroup.single())


def quantized(folder: Path, format: Format) -> Path:
    """Saves a small model in a format and returns its folder."""
    fields = {"hidden_size": HIDDEN, "intermediate_size": CHANNELS, "num_hidden_layers": 1}
    tiny_model("llama", folder / "dense", vocab_size=32, **fields)
    return quantize_folder(folder / "dense", folder / "quantized", format)


def load_mlp(folder: Path, *, kernels: bool) -> GatedMLP:
    """Returns the MLP of a model's first layer, over the kernels or in plain torch."""
    backend = Backend(CPU, torch.float32, ParallelGroup.single(), has_kernels=kernels)
    quantization = read_quantization(read_json(folder / "config.json"))
    make = LayerMaker(backend, HIDDEN, 512, 1e-6, quantization=quantization)
    prefix = "model.layers.0"
    norm = make.norm(f"{prefix}.post_attention_layernorm")
    mlp = make.gated_mlp(f"{prefix}.mlp", CHANNELS, norm=norm)
    load_weights(
        list(make.weight_shards()), folder, "auto", 0, lambda done, total: None, lambda name: True
    )
    make.finalize()
    return mlp


@pytest.mark.parametrize(
    ("groups", "columns", "reason"),
    [
        (Groups(size=32, seed=1), Shard(64, 64, 128), "inputs are not whole groups of 32"),
        (Groups(size=64), Shard(32, 32, 128), "inputs do not begin with a group of 64"),
        (Groups(size=16), Shard.whole(128), "the kernels lack groups of 16 inputs"),
    ],
)
def test_what_the_kernels_cannot_read_is_dequantized(
    groups: Groups, columns: Shard, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = gptq(groups).tensors(torch.randn(16, 128))
    save_file({f"x.{name}": part for name, part in tensors.items()}, tmp_path / "x.safetensors")
    backend = Backend(CPU, torch.float32, ParallelGroup.single(), has_kernels=True)
    scheme = GroupScheme("gptq", 4, groups.size, False, groups.seed is not None)
    weight = KernelGroupedWeight([Source("x", Shard.whole(16))], columns, backend, scheme)
    shards = list(weight.weight_shards())
    load_weights(shards, tmp_path, "auto", 0, lambda done, total: None, lambda name: True)
    expected = weight.dequantized()
    assert weight.input_order() is None
    with caplog.at_level("INFO"):
        weight.finalize()
    assert reason in caplog.text
    x = torch.randn(2, columns.size)
    assert_close(weight.multiply(x), x @ expected.T)
