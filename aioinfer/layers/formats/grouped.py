"""Weights in 4 or 8 bits, of which groups of neighbouring inputs share a scale and a zero point.

Read as GPTQ (Frantar et al. 2023), AWQ (Lin et al. 2023) and compressed-tensors (`pack-quantized`)
store them: integers packed into int32, the first in the lowest bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.quantized import QuantizedWeight
from aioinfer.layers.formats.schemes import GroupScheme
from aioinfer.layers.shards import (
    NamedShards,
    Shard,
    Source,
    TensorArena,
    WeightShard,
    sharded_part,
)

#: The place in an int32 of each of eight neighbouring output features, in AWQ's layout.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
#: With random integers (of a deviation of 4.6 in 4 bits, 74 in 8) weights are as large as dense
#: models with random weights have.
_DUMMY_SCALES = {4: 0.02 / 4.6, 8: 0.02 / 74}


class _Part(NamedTuple):
    """The tensors of one source, as the checkpoint lays them out: integers [out, in / packed] or
    its transpose, scales and zero points likewise by group."""

    integers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_of: torch.Tensor | None


class GroupedWeight(QuantizedWeight):
    """A weight of 4-bit or 8-bit integers: (integer - zero point) * scale.

    Args:
        sources, columns, backend: as in `QuantizedWeight`.
        scheme: of the modules.
        memory: contiguous, to load packed integers into; by default new tensors.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        columns: Shard,
        backend: Backend,
        scheme: GroupScheme,
        memory: torch.Tensor | None = None,
    ):
        super().__init__(sources, columns, backend)
        self._memory = None if memory is None else TensorArena(memory)
        self._scheme = scheme
        self._packed = 32 // scheme.bits
        self._is_transposed = scheme.layout != "packed"
        self._groups = self._covered_groups()
        self._parts = [self._make_part(source) for source in sources]

    def _covered_groups(self) -> Shard:
        """Returns the groups of this rank's inputs; with an order of their own they may be any."""
        size, columns = self._scheme.group_size, self._columns
        if size is None:
            return Shard.whole(1)
        total = -(-columns.total // size)
        if self._scheme.has_order:
            return Shard.whole(total)
        start, end = columns.start // size, -(-(columns.start + columns.size) // size)
        return Shard(start, end - start, total)

    def _make_part(self, source: Source) -> _Part:
        """Returns the empty tensors of a source."""
        rows, scheme, device = source.rows, self._scheme, self._backend.device
        packs_outputs = scheme.layout == "awq"
        packed_rows, packed_columns = rows.size, self._columns.size
        if packs_outputs:
            packed_rows = self._packed_shard(rows, source.name).size
        else:
            packed_columns = self._packed_shard(self._columns, source.name).size
        if self._memory is None:
            integers = self._empty(packed_rows, packed_columns, torch.int32)
        else:
            shape = packed_rows, packed_columns
            integers = self._memory.take(shape[::-1] if self._is_transposed else shape, torch.int32)
        scales = self._empty(rows.size, self._groups.size, torch.float32)
        zeros = group_of = None
        if scheme.has_zeros:
            packed = self._packed_shard(rows, source.name)
            zeros = self._empty(packed.size, self._groups.size, torch.int32)
        if scheme.has_order:
            places = torch.arange(self._columns.size, dtype=torch.int32, device=device)
            group_of = (places + self._columns.start) // (scheme.group_size or self._columns.total)
        return _Part(integers, scales, zeros, group_of)

    def _empty(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        shape = (columns, rows) if self._is_transposed else (rows, columns)
        return torch.zeros(shape, dtype=dtype, device=self._backend.device)

    def _packed_shard(self, shard: Shard, name: str) -> Shard:
        """Returns a shard of a dimension counted in int32. Raises `ConfigError` if it does not
        begin and end with one."""
        packed = self._packed
        if shard.start % packed or (shard.size % packed and shard.size < shard.total):
            raise ConfigError(
                f"{name}: {shard.size} features from {shard.start} on cannot be taken out of "
                f"{self._scheme.bits}-bit integers that are packed by {packed}; take fewer "
                "tensor-parallel ranks"
            )
        return Shard(shard.start // packed, -(-shard.size // packed), -(-shard.total // packed))

    # ---------------------------------------------------------------- loading

    def weight_shards(self) -> NamedShards:
        """See `Weight.weight_shards`."""
        for source, part in zip(self._sources, self._parts, strict=True):
            yield from self._shards_of(source, part)

    def _shards_of(self, source: Source, part: _Part) -> Iterator[tuple[str, WeightShard]]:
        rows, columns, scheme, name = source.rows, self._columns, self._scheme, source.name
        packed_rows = self._packed_shard(rows, name) if part.zeros is not None else rows
        names = _NAMES[scheme.layout]
        if scheme.layout == "awq":
            packed = self._shard(part.integers, self._packed_shard(rows, name), columns)
        else:
            packed = self._shard(part.integers, rows, self._packed_shard(columns, name))
        yield f"{name}.{names.integers}", packed
        scales = self._shard(part.scales, rows, self._groups, dummy=_DUMMY_SCALES[scheme.bits])
        yield f"{name}.{names.scales}", replace(scales, store=source.scaling(part.scales))
        if part.zeros is not None:
            yield f"{name}.{names.zeros}", self._shard(part.zeros, packed_rows, self._groups)
        if part.group_of is not None:
            group_of = WeightShard(part.group_of, 0, columns.start, columns.total)
            yield f"{name}.{names.group_of}", group_of

    def _shard(
        self, destination: torch.Tensor, rows: Shard, columns: Shard, dummy: float | None = None
    ) -> WeightShard:
        """Returns where a part of a tensor [rows, columns], or of its transpose, goes."""
        dim, part = sharded_part(rows, columns)
        if self._is_transposed:
            dim = 1 - dim
        return WeightShard(destination, dim, part.start, part.total, dummy=dummy)

    def release(self) -> None:
        """See `QuantizedWeight.release`."""
        self._parts = []

    # ---------------------------------------------------------------- unpacking

    def joined(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns the loaded integers, uint8 [out, in], scales, float32 [out, groups], and zero
        points, int32 [out, groups], or None."""
        pairs = zip(self._sources, self._parts, strict=True)
        parts = [self.unpacked(source, part) for source, part in pairs]
        zeros = [part[2] for part in parts if part[2] is not None]
        integers = torch.cat([part[0].to(torch.uint8) for part in parts])
        return integers, torch.cat([part[1] for part in parts]), torch.cat(zeros) if zeros else None

    def dequantized(self) -> torch.Tensor:
        """See `QuantizedWeight.dequantized`."""
        return torch.cat(
            [
                self._dequantize(source, part)
                for source, part in zip(self._sources, self._parts, strict=True)
            ]
        )

    def _dequantize(self, source: Source, part: _Part) -> torch.Tensor:
        """Returns the weight of one source [out, in] in float32."""
        integers, scales, zeros = self.unpacked(source, part)
        group_of = self._group_of(part)
        if zeros is None:
            integers = integers - 2 ** (self._scheme.bits - 1)
        else:
            integers = integers - zeros[:, group_of]
        return integers * scales[:, group_of]

    def unpacked(
        self, source: Source, part: _Part
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns the integers of a source, int32 [out, in], its scales, float32 [out, groups], and
        its zero points, int32 [out, groups], or None."""
        scheme, rows = self._scheme, source.rows.size
        if scheme.layout == "awq":
            integers = _in_awq_order(_unpack(part.integers, scheme.bits, 1))[:, :rows].t()
        elif scheme.layout == "packed":
            integers = _unpack(part.integers, scheme.bits, 1)[:, : self._columns.size]
        else:
            integers = _unpack(part.integers, scheme.bits, 0)[: self._columns.size].t()
        scales = part.scales.t() if self._is_transposed else part.scales
        if part.zeros is None:
            return integers, scales, None
        if scheme.layout == "packed":
            return integers, scales, _unpack(part.zeros, scheme.bits, 0)[:rows]
        zeros = _unpack(part.zeros, scheme.bits, 1)
        if scheme.layout == "awq":
            zeros = _in_awq_order(zeros)
        elif scheme.layout == "gptq":
            # AutoGPTQ stores them less 1, and the largest as 0
            zeros = (zeros + 1) & (2**scheme.bits - 1)
        return integers, scales, zeros[:, :rows].t()

    def _group_of(self, part: _Part) -> torch.Tensor:
        """Returns the group of each input of this rank, int64 [in], among those that were
        loaded."""
        if part.group_of is not None:
            return part.group_of.long()
        columns, size = self._columns, self._scheme.group_size or self._columns.total
        places = torch.arange(columns.size, device=self._backend.device)
        return (places + columns.start) // size - self._groups.start


class _Names(NamedTuple):
    """The names of the tensors of a layout, behind the name of the module."""

    integers: str
    scales: str
    zeros: str
    group_of: str


_GPTQ_NAMES = _Names("qweight", "scales", "qzeros", "g_idx")
_NAMES = {
    "gptq": _GPTQ_NAMES,
    "gptq_v2": _GPTQ_NAMES,
    "awq": _GPTQ_NAMES,
    "packed": _Names("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
}


def _unpack(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Returns the integers of an int32 tensor, unsigned, 32 / bits for each of its elements along a
    dimension, the integers of the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    unpacked = (packed.unsqueeze(dim + 1) >> (shifts[:, None] if dim == 0 else shifts)) & (
        2**bits - 1
    )
    return unpacked.flatten(dim, dim + 1)


def _in_awq_order(unpacked: torch.Tensor) -> torch.Tensor:
    """Returns [in, out] with the output features in order, of one in AWQ's order: of eight, the
    features of the even places come first."""
    order = torch.tensor(_AWQ_PLACES, device=unpacked.device)
    return unpacked.unflatten(1, (-1, len(order)))[:, :, order].flatten(1)
