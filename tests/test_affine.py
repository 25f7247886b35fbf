"""Weights that stay quantized after the conversion of a GGUF file: their numbers, products, and
shards. The reference is the dequantization of the `gguf` package."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import aioinfer.layers.embedding
import aioinfer.layers.formats.affine
import aioinfer.layers.part_maker
from aioinfer.checkpoint.gguf import convert_gguf
from aioinfer.checkpoint.gguf_groups import GROUPED_TYPES, Groups, pack_pairs
from aioinfer.errors import ConfigError
from aioinfer.layers.embedding import Embedding, LMHead, Vocabulary
from aioinfer.layers.formats.affine import AffineRows, AffineWeight
from aioinfer.layers.formats.dense import DenseWeight, HalfWeight, PackedWeight
from aioinfer.layers.formats.schemes import AffineScheme
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.shards import Shard, Source, WeightShard
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.registry import build_model
from tests.gguf_models import config_of, random_model, write_gguf
from tests.paged_model import PagedModel, backend_of, load_model

CPU = torch.device("cpu")
Type = gguf.GGMLQuantizationType
#: Where the float16 of a block lie, in bytes.
HALVES = {Type.Q4_1: (0, 2), Type.Q5_1: (0, 2), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2),
          Type.Q6_K: (208,)}  # fmt: skip
SCHEMES = [AffineScheme(4, 32, True), AffineScheme(4, 32, False), AffineScheme(8, 16, False),
           AffineScheme(8, 32, True)]  # fmt: skip


# -------------------------------------------------------------------- numbers


def random_blocks(kind: Type, count: int) -> np.ndarray:
    """Blocks of random bytes, with scales that are numbers, some of them negative."""
    rng = np.random.default_rng(int(kind))
    blocks = rng.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        scales = rng.normal(0, 0.02, (count, 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return blocks


def rows_of(parts: Groups, scheme: AffineScheme, num_rows: int) -> AffineRows:
    """The parts of blocks as the rows of a weight."""
    columns = Shard.whole(parts.integers.size // num_rows)
    rows = AffineRows(Source("w", Shard.whole(num_rows)), columns, scheme, CPU)
    integers = pack_pairs(parts.integers) if scheme.bits == 4 else parts.integers
    for values, place in (
        (integers, rows.integers),
        (parts.scales, rows.scales),
        (parts.offsets, rows.offsets),
    ):
        assert (values is None) == (place is None)
        if values is not None and place is not None:
            place.copy_(torch.from_numpy(np.ascontiguousarray(values)).view(place.shape))
    return rows


@pytest.mark.parametrize("kind", GROUPED_TYPES, ids=lambda kind: kind.name)
def test_every_type_keeps_its_numbers(kind: Type):
    grouped = GROUPED_TYPES[kind]
    blocks = random_blocks(kind, 12)
    scheme = AffineScheme(grouped.bits, grouped.group_size, grouped.has_offsets)
    found = rows_of(grouped.take_apart(blocks), scheme, 6).dequantized()
    expected = gguf.dequantize(blocks.reshape(6, -1), kind)
    assert np.isfinite(expected).all()
    assert np.array_equal(found.numpy(), expected)


# -------------------------------------------------------------------- products


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_float16_products_are_close_to_those_of_float64(rows: int):
    weight, bias, x = torch.randn(70, 96) / 50, torch.randn(70), torch.randn(rows, 2, 192)[..., ::2]
    expected = F.linear(x.double(), weight.double(), bias.double())
    half = HalfWeight(weight)
    distance = half.multiply(x, bias) - expected
    assert 0 < distance.norm() < 5e-4 * expected.norm()
    assert half.multiply(x[:0], bias).shape == (0, 2, 70)
    # of weights that float16 holds the product is that of float32
    exact = weight.half().float()
    close = F.linear(x.double(), exact.double()) - HalfWeight(exact).multiply(x, None)
    assert close.norm() < 1e-6 * expected.norm()


# -------------------------------------------------------------------- shards


def random_tensors(
    name: str, rows: int, columns: int, scheme: AffineScheme
) -> dict[str, torch.Tensor]:
    """A quantized module of a checkpoint."""
    groups = (rows, columns // scheme.group_size)
    packed = columns // 2 if scheme.bits == 4 else columns
    dtype = torch.uint8 if scheme.bits == 4 else torch.int8
    bounds = torch.iinfo(dtype)
    tensors = {
        "integers": torch.randint(bounds.min, bounds.max + 1, (rows, packed), dtype=dtype),
        "scales": torch.randn(groups),
    }
    if scheme.has_offsets:
        tensors["offsets"] = torch.randn(groups)
    return {f"{name}.weight_{part}": values for part, values in tensors.items()}


def fill(shards: Sequence[tuple[str, WeightShard]], tensors: dict[str, torch.Tensor]) -> None:
    """Loads a rank's shards of a checkpoint's tensors."""
    assert {name for name, _ in shards} == tensors.keys()
    for name, shard in shards:
        assert shard.checkpoint_shape == list(tensors[name].shape)
        part = tensors[name].narrow(shard.dim, shard.start, shard.destination.shape[shard.dim])
        shard.destination.copy_(part)


def loaded_weight(
    names: Sequence[str], rows: Shard, columns: Shard, scheme: AffineScheme,
    tensors: dict[str, torch.Tensor],
) -> AffineWeight:  # fmt: skip
    sources = [Source(name, rows) for name in names]
    weight = AffineWeight(sources, columns, backend_of(), [scheme] * len(names))
    fill(list(weight.weight_shards()), tensors)
    return weight


@pytest.mark.parametrize("scheme", SCHEMES)
def test_shards_are_parts_of_the_whole(scheme: AffineScheme):
    """Also where a rank's inputs begin within a group: 96 inputs over 4 ranks."""
    tensors = random_tensors("a", 8, 96, scheme) | random_tensors("b", 8, 96, scheme)
    rows, columns = Shard.whole(8), Shard.whole(96)
    whole = loaded_weight("ab", rows, columns, scheme, tensors).dequantized()
    assert whole.shape == (16, 96)
    a, b = whole[:8], whole[8:]
    for size in (2, 4):
        for rank in range(size):
            part = Shard.of_rank(8, rank, size)
            of_outputs = loaded_weight("ab", part, columns, scheme, tensors).dequantized()
            some = slice(part.start, part.start + part.size)
            assert torch.equal(of_outputs, torch.cat((a[some], b[some])))
            part = Shard.of_rank(96, rank, size)
            of_inputs = loaded_weight("ab", rows, part, scheme, tensors).dequantized()
            assert torch.equal(of_inputs, whole[:, part.start : part.start + part.size])


def test_a_pair_of_integers_cannot_be_split():
    with pytest.raises(
        ConfigError, match=r"w: 3 input features from 3 on .* fewer tensor-parallel"
    ):
        AffineRows(Source("w", Shard.whole(4)), Shard(3, 3, 32), SCHEMES[0], CPU)


@pytest.mark.parametrize(("vocab_size", "size"), [(64, 1), (61, 4), (3, 8)])
@pytest.mark.parametrize("tied", [True, False])
def test_both_ends_of_the_model_over_ranks(vocab_size: int, size: int, tied: bool):
    torch.manual_seed(0)  # nine logits of 2.5 % of all seeds exceed the limit
    scheme = AffineScheme(8, 32, False)
    stored = random_tensors("e", vocab_size, 64, scheme)
    weight = rows_of(
        Groups(stored["e.weight_integers"].numpy(), stored["e.weight_scales"].numpy(), None),
        scheme,
        vocab_size,
    ).dequantized()
    ids, hidden = torch.arange(vocab_size).flip(0).int(), torch.randn(3, 64)
    norm = RMSNorm("n", 64, 1e-5, backend_of())
    embedded, logits = [], []
    for rank in range(size):
        ranks = backend_of(rank, size)
        vocabulary = Vocabulary(vocab_size, ranks.group)
        embedding = Embedding("e", vocabulary, 64, ranks, scheme=scheme)
        given = embedding if tied else None
        head = LMHead("e", vocabulary, 64, ranks, tied=given, scheme=None if tied else scheme)
        fill(list(embedding.weight_shards()), stored)
        assert bool(list(head.weight_shards())) == (not tied)
        if not tied:
            fill(list(head.weight_shards()), stored)
        embedding.finalize()
        head.finalize()
        embedded.append(embedding(ids).hidden)
        logits.append(head(hidden, norm))
    assert torch.equal(torch.stack(embedded).sum(0), weight[ids.long()])
    expected = norm(hidden).double() @ weight.T.double()
    assert (torch.cat(logits, dim=-1) - expected).norm() < 5e-4 * expected.norm()


# -------------------------------------------------------------------- models

#: One layer has one scheme for all parts of a product, the other mixes them with float32.
TYPES = {
    "token_embd": Type.Q8_0, "output": Type.Q4_1,
    "blk.0.attn_q": Type.Q4_1, "blk.0.attn_k": Type.Q4_1, "blk.0.attn_v": Type.Q4_1,
    "blk.0.attn_output": Type.Q4_0, "blk.0.ffn_gate": Type.Q5_0, "blk.0.ffn_up": Type.Q5_0,
    "blk.0.ffn_down": Type.Q5_1,
    "blk.1.attn_q": Type.Q4_0, "blk.1.attn_k": Type.Q8_0, "blk.1.ffn_up": Type.Q4_1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with quantized weights, converted with and without them."""
    root = tmp_path_factory.mktemp("models")
    source = random_model("llama", root / "source")
    quantize = {f"{name}.weight": kind for name, kind in TYPES.items()}
    file = write_gguf(root / "model.gguf", source, "llama", quantize=quantize)
    kept, expanded = root / "kept", root / "expanded"
    for folder in (kept, expanded):
        folder.mkdir()
        convert_gguf(file, folder, keeps_quantized=folder == kept)
    return kept, expanded


def logits_of(
    folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, DecoderModel]:
    model = load_model(folder, ParallelGroup.single(), dtype)
    assert isinstance(model, DecoderModel)
    paged = PagedModel(model, 16, dtype)
    return paged.step({0: range(7, 27), 1: [9]})[0], model


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the extra `cpu` is not installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "numba" else found(name)
    )


def test_a_model_that_stays_quantized_computes_with_the_same_weights(folders: tuple[Path, Path]):
    found, model = logits_of(folders[0])
    expected, _ = logits_of(folders[1])
    assert (found - expected).norm() < 1e-5 * expected.norm()
    for weight in (model.layers[0].parts[1].gate_up.weight, model.head.weight):
        assert isinstance(weight, AffineWeight)
        assert weight.is_compiled
    assert model.describe(16).endswith("multiplied as they are, by kernels that numba compiles")


@pytest.mark.usefixtures("without_numba")
def test_without_numba_weights_become_float16(folders: tuple[Path, Path]):
    found, model = logits_of(folders[0])
    expected, other = logits_of(folders[1])
    assert (found - expected).norm() < 2e-3 * expected.norm()
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    for weight, kind in (
        (model.layers[0].parts[1].gate_up.weight._dense, HalfWeight),  # type: ignore[attr-defined]
        (model.head.weight, HalfWeight),
        (other.head.weight, PackedWeight),
    ):
        assert isinstance(weight, DenseWeight)
        assert isinstance(weight._packed, kind)
    assert model.describe(16) == (
        "plain torch; quantized weights (gguf: 4 bits in groups of 32, 8 bits in groups of 32), "
        "multiplied as float16"
    )
    assert other.describe(16) == "plain torch"


@pytest.mark.usefixtures("without_numba")
def test_the_size_of_weights_is_what_the_device_holds(folders: tuple[Path, Path]):
    """Two bytes for each weight of a quantized module, four for others; the embedding stays."""
    models = [logits_of(folder)[1] for folder in folders]
    size = models[1].weights_bytes
    embedding, head = models[1].embedding.weight, models[1].vocabulary.shard_size * 64
    assert models[0].embedding.quantized is not None
    size += models[0].embedding.quantized.nbytes - embedding.nbytes - 2 * head
    for ours, dense in zip(*(model.layers for model in models), strict=True):
        for part, name in (
            (0, "qkv"), (0, "output"), (1, "gate_up"), (1, "down"),
        ):  # fmt: skip
            weight = getattr(ours.parts[part], name).weight
            if isinstance(weight, AffineWeight):
                size -= getattr(dense.parts[part], name).weight.held_bytes // 2
    assert models[0].weights_bytes == size


@pytest.mark.usefixtures("without_numba")
def test_without_float16_products_the_model_is_the_dequantized_one(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    for module in (
        aioinfer.layers.formats.affine, aioinfer.layers.embedding, aioinfer.layers.part_maker
    ):  # fmt: skip
        monkeypatch.setattr(module, "has_half_products", lambda backend: False)
    for dtype in (torch.float32, torch.bfloat16):
        found, model = logits_of(folders[0], dtype)
        assert model.describe(16).endswith("dequantized when they are loaded")
        assert torch.equal(found, logits_of(folders[1], dtype)[0])


def test_dummy_weights(folders: tuple[Path, Path]):
    model = build_model(folders[0], backend_of())
    assert isinstance(model, DecoderModel)
    model.load(folders[0], "dummy", 0, lambda done, total: None)
    weight = model.embedding.quantized
    assert weight is not None
    assert 0.01 < weight.dequantized().std() < 0.04


def test_what_a_converted_folder_says(folders: tuple[Path, Path]):
    quantization = config_of(folders[0])["quantization_config"]
    assert quantization["quant_method"] == "gguf_groups"
    modules = {
        (group["bits"], group["group_size"], group["has_offsets"]): group["modules"]
        for group in quantization["groups"]
    }
    assert set(modules) == {(4, 32, True), (4, 32, False), (8, 32, False), (8, 32, True)}
    assert "model.layers.0.self_attn.o_proj" in modules[4, 32, False]
    assert sum(map(len, modules.values())) == len(TYPES)
    assert "quantization_config" not in config_of(folders[1])
    sizes = [(folder / "model.safetensors").stat().st_size for folder in folders]
    assert sizes[0] < 0.7 * sizes[1]
