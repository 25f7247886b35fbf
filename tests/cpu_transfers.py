"""Copies of offloaded weights from memory of the host to memory of the host, for tests."""

from __future__ import annotations

from typing import Any

import torch


class CpuTransfers:
    """Implements `Transfers` with memory of the host on both sides."""

    def __init__(self, *, is_late: bool = False):
        self._is_late = is_late
        self.count = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        self.count += 1
        target.fill_(255)  # what was there may be gone from now on: NaN
        if not self._is_late:
            target.copy_(source)
        return target, source

    def wait(self, end: Any) -> None:
        target, source = end
        target.copy_(source)
