"""The part of a checkpoint that a rank holds: shards of dimensions, modules and tensors.

Layers and weight formats describe their weights in these terms, and the loader reads them
(`models.loader`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Shard:
    """A range of a dimension.

    Attributes:
        start, size: the range.
        total: the length of the dimension in the checkpoint.
    """

    start: int
    size: int
    total: int

    @classmethod
    def whole(cls, total: int) -> Shard:
        """Returns all of a dimension of length `total`."""
        return cls(0, total, total)

    @classmethod
    def of_rank(cls, total: int, rank: int, size: int) -> Shard:
        """Returns the part of rank `rank` of `size`, which divide the dimension evenly."""
        return cls(rank * (total // size), total // size, total)

    @classmethod
    def near_equal(cls, total: int, rank: int, size: int) -> Shard:
        """Returns the part of rank `rank` of `size`, whose parts differ in length by 1 at most."""
        start, end = total * rank // size, total * (rank + 1) // size
        return cls(start, end - start, total)

    def times(self, length: int) -> Shard:
        """Returns the same part of a dimension that has `length` elements for each one of this."""
        return Shard(self.start * length, self.size * length, self.total * length)


@dataclass(frozen=True, slots=True)
class StackIndex:
    """A place in the first dimension of checkpoint tensors that hold the weights of several
    modules, such as all experts of a layer.

    Attributes:
        number: the place.
        total: the length of the dimension.
        is_out_first: whether a dense stack is [modules, out, in], and not [modules, in, out].
    """

    number: int
    total: int
    is_out_first: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """The rows (output features) of a checkpoint module that a rank has.

    Attributes:
        name: of the module, such as "model.layers.0.self_attn.q_proj".
        rows: which of its output features.
        stack: where in a stack of modules this one is, None for a module with tensors of its own. A
            dense stack is the tensor `name` [modules, in, out], as transformers writes it for
            gpt-oss, or [modules, out, in].
        is_transposed: whether the checkpoint has the weight as [in, out].
        scale: multiplied with weight and bias when they are loaded.
        has_bias: whether the module has a bias, in a layer in which others have one.
    """

    name: str
    rows: Shard
    stack: StackIndex | None = None
    is_transposed: bool = False
    scale: float = 1.0
    has_bias: bool = True

    def scaling(self, destination: torch.Tensor) -> Callable[[torch.Tensor], None] | None:
        """Returns what stores a loaded part times `scale` in a destination; None for a part that is
        copied as it is."""
        if self.scale == 1.0:
            return None

        def store(part: torch.Tensor) -> None:
            destination.copy_(part.float() * self.scale)

        return store


def merged_sources(
    name: str, modules: Sequence[str], shards: Sequence[Shard], merged: str | None
) -> list[Source]:
    """Returns which rows of the checkpoint this rank has: `shards[i]` of `modules[i]` of module
    `name`, or of module `merged`, which holds the modules one after the other."""
    if merged is None:
        return [
            Source(f"{name}.{module}", shard) for module, shard in zip(modules, shards, strict=True)
        ]
    total, starts = 0, []
    for shard in shards:
        starts.append(total + shard.start)
        total += shard.total
    return [
        Source(f"{name}.{merged}", Shard(start, shard.size, total))
        for start, shard in zip(starts, shards, strict=True)
    ]


def sharded_part(rows: Shard, columns: Shard) -> tuple[int, Shard]:
    """Returns the dimension of a weight [rows, columns] of which a rank has a part, and the part:
    of the columns if it does not have all of them, else of the rows."""
    return (1, columns) if columns.size < columns.total else (0, rows)


@dataclass(frozen=True, slots=True)
class WeightShard:
    """Destination of a part of a checkpoint tensor.

    Attributes:
        destination: a view of the parameter.
        dim: the dimension of the checkpoint tensor along which a part is taken.
        start: where the part begins; it is as long as the destination.
        total: the length of the checkpoint tensor in that dimension, or None where the destination
            takes all of it.
        store: puts a part, as the checkpoint has it, into the destination, where more is to be done
            than to copy it; the part has the destination's shape.
        is_scale: the tensor holds scales of quantized weights: it may have dimensions of length 1
            more or fewer than the destination, and one number alone stands for all.
        stack: which element of the checkpoint tensor's first dimension all of this is about; the
            other attributes are about the dimensions behind it.
        dummy: the value of each element in a model with random weights; by default random.
        skew: (number, factor): the first so many rows of the destination are multiplied with the
            factor in a model with skewed random weights.
    """

    destination: torch.Tensor
    dim: int = 0
    start: int = 0
    total: int | None = None
    store: Callable[[torch.Tensor], None] | None = None
    is_scale: bool = False
    dummy: float | None = None
    skew: tuple[int, float] | None = None
    stack: StackIndex | None = None

    @property
    def checkpoint_shape(self) -> list[int]:
        """The shape that the checkpoint tensor must have."""
        shape = list(self.destination.shape)
        if self.total is not None:
            shape[self.dim] = self.total
        return shape if self.stack is None else [self.stack.total, *shape]


class HeadVector:
    """A parameter of each head of a rank.

    Args:
        name: of the checkpoint tensor.
        heads: which of its heads this rank has.
        device: of the parameter.
        initial: its value until it is loaded, and in a model with random weights.
        has_ones: whether the tensor may have dimensions of length 1 beside the heads'.

    Attributes:
        values: float32 [heads].
    """

    def __init__(
        self, name: str, heads: Shard, device: torch.device, initial: float = 0.0, *,
        has_ones: bool = False,
    ):  # fmt: skip
        self._name, self._heads, self._has_ones = name, heads, has_ones
        self.values = torch.full((heads.size,), initial, dtype=torch.float32, device=device)

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's part of the checkpoint's tensor goes."""
        heads = self._heads
        shard = WeightShard(self.values, 0, heads.start, heads.total, is_scale=self._has_ones)
        yield self._name, shard

    def finalize(self) -> None:
        """Leaves the values as they are."""


class TensorArena:
    """Tensors of other shapes and types, one after the other, in the memory of a tensor.

    Args:
        memory: contiguous.
    """

    def __init__(self, memory: torch.Tensor):
        self._bytes = memory.view(-1).view(torch.uint8)
        self._taken = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns the next tensor, of zeros."""
        begin, size = self._taken, math.prod(shape) * dtype.itemsize
        self._taken += size
        assert self._taken <= len(self._bytes), "the memory is too small"
        return self._bytes[begin : self._taken].zero_().view(dtype).view(*shape)


#: Pairs of a checkpoint tensor's name and where a part of it goes. A name may occur several times.
NamedShards = Iterator[tuple[str, WeightShard]]
