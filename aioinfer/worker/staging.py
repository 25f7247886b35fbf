"""Pinned memory through which the arrays of a step reach the GPU: packed into one copy that the
host does not wait for.

The GPU model runner owns a `Staging`. Buffers are used one after the other; a buffer is written
again only when the step that read it is over. `upload` is for further arrays, which few steps have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.ipc.plan import I32

#: Steps whose host and result buffers may be in use at a time: two are in flight, one is being
#: prepared, one is being read. With P pipeline stages P + 1 are in flight.
NUM_BUFFERS = 16
_MIN_SIZE = 1 << 14


class Staging:
    """Uploads of int32 arrays. `device` is the device of the steps; on a CPU (in tests) nothing is
    pinned.

    Attributes:
        index: which of the `NUM_BUFFERS` buffers the current step uses.
    """

    def __init__(self, device: torch.device):
        self.index = 0
        self._device = device
        self._buffers = [self._make(_MIN_SIZE) for _ in range(NUM_BUFFERS)]
        self._over: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS

    def begin(self) -> int:
        """Begins a step: takes the next buffer, and waits for the step that used it.

        Returns its index.
        """
        self.index = (self.index + 1) % NUM_BUFFERS
        over = self._over[self.index]
        if over is not None:
            over.synchronize()
        return self.index

    def end(self, over: torch.cuda.Event) -> None:
        """Ends a step: `over` is recorded when all of its work has been launched."""
        self._over[self.index] = over

    def upload(self, arrays: Sequence[I32]) -> list[torch.Tensor]:
        """Returns each array as an int32 tensor of its shape on the device. At most once a step."""
        sizes = [array.size for array in arrays]
        total = sum(sizes)
        if len(self._buffers[self.index]) < total:
            self._buffers[self.index] = self._make(1 << total.bit_length())
        buffer = self._buffers[self.index]
        np.concatenate([array.reshape(-1) for array in arrays], out=buffer.numpy()[:total])
        uploaded = buffer[:total].to(self._device, non_blocking=True, copy=True)
        return [
            part.view(array.shape)
            for part, array in zip(uploaded.split(sizes), arrays, strict=True)
        ]

    def host_buffer(self, size: int) -> torch.Tensor:
        """Returns int32 [size] of this step's pinned memory, to be filled and copied instead of
        `upload`."""
        if len(self._buffers[self.index]) < size:
            self._buffers[self.index] = self._make(1 << size.bit_length())
        return self._buffers[self.index][:size]

    def _make(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Returns a copy of an array, which may be a view into the ring, on a device; a GPU's
    computation is not waited for. Torch keeps the pinned memory until the copy is over."""
    if device.type != "cuda":
        return torch.tensor(array, device=device)
    # torch warns of arrays that may not be written to, as those of a plan that was copied
    source = array if array.flags.writeable else array.copy()
    return torch.from_numpy(source).pin_memory().to(device, non_blocking=True)
