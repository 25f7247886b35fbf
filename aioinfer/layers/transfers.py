"""What `offload` needs of a device: copies of weights to it, which the worker makes."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch


class Transfers(Protocol):
    """Copies from memory of the host to a device, beside its kernels."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns memory of the host for copies, uint8 [nbytes]. Raises `RuntimeError`."""

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Begins a copy that waits for all that has been launched so far; returns its end."""

    def wait(self, end: Any) -> None:
        """Has all that is launched from now on wait for the end of a copy."""


class Offload(NamedTuple):
    """What a rank is to offload.

    Attributes:
        nbytes: of weights, at least.
        transfers: copies.
    """

    nbytes: int
    transfers: Transfers
