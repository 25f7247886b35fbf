"""Tensors of a safetensors file on their way to a GPU: large reads into pinned memory, of which one
is copied while the next is read.

safetensors maps its files into memory. A copy from there takes page fault by page fault what a disk
gives in large reads, and the driver copies it into pinned memory of its own. Large reads into
pinned memory are fastsafetensors' way (Yoshimura et al., "Speeding up Model Loading with
fastsafetensors", 2025).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from aioinfer.errors import ConfigError

#: Bytes of a read, and pieces of pinned memory of so many bytes that a thread has.
_PIECE_BYTES, _PIECES = 16 * 2**20, 2
#: The types of tensors by their names in safetensors files.
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Staging:
    """The pinned memory of one thread that reads files, and a stream for the copies from it: a
    context manager, within which the stream is the current one. At its end all has been copied.

    Args:
        device: to which tensors are copied. Tests have a CPU here, whose memory is not pinned.
    """

    def __init__(self, device: torch.device):
        self.device = device
        is_gpu = device.type != "cpu"
        self._stream = torch.cuda.Stream(device) if is_gpu else None
        self._pieces = [
            torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=is_gpu) for _ in range(_PIECES)
        ]
        self._copied = [torch.cuda.Event() if is_gpu else None for _ in self._pieces]
        self._reads = 0

    def __enter__(self) -> Staging:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            self._context = torch.cuda.stream(self._stream)
            self._context.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stream is not None:
            self._context.__exit__(kind, error, trace)
            self._stream.synchronize()

    def read(self, file: int, position: int, destination: torch.Tensor) -> None:
        """Reads from an open file at a position into a tensor, uint8 [bytes] on the device. Copies
        may be under way at the return. Raises `OSError`, or `EOFError` where the file ends."""
        for begin in range(0, len(destination), _PIECE_BYTES):
            number = self._reads % _PIECES
            self._reads += 1
            piece, copied = self._pieces[number], self._copied[number]
            if copied is not None:
                copied.synchronize()  # the copy of what it had before
            part = destination[begin : begin + _PIECE_BYTES]
            _read_all(file, position + begin, piece.numpy().data[: len(part)])
            part.copy_(piece[: len(part)], non_blocking=True)
            if copied is not None:
                copied.record()


def _read_all(file: int, position: int, memory: memoryview) -> None:
    while memory:
        count = os.preadv(file, [memory], position)
        if not count:
            raise EOFError(f"the file ends at {position} bytes")
        memory, position = memory[count:], position + count


class StagedFile:
    """The tensors of a safetensors file, each of which is read when it is indexed: a context
    manager.

    Args:
        mapped: the file, opened by safetensors, which has checked its header.
        path: of the file.
        staging: of the thread that reads.
    """

    def __init__(self, mapped: Any, path: Path, staging: Staging):
        self._mapped, self._path, self._staging = mapped, path, staging

    def __enter__(self) -> StagedFile:
        self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self._positions = tensor_positions(self._path)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def get_slice(self, name: str) -> StagedTensor:
        """Returns a tensor. Raises `SafetensorError` if there is none of that name."""
        stored = self._mapped.get_slice(name)
        return StagedTensor(stored, self._file, self._positions[name], self._staging, self._path)


class StagedTensor:
    """A tensor of a file; it resembles a slice of safetensors'."""

    def __init__(self, stored: Any, file: int, position: int, staging: Staging, path: Path):
        self._stored, self._file, self._position = stored, file, position
        self._staging, self._path = staging, path

    def get_shape(self) -> list[int]:
        """Returns its shape."""
        return list(self._stored.get_shape())

    def get_dtype(self) -> str:
        """Returns the name of its type in safetensors files."""
        return str(self._stored.get_dtype())

    def __getitem__(self, place: Any) -> torch.Tensor:
        """Returns a part on the device: of the first dimension no more than that is read. Raises
        `ConfigError` if the file cannot be read."""
        shape, dtype = self.get_shape(), _DTYPES[self.get_dtype()]
        first, *rest = place if isinstance(place, tuple) else (place,)
        start = 0
        if shape and first is not Ellipsis:
            start, stop, _ = first.indices(shape[0])
            row = prod(shape[1:]) * dtype.itemsize
            start, shape = start * row, [max(0, stop - start), *shape[1:]]
        values = torch.empty(shape, dtype=dtype, device=self._staging.device)
        try:
            if values.numel():
                whole = values.reshape(-1).view(torch.uint8)
                self._staging.read(self._file, self._position + start, whole)
        except (OSError, EOFError) as error:
            raise ConfigError(f"{self._path} cannot be read: {error}") from error
        return values[(slice(None), *rest)] if rest else values


def tensor_positions(file: Path) -> Mapping[str, int]:
    """Returns where each tensor of a safetensors file begins, in bytes. The header has to be right,
    as that of a file is which safetensors has opened."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    return {
        name: 8 + size + entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }
