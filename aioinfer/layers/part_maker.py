"""Makes the parts that layers consist of, for one rank: weights, linear layers, norms, tables of
rotary embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.base import WeightFormat
from aioinfer.layers.formats.make import make_weight
from aioinfer.layers.formats.schemes import Quantization
from aioinfer.layers.linear import ColumnParallelLinear, RowParallelLinear
from aioinfer.layers.made_layers import MadeLayers
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.rotary import RopeConfig, RotaryTable
from aioinfer.layers.shards import Shard, Source


class PartMaker:
    """Makes parts, and keeps those that have parameters. `LayerMaker` is one that makes layers of
    them.

    Attributes:
        backend: of the rank.
        hidden_size: of the residual stream.
        norm_eps: of every RMSNorm, unless a layer has its own.
        quantization: which linear layers are quantized, and how.
        made: the made layers.
    """

    def __init__(
        self,
        backend: Backend,
        hidden_size: int,
        max_len: int,
        norm_eps: float,
        served_len: int | None = None,
        quantization: Quantization | None = None,
    ):
        """
        Args:
            backend: of the rank.
            hidden_size: of the residual stream.
            max_len: the maximum number of positions of a sequence.
            norm_eps: of every RMSNorm.
            served_len: the longest sequence that is served; `max_len` by default.
            quantization: which linear layers are quantized, and how.
        """
        self.backend = backend
        self.hidden_size = hidden_size
        self.norm_eps = norm_eps
        self.quantization = quantization
        self.made = MadeLayers()
        self._max_len, self._served_len = max_len, served_len
        self._tables: dict[Any, RotaryTable] = {}

    def weight(self, sources: Sequence[Source], columns: Shard) -> WeightFormat:
        """Returns the weight of a linear layer; see `make_weight`. The layer that uses it loads
        it."""
        return self.made.count(make_weight(sources, columns, self.backend, self.quantization))

    def column(
        self, sources: list[Source], in_features: int | None = None, *, bias: bool = False
    ) -> ColumnParallelLinear:
        """Returns a column-parallel layer, by default of the residual stream."""
        weight = self.weight(sources, Shard.whole(in_features or self.hidden_size))
        return self.made.keep(
            ColumnParallelLinear(sources, weight, bias=bias, backend=self.backend)
        )

    def row(self, name: str, columns: Shard, *, bias: bool) -> RowParallelLinear:
        """Returns a row-parallel layer; its outputs are the residual stream's."""
        source = Source(name, Shard.whole(self.hidden_size))
        weight = self.weight([source], columns)
        linear = RowParallelLinear(name, weight, self.hidden_size, bias=bias, backend=self.backend)
        return self.made.keep(linear)

    def rotary(self, rope: RopeConfig, head_size: int) -> RotaryTable:
        """Returns the table of a variant, made once for all layers that have it."""
        key = rope.key, head_size
        if key not in self._tables:
            self._tables[key] = RotaryTable(
                rope, head_size, self._max_len, self.backend.device, self._served_len
            )
        return self._tables[key]

    def norm(
        self,
        name: str,
        size: int | None = None,
        *,
        unit_offset: bool = False,
        eps: float | None = None,
    ) -> RMSNorm:
        """Returns an RMSNorm, by default of the residual stream; `eps`: if not the model's."""
        size = self.hidden_size if size is None else size
        eps = self.norm_eps if eps is None else eps
        norm = RMSNorm(name, size, eps, self.backend, unit_offset=unit_offset)
        return self.made.keep(norm)
