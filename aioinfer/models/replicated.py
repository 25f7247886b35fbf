"""A module in plain torch that every tensor-parallel rank has whole, with parameters under the
names of the checkpoint's tensors: the tower of a model that reads pictures, or an encoder before a
decoder."""

from __future__ import annotations

from typing import ClassVar

import torch

from aioinfer.layers.backend import Backend
from aioinfer.layers.shards import NamedShards, WeightShard


class Embedding(torch.nn.Embedding):
    """An embedding table that a checkpoint fills. Random numbers on the device "meta" would import
    torch's compiler, for two seconds."""

    def reset_parameters(self) -> None:
        """Leaves the table as it is."""


class ReplicatedModule(torch.nn.Module):
    """Base class. A subclass makes its modules on the device "meta"; `place` gives them memory.

    Attributes:
        prefix: of its tensors' names in checkpoints.
        has_kernels: whether it may use kernels.
    """

    prefix: ClassVar[str] = ""
    has_kernels = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic."""
        return next(self.parameters()).dtype

    def place(self, backend: Backend) -> None:
        """Gives the parameters memory on a rank's device, in the dtype of its arithmetic; norms are
        1 and biases 0 until they are loaded."""
        self.has_kernels = backend.has_kernels
        self.requires_grad_(False)

        def empty(values: torch.Tensor) -> torch.Tensor:
            # `to_empty` would import SymPy, for half a second
            dtype = backend.dtype if values.is_floating_point() else values.dtype
            return torch.empty(values.shape, dtype=dtype, device=backend.device)

        self._apply(empty)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(float(name.endswith("weight")))

    def weight_shards(self) -> NamedShards:
        """Yields where the tensors of the checkpoint go: each whole. One of a single number may be
        without a dimension there."""
        for name, parameter in self.named_parameters():
            is_number = parameter.numel() == 1
            yield f"{self.prefix}{name}", WeightShard(parameter.data, is_scale=is_number)

    def finalize(self) -> None:
        """See `part_maker.Loadable`: nothing is left to be done."""
