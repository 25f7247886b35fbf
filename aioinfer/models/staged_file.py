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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from math import prod
from pathlib import Path
from typing import Any

import torch

from aioinfer.errors import ConfigError

#: Bytes of a read, and how many pieces of pinned memory of that size a thread has.
_PIECE_BYTES, _PIECES = 16 * 2**20, 2
#: The types of tensors by their names in safetensors files.
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@contextmanager
def stage_file(
    mapped: Any, path: Path, positions: Mapping[str, int], device: torch.device
) -> Iterator[StagedFile]:
    """Context in which one thread copies tensors of a file to a device, on a stream that is the
    current one within it. At its end all have been copied.

    Args:
        mapped: the file, opened by safetensors, which has checked its header.
        path: of the file.
        positions: `tensor_positions` of the file.
        device: a GPU. Tests have a CPU here, whose memory is not pinned.
    """
    stream = None if device.type == "cpu" else torch.cuda.Stream(device)
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))
    with path.open("rb", buffering=0) as file:
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                yield StagedFile(mapped, path, file.fileno(), positions, device)
        finally:
            if stream is not None:
                stream.synchronize()


class StagedFile:
    """The tensors of a safetensors file, each of which is read when it is indexed. Made by
    `stage_file`.

    Attributes:
        device: to which tensors are copied.
    """

    def __init__(
        self, mapped: Any, path: Path, file: int, positions: Mapping[str, int],
        device: torch.device,
    ):  # fmt: skip
        """`file` is the open file's number; the others are `stage_file`'s."""
        self.device = device
        self._mapped, self._path, self._file, self._positions = mapped, path, file, positions
        is_gpu = device.type != "cpu"
        self._pieces = [
            torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=is_gpu) for _ in range(_PIECES)
        ]
        self._copied = [torch.cuda.Event() if is_gpu else None for _ in self._pieces]
        self._reads = 0

    def get_slice(self, name: str) -> StagedTensor:
        """Returns a tensor. Raises `SafetensorError` if there is none of that name."""
        return StagedTensor(self._mapped.get_slice(name), self, self._positions[name])

    def read(self, position: int, destination: torch.Tensor) -> None:
        """Reads the bytes at a position of the file into a tensor, uint8 [bytes] on the device.
        Copies may be under way at the return. Raises `ConfigError` if they cannot be read."""
        try:
            for begin in range(0, len(destination), _PIECE_BYTES):
                self._read_piece(position + begin, destination[begin : begin + _PIECE_BYTES])
        except (OSError, EOFError) as error:
            raise ConfigError(f"{self._path} cannot be read: {error}") from error

    def _read_piece(self, position: int, destination: torch.Tensor) -> None:
        number = self._reads % _PIECES
        self._reads += 1
        piece, copied = self._pieces[number], self._copied[number]
        if copied is not None:
            copied.synchronize()  # the copy of what it had before
        _read_all(self._file, position, piece.numpy().data[: len(destination)])
        destination.copy_(piece[: len(destination)], non_blocking=True)
        if copied is not None:
            copied.record()


def _read_all(file: int, position: int, memory: memoryview) -> None:
    while memory:
        count = os.preadv(file, [memory], position)
        if not count:
            raise EOFError(f"the file ends at {position} bytes")
        memory, position = memory[count:], position + count


class StagedTensor:
    """A tensor of a file; it resembles a slice of safetensors'."""

    def __init__(self, stored: Any, file: StagedFile, position: int):
        self._stored, self._file, self._position = stored, file, position

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
        values = torch.empty(shape, dtype=dtype, device=self._file.device)
        if values.numel():
            self._file.read(self._position + start, values.reshape(-1).view(torch.uint8))
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
