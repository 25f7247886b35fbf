"""The product of all weights, as a new format and an adapter see it: both are classes of this file
alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from aioinfer import LLM, SamplingParams
from aioinfer.layers import part_maker
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats import FORMATS, make_weight
from aioinfer.layers.formats.base import ACTIVATIONS, Epilogue, Weight
from aioinfer.layers.formats.dense import DenseWeight
from aioinfer.layers.formats.quantized import QuantizedWeight
from aioinfer.layers.formats.schemes import Quantization, Scheme
from aioinfer.layers.kernel_choices import Candidate
from aioinfer.layers.norm import LayerNorm, RMSNorm
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.shards import NamedShards, Shard, Source, WeightShard
from tests.gpu.random_models import random_model

OUT, INPUTS = 16, 24
BACKEND = Backend(torch.device("cpu"), torch.float32, ParallelGroup.single())
SOURCE = Source("x", Shard.whole(OUT))


def epilogues(total: torch.Tensor) -> list[Epilogue]:
    """Returns combinations of what may go with a product; some write to `total`."""
    rms, layer = RMSNorm("n", INPUTS, 1e-6, BACKEND), LayerNorm("n", INPUTS, 1e-6, BACKEND)
    bias = torch.randn(OUT)
    return [
        Epilogue(), Epilogue(rms, bias), Epilogue(layer, gate="silu"),
        Epilogue(rms, bias, "gelu_new"), Epilogue(rms, bias, add_to=total),
        Epilogue(layer, bias, out=total), Epilogue(rms, bias, activation="gelu"),
        Epilogue(None, bias, activation="gelu_new"), Epilogue(layer, activation="relu2"),
    ]  # fmt: skip


def expected_of(x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    normed = x if epilogue.norm is None else epilogue.norm(x)
    product = F.linear(normed, weight, epilogue.bias)
    if epilogue.gate is not None:
        gate, up = product.chunk(2, dim=-1)
        return ACTIVATIONS[epilogue.gate](gate) * up
    if epilogue.activation is not None:
        return ACTIVATIONS[epilogue.activation](product)
    return product if epilogue.add_to is None else epilogue.add_to + product


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("prepared", [True, False])
def test_a_dense_weight_with_every_epilogue(rows: int, prepared: bool):
    torch.manual_seed(rows)
    weight = DenseWeight([SOURCE], Shard.whole(INPUTS), BACKEND)
    numbers = weight.loaded.normal_().clone()
    if prepared:
        weight.finalize()
    x, total = torch.randn(rows, INPUTS), torch.randn(rows, OUT)
    for epilogue in epilogues(total):
        expected = expected_of(x, numbers, epilogue)
        found = weight.multiply(x, epilogue)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert (found is total) == (epilogue.add_to is not None or epilogue.out is not None)


# -------------------------------------------------------------------- an adapter


class LowRank(Weight):
    """A weight W and an adapter: W + B A (Hu et al. 2021), A [rank, in] and B [out, rank]."""

    only = Candidate("adapter", fuses=frozenset({"bias"}))

    def __init__(self, weight: Weight, a: torch.Tensor, b: torch.Tensor):
        super().__init__(weight._sources, weight._columns, weight._backend)
        self._weight, self._a, self._b = weight, a, b

    @property
    def kind(self) -> Hashable:
        return "low rank", self._weight.kind

    @property
    def held_bytes(self) -> int:
        return self._weight.held_bytes + self._a.nbytes + self._b.nbytes

    def weight_shards(self) -> NamedShards:
        return self._weight.weight_shards()

    def dequantized(self) -> torch.Tensor:
        return self._weight.dequantized() + self._b @ self._a

    def finalize(self) -> None:
        self._weight.row_order = self.row_order
        if self.row_order is not None:
            self._b = self._b[self.row_order]
        self._weight.finalize()

    def launch(self, candidate: Candidate, x: Any, epilogue: Epilogue) -> torch.Tensor:
        product = self._weight.multiply(x, epilogue)
        return product.addmm_(x @ self._a.t(), self._b.t())


@pytest.mark.parametrize("rows", [1, 5])
def test_an_adapter_is_the_merged_weight(rows: int):
    torch.manual_seed(rows)
    base = DenseWeight([SOURCE], Shard.whole(INPUTS), BACKEND)
    base.loaded.normal_()
    adapted = LowRank(base, torch.randn(4, INPUTS), torch.randn(OUT, 4))
    merged = adapted.dequantized()
    adapted.finalize()
    x = torch.randn(rows, INPUTS)
    for index in range(len(epilogues(x))):
        torch.manual_seed(index)
        epilogue = epilogues(torch.randn(rows, OUT))[index]
        expected = expected_of(x, merged, epilogue)
        torch.testing.assert_close(adapted.multiply(x, epilogue), expected, rtol=1e-4, atol=1e-4)


class Merged(DenseWeight):
    """A weight to which an adapter is added when it is loaded."""

    adapter: torch.Tensor

    def finalize(self) -> None:
        self.loaded.add_(self.adapter)
        super().finalize()


def generate(folder: Path) -> list[list[int]]:
    """Returns greedy texts of a model on a CPU."""
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    settings = {
        "parallel.executor": "inline", "parallel.device": "cpu", "cache.num_blocks": 20,
        "model.dtype": "float32", "scheduler.max_num_seqs": 4,
    }  # fmt: skip
    prompts = [[3, 4, 5], [7] * 30, [9, 11]]
    with LLM(str(folder), settings=settings, progress=False) as llm:
        return [list(output.token_ids) for output in llm.generate(prompts, greedy)]


def test_a_model_with_adapters_gives_the_text_of_the_merged_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On all products of its layers. The adapters change the text."""
    folder = tmp_path
    random_model(folder, vocab_size=512)
    adapters: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def adapter_of(sources: Sequence[Source], columns: Shard) -> tuple[torch.Tensor, torch.Tensor]:
        out = sum(source.rows.size for source in sources)
        made = torch.randn(4, columns.size) / 16, torch.randn(out, 4) / 16
        return adapters.setdefault(sources[0].name, made)

    def adapted(sources: Sequence[Source], columns: Shard, backend: Backend, _: Any) -> Weight:
        weight = DenseWeight(sources, columns, backend)
        return LowRank(weight, *adapter_of(sources, columns))

    def merged(sources: Sequence[Source], columns: Shard, backend: Backend, _: Any) -> Weight:
        weight = Merged(sources, columns, backend)
        a, b = adapter_of(sources, columns)
        weight.adapter = b @ a
        return weight

    plain = generate(folder)
    monkeypatch.setattr(part_maker, "make_weight", adapted)
    found = generate(folder)
    monkeypatch.setattr(part_maker, "make_weight", merged)
    assert found == generate(folder) != plain
    assert len(adapters) == 2 * 4  # qkv, output, gate and up, down


# -------------------------------------------------------------------- a format


@dataclass(frozen=True, slots=True)
class ByteScheme(Scheme):
    """Rows of int8, each with a float32 scale."""


class ByteWeight(QuantizedWeight):
    """A weight with a `ByteScheme`."""

    def __init__(self, sources: list[Source], columns: Shard, backend: Backend, scheme: ByteScheme):
        super().__init__(sources, columns, backend)
        self._scheme = scheme
        self.values = torch.empty(self._out, columns.size, dtype=torch.int8)
        self.scales = torch.empty(self._out, 1)

    def weight_shards(self) -> NamedShards:
        first = 0
        for source in self._sources:
            rows, part = source.rows, slice(first, first + source.rows.size)
            yield f"{source.name}.weight", WeightShard(self.values[part], 0, rows.start, rows.total)
            yield f"{source.name}.scale", WeightShard(self.scales[part], 0, rows.start, rows.total)
            first = part.stop

    def dequantized(self) -> torch.Tensor:
        return self.values * self.scales

    def release(self) -> None:
        del self.values, self.scales


@pytest.mark.parametrize("rows", [1, 5])
def test_a_format_of_another_module(rows: int, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(rows)
    monkeypatch.setitem(FORMATS, ByteScheme, ByteWeight)
    quantization = Quantization("bytes", [(["Linear"], ByteScheme())])
    sources = [Source("x", Shard(2, 10, 12)), Source("y", Shard.whole(6))]
    weight = make_weight(sources, Shard.whole(INPUTS), BACKEND, quantization)
    assert isinstance(weight, ByteWeight)
    numbers = []
    for name, shard in weight.weight_shards():
        if name.endswith("weight"):
            shard.destination.copy_(torch.randint(-128, 128, shard.destination.shape))
            numbers.append(shard.destination.float())
        else:
            shard.destination.uniform_(0.01, 0.1)
            numbers[-1] *= shard.destination
    order = torch.randperm(OUT)
    weight.row_order = order
    weight.finalize()
    assert weight.held_bytes == OUT * INPUTS * 4
    x, total = torch.randn(rows, INPUTS), torch.randn(rows, OUT)
    for epilogue in epilogues(total):
        expected = expected_of(x, torch.cat(numbers)[order], epilogue)
        torch.testing.assert_close(weight.multiply(x, epilogue), expected, rtol=1e-4, atol=1e-4)
