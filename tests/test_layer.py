"""Layers of parts: what each part reads, which rows the last mixer keeps, and which caches each
gets."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from aioinfer.ipc.kv_spec import AttentionSpec, KVSpec, group_layers
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.base import ACTIVATIONS
from aioinfer.layers.layer import Layer, LayerCache, Mixer, Part
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.norm import (
    HeadLayerNorms,
    LayerNorm,
    Norm,
    RMSNorm,
    SplitRMSNorm,
    norm_in_place,
)
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.shards import Shard
from aioinfer.layers.step import GroupInputs, SampledRows, Step, StepInputs
from tests.pairs import pairwise

CPU = Backend(torch.device("cpu"), torch.float32, ParallelGroup.single())
NARROW, WIDE = AttentionSpec(1, 8), AttentionSpec(2, 8)


class Scale(Part):
    """Adds `factor` times the (normed) stream to it."""

    def __init__(self, factor: float, norm: Norm | None = None):
        self.factor, self.norm = factor, norm

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        return ()

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        stream.add_over_ranks(stream.normed(self.norm) * self.factor)


class Mean(Mixer):
    """Adds the mean of the step's tokens to each of them."""

    scales = None

    def __init__(self, *specs: KVSpec):
        self.specs, self.bound = specs, ()

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        return self.specs

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        return ()

    def bind(self, caches: Sequence[LayerCache], plans: object) -> None:
        self.bound = tuple(cache.group for cache in caches)

    def __call__(self, stream: ResidualStream, step: Step, *, is_last: bool = False) -> None:
        mean = stream.inputs.mean(0, keepdim=True)
        if is_last and step.sampled is not None:
            stream.select(step.sampled.last)
        stream.add_over_ranks(mean.expand(len(stream), -1).clone())


def step(tokens: int, last: list[int] | None = None) -> Step:
    """Returns a step of one row, whose sampled tokens are `last`."""
    numbers = torch.arange(tokens, dtype=torch.int32)
    groups = (GroupInputs(numbers.long(), numbers[:1, None]),)
    ends = torch.tensor([0, tokens], dtype=torch.int32)
    inputs = StepInputs(numbers, numbers, ends, ends[1:], groups)
    sampled = None
    if last is not None:
        where = torch.tensor(last, dtype=torch.int32)
        sampled = SampledRows(torch.zeros_like(where), where, where + 1)
    return Step(inputs, 0, sampled)


def run(layer: Layer, x: torch.Tensor, last: list[int] | None = None) -> torch.Tensor:
    stream = ResidualStream(x.clone(), CPU)
    layer(stream, step(len(x), last), is_last=last is not None)
    return stream.hidden


def test_parts_one_after_the_other_read_what_the_parts_before_them_added() -> None:
    x = torch.randn(3, 8)
    torch.testing.assert_close(run(Layer([Scale(1.0), Scale(2.0)]), x), x * 2 * 3)


def test_parts_side_by_side_read_the_stream_as_it_was() -> None:
    x = torch.randn(3, 8)
    torch.testing.assert_close(run(Layer([Scale(1.0), Scale(2.0)], parallel=True), x), x * 4)


def test_parts_that_follow_parts_side_by_side_read_what_these_added() -> None:
    """Also where the last mixer, side by side with others, leaves the sampled rows alone."""
    x = torch.randn(5, 8)
    layer = Layer([Scale(1.0), Scale(2.0)], parallel=True, then=[Scale(2.0)])
    torch.testing.assert_close(run(layer, x), x * 4 * 3)
    layer = Layer([Mean(NARROW), Mean(WIDE)], parallel=True, then=[Scale(2.0)])
    expected = run(layer, x)
    torch.testing.assert_close(expected, (x + 2 * x.mean(0)) * 3)
    torch.testing.assert_close(run(layer, x, [4, 1]), expected[[4, 1]])


def test_a_norm_that_parts_side_by_side_share_is_computed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    norm, calls = LayerNorm("n", 8, 1e-5, CPU), []
    compute = LayerNorm.__call__

    def counted(self: LayerNorm, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(x)
        return compute(self, x, out)

    monkeypatch.setattr(LayerNorm, "__call__", counted)
    x = torch.randn(3, 8)
    found = run(Layer([Scale(1.0, norm), Scale(2.0, norm)], parallel=True), x)
    assert len(calls) == 1
    torch.testing.assert_close(found, x + 3 * compute(norm, x))
    run(Layer([Scale(1.0, norm), Scale(2.0, norm)]), x)
    assert len(calls) == 3


@pytest.mark.parametrize("parallel", [False, True])
def test_the_last_mixer_of_the_last_layer_keeps_the_sampled_rows(parallel: bool) -> None:
    """Mixers before it still see all tokens, and the parts behind it the sampled ones alone."""
    x = torch.randn(5, 8)
    layer = Layer([Mean(NARROW), Scale(2.0), Mean(WIDE), Scale(3.0)], parallel=parallel)
    expected = run(layer, x)[[4, 1]]
    torch.testing.assert_close(run(layer, x, [4, 1]), expected)


@pytest.mark.parametrize("parallel", [False, True])
def test_a_last_layer_without_mixers_computes_the_sampled_rows_alone(parallel: bool) -> None:
    x = torch.randn(5, 8)
    layer = Layer([Scale(2.0), Scale(3.0)], parallel=parallel)
    found = run(layer, x, [4, 1])
    torch.testing.assert_close(found, run(layer, x)[[4, 1]])


def test_each_part_gets_the_caches_of_its_own_specifications() -> None:
    one, two, none = Mean(WIDE, NARROW), Mean(NARROW), Mean()
    layers = [Layer([one, Scale(1.0), two]), Layer([none])]
    groups = group_layers([layer.kv_specs for layer in layers])
    assert [(group.spec, group.layers) for group in groups] == [(WIDE, (0,)), (NARROW, (0, 0))]
    caches = [
        LayerCache(group.spec, torch.empty(0), number, 16)
        for number, group in enumerate(groups)
        for layer in group.layers
        if layer == 0
    ]
    layers[0].bind(caches, None)
    layers[1].bind([], None)
    assert (one.bound, two.bound, none.bound) == ((0, 1), (1,), ())


HIDDEN, CHANNELS = 24, 40


def make_layers() -> LayerMaker:
    backend = Backend(torch.device("cpu"), torch.float32, ParallelGroup.single())
    return LayerMaker(backend, HIDDEN, max_len=8, norm_eps=1e-6)


def load_random(make: LayerMaker) -> dict[str, torch.Tensor]:
    """Fills the made layers with random numbers and prepares them; returns copies of these by their
    names in the checkpoint."""
    torch.manual_seed(0)
    loaded = {}
    for name, shard in make.weight_shards():
        shard.destination.normal_()
        loaded[name] = shard.destination.clone()
    make.finalize()
    return loaded


@pairwise(bias=[True, False], activation=["relu", "gelu", "gelu_new"], tokens=[1, 5])
def test_an_mlp_without_a_gate(tokens: int, activation: str, bias: bool):
    make = make_layers()
    mlp = make.mlp(
        "fc1", "fc2", CHANNELS, norm=make.norm("norm"), activation=activation, bias=bias
    )  # fmt: skip
    loaded = load_random(make)
    assert ("fc1.bias" in loaded) == ("fc2.bias" in loaded) == bias
    x = torch.randn(tokens, HIDDEN)
    stream = ResidualStream(x.clone(), make.backend)
    mlp(stream, None)  # type: ignore[arg-type]  # an MLP reads nothing of a step
    normed = F.rms_norm(x, (HIDDEN,), loaded["norm.weight"], 1e-6)
    up = F.linear(normed, loaded["fc1.weight"], loaded.get("fc1.bias"))
    activated = {
        "relu": F.relu(up),
        "gelu": F.gelu(up),
        "gelu_new": F.gelu(up, approximate="tanh"),
    }[activation]
    expected = x + F.linear(activated, loaded["fc2.weight"], loaded.get("fc2.bias"))
    torch.testing.assert_close(stream.hidden, expected, rtol=1e-4, atol=1e-4)


@pairwise(bias=[True, False], activation=["silu", "gelu_pytorch_tanh"], tokens=[1, 5])
def test_an_mlp_with_a_gate(tokens: int, activation: str, bias: bool):
    make = make_layers()
    norm = make.norm("norm")
    mlp = make.gated_mlp("mlp", CHANNELS, norm=norm, activation=activation, bias=bias)
    loaded = load_random(make)
    x = torch.randn(tokens, HIDDEN)
    stream = ResidualStream(x.clone(), make.backend)
    mlp(stream, None)  # type: ignore[arg-type]
    normed = F.rms_norm(x, (HIDDEN,), loaded["norm.weight"], 1e-6)
    gate, up, down = (
        (loaded[f"mlp.{name}_proj.weight"], loaded.get(f"mlp.{name}_proj.bias"))
        for name in ("gate", "up", "down")
    )
    gated = ACTIVATIONS[activation](F.linear(normed, *gate)) * F.linear(normed, *up)
    torch.testing.assert_close(stream.hidden, x + F.linear(gated, *down), rtol=1e-4, atol=1e-4)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def backend(dtype: torch.dtype) -> Backend:
    return Backend(torch.device("cpu"), dtype, ParallelGroup.single())


def norms(dtype: torch.dtype) -> tuple[RMSNorm, LlamaRMSNorm]:
    torch.manual_seed(0)
    ours = RMSNorm("n", 96, 1e-5, backend(dtype))
    theirs = LlamaRMSNorm(96, 1e-5).to(dtype)
    ours.weight.uniform_(0.5, 1.5)
    theirs.weight.data.copy_(ours.weight)
    return ours, theirs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_equals_transformers(dtype: torch.dtype, scale: float):
    ours, theirs = norms(dtype)
    x = (torch.randn(7, 3, 96) * scale).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x).detach(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_less_one_equal_gemmas(dtype: torch.dtype):
    torch.manual_seed(0)
    ours = RMSNorm("n", 96, 1e-5, backend(dtype), unit_offset=True)
    theirs = GemmaRMSNorm(96, 1e-5).to(dtype)
    theirs.weight.data.uniform_(-0.5, 0.5)
    (name, shard), *rest = ours.weight_shards()
    assert (name, rest) == ("n.weight", [])
    shard.destination.copy_(theirs.weight)
    ours.finalize()
    x = torch.randn(7, 3, 96).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x).detach(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_of_the_residual_stream(dtype: torch.dtype):
    ours, theirs = norms(dtype)
    hidden = torch.randn(7, 96).to(dtype)
    stream = ResidualStream(hidden, backend(dtype))
    torch.testing.assert_close(stream.normed(ours), theirs(hidden).detach(), rtol=0, atol=0)
    assert stream.normed(None) is hidden


class SummedRanks(ParallelGroup):
    """One of several ranks, in place of whose all-reduce stands a sum that is known."""

    def __init__(self, rank: int, size: int, total: torch.Tensor):
        super().__init__(rank, size)
        self._total = total

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        assert values.shape == self._total.shape
        self.own = values.clone()
        return values.copy_(self._total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("copies", [1, 2])
def test_norms_of_dimensions_that_ranks_share(dtype: torch.dtype, copies: int):
    """Two norms over 96 channels, of which each rank has 32; a part of the second may be had by
    several ranks."""
    torch.manual_seed(0)
    weights, whole = torch.rand(2, 96) + 0.5, torch.randn(2, 7, 96).to(dtype)
    expected = []
    for weight, x in zip(weights.to(dtype), whole, strict=True):
        theirs = LlamaRMSNorm(96, 1e-5).to(dtype)
        theirs.weight.data.copy_(weight)
        expected.append(theirs(x).detach())
    total = whole.float().square().sum(-1)
    sums = torch.zeros(2, 7)
    for rank in range(3 * copies):
        part = Shard(rank // copies * 32, 32, 96)
        group = SummedRanks(rank, 3 * copies, total)
        backend = Backend(torch.device("cpu"), dtype, group)
        norms = [SplitRMSNorm(f"n{i}", part, copies, 1e-5, backend) for i in range(2)]
        for norm, weight in zip(norms, weights, strict=True):
            ((_, shard),) = norm.weight_shards()
            assert (shard.start, shard.total, len(shard.destination)) == (part.start, 96, 32)
            shard.destination.copy_(weight[part.start : part.start + 32])
        local = slice(part.start, part.start + 32)
        parts = [x[:, local].clone() for x in whole]
        norm_in_place(parts, norms, backend)
        for ours, theirs in zip(parts, expected, strict=True):
            tolerance = 1e-6 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(ours, theirs[:, local], rtol=tolerance, atol=1e-6)
        sums += group.own
    torch.testing.assert_close(sums, total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_in_place_of_a_rank_alone(dtype: torch.dtype):
    ours, theirs = norms(dtype)
    split = SplitRMSNorm("n", Shard.whole(96), 1, 1e-5, backend(dtype))
    split.weight.copy_(ours.weight)
    x = torch.randn(7, 200).to(dtype)
    expected = theirs(x[:, 50:146]).detach()
    norm_in_place([x[:, 50:146]], [split], backend(dtype))
    assert torch.equal(x[:, 50:146], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_layer_norms_equal_torchs(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    ours = LayerNorm("n", 96, 1e-5, backend(dtype), bias=bias)
    theirs = torch.nn.LayerNorm(96, 1e-5, bias=bias, dtype=dtype)
    for (name, shard), parameter in zip(ours.weight_shards(), theirs.parameters(), strict=True):
        assert name in ("n.weight", "n.bias")
        parameter.data.uniform_(0.5, 1.5)
        shard.destination.copy_(parameter)
    ours.finalize()
    x = torch.randn(7, 3, 96).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x).detach(), rtol=0, atol=0)
    out = torch.empty_like(x)
    assert ours(x, out=out) is out
    assert torch.equal(out, ours(x))


def test_norms_by_head_have_the_weights_of_this_ranks_heads() -> None:
    norm = HeadLayerNorms("n", Shard(2, 3, 6), 16, 1e-5, backend(torch.float32))
    shards = dict(norm.weight_shards())
    assert list(shards) == [f"n.norms.{head}.weight" for head in (2, 3, 4)]
    for shard in shards.values():
        shard.destination.uniform_(0.5, 1.5)
    x = torch.randn(5, 3, 16)
    expected = [
        torch.nn.functional.layer_norm(x[:, head], (16,), shard.destination, None, 1e-5)
        for head, shard in enumerate(shards.values())
    ]
    torch.testing.assert_close(norm(x), torch.stack(expected, 1))
