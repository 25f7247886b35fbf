"""The memory of a rank's weights and of its KV cache, which a rank that sleeps gives back.

A worker makes a `RankMemory`, has it take the loaded weights and make the tensors of the KV cache,
and calls `sleep` and `wake_up`, while no step is in flight.

- `RankMemory` is for CPUs. The KV cache's pages go back to the system and come again, zero, as they
  are written. Weights are in memory of the host anyway, where they stay.
- `VirtualRankMemory` is for GPUs, with `model.sleep_mode`: weights and KV cache are in ranges of
  addresses whose memory comes and goes (`virtual_memory`), so that CUDA graphs stay valid. The
  weights are copied to pinned memory of the host, which is taken once, beside the first steps, and
  kept; they are copied again only when they have changed.

The weights move into their range when they are loaded: `find_tensors` goes through all objects that
the model refers to, and the tensors that it finds get other memory, in place.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import torch

from aioinfer.errors import WorkerCallError
from aioinfer.layers.tensor_memory import find_tensors, group_by_storage, move_tensors, padded
from aioinfer.worker.memory import make_kv
from aioinfer.worker.pinned_memory import pin, unpin
from aioinfer.worker.virtual_memory import CHUNK_BYTES, VirtualMemory

#: What may sleep and wake by itself, in the order of waking.
TAGS = ("weights", "kv_cache")
_MADV_DONTNEED = 4


class RankMemory:
    """On a CPU.

    Attributes:
        asleep: which of `TAGS` have no memory.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.asleep: set[str] = set()
        self._kv: list[torch.Tensor] = []

    def take_weights(self, owners: Sequence[object]) -> None:
        """Keeps the weights that `owners` refer to, which have been loaded."""

    def make_kv(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a KV cache of zeros."""
        tensor = make_kv(shape, dtype, self.device)
        self._kv.append(tensor)
        return tensor

    def begin_service(self) -> None:
        """Prepares for sleep, once the rank serves."""

    def note_update(self) -> None:
        """Notes that the weights have changed."""

    def sleep(self, dropped: Sequence[torch.Tensor] = ()) -> None:
        """Gives the memory back; weights are kept on the host, but for those that are `dropped`,
        which are undefined after waking."""
        if "kv_cache" not in self.asleep:
            for tensor in self._kv:
                _drop_pages(tensor)
        self.asleep.update(TAGS)

    def wake_up(self, tags: Iterable[str]) -> None:
        """Takes memory for `tags`: the weights are what they were, the KV cache is zero. Raises
        `WorkerCallError` where memory is too short: what is named then still sleeps."""
        self.asleep.difference_update(tags)


def _drop_pages(tensor: torch.Tensor) -> None:
    """Gives the pages of a mapping of its own back, of which later reads see zeros."""
    if tensor.nbytes:
        libc = ctypes.CDLL(None)
        address = ctypes.c_void_p(tensor.data_ptr())
        libc.madvise(address, ctypes.c_size_t(tensor.nbytes), _MADV_DONTNEED)


class VirtualRankMemory(RankMemory):
    """On a GPU, with `model.sleep_mode`."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._weights: VirtualMemory | None = None
        self._used = 0  # bytes of the weights
        self._places: list[tuple[int, int]] = []  # (begin, end) of each storage in their range
        self._kept: list[slice] = []  # what the host has of it, while the weights sleep
        self._host: torch.Tensor | None = None  # pinned: the weights while they sleep
        self._is_copied = False
        self._allocation: threading.Thread | None = None
        self._ranges: list[VirtualMemory] = []  # of the KV cache

    def take_weights(self, owners: Sequence[object]) -> None:
        """See `RankMemory.take_weights`. Moves them: memory for one chunk more is taken meanwhile,
        and for one tensor."""
        groups = [
            each for each in group_by_storage(find_tensors(owners)) if each[0].device == self.device
        ]
        self._used = sum(padded(group[0].untyped_storage().nbytes()) for group in groups)
        self._weights = weights = VirtualMemory(self._used, self.device)
        weights.map(1)
        memory, begin, left = weights.tensor(), 0, 0
        while groups:
            group = groups.pop(0)
            size = group[0].untyped_storage().nbytes()
            weights.map(min(begin + size, weights.nbytes))
            move_tensors(group, memory, begin)
            self._places.append((begin, begin + size))
            begin, left = begin + padded(size), left + size
            del group
            if left > CHUNK_BYTES:
                torch.cuda.empty_cache()  # the memory that was left
                left = 0
        weights.map()
        torch.cuda.empty_cache()

    def make_kv(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `RankMemory.make_kv`."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        memory = VirtualMemory(nbytes, self.device)
        memory.map()
        self._ranges.append(memory)
        return memory.tensor()[:nbytes].zero_().view(dtype).view(shape)

    def begin_service(self) -> None:
        """See `RankMemory.begin_service`. Takes the host's memory for the weights, in a thread:
        pinning 16 GB takes seconds."""
        self._allocation = threading.Thread(target=self._allocate, daemon=True)
        self._allocation.start()

    def _allocate(self) -> None:
        host = torch.frombuffer(mmap.mmap(-1, max(1, self._used)), dtype=torch.uint8)
        try:
            with torch.inference_mode():
                pin(host)
        except RuntimeError:
            return  # `sleep` reports it
        weakref.finalize(self, unpin, [host.data_ptr()], self.device).atexit = False
        self._host = host

    def note_update(self) -> None:
        """See `RankMemory.note_update`."""
        self._is_copied = False

    def sleep(self, dropped: Sequence[torch.Tensor] = ()) -> None:
        """See `RankMemory.sleep`."""
        assert self._weights is not None, "no weights were taken"
        if "weights" not in self.asleep:
            self._kept = self._places_without(dropped, self._weights)
            self._copy_to_host(self._weights)
            self._weights.unmap()
            self.asleep.add("weights")
        for memory in self._ranges:
            memory.unmap()
        self.asleep.add("kv_cache")
        torch.cuda.empty_cache()

    def _places_without(
        self, dropped: Sequence[torch.Tensor], weights: VirtualMemory
    ) -> list[slice]:
        """Returns what is to be kept of the weights' range."""
        if not dropped:
            return [slice(0, self._used)]
        first = weights.tensor().data_ptr()
        begins = sorted(tensor.data_ptr() - first for tensor in dropped)
        return [
            slice(begin, end)
            for begin, end in self._places
            if bisect_left(begins, begin) == bisect_left(begins, end)
        ]

    def _copy_to_host(self, weights: VirtualMemory) -> None:
        if self._allocation is not None:
            self._allocation.join()
        if self._host is None:
            raise WorkerCallError(
                f"the host has too little memory for {self._used} bytes of weights, pinned"
            )
        if not self._is_copied:
            for place in self._kept:
                self._host[place].copy_(weights.tensor()[place], non_blocking=True)
            torch.cuda.synchronize(self.device)
            self._is_copied = self._kept == [slice(0, self._used)]

    def wake_up(self, tags: Iterable[str]) -> None:
        """See `RankMemory.wake_up`."""
        for tag in TAGS:
            if tag in tags and tag in self.asleep:
                ranges = self._ranges if tag == "kv_cache" else [self._weights]
                self._map([each for each in ranges if each is not None], tag)
                self.asleep.discard(tag)

    def _map(self, ranges: Sequence[VirtualMemory], tag: str) -> None:
        torch.cuda.empty_cache()  # what an update of the weights has left there
        try:
            for memory in ranges:
                memory.map()
                if tag == "kv_cache":
                    memory.tensor().zero_()
                elif self._host is not None:
                    for place in self._kept:
                        memory.tensor()[place].copy_(self._host[place], non_blocking=True)
        except RuntimeError as error:
            for memory in ranges:
                memory.unmap()
            raise WorkerCallError(f"there is no memory to wake up the {tag}: {error}") from error


def make_rank_memory(device: torch.device, *, sleeps: bool) -> RankMemory | None:
    """Returns the memory of a rank; None on a GPU where it is not to sleep."""
    if device.type == "cpu":
        return RankMemory(device)
    return VirtualRankMemory(device) if sleeps else None
