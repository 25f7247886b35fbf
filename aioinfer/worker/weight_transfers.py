"""Copies of offloaded weights from pinned memory of the host to a GPU (see `layers.transfers`).

They are on a stream of their own, which joins the capture of a CUDA graph by the first event that
it waits for: a copy is then a node of the graph.
"""

from __future__ import annotations

import mmap
import weakref

import torch

from aioinfer.worker.host_blocks import pin, unpin


class GpuTransfers:
    """Implements `Transfers`."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._pinned: list[int] = []
        weakref.finalize(self, unpin, self._pinned, device).atexit = False

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See `Transfers.allocate`. The memory is not of torch's allocator, which records an event
        for each use: that of a graph cannot be asked whether it is over."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        pin(memory)
        self._pinned.append(memory.data_ptr())
        return memory

    def start(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """See `Transfers.start`."""
        self._stream.wait_stream(torch.cuda.current_stream(target.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, end: torch.cuda.Event) -> None:
        """See `Transfers.wait`."""
        torch.cuda.current_stream(self._stream.device).wait_event(end)
