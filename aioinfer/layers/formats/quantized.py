"""Common base of the formats of quantized weights, with the product of the dequantized weight."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.base import PLAIN, Epilogue, Weight
from aioinfer.layers.formats.dense import DenseWeight
from aioinfer.layers.kernel_choices import Candidate
from aioinfer.layers.shards import Shard, Source


def make_dense(
    sources: Sequence[Source],
    columns: Shard,
    backend: Backend,
    weight: torch.Tensor | None = None,
) -> DenseWeight:
    """Returns the dense weight for the backend; arguments as in `DenseWeight`."""
    if backend.has_kernels:
        from aioinfer.layers.formats.kernel_dense import KernelDenseWeight

        return KernelDenseWeight(sources, columns, backend, weight)
    return DenseWeight(sources, columns, backend, weight)


class QuantizedWeight(Weight):
    """A weight that is stored quantized.

    A format with kernels of its own overrides `finalize` and the product. Without them, on CPUs and
    for shapes that kernels do not take, the weight is dequantized once, when it is loaded, and
    computed with as a dense one: as exact, and no smaller.
    """

    _scheme: Any  # of the subclass
    #: The dequantized weight, where it is computed with.
    _dense: DenseWeight | None = None

    @property
    def held_bytes(self) -> int:
        """See `Weight.held_bytes`. A format that computes with something else than the dequantized
        weight overrides it, unless its attributes are the tensors that it keeps."""
        if self._dense is not None:
            return self._dense.held_bytes
        return sum(kept.nbytes for kept in vars(self).values() if isinstance(kept, torch.Tensor))

    @property
    def kind(self) -> Hashable:
        """See `Weight.kind`."""
        return self._scheme

    @abstractmethod
    def dequantized(self) -> torch.Tensor:
        """Returns the loaded weight in float32 [out, in], its rows in checkpoint order."""

    @abstractmethod
    def release(self) -> None:
        """Drops the loaded tensors: `finalize` has prepared the tensors for the products."""

    def finalize(self) -> None:
        """Dequantizes the weight, in the backend's dtype; one that is loaded again goes into the
        memory that `begin_reload` of the dense one has prepared."""
        if self._dense is not None:
            self.dequantize_into(self._dense.loaded)
            self.release()
            self._dense.finalize()
            return
        weight = self.dequantized().to(self._backend.dtype)
        self.release()
        self._use(make_dense(self._sources, self._columns, self._backend, weight))

    def dequantize_into(self, target: torch.Tensor) -> None:
        """Writes the loaded weight to `target` [out, in], its rows in checkpoint order."""
        target.copy_(self.dequantized())

    def drop(self) -> list[torch.Tensor]:
        """See `Droppable.drop`."""
        if self._dense is None:
            raise NotImplementedError
        return self._dense.drop()

    def _use(self, dense: DenseWeight) -> None:
        """Computes with a dense weight from now on, which this finalizes."""
        dense.row_order, dense.gate, self.row_order = self.row_order, self.gate, None
        dense.extension = self.extension
        dense.finalize()
        self._dense = dense

    def multiply(self, x: Any, epilogue: Epilogue = PLAIN) -> torch.Tensor:
        """See `Weight.multiply`."""
        if self._dense is not None:
            return self._dense.multiply(x, epilogue)
        return super().multiply(x, epilogue)

    def launch(self, candidate: Candidate, x: Any, epilogue: Epilogue) -> torch.Tensor:
        """See `Weight.launch`; a format with kernels of its own overrides it."""
        raise RuntimeError("finalize was not called")
