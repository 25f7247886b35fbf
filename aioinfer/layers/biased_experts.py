"""Experts as gpt-oss has them (OpenAI 2025): with biases and a clamped activation, all experts of a
layer in one checkpoint tensor for each projection, and the channels of gate and up in turns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aioinfer.layers.backend import Backend
from aioinfer.layers.experts import Expert
from aioinfer.layers.formats.base import Epilogue, Weight
from aioinfer.layers.shards import NamedShards, Shard, Source, StackIndex, WeightShard


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1), of a gate of at most `limit` and of up within
    -limit .. limit."""

    alpha: float
    limit: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Returns the channels [..., n] of gate and up [..., n]."""
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return torch.sigmoid(gate * self.alpha).mul_(gate).mul_(up + 1)


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    """The places of an expert's tensors in the checkpoint.

    Attributes:
        name: of the module of all experts.
        index: which of them.
        channels: this rank's, of each expert.
        hidden_size: of the tokens.
    """

    name: str
    index: StackIndex
    channels: Shard
    hidden_size: int

    @property
    def gate_up(self) -> Source:
        """Gate and up in turns: channel i is output features 2 i and 2 i + 1."""
        channels = self.channels
        rows = Shard(2 * channels.start, 2 * channels.size, 2 * channels.total)
        return Source(f"{self.name}.gate_up_proj", rows, self.index)

    @property
    def down(self) -> Source:
        """The second projection."""
        return Source(f"{self.name}.down_proj", Shard.whole(self.hidden_size), self.index)


class BiasedExpert(Expert):
    """This rank's channels of one expert.

    Args:
        places: of its tensors.
        gate_up: the weight of `places.gate_up`. down: the weight of `places.down`, for these
            channels.
        swiglu: the activation.
        backend: of the rank.
    """

    def __init__(
        self,
        places: ExpertPlaces,
        gate_up: Weight,
        down: Weight,
        swiglu: ClampedSwiGLU,
        backend: Backend,
    ):
        super().__init__(gate_up, down, "silu")  # in the place of which `swiglu` is computed
        self._places, self._swiglu = places, swiglu
        self._gate_up_bias, self._down_bias = (
            torch.zeros(source.rows.size, dtype=backend.dtype, device=backend.device)
            for source in (places.gate_up, places.down)
        )

    def weight_shards(self) -> NamedShards:
        """See `Expert.weight_shards`."""
        yield from super().weight_shards()
        places = self._places
        for source, bias in ((places.gate_up, self._gate_up_bias), (places.down, self._down_bias)):
            rows = source.rows
            shard = WeightShard(bias, 0, rows.start, rows.total, stack=source.stack)
            yield f"{source.name}_bias", shard

    def finalize(self) -> None:
        """Puts the channels of up behind the channels of the gate. The output's bias is added by
        the rank that has the first channels."""
        features = torch.arange(2 * self._places.channels.size)
        order = torch.cat((features[::2], features[1::2]))
        self.gate_up.row_order = order
        self._gate_up_bias.copy_(self._gate_up_bias[order.to(self._gate_up_bias.device)])
        if self._places.channels.start:
            self._down_bias.zero_()
        super().finalize()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Expert.__call__`."""
        both = self.gate_up.multiply(x, Epilogue(bias=self._gate_up_bias))
        gated = self._swiglu(*both.chunk(2, dim=-1))
        return self.down.multiply(gated, Epilogue(bias=self._down_bias))
