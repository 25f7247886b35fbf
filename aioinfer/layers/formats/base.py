"""What a linear layer asks of a weight format, and what a format tells the loader.

A linear layer knows which part of which checkpoint modules this rank has (`Source`); its weight
format knows which tensors such a module has in the checkpoint, where their parts go
(`WeightShard`), and how to multiply with them. A new format is a class like `dense.DenseWeight`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from aioinfer.layers.norm import RMSNorm


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


@dataclass(frozen=True, slots=True)
class Source:
    """The rows (output features) of a checkpoint module that a rank has.

    Attributes:
        name: of the module, such as "model.layers.0.self_attn.q_proj".
        rows: which of its output features.
    """

    name: str
    rows: Shard


@dataclass(frozen=True, slots=True)
class WeightShard:
    """Where a part of a checkpoint tensor goes.

    Attributes:
        destination: a view of the parameter.
        dim: the dimension of the checkpoint tensor along which a part is taken.
        start: where the part begins; it is as long as the destination.
        total: the length of the checkpoint tensor in that dimension, or None where the destination
            takes all of it.
    """

    destination: torch.Tensor
    dim: int = 0
    start: int = 0
    total: int | None = None

    @property
    def checkpoint_shape(self) -> list[int]:
        """The shape that the checkpoint tensor must have."""
        shape = list(self.destination.shape)
        if self.total is not None:
            shape[self.dim] = self.total
        return shape


#: Pairs of a checkpoint tensor's name and where a part of it goes. A name may occur several times.
NamedShards = Iterator[tuple[str, WeightShard]]


class WeightFormat(Protocol):
    """The weight of one linear layer on one rank: `out` output features of `in` input features.

    The fused products are optional: a format that lacks one says so through `fuses_norm`, or
    computes it in several launches.
    """

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's parts of the checkpoint's tensors go, before `finalize`."""
        ...

    def reorder_rows(self, order: torch.Tensor) -> None:
        """Puts row `order[i]` (int64 [out]) at place i. Called before `finalize`."""
        ...

    def finalize(self) -> None:
        """Prepares the loaded weight for the device."""
        ...

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns x W^T + bias [..., out] for x [..., in]."""
        ...

    def fuses_norm(self, rows: int) -> bool:
        """Whether `multiply_normed` is one launch for so many rows."""
        ...

    def multiply_normed(
        self, x: torch.Tensor, norm: RMSNorm, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns norm(x) W^T [T, out] for x [T, in]."""
        ...

    def multiply_gated(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        """Returns silu(gate) * up [T, out / 2] for x [T, in], or for norm(x).

        Only for a weight whose rows are in the order of `kernels.gated_product.interleave`.
        """
        ...

    def warm_up_gated(self) -> None:
        """Launches `multiply_gated` in every configuration that the number of rows chooses."""
        ...

    def add_product(self, x: torch.Tensor, total: torch.Tensor) -> None:
        """Adds x W^T to `total` [T, out], in place, for x [T, in]."""
        ...
