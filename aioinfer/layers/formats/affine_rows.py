"""Rows of a weight in 4 or 8 bits, of which groups of inputs share a scale and an offset, as
converted GGUF files hold them."""

from __future__ import annotations

import torch

from aioinfer.errors import ConfigError
from aioinfer.layers.formats.schemes import AffineScheme
from aioinfer.layers.shards import NamedShards, Shard, Source, WeightShard, sharded_part

#: With these scales, random integers (of a deviation of 4.6 in 4 bits, 74 in 8) make weights as
#: large as dense models with random weights have.
_DUMMY_SCALES = {4: 0.02 / 4.6, 8: 0.02 / 74}
#: 4-bit integers without offsets are stored plus this.
MIDDLE = 8
#: Values dequantized at a time: a slice of float32 that stays small beside the weight.
_SLICE_VALUES = 1 << 22


class AffineRows:
    """The rows of one checkpoint module that a rank has, as they are stored.

    Args:
        source: which rows.
        columns: the input features that this rank has.
        scheme: of the module.
        device: where they are kept.

    Attributes:
        scheme: of the module.
        integers: uint8 [rows, in / 2] or int8 [rows, in].
        scales, offsets: float32 [rows, groups]; offsets may be None.

    Raises:
        ConfigError: a rank's input features do not begin and end with a byte.
    """

    def __init__(self, source: Source, columns: Shard, scheme: AffineScheme, device: torch.device):
        self._source, self._columns, self.scheme = source, columns, scheme
        rows, size = source.rows.size, scheme.group_size
        if scheme.bits == 4 and (columns.start % 2 or columns.size % 2):
            raise ConfigError(
                f"{source.name}: {columns.size} input features from {columns.start} on cannot be "
                "taken out of pairs of 4-bit integers; take fewer tensor-parallel ranks"
            )
        packed = 2 if scheme.bits == 4 else 1
        self._bytes = Shard(columns.start // packed, columns.size // packed,
                            columns.total // packed)  # fmt: skip
        first, end = columns.start // size, -(-(columns.start + columns.size) // size)
        self._groups = Shard(first, end - first, -(-columns.total // size))
        dtype = torch.uint8 if scheme.bits == 4 else torch.int8
        self.integers = torch.empty(rows, self._bytes.size, dtype=dtype, device=device)
        self.scales = torch.empty(rows, self._groups.size, device=device)
        self.offsets = torch.zeros_like(self.scales) if scheme.has_offsets else None

    def __len__(self) -> int:
        return len(self.integers)

    @property
    def has_whole_groups(self) -> bool:
        """Whether this rank's input features are groups without a remainder."""
        size = self.scheme.group_size
        return self._columns.start % size == 0 and self._columns.size % size == 0

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take."""
        kept = (self.integers, self.scales, self.offsets)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's parts of the checkpoint's tensors go."""
        name, rows = self._source.name, self._source.rows
        dim, part = sharded_part(rows, self._bytes)
        yield f"{name}.weight_integers", WeightShard(self.integers, dim, part.start, part.total)
        # a rank's columns may lie within one group: then it has all groups, and a part of the rows
        dim, part = sharded_part(rows, self._groups)
        scale = _DUMMY_SCALES[self.scheme.bits]
        yield (
            f"{name}.weight_scales",
            WeightShard(self.scales, dim, part.start, part.total, dummy=scale),
        )
        if self.offsets is not None:
            offset = -scale * (MIDDLE - 0.5) if self.scheme.bits == 4 else 0.0
            yield (
                f"{name}.weight_offsets",
                WeightShard(self.offsets, dim, part.start, part.total, dummy=offset),
            )

    def dequantized(self, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """Returns some rows (a slice, or their numbers, int64 [n]) in float32 [n, in]: the numbers
        that the `gguf` package gives, bit for bit."""
        integers, scheme = self.integers[rows], self.scheme
        if scheme.bits == 4:
            integers = torch.stack((integers & 15, integers >> 4), dim=-1).flatten(1)
        values = integers.float()
        if scheme.bits == 4 and not scheme.has_offsets:
            values -= MIDDLE
        values = self._by_group(values)
        values *= self.scales[rows].unsqueeze(-1)
        if self.offsets is not None:
            values += self.offsets[rows].unsqueeze(-1)
        begin = self._columns.start - self._groups.start * scheme.group_size
        return values.flatten(1)[:, begin : begin + self._columns.size]

    def _by_group(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values [n, in] as [n, groups, group size], zeros where a group is not this
        rank's."""
        size = self.scheme.group_size
        before = self._columns.start - self._groups.start * size
        after = self._groups.size * size - before - self._columns.size
        if before or after:
            values = torch.nn.functional.pad(values, (before, after))
        return values.unflatten(1, (-1, size))

    def dequantize_into(self, out: torch.Tensor) -> None:
        """Writes all rows to `out` [rows, in], in its dtype, a slice at a time."""
        step = max(1, _SLICE_VALUES // max(1, out.shape[1]))
        for begin in range(0, len(out), step):
            some = slice(begin, begin + step)
            out[some] = self.dequantized(some)
