"""Other ways for KV blocks to cross the host's link than `worker.host_blocks.StagedCrossing`, for
`bench_kv_copies.py` to compare.

`BatchedCrossing` copies the pieces of a block, which are contiguous on both sides (keys or values
of a layer), straight to their places, without a staging buffer: 72 pieces of 256 KiB for Qwen3-8B
and blocks of 128 tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from aioinfer.ipc.plan import I32
from aioinfer.worker.host_blocks import HostBlocks
from aioinfer.worker.kv_tensors import KVTensors


@dataclass(frozen=True, slots=True)
class Pieces:
    """Contiguous pieces of some blocks.

    Attributes:
        on_device, on_host: uint64 [n], where each piece begins.
        nbytes: of each.
    """

    on_device: np.ndarray[Any, np.dtype[np.uint64]]
    on_host: np.ndarray[Any, np.dtype[np.uint64]]
    nbytes: int


def pieces_of(kv: KVTensors, host: HostBlocks, moves: I32) -> Iterator[Pieces]:
    """Yields the pieces of blocks and their places, of one group after the other. `moves`: int32
    [n, 3], group, place and block."""
    for group in np.unique(moves[:, 0]).tolist():
        own = moves[moves[:, 0] == group].astype(np.int64)
        first, memory = kv.block(group, 0), host.groups[group]
        if not first.numel():
            continue
        step = kv.block(group, 1).data_ptr() - first.data_ptr() if kv.num_blocks[group] > 1 else 0
        parts, layers = first.shape[:2]
        nbytes = first[0, 0].nbytes
        within = (
            np.arange(parts)[:, None] * first.stride(0) + np.arange(layers) * first.stride(1)
        ).ravel() * first.itemsize
        on_device = first.data_ptr() + own[:, 2:] * step + within
        on_host = memory.data_ptr() + own[:, 1:2] * memory.shape[1] + np.arange(
            parts * layers
        ) * nbytes  # fmt: skip
        yield Pieces(on_device.astype(np.uint64).ravel(), on_host.astype(np.uint64).ravel(), nbytes)


class BufferedCrossing:
    """Stages blocks in turn in several buffers, so that the link goes on while a kernel spreads the
    block before; the kernel moves eight bytes at a time."""

    def __init__(self, kv: KVTensors, host: HostBlocks, buffers: int = 3):
        self._kv, self._host = kv, host
        size = max(kv.block_bytes)
        self._staging = torch.empty(2, buffers, size, dtype=torch.uint8, device=kv.device)
        self._link = torch.cuda.Stream(kv.device)

    def to_device(self, moves: I32) -> None:
        """See `Crossing.to_device`."""
        spreading = torch.cuda.current_stream()
        self._link.wait_stream(spreading)
        spread: list[torch.cuda.Event] = []
        for number, (group, place, block) in enumerate(moves.tolist()):
            target = _wide(self._kv.block(group, block))
            staged = self._staged(0, number, target)
            if number >= len(self._staging[0]):
                self._link.wait_event(spread[number - len(self._staging[0])])
            with torch.cuda.stream(self._link):
                staged.copy_(self._host.place(group, place, target), non_blocking=True)
            spreading.wait_stream(self._link)
            target.copy_(staged)
            spread.append(spreading.record_event())

    def to_host(self, moves: I32) -> None:
        """See `Crossing.to_host`."""
        gathering = torch.cuda.current_stream()
        self._link.wait_stream(gathering)
        crossed: list[torch.cuda.Event] = []
        for number, (group, place, block) in enumerate(moves.tolist()):
            source = _wide(self._kv.block(group, block))
            staged = self._staged(1, number, source)
            if number >= len(self._staging[1]):
                gathering.wait_event(crossed[number - len(self._staging[1])])
            staged.copy_(source)
            self._link.wait_stream(gathering)
            with torch.cuda.stream(self._link):
                self._host.place(group, place, source).copy_(staged, non_blocking=True)
                crossed.append(self._link.record_event())
        gathering.wait_stream(self._link)

    def _staged(self, direction: int, number: int, like: torch.Tensor) -> torch.Tensor:
        buffer = self._staging[direction, number % len(self._staging[direction])]
        return buffer[: like.nbytes].view(like.dtype).view(like.shape)


def _wide(block: torch.Tensor) -> torch.Tensor:
    """Returns a view of a block with eight bytes an element, if its rows have as many."""
    return block.view(torch.int64) if block.shape[-1] * block.itemsize % 8 == 0 else block


class BatchedCrossing:
    """Gives all pieces to the driver in one call (`cuMemcpyBatchAsync`, CUDA 12.8): the copy
    engines move them, and no kernel runs. The idea is vLLM's `swap_blocks_batch`."""

    def __init__(self, kv: KVTensors, host: HostBlocks):
        self._kv, self._host = kv, host
        self._copy = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        self._copy.argtypes = [
            pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
        ]  # fmt: skip
        # CUmemcpyAttributes: sources are read in the order of the stream; no hints
        self._attributes = (ctypes.c_int * 6)(1)

    def to_device(self, moves: I32) -> None:
        """See `Crossing.to_device`."""
        for pieces in pieces_of(self._kv, self._host, moves):
            self._launch(pieces.on_device, pieces.on_host, pieces.nbytes)

    def to_host(self, moves: I32) -> None:
        """See `Crossing.to_host`."""
        for pieces in pieces_of(self._kv, self._host, moves):
            self._launch(pieces.on_host, pieces.on_device, pieces.nbytes)

    def _launch(self, targets: Any, sources: Any, nbytes: int) -> None:
        sizes = np.full(len(targets), nbytes, np.uint64)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        status = self._copy(
            targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes),
            ctypes.addressof(self._attributes), ctypes.addressof(first), 1,
            ctypes.addressof(failed), torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        if status:
            raise RuntimeError(f"cuMemcpyBatchAsync fails: {status}, copy {failed.value}")
