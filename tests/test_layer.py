"""Layers of parts: what each part reads, which rows the last mixer keeps, and which caches each
gets."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest
import torch

from aioinfer.ipc.kv_spec import AttentionSpec, KVSpec, group_layers
from aioinfer.layers.backend import Backend
from aioinfer.layers.layer import Layer, LayerCache, Mixer, Part
from aioinfer.layers.norm import LayerNorm, Norm
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import GroupInputs, SampledRows, Step, StepInputs

CPU = Backend(torch.device("cpu"), torch.float32, ParallelGroup.single())
NARROW, WIDE = AttentionSpec(1, 8), AttentionSpec(2, 8)


class Scale(Part):
    """Adds `factor` times the (normed) stream to it."""

    def __init__(self, factor: float, norm: Norm | None = None):
        self.factor, self.norm = factor, norm

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        return ()

    def warm_up(self, hidden_size: int) -> None:
        raise NotImplementedError

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

    def warm_up(self, hidden_size: int) -> None:
        raise NotImplementedError

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
