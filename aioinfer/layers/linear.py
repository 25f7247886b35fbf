"""Linear layers, whole or split over tensor-parallel ranks in the manner of Megatron (Shoeybi et
al. 2019): a column-parallel layer gives each rank some output features, a row-parallel layer takes
some input features of each rank and sums its results over the ranks.

How a weight is stored, loaded and multiplied is up to its format (`formats`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.base import Epilogue, Weight
from aioinfer.layers.norm import Norm
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.shards import NamedShards, Shard, Source, WeightShard


class ColumnParallelLinear:
    """y = x W^T + b, of this rank's output features. Several checkpoint modules may be merged.

    Args:
        sources: the checkpoint modules of the output features, one after the other.
        weight: of these, for all input features.
        bias: whether there is one.
        backend: of the rank.
    """

    def __init__(self, sources: Sequence[Source], weight: Weight, *, bias: bool, backend: Backend):
        self._sources = sources
        self._backend = backend
        self.weight = weight
        self.bias: torch.Tensor | None = None
        if bias:
            rows = sum(source.rows.size for source in sources)
            self.bias = torch.zeros(rows, dtype=backend.dtype, device=backend.device)
        #: of the step before, since all steps have the same but for the ranks' sums
        self._epilogue = Epilogue(None, self.bias)

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's parts of the checkpoint's tensors go."""
        yield from self.weight.weight_shards()
        first = 0
        for source in self._sources:
            if self.bias is not None:
                part = self.bias[first : first + source.rows.size]
                first += source.rows.size
                shard = WeightShard(part, 0, source.rows.start, source.rows.total)
                yield f"{source.name}.bias", shard

    def reorder_rows(self, order: torch.Tensor) -> None:
        """Puts output feature `order[i]` (int64 [out]) at place i. Called before `finalize`."""
        self.weight.row_order = order
        if self.bias is not None:
            self.bias.copy_(self.bias[order.to(self.bias.device)])

    def finalize(self) -> None:
        """Prepares the loaded weight for the device."""
        self.weight.finalize()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [..., out] for x [..., in]."""
        return self.weight.multiply(x, Epilogue(None, self.bias))

    def of_normed(
        self, stream: ResidualStream, norm: Norm | None, gate: str | None = None
    ) -> torch.Tensor:
        """Returns the product [T, out] with the normed stream; with `gate`, an activation of
        `formats.base.ACTIVATIONS`, that of the gate times up [T, out / 2].

        The norm is left to the product, unless parts side by side have it in common, or an
        outstanding sum computes it along the way, and quantizes what the weight takes so."""
        x: Any
        if norm is None or (stream.is_reduced and not stream.is_parallel):
            x = stream.inputs
        else:
            format = self.weight.input_format(len(stream))
            x = stream.normed(norm) if format is None else stream.normed_for(norm, format)
            norm = None
        if self._epilogue.norm is not norm or self._epilogue.gate is not gate:
            self._epilogue = Epilogue(norm, self.bias, gate)
        return self.weight.multiply(x, self._epilogue)

    def warm_up(self, norm: Norm | None, gate: str | None = None) -> None:
        """Launches the products of `of_normed` in every configuration that the number of rows
        selects; both ways where an all-reduce may do the norm."""
        for before in (norm, None) if self._backend.group.size > 1 else (norm,):
            self.weight.warm_up(Epilogue(before, self.bias, gate))


class RowParallelLinear:
    """A linear layer whose input features are split over the ranks: its results are summed, and the
    bias is added once.

    Args:
        name: of the checkpoint module.
        weight: of all output features, for this rank's input features.
        out_features: how many.
        bias: whether there is one.
        backend: of the rank.
    """

    def __init__(
        self, name: str, weight: Weight, out_features: int, *, bias: bool, backend: Backend
    ):
        self._name = name
        self._out_features = out_features
        self.weight = weight
        self._backend = backend
        self.bias: torch.Tensor | None = None
        if bias:
            self.bias = torch.zeros(out_features, dtype=backend.dtype, device=backend.device)

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's parts of the checkpoint's tensors go."""
        yield from self.weight.weight_shards()
        if self.bias is not None:
            yield f"{self._name}.bias", WeightShard(self.bias)

    def finalize(self) -> None:
        """Prepares the loaded weight for the device."""
        self.weight.finalize()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, out], the same on every rank, for this rank's part of x [T, in]."""
        all_reduce = self._backend.all_reduce
        if all_reduce is None:
            total = self._backend.group.all_reduce(self.weight.multiply(x))
            return total if self.bias is None else total.add_(self.bias)
        partial = self._partial(x)
        total = torch.empty_like(partial)
        all_reduce.add(partial, total, None, 0.0, is_first=True, pdl=self._backend.pdl)
        return total

    def add_to(
        self,
        stream: ResidualStream,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        scale: float = 1.0,
    ) -> None:
        """Adds the product of this rank's part of x [T, in], summed over the ranks, to the stream.

        Args:
            norm: applied to the sum before it is added, if given.
            scale: multiplied with the addend.
        """
        if norm is not None or scale != 1.0:
            product = self(x)
            stream.hidden.add_(product if norm is None else norm(product), alpha=scale)
        elif self._backend.all_reduce is not None:
            stream.add_partial(self._partial(x))
        elif self._backend.group.size > 1:
            stream.hidden.add_(self(x))
        else:
            hidden = stream.hidden
            product = self.weight.multiply(x, Epilogue(None, self.bias, None, hidden))
            if product is not hidden:
                stream.add_parts(product)

    def warm_up(self) -> None:
        """Launches this rank's products in every configuration that the number of rows selects."""
        if self._backend.group.size == 1:
            self.weight.warm_up(adds=True)
        self.weight.warm_up()  # over several ranks, or normed before it is added

    def _partial(self, x: Any) -> torch.Tensor:
        """Writes this rank's part of the product to symmetric memory and returns it; rank 0 adds
        the bias."""
        backend = self._backend
        assert backend.all_reduce is not None
        out = backend.all_reduce.partial[: len(x)]
        partial = self.weight.multiply(x, Epilogue(out=out))
        if self.bias is not None and backend.group.rank == 0:
            partial += self.bias
        return partial


def row_shard(total: int, backend: Backend) -> Shard:
    """Returns this rank's input features of a row-parallel layer with `total` of them."""
    return Shard.of_rank(total, backend.group.rank, backend.group.size)
