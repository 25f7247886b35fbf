"""Per-layer inputs (Gemma 3n, Gemma Team 2025, and Gemma 4): beside its embedding a token has a
vector for each layer, from a table of its own and from the embedding, which the layer adds to the
residual stream through a gate. They are made before the first layer, and lie at the beginning of
the stream's side (`ResidualStream`), the vector of one layer after the other.

Every rank has all of these products: they are small, and no sum over the ranks is needed.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from aioinfer.layers.embedding import Embedding
from aioinfer.layers.formats.base import ACTIVATIONS
from aioinfer.layers.layer import Part
from aioinfer.layers.linear import ColumnParallelLinear
from aioinfer.layers.norm import Norm
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.shards import NamedShards, Shard, Source, WeightShard
from aioinfer.layers.step import Step

if TYPE_CHECKING:
    from aioinfer.layers.part_maker import PartMaker


class PerLayerEmbedding(Part):
    """Makes the per-layer inputs of all layers, as the first part of the first layer: the stream
    has the embeddings.

    Args:
        table: the embedding of all layers' vectors, scaled. Token ids beyond it, and tokens of
            pictures, have the vectors of token 0.
        projection: from the embedding to all layers' vectors.
        scale: multiplied with the projection's results before their norm.
        norm: of each layer's vector.
        size: channels of a vector.
    """

    def __init__(
        self,
        table: Embedding,
        projection: ColumnParallelLinear,
        norm: Norm,
        size: int,
        scale: float,
    ):
        self._table, self._projection, self._norm = table, projection, norm
        self._size, self._scale = size, scale

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        return (self._projection.weight.kind,)

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """Makes the stream's side [T, layers * size]."""
        ids, table = step.inputs.input_ids, self._table
        ids = ids.masked_fill(ids >= table.vocabulary.vocab_size, 0)
        if step.pictures is not None:
            ids.masked_fill_(step.pictures.rows >= 0, 0)
        projected = self._projection(stream.hidden).mul_(self._scale)
        vectors = self._norm(projected.view(-1, self._size)).view(projected.shape)
        stream.side = vectors.add_(table.rows(ids)).mul_(2**-0.5)


class PerLayerInput(Part):
    """Adds what a layer makes of its per-layer input to the stream: gate, product with the input,
    projection, norm.

    Args:
        gate: from the stream to the channels of the input.
        projection: from these back.
        norm: of the addend.
        activation: of the gate; see `formats.base.ACTIVATIONS`.
        channels: where the layer's input is in the stream's side.
    """

    def __init__(
        self,
        gate: ColumnParallelLinear,
        projection: ColumnParallelLinear,
        norm: Norm,
        activation: str,
        channels: slice,
    ):
        self._gate, self._projection, self._norm = gate, projection, norm
        self._activation, self._channels = ACTIVATIONS[activation], channels

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        return self._gate.weight.kind, self._projection.weight.kind

    def addend(self, stream: ResidualStream, x: torch.Tensor) -> torch.Tensor:
        """Returns the addend [T, hidden_size] for x [T, hidden_size]."""
        assert stream.side is not None
        gated = self._activation(self._gate(x)).mul_(stream.side[:, self._channels])
        return self._norm(self._projection(gated))

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """See `Part`."""
        hidden = stream.hidden
        hidden.add_(self.addend(stream, hidden))


class StreamScale(Part):
    """Multiplies the stream by a number of the layer (Gemma 4's `layer_scalar`).

    Args:
        name: of the checkpoint tensor.
        device: of the rank.
    """

    def __init__(self, name: str, device: torch.device):
        self._name = name
        self._scale = torch.ones(1, dtype=torch.float32, device=device)
        self._number = 1.0

    def weight_shards(self) -> NamedShards:
        """Yields the number, which every rank has."""
        yield self._name, WeightShard(self._scale)

    def finalize(self) -> None:
        """Brings the number to the host."""
        self._number = self._scale.item()

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        return ()

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """See `Part`."""
        if self._number != 1.0:
            stream.hidden.mul_(self._number)


def make_per_layer_embedding(
    make: PartMaker, prefix: str, vocab_size: int, num_layers: int, size: int
) -> PerLayerEmbedding:
    """Returns the part that makes the per-layer inputs.

    Args:
        prefix: of the checkpoint modules.
        vocab_size: of the table.
        num_layers: of the model.
        size: channels of an input.
    """
    total = num_layers * size
    name = f"{prefix}.embed_tokens_per_layer"
    table = make.embedding(name, vocab_size, scale=size**0.5, size=total)
    projection = make.column([Source(f"{prefix}.per_layer_model_projection", Shard.whole(total))])
    norm = make.norm(f"{prefix}.per_layer_projection_norm", size)
    return PerLayerEmbedding(table, projection, norm, size, make.hidden_size**-0.5)


def make_per_layer_input(
    make: PartMaker, prefix: str, number: int, size: int, *, activation: str
) -> PerLayerInput:
    """Returns the part that adds the input of layer `number`, of `size` channels, to the stream.

    Args:
        prefix: of the layer's checkpoint modules.
        activation: of the gate.
    """
    gate = make.column([Source(f"{prefix}.per_layer_input_gate", Shard.whole(size))])
    back = [Source(f"{prefix}.per_layer_projection", Shard.whole(make.hidden_size))]
    return PerLayerInput(
        gate,
        make.column(back, size),
        make.norm(f"{prefix}.post_per_layer_input_norm"),
        activation,
        slice(number * size, (number + 1) * size),
    )


def make_stream_scale(make: PartMaker, name: str) -> StreamScale:
    """Returns the part that multiplies the stream by the checkpoint tensor `name`, one number."""
    return make.keep(StreamScale(name, make.backend.device))
