"""Writes a safetensors file piece by piece, from many threads, without holding its tensors.

The format (github.com/huggingface/safetensors) is a JSON header that gives each tensor's dtype,
shape and place, and then their bytes: with dtypes and shapes known, any part of any tensor can be
written at any time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1}
#: Tensors begin at multiples of this in the file, as the reference implementation lays them out.
_ALIGNMENT = 8


class TensorSpec(NamedTuple):
    """The dtype and shape of a tensor that the file will hold.

    Attributes:
        dtype: "F32", "F16", "BF16", "I8" or "U8".
        shape: the tensor's.
    """

    dtype: str
    shape: tuple[int, ...]


class SafetensorsWriter:
    """A file whose header is written, and whose tensors `write` fills in; a context manager.

    A part that is never written is zero.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec]):
        """Creates the file at its full size. Raises `OSError` where it cannot be created."""
        self._begin: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        # The widest items go first: so every tensor is aligned to its items without gaps, which
        # the format forbids.
        for name, (dtype, shape) in sorted(
            specs.items(), key=lambda item: -_ITEM_BYTES[item[1].dtype]
        ):
            end = offset + prod(shape) * _ITEM_BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            self._begin[name] = offset
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        start = 8 + len(text)
        self._begin = {name: start + begin for name, begin in self._begin.items()}
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.pwrite(self._file, len(text).to_bytes(8, "little") + text, 0)
            os.truncate(self._file, start + offset)
        except OSError:
            os.close(self._file)
            raise

    def write(self, name: str, offset: int, values: np.ndarray) -> None:
        """Writes a part of a tensor, `offset` bytes behind its begin. Any thread may call it.

        Args:
            values: contiguous, with the items of the tensor's dtype.

        Raises:
            OSError: the disk is full, say.
        """
        left = values.reshape(-1).view(np.uint8).data
        position = self._begin[name] + offset
        while left:
            written = os.pwrite(self._file, left, position)
            left, position = left[written:], position + written

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)
