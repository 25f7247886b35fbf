"""Another way for KV blocks to cross the host's link than those of `worker.block_crossings`, for
`bench_kv_copies.py` to compare."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from aioinfer.ipc.plan import I32
from aioinfer.worker.kv_tensors import KVTensors

_ON_HOST, _ON_DEVICE = 1, 2  # CUmemorytype


class PitchedCrossing:
    """Copies a block as the rows of a matrix, whose pitch on the device is the bytes of a layer's
    blocks (`cuMemcpy2DAsync`): one call a block, with any driver. A pitch is below 2 GiB."""

    def __init__(self, kv: KVTensors, places: Sequence[torch.Tensor]):
        self._kv, self._places = kv, places
        self._copy = ctypes.CDLL("libcuda.so.1").cuMemcpy2DAsync_v2
        self._copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def to_device(self, moves: I32) -> None:
        """See `Crossing.to_device`."""
        for group, place, block in moves.tolist():
            host, device, size = self._sides(group, place, block)
            self._launch(host, device, size)

    def to_host(self, moves: I32) -> None:
        """See `Crossing.to_host`."""
        for group, place, block in moves.tolist():
            host, device, size = self._sides(group, place, block)
            self._launch(device, host, size)

    def _sides(
        self, group: int, place: int, block: int
    ) -> tuple[list[int], list[int], tuple[int, int]]:
        """Returns place and block as `CUDA_MEMCPY2D` describes them, and bytes and number of the
        rows."""
        rows = self._kv.block(group, block)
        width, pitch = rows[0, 0].nbytes, rows.stride(1) * rows.itemsize
        assert rows.stride(0) == rows.shape[1] * rows.stride(1)
        host = [0, 0, _ON_HOST, self._places[group][place].data_ptr(), 0, 0, width]
        device = [0, 0, _ON_DEVICE, 0, rows.data_ptr(), 0, pitch]
        return host, device, (width, rows.shape[0] * rows.shape[1])

    def _launch(self, source: list[int], target: list[int], size: tuple[int, int]) -> None:
        # CUDA_MEMCPY2D: 16 words, the enums padded to eight bytes
        fields = (ctypes.c_uint64 * 16)(*source, *target, *size)
        stream = torch.cuda.current_stream().cuda_stream
        if status := self._copy(ctypes.addressof(fields), stream):
            raise RuntimeError(f"cuMemcpy2DAsync fails: {status}")
