"""Weights of one byte, float8 (e4m3fn) or int8, with scales per output feature or per block.

Read as compressed-tensors (`float-quantized`, `int-quantized`) and transformers' and vLLM's `fp8`
store them (with blocks of 128 x 128: DeepSeek-V3, DeepSeek-AI 2024, and Qwen3-FP8), or quantized
from weights of 16 or 32 bits while they are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.quantized import QuantizedWeight
from aioinfer.layers.formats.schemes import ScaledScheme
from aioinfer.layers.shards import NamedShards, Shard, Source, WeightShard, sharded_part

#: The dtype of stored values by the kind of a scheme, and the largest magnitude that is used.
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
MAXIMA = {"fp8": torch.finfo(torch.float8_e4m3fn).max, "int8": 127.0}
#: Values that are quantized at a time, each of which takes some ten bytes meanwhile.
_SLICE_VALUES = 1 << 24
#: Keeps the scale of a row of zeros from being zero.
_SMALLEST = 1e-12
#: With these scales, random values make weights as large as dense models with random weights have
#: (`models.loader`): float8 values with a deviation of 64, uniform integers with one of 74.
_DUMMY_SCALES = {"fp8": 0.02 / 64, "int8": 0.02 / 74}


class ScaledWeight(QuantizedWeight):
    """A weight of one byte: stored value * scale.

    Args:
        values: [out, in] to load stored values into; by default a new tensor.

    Attributes:
        values: float8 or int8 [out, in], before `release`.
        scales: float32, before `release`: [out], or [blocks of output features, blocks of input
            features] of each source one below the other.
        input_scale: float32 scalar of static activation scales, or None: the largest of the
            sources, since they share the input.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        columns: Shard,
        backend: Backend,
        scheme: ScaledScheme,
        values: torch.Tensor | None = None,
    ):
        super().__init__(sources, columns, backend)
        self._scheme = scheme
        self._block_rows = [_covered(source.rows, scheme.block, 0) for source in sources]
        self._make_room(values)
        self._input_scales = torch.zeros(len(sources), device=backend.device)

    def _make_room(self, values: torch.Tensor | None) -> None:
        """Makes the tensors to load into; `values` as given to the class."""
        scheme, device = self._scheme, self._backend.device
        if values is None:
            shape = self._out, self._columns.size
            values = torch.empty(shape, dtype=DTYPES[scheme.kind], device=device)
        self.values = values
        rows = sum(covered.size for covered in self._block_rows)
        blocks = () if scheme.block is None else (self._block_columns.size,)
        self.scales = torch.ones(rows, *blocks, device=device)

    @property
    def _block_columns(self) -> Shard:
        return _covered(self._columns, self._scheme.block, 1)

    @property
    def input_scale(self) -> torch.Tensor | None:
        """See above."""
        return self._input_scales.max() if self._scheme.inputs == "static" else None

    def weight_shards(self) -> NamedShards:
        """See `Weight.weight_shards`."""
        first = first_block = 0
        for index, (source, blocks) in enumerate(zip(self._sources, self._block_rows, strict=True)):
            values = self.values[first : first + source.rows.size]
            scales = self.scales[first_block : first_block + blocks.size]
            store = None
            if self._scheme.is_online:
                store = partial(self._quantize, values, scales, source.scale)
            first, first_block = first + source.rows.size, first_block + blocks.size
            dim, part = sharded_part(source.rows, self._columns)
            yield (
                f"{source.name}.weight",
                WeightShard(values, dim, part.start, part.total, store=store),
            )
            if self._scheme.is_online:
                continue
            shard = self._scale_shard(scales, blocks)
            shard = replace(shard, store=source.scaling(scales))
            yield f"{source.name}.{self._scheme.scales}", shard
            if self._scheme.inputs == "static":
                scale = self._input_scales[index : index + 1]
                yield f"{source.name}.input_scale", WeightShard(scale, is_scale=True, dummy=1.0)

    def _quantize(
        self, values: torch.Tensor, scales: torch.Tensor, scale: float, part: torch.Tensor
    ) -> None:
        """Quantizes a part of a checkpoint tensor, times a scale, into views of the parameters:
        some rows at a time, since memory is short when a model that serves gets new weights, beside
        its KV cache."""
        step = max(1, _SLICE_VALUES // max(1, part.shape[1]))
        for begin in range(0, len(part), step):
            rows = slice(begin, begin + step)
            quantized, row_scales = quantize_rows(part[rows].to(values.device), self._scheme.kind)
            values[rows] = quantized
            scales[rows] = row_scales * scale

    def _scale_shard(self, scales: torch.Tensor, rows: Shard) -> WeightShard:
        """Returns where the scales of a source go; `rows` counts output features or blocks."""
        if self._scheme.block is None:
            dim, part = 0, rows
        else:
            dim, part = sharded_part(rows, self._block_columns)
        dummy = _DUMMY_SCALES[self._scheme.kind]
        return WeightShard(scales, dim, part.start, part.total, is_scale=True, dummy=dummy)

    def dequantized(self) -> torch.Tensor:
        """See `QuantizedWeight.dequantized`."""
        return self._dequantized(slice(None))

    def dequantize_into(self, target: torch.Tensor) -> None:
        """See `QuantizedWeight.dequantize_into`: some rows at a time, as `_quantize` does."""
        step = max(1, _SLICE_VALUES // max(1, self._columns.size))
        for begin in range(0, self._out, step):
            rows = slice(begin, begin + step)
            target[rows] = self._dequantized(rows)

    def _dequantized(self, rows: slice) -> torch.Tensor:
        """Returns some rows of the loaded weight in float32."""
        scales = self.scales[self.scale_rows()[rows]]
        values = self.values[rows].float()
        if self._scheme.block is None:
            return values.mul_(scales.unsqueeze(1))
        columns = _within(self._columns, self._scheme.block[1], scales.device)
        return values.mul_(scales[:, columns])

    def scale_rows(self) -> torch.Tensor:
        """Returns which row of `scales` each output feature has, int64 [out]."""
        device = self.scales.device
        if self._scheme.block is None:
            return torch.arange(self._out, device=device)
        rows, first = [], 0
        for source, blocks in zip(self._sources, self._block_rows, strict=True):
            rows.append(first + _within(source.rows, self._scheme.block[0], device))
            first += blocks.size
        return torch.cat(rows)

    def release(self) -> None:
        """See `QuantizedWeight.release`."""
        del self.values, self.scales

    def begin_reload(self) -> None:
        """See `Weight.begin_reload`."""
        if self._dense is not None:
            self._dense.begin_reload()
        self._make_room(None)


def quantize_rows(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (values [out, in] in the dtype of a scheme's kind, scales float32 [out]) for a weight
    [out, in]: each row is scaled so that its largest magnitude becomes the largest of the type, and
    rounded to nearest."""
    weight, maximum = weight.float(), MAXIMA[kind]
    scales = weight.abs().amax(dim=1).clamp_(min=_SMALLEST).div_(maximum)
    values = (weight / scales.unsqueeze(1)).clamp_(-maximum, maximum)
    return (values.round_() if kind == "int8" else values).to(DTYPES[kind]), scales


def _covered(shard: Shard, block: tuple[int, int] | None, dim: int) -> Shard:
    """Returns the blocks that a shard of a dimension touches; without blocks the shard itself."""
    if block is None:
        return shard
    size = block[dim]
    start, end = shard.start // size, -(-(shard.start + shard.size) // size)
    return Shard(start, end - start, -(-shard.total // size))


def _within(shard: Shard, size: int, device: torch.device) -> torch.Tensor:
    """Returns for each place of a shard (int64 [shard.size]) the number of its block among those
    that the shard touches."""
    places = torch.arange(shard.start, shard.start + shard.size, device=device)
    return places // size - shard.start // size
