"""Upload of masks from shared memory to a GPU.

`GpuModelRunner` owns one. The whole memory is registered with CUDA when the first masks come, so
that it is read by the copy engine as it is; only the masks of a step's constrained rows are copied,
on a stream of their own, while the device still computes the step.
"""

from __future__ import annotations

import contextlib
import logging

import numpy as np
import torch

from aioinfer.ipc.plan import I32

_log = logging.getLogger(__name__)


class MaskUploads:
    """Uploads masks. `device` is the device of the steps; on a CPU (in tests) it copies plainly."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._registered: int | None = None  # the address of the memory, 0 if it could not be

    def upload(self, masks: I32) -> torch.Tensor:
        """Returns masks (int32 [M, words], rows of shared memory) on the device. Later launches
        wait for them, and the host does not."""
        if self._stream is None:
            return torch.from_numpy(masks.copy())
        source = torch.from_numpy(masks)
        if not self._is_registered(masks):
            source = source.pin_memory()  # a copy, in memory that torch keeps until it is over
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            uploaded = source.to(self._device, non_blocking=True)
        current.wait_stream(self._stream)
        uploaded.record_stream(current)
        return uploaded

    def _is_registered(self, masks: I32) -> bool:
        """Whether CUDA reads the memory of `masks` directly; registers all of it at the first
        call."""
        whole = _whole_of(masks)
        if whole is None:
            return False
        if self._registered is None:
            address = whole.ctypes.data
            error = torch.cuda.cudart().cudaHostRegister(address, whole.nbytes, 0)
            self._registered = 0 if int(error) else address
            if int(error):
                _log.warning("masks are copied twice: cudaHostRegister failed with %s", error)
                with contextlib.suppress(RuntimeError):  # or the next launch would report the error
                    torch.zeros(1, device=self._device)
        return self._registered == whole.ctypes.data


def _whole_of(masks: I32) -> I32 | None:
    """Returns the array [buffers, rows, words] that `masks` are a view of; None if they are none of
    `ipc.masks.MaskMemory`."""
    base = masks
    while isinstance(base.base, np.ndarray):
        base = base.base
    return base if base is not masks and not base.flags.owndata else None
