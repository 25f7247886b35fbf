"""What the layers of one rank compute with: device, dtype, ranks, and kernels where there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aioinfer.layers.parallel import ParallelGroup

if TYPE_CHECKING:
    from aioinfer.kernels.all_reduce import AllReduce


@dataclass(slots=True)
class Backend:
    """One for all layers of a rank.

    Attributes:
        device, dtype: of weights and arithmetic.
        group: the tensor-parallel ranks that share each layer.
        has_kernels: whether the layers use the Triton kernels; plain torch otherwise.
        pdl: whether kernels are launched as programmatic dependents (Hopper and later).
        all_reduce: the sum over the ranks in symmetric memory; None for one rank, or without
            kernels. The worker sets it when it knows how many tokens a step may have.
    """

    device: torch.device
    dtype: torch.dtype
    group: ParallelGroup
    has_kernels: bool = False
    pdl: bool = False
    all_reduce: AllReduce | None = None

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, group: ParallelGroup) -> Backend:
        """Returns the backend of a device: kernels on GPUs, dependent launches from Hopper on."""
        if device.type == "cpu":
            return cls(device, dtype, group)
        is_hopper = torch.cuda.get_device_capability(device)[0] >= 9
        return cls(device, dtype, group, has_kernels=True, pdl=is_hopper)
