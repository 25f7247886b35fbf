"""Weights in MXFP4 (OCP Microscaling Formats 1.0), dequantized when they are loaded.

A byte holds two numbers in e2m1, the number of the lower input in its low bits; 16 bytes and a
scale in e8m0 are a block of 32 inputs of an output feature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.quantized import QuantizedWeight
from aioinfer.layers.formats.schemes import MXFP4Scheme
from aioinfer.layers.shards import (
    NamedShards,
    Shard,
    Source,
    TensorArena,
    WeightShard,
    sharded_part,
)

#: Inputs that share a scale, and the bytes of their numbers.
BLOCK, BLOCK_BYTES = 32, 16
#: The bias of the exponents of scales in e8m0.
_EXPONENT_BIAS = 127
#: By the codes of e2m1: a bit of sign, two of exponent, one of mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
#: By the codes of e8m0, the last of which is NaN. A table is exact on every device, which `ldexp`
#: need not be.
_POWERS = (*(2.0 ** (code - _EXPONENT_BIAS) for code in range(255)), math.nan)
#: With random codes (of a deviation of 2.9) weights have a deviation of 0.023, about the same as
#: dense models with random weights.
_DUMMY_SCALE = _EXPONENT_BIAS - 7


class _Part(NamedTuple):
    """The tensors of one source: uint8 [out, blocks, 16] and [out, blocks]."""

    blocks: torch.Tensor
    scales: torch.Tensor


class MXFP4Weight(QuantizedWeight):
    """A weight of a stack of modules, in MXFP4.

    A rank whose inputs begin or end within a block reads all of the block.

    Args:
        sources, columns, backend: as in `QuantizedWeight`.
        memory: contiguous, to load the numbers into; by default new tensors.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        columns: Shard,
        backend: Backend,
        memory: torch.Tensor | None = None,
    ):
        super().__init__(sources, columns, backend)
        self._memory = None if memory is None else TensorArena(memory)
        self._scheme = MXFP4Scheme()
        start, end = columns.start // BLOCK, -(-(columns.start + columns.size) // BLOCK)
        self._blocks = Shard(start, end - start, -(-columns.total // BLOCK))
        self._parts = [self._make_part(source.rows.size) for source in sources]

    def _make_part(self, rows: int) -> _Part:
        shape, device = (rows, self._blocks.size), self._backend.device
        if self._memory is None:
            blocks = torch.zeros(*shape, BLOCK_BYTES, dtype=torch.uint8, device=device)
        else:
            blocks = self._memory.take((*shape, BLOCK_BYTES), torch.uint8)
        return _Part(blocks, torch.zeros(shape, dtype=torch.uint8, device=device))

    def weight_shards(self) -> NamedShards:
        """See `Weight.weight_shards`."""
        for source, (blocks, scales) in zip(self._sources, self._parts, strict=True):
            dim, part = sharded_part(source.rows, self._blocks)
            place = dim, part.start, part.total
            yield f"{source.name}_blocks", WeightShard(blocks, *place, stack=source.stack)
            yield (
                f"{source.name}_scales",
                WeightShard(scales, *place, stack=source.stack, dummy=_DUMMY_SCALE),
            )

    def dequantized(self) -> torch.Tensor:
        """See `QuantizedWeight.dequantized`."""
        first = self._columns.start - self._blocks.start * BLOCK
        return torch.cat(
            [
                dequantize(part.blocks, part.scales)[:, first : first + self._columns.size]
                for part in self._parts
            ]
        )

    def joined(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loaded blocks, uint8 [out, blocks, 16], and scales, uint8 [out, blocks]."""
        parts = self._parts
        return torch.cat([part.blocks for part in parts]), torch.cat([p.scales for p in parts])

    def largest_scale(self) -> torch.Tensor:
        """Returns the largest code of a scale, a scalar."""
        return torch.stack([part.scales.max() for part in self._parts]).max()

    def release(self) -> None:
        """See `QuantizedWeight.release`."""
        self._parts = []


def make_mxfp4(
    sources: Sequence[Source], columns: Shard, backend: Backend, scheme: MXFP4Scheme
) -> MXFP4Weight:
    """Returns a weight in MXFP4. Raises `ConfigError` for a module that is not one of a stack."""
    if sources[0].stack is None:
        raise ConfigError(f"{sources[0].name}: MXFP4 is supported for gpt-oss's experts alone")
    return MXFP4Weight(sources, columns, backend)


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns the numbers of blocks (uint8 [..., blocks, 16]) with scales (uint8 [..., blocks]) in
    float32 [..., blocks * 32]; all of them are exact there and in bfloat16."""
    values, powers = (torch.tensor(table, device=blocks.device) for table in (_VALUES, _POWERS))
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).int()
    return (values[codes].flatten(-2) * powers[scales.int()][..., None]).flatten(-2)
