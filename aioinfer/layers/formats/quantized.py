"""Common base of the formats of quantized weights: products with the dequantized weight.

A format with kernels of its own overrides the products. Without them, on CPUs and for shapes that
kernels do not take, the weight is dequantized once, when it is loaded, and computed with as a dense
one: as exact, and no smaller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.dense import DenseWeight, make_dense
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.shards import NamedShards, Shard, Source

if TYPE_CHECKING:
    from aioinfer.kernels.quantize import InputFormat


class QuantizedWeight(ABC):
    """Implements `WeightFormat` with the dequantized weight.

    A format with kernels whose tiles depend on the number of rows overrides `warm_up_rows`.

    Args:
        sources: the checkpoint modules of its rows, one after the other.
        columns: the input features that this rank has.
        backend: of the rank.
    """

    _scheme: Any  # of the subclass

    def __init__(self, sources: Sequence[Source], columns: Shard, backend: Backend):
        self._sources, self._columns, self._backend = sources, columns, backend
        self._out = sum(source.rows.size for source in sources)
        #: the place in checkpoint order of each output feature, or None for the same order
        self._row_order: torch.Tensor | None = None
        self._dense: DenseWeight | None = None

    @property
    def held_bytes(self) -> int:
        """See `WeightFormat.held_bytes`. A format that computes with something else than the
        dequantized weight overrides it, unless its attributes are the tensors that it keeps."""
        if self._dense is not None:
            return self._dense.held_bytes
        return sum(kept.nbytes for kept in vars(self).values() if isinstance(kept, torch.Tensor))

    @property
    def kind(self) -> Hashable:
        """See `WeightFormat.kind`."""
        return self._scheme

    @abstractmethod
    def weight_shards(self) -> NamedShards:
        """See `WeightFormat.weight_shards`."""

    @abstractmethod
    def dequantized(self) -> torch.Tensor:
        """Returns the loaded weight in float32 [out, in], its rows in checkpoint order."""

    @abstractmethod
    def release(self) -> None:
        """Drops the loaded tensors: `finalize` has prepared the tensors for the products."""

    def reorder_rows(self, order: torch.Tensor) -> None:
        """See `WeightFormat.reorder_rows`. The rows are moved in `finalize`."""
        self._row_order = order if self._row_order is None else self._row_order[order]

    def take_input_order(self) -> torch.Tensor | None:
        """See `WeightFormat.take_input_order`."""
        return None

    def prepare_gate(self) -> bool:
        """See `WeightFormat.prepare_gate`."""
        return False

    def finalize(self) -> None:
        """Dequantizes the weight, in the backend's dtype."""
        weight = self.dequantized().to(self._backend.dtype)
        if self._row_order is not None:
            weight = weight[self._row_order.to(weight.device)]
        self.release()
        self._dense = make_dense(self._sources, self._columns, self._backend, weight)
        self._dense.finalize()

    @property
    def _product(self) -> DenseWeight:
        assert self._dense is not None, "finalize was not called"
        return self._dense

    def warm_up_rows(self) -> Sequence[int]:
        """See `WeightFormat.warm_up_rows`."""
        return ()

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `WeightFormat.multiply`."""
        return self._product.multiply(x, bias, out)

    def fuses_norm(self, rows: int) -> bool:
        """See `WeightFormat.fuses_norm`."""
        return self._product.fuses_norm(rows)

    def input_format(self, rows: int) -> InputFormat | None:
        """See `WeightFormat.input_format`."""
        return None

    def multiply_normed(
        self, x: torch.Tensor, norm: RMSNorm, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `WeightFormat.multiply_normed`."""
        return self._product.multiply_normed(x, norm, out)

    def multiply_gated(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        """See `WeightFormat.multiply_gated`."""
        return self._product.multiply_gated(x, norm)

    def warm_up_gated(self) -> None:
        """See `WeightFormat.warm_up_gated`."""
        self._product.warm_up_gated()

    def add_product(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor | None:
        """See `WeightFormat.add_product`."""
        return self._product.add_product(x, total)
