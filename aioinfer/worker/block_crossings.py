"""How KV blocks cross the link between a device and memory of the host.

A place of the host has the bytes of one block, parts and layers one behind the other, as files and
other servers get them. On the device these **pieces** lie apart: for Qwen3-8B and blocks of 128
tokens a block has 72 pieces of 256 KiB, keys or values of a layer. Neighbouring blocks therefore
never adjoin on both sides, and a piece is the largest part that one copy can move.

- `BatchedCrossing` gives the addresses of all pieces to the driver in one call, which needs CUDA
  12.8: the copy engines move them, no kernel runs beside the steps, and nothing is staged on the
  device. The idea is vLLM's `swap_blocks_batch`.
- `PlainCrossing` copies block by block with torch, on CPUs and with older drivers. On a GPU, torch
  then takes memory for a block in each direction, and a kernel spreads or gathers the pieces.

`host_blocks` has the places, and decides when blocks cross.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from aioinfer.ipc.plan import I32
from aioinfer.worker.kv_tensors import KVTensors

I64 = np.ndarray[Any, np.dtype[np.int64]]
U64 = np.ndarray[Any, np.dtype[np.uint64]]
#: Begins to copy pieces, in any order: uint64 [n] each, where each piece goes, where it comes from,
#: and its bytes.
CopyPieces = Callable[[U64, U64, U64], None]


class Crossing(Protocol):
    """Copies blocks, on a GPU behind what is on the current stream."""

    def to_device(self, moves: I32) -> None:
        """Copies places of the host to blocks: int32 [n, 3], group, place and block."""

    def to_host(self, moves: I32) -> None:
        """Copies blocks to places of the host: int32 [n, 3], group, place and block. Of several
        blocks for one place, the last stays."""


def make_crossing(kv: KVTensors, places: Sequence[torch.Tensor]) -> Crossing:
    """Returns the way for blocks of `kv` that its device and the driver have.

    Args:
        kv: of the rank.
        places: of each group, uint8 [places, bytes of a block] in memory of the host, on a GPU
            pinned; without places where the rank has none of the group's layers.
    """
    copy = driver_copy() if kv.device.type == "cuda" else None
    return BatchedCrossing(kv, places, copy) if copy is not None else PlainCrossing(kv, places)


class PlainCrossing:
    """Implements `Crossing` with torch's copies."""

    def __init__(self, kv: KVTensors, places: Sequence[torch.Tensor]):
        self._kv, self._places = kv, places

    def to_device(self, moves: I32) -> None:
        """See `Crossing.to_device`."""
        for group, place, block in moves.tolist():
            target = self._kv.block(group, block)
            target.copy_(self._place(group, place, target), non_blocking=True)

    def to_host(self, moves: I32) -> None:
        """See `Crossing.to_host`."""
        for group, place, block in moves.tolist():
            source = self._kv.block(group, block)
            self._place(group, place, source).copy_(source, non_blocking=True)

    def _place(self, group: int, place: int, like: torch.Tensor) -> torch.Tensor:
        """Returns a view of a place in shape and dtype of a block; of a group without layers on
        this rank, an empty one."""
        return (
            self._places[group][place].view(like.dtype).view(like.shape) if like.numel() else like
        )


@dataclass(frozen=True, slots=True, eq=False)
class _GroupPieces:
    """Where the pieces of a group's blocks are.

    Attributes:
        on_device: int64 [pieces of a block], addresses of the pieces of block 0.
        block_step: bytes from a block to the next on the device.
        on_host: int64 [pieces of a block], addresses of the pieces of place 0.
        place_step: bytes of a place.
        nbytes: of a piece.
    """

    on_device: I64
    block_step: int
    on_host: I64
    place_step: int
    nbytes: int

    @classmethod
    def of(cls, blocks: torch.Tensor, places: torch.Tensor) -> _GroupPieces:
        """Returns the pieces of blocks [parts, layers, num_blocks, ...], whose bytes within a layer
        are adjacent."""
        parts, layers, per_layer = blocks.shape[0], blocks.shape[1], blocks[:1, :1, :1].nbytes
        part_step, layer_step, block_step = (
            blocks.stride(dim) * blocks.itemsize for dim in range(3)
        )
        if not parts * layers:
            return cls(np.empty(0, np.int64), 0, np.empty(0, np.int64), 0, 0)
        assert blocks[0, 0, 0].is_contiguous()
        offsets = np.add.outer(np.arange(parts) * part_step, np.arange(layers) * layer_step)
        return cls(
            blocks.data_ptr() + offsets.ravel(),
            block_step,
            places.data_ptr() + np.arange(parts * layers) * per_layer,
            places.stride(0),
            per_layer,
        )


class BatchedCrossing:
    """Implements `Crossing` with one call for all pieces of all blocks."""

    def __init__(self, kv: KVTensors, places: Sequence[torch.Tensor], copy: CopyPieces):
        """`copy` is called with the pieces; see `driver_copy`."""
        self._groups = [
            _GroupPieces.of(kv.blocks(group), memory) for group, memory in enumerate(places)
        ]
        self._copy = copy

    def to_device(self, moves: I32) -> None:
        """See `Crossing.to_device`."""
        on_device, on_host, sizes = self._pieces(moves)
        if len(sizes):
            self._copy(on_device, on_host, sizes)

    def to_host(self, moves: I32) -> None:
        """See `Crossing.to_host`."""
        on_device, on_host, sizes = self._pieces(_last_of_places(moves))
        if len(sizes):
            self._copy(on_host, on_device, sizes)

    def _pieces(self, moves: I32) -> tuple[U64, U64, U64]:
        """Returns the pieces of some blocks, uint64 [n] each: addresses on the device, addresses on
        the host, and bytes."""
        on_device, on_host, sizes = [], [], []
        for number, group in enumerate(self._groups):
            own = moves[moves[:, 0] == number].astype(np.int64)
            on_device.append((own[:, 2:3] * group.block_step + group.on_device).ravel())
            on_host.append((own[:, 1:2] * group.place_step + group.on_host).ravel())
            sizes.append(np.full(len(on_host[-1]), group.nbytes, np.uint64))
        addresses = np.concatenate(on_device), np.concatenate(on_host)
        return addresses[0].astype(np.uint64), addresses[1].astype(np.uint64), np.concatenate(sizes)


def _last_of_places(moves: I32) -> I32:
    """Returns moves without those whose place a later one overwrites: the pieces of a call are
    copied in any order."""
    numbers = moves[:, 0].astype(np.int64) << 32 | moves[:, 1]
    _, from_end = np.unique(numbers[::-1], return_index=True)
    return moves if len(from_end) == len(moves) else moves[len(moves) - 1 - from_end]


def driver_copy(flags: int = 0) -> CopyPieces | None:
    """Returns `cuMemcpyBatchAsync` of the driver, on the current stream; None where the driver is
    older than CUDA 12.8. It raises `RuntimeError` where a call fails.

    Args:
        flags: `CUmemcpyFlags`, 1 for the hint to overlap copies with kernels.
    """
    function = getattr(ctypes.CDLL("libcuda.so.1"), "cuMemcpyBatchAsync", None)
    if function is None:
        return None
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    function.argtypes = [
        pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
    ]  # fmt: skip
    # CUmemcpyAttributes: sources are read in the order of the stream, no hints of locations
    attributes = (ctypes.c_int * 6)(1, 0, 0, 0, 0, flags)

    def copy(targets: U64, sources: U64, sizes: U64) -> None:
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        status = function(
            targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes),
            ctypes.addressof(attributes), ctypes.addressof(first), 1, ctypes.addressof(failed),
            torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        if status:
            raise RuntimeError(f"cuMemcpyBatchAsync fails: {status}, copy {failed.value}")

    return copy
