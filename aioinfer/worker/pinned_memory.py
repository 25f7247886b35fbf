"""Memory of the host that is pinned, from and to which a GPU copies beside its kernels: KV blocks
(`host_blocks`), the weights of a rank that sleeps (`rank_memory`), offloaded weights, and what
features keep there."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence

import torch


def pin(memory: torch.Tensor) -> None:
    """Pins memory as it is. (torch's own allocator rounds up to a power of two.)"""
    memory.zero_()  # by several threads: else the driver touches the pages one by one
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error) != 0:
        raise RuntimeError(f"cannot allocate memory: pinning {memory.nbytes} bytes fails: {error}")


def unpin(addresses: Sequence[int], device: torch.device) -> None:
    """Ends the pinning of memory that is about to be freed: else what the process allocates at
    these addresses later would count as pinned, and copies would read the pages before."""
    if addresses:
        torch.cuda.synchronize(device)
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)


class PinnedMemory:
    """Pinned memory for copies from and to a GPU, for as long as this object exists. It is not of
    torch's allocator, which rounds up to a power of two, and which records an event for each use:
    that of a graph cannot be asked whether it is over. Threads may share it."""

    def __init__(self, device: torch.device):
        self._pinned: list[int] = []
        weakref.finalize(self, unpin, self._pinned, device).atexit = False

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns memory, uint8 [nbytes], all zeros."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        pin(memory)
        self._pinned.append(memory.data_ptr())
        return memory


class GpuTransfers(PinnedMemory):
    """Implements `layers.backend.Transfers`, for offloaded weights.

    The copies are on a stream of their own, which joins the capture of a CUDA graph by the first
    event that it waits for: a copy is then a node of the graph.
    """

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """See `Transfers.start`."""
        self._stream.wait_stream(torch.cuda.current_stream(target.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, end: torch.cuda.Event) -> None:
        """See `Transfers.wait`."""
        torch.cuda.current_stream(self._stream.device).wait_event(end)
