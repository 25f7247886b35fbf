"""AltUp (Baykal et al. 2023) and LAuReL (Menghani et al. 2024), as Gemma 3n has them.

With AltUp a token has several streams, which lie in the side of the residual stream
(`ResidualStream`) from a channel on. A layer predicts all of them by a mixture, computes one, the
active stream, in the place of the hidden states, and corrects the others by how far the prediction
of this one was off. The streams are made of the embedding before the first layer, and become one
again behind the last.

Every rank has all of these products: they are small, and no sum over the ranks is needed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from aioinfer.layers.backend import Backend
from aioinfer.layers.layer import Part
from aioinfer.layers.linear import ColumnParallelLinear
from aioinfer.layers.norm import Norm
from aioinfer.layers.per_layer import PerLayerInput
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.shards import NamedShards, Shard, Source, WeightShard
from aioinfer.layers.step import Step

if TYPE_CHECKING:
    from aioinfer.layers.part_maker import PartMaker

#: The least mean square that a stream is divided by.
_SMALLEST = 1e-5


@dataclass(frozen=True, slots=True)
class StreamShape:
    """The streams of a token.

    Attributes:
        count: how many.
        active: the number of the one that layers compute.
        first: where they begin in the side of the residual stream.
        size: channels of each.
    """

    count: int
    active: int
    first: int
    size: int

    def of(self, stream: ResidualStream) -> torch.Tensor:
        """Returns the streams [T, count, size], a view of the side."""
        assert stream.side is not None
        return stream.side[:, self.first :].unflatten(1, (self.count, self.size))


class SmallMatrix:
    """A matrix that every rank has whole, multiplied in plain torch.

    Args:
        name: of the checkpoint tensor.
        shape: [out, in], or of a vector.
        backend: of the rank.
    """

    def __init__(self, name: str, shape: Sequence[int], backend: Backend):
        self._name = name
        self.weight = torch.zeros(*shape, dtype=backend.dtype, device=backend.device)

    def weight_shards(self) -> NamedShards:
        """Yields the matrix."""
        yield self._name, WeightShard(self.weight)

    def finalize(self) -> None:
        """Leaves the matrix as it is."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, out] for x [T, in]."""
        return F.linear(x, self.weight)


class StreamRouter:
    """The coefficients of a layer's mixtures of streams.

    Args:
        norm: of the active stream.
        router: from this to a number for each stream.
    """

    def __init__(self, norm: Norm, router: SmallMatrix):
        self._norm, self._router = norm, router

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, count] for the active stream x [T, size]."""
        routed = self._router(self._norm(x).mul_(1 / x.shape[1]))
        return routed.float().tanh_().to(x.dtype)


class _WithoutProducts(Part):
    """A part whose products need no warm-up."""

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        return ()


class PredictStreams(_WithoutProducts):
    """Predicts the streams of a layer, and makes the active one the hidden states.

    Args:
        shape: of the streams.
        router: of the layer.
        coefficients: from the router's numbers to the mixtures: count * count rows.
    """

    def __init__(self, shape: StreamShape, router: StreamRouter, coefficients: SmallMatrix):
        self._shape, self._router, self._coefficients = shape, router, coefficients

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """See `Part`."""
        shape, streams = self._shape, self._shape.of(stream)
        mixtures = self._coefficients(self._router(streams[:, shape.active]))
        streams.add_(mixtures.view(-1, shape.count, shape.count) @ streams)
        stream.hidden.copy_(streams[:, shape.active])


class CorrectStreams(_WithoutProducts):
    """Corrects the predicted streams by the active one, which the layer has computed, and adds the
    layer's own input to all but the first.

    Args:
        shape: of the streams.
        router: of the layer.
        coefficients: from the router's numbers to a factor for each stream, less 1.
        layer_input: of the layer.
        scale: of the active stream where the layer's input is computed from it.
        is_scaled: whether it is scaled at all.
    """

    def __init__(
        self,
        shape: StreamShape,
        router: StreamRouter,
        coefficients: SmallMatrix,
        layer_input: PerLayerInput,
        scale: SmallMatrix,
        *,
        is_scaled: bool,
    ):
        self._shape, self._router, self._coefficients = shape, router, coefficients
        self._input, self._scale, self._is_scaled = layer_input, scale, is_scaled

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        return self._input.kinds

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """See `Part`."""
        shape, streams, computed = self._shape, self._shape.of(stream), stream.hidden
        factors = self._coefficients(self._router(computed)).add_(1.0)
        missed = computed - streams[:, shape.active]
        streams.addcmul_(factors.unsqueeze(2), missed.unsqueeze(1))
        active = streams[:, shape.active].contiguous()
        if self._is_scaled:
            active = active * self._scale.weight
        streams[:, 1:].add_(self._input.addend(stream, active).unsqueeze(1))


class _Projections(Part):
    """A part with a projection for each stream but the first.

    Args:
        shape: of the streams.
        projections: of these streams.
    """

    def __init__(self, shape: StreamShape, projections: Sequence[ColumnParallelLinear]):
        self._shape, self._projections = shape, projections

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        return tuple(projection.weight.kind for projection in self._projections[:1])


class SpreadStreams(_Projections):
    """Makes the streams of the embedding, behind what the side has: projections of it, as large as
    itself. A part of the first layer."""

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """See `Part`."""
        hidden, side = stream.hidden, stream.side
        others = (_as_large(project(hidden), hidden) for project in self._projections)
        stream.side = torch.cat([*([] if side is None else [side]), hidden, *others], dim=1)


class MergeStreams(_Projections):
    """Makes the hidden states of the streams: the mean of the first and of projections of the
    others, as large as it. The last part of the last layer."""

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """See `Part`."""
        streams = self._shape.of(stream)
        total = streams[:, 0].clone()
        for number, project in enumerate(self._projections, 1):
            total += _as_large(project(streams[:, number].contiguous()), streams[:, 0])
        stream.hidden.copy_(total.div_(self._shape.count))


def _as_large(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns x [T, size] with the root mean squares of another."""
    target = like.float().square().mean(-1, keepdim=True).sqrt_()
    own = x.float().square().mean(-1, keepdim=True).clamp_(min=_SMALLEST).sqrt_()
    return (x.float() * target / own).to(x.dtype)


class Laurel(Part):
    """Adds a projection of low rank beside attention: of what attention has read, with it and
    normed; then divides the stream by the square root of 2.

    Args:
        shape: of the streams, of which the active one is what attention has read.
        input_norm: as attention's.
        left, right: the projection.
        norm: of its result.
    """

    def __init__(
        self,
        shape: StreamShape,
        input_norm: Norm,
        left: ColumnParallelLinear,
        right: ColumnParallelLinear,
        norm: Norm,
    ):
        self._shape, self._input_norm, self._norm = shape, input_norm, norm
        self._left, self._right = left, right

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        return self._left.weight.kind, self._right.weight.kind

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """See `Part`."""
        read = self._shape.of(stream)[:, self._shape.active].contiguous()
        x = self._input_norm(read)
        projected = self._norm(self._right(self._left(x)))
        stream.hidden.add_(projected.add_(x)).mul_(2**-0.5)


def make_stream_parts(
    make: PartMaker, prefix: str, shape: StreamShape, layer_input: PerLayerInput, *, scaled: bool
) -> tuple[PredictStreams, CorrectStreams]:
    """Returns the first and the last part of a layer with the checkpoint module `prefix`.

    Args:
        shape: of the streams.
        layer_input: of the layer.
        scaled: whether the active stream is scaled where the layer's input is computed from it.
    """

    def matrix(name: str, *sizes: int) -> SmallMatrix:
        return make.keep(SmallMatrix(f"{prefix}.{name}", sizes, make.backend))

    count = shape.count
    norm = make.norm(f"{prefix}.router_norm")
    router = StreamRouter(norm, matrix("modality_router.weight", count, shape.size))
    return (
        PredictStreams(shape, router, matrix("prediction_coefs.weight", count * count, count)),
        CorrectStreams(
            shape, router, matrix("correction_coefs.weight", count, count), layer_input,
            matrix("correct_output_scale", shape.size), is_scaled=scaled,
        ),
    )  # fmt: skip


def make_stream_projections(
    make: PartMaker, name: str, shape: StreamShape
) -> list[ColumnParallelLinear]:
    """Returns the projections of all streams but the first, of the checkpoint module `name`."""
    whole = Shard.whole(shape.size)
    return [make.column([Source(f"{name}.{n}", whole)]) for n in range(shape.count - 1)]


def make_laurel(
    make: PartMaker, name: str, shape: StreamShape, rank: int, input_norm: Norm
) -> Laurel:
    """Returns the projection of rank `rank` beside attention of the checkpoint module `name`;
    `shape` and `input_norm` as in `Laurel`."""
    left = make.column([Source(f"{name}.linear_left", Shard.whole(rank))])
    right = make.column([Source(f"{name}.linear_right", Shard.whole(shape.size))], rank)
    return Laurel(shape, input_norm, left, right, make.norm(f"{name}.post_laurel_norm"))
