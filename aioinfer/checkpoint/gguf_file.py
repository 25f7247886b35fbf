"""Reads the container format GGUF: metadata, the list of tensors, and tensors as values.

The format is specified in the ggml project's `docs/gguf.md`. The header is parsed here because the
`gguf` package takes one numpy view for each string: 7 s for a vocabulary of 150 000 tokens, against
a fifth of a second. The arithmetic of the quantized types stays that package's.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from aioinfer.errors import ConfigError

_VERSIONS = (2, 3)
_STRING, _ARRAY = int(gguf.GGUFValueType.STRING), int(gguf.GGUFValueType.ARRAY)
#: The `struct` codes of the scalar types of metadata.
_SCALARS = {
    gguf.GGUFValueType.UINT8: "B",
    gguf.GGUFValueType.INT8: "b",
    gguf.GGUFValueType.UINT16: "H",
    gguf.GGUFValueType.INT16: "h",
    gguf.GGUFValueType.UINT32: "I",
    gguf.GGUFValueType.INT32: "i",
    gguf.GGUFValueType.FLOAT32: "f",
    gguf.GGUFValueType.BOOL: "?",
    gguf.GGUFValueType.UINT64: "Q",
    gguf.GGUFValueType.INT64: "q",
    gguf.GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
        name: such as `blk.0.attn_q.weight`.
        shape: outermost dimension first, as in torch (the file has it the other way round).
        type: the number format; see `gguf.GGMLQuantizationType`.
        rows: uint8 [shape[0], bytes of a row]; a one-dimensional quantized tensor is one row.
    """

    name: str
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    rows: np.ndarray

    def values(self, selection: slice | np.ndarray = slice(None)) -> np.ndarray:
        """Returns the values of some rows (all of them by default) as float32, flat.

        Raises:
            ConfigError: the number format is none that the `gguf` package can dequantize.
        """
        stored = self.rows[selection]
        try:
            # As one long row: the package works through tensors in groups of 16 rows otherwise.
            return gguf.dequantize(stored.reshape(1, -1), self.type)[0]
        except NotImplementedError:
            raise ConfigError(
                f"the GGUF tensor {self.name} is of the type {self.type.name}, which is not "
                f"supported"
            ) from None


class GgufFile:
    """A GGUF file that is mapped into memory.

    Attributes:
        path: where it lies.
        metadata: its key-value pairs; a value is a str, a number, a bool, or a list of these. A
            number in float32 is given as the shortest decimal that rounds to it.
        tensors: by name, in the order of the file.
    """

    def __init__(self, path: Path):
        """Opens a file and parses its header.

        Raises:
            ConfigError: it cannot be read, is no GGUF file, or was cut off.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._position = 0
            self.metadata, self.tensors = self._parse()
        except (OSError, ValueError, struct.error, KeyError, OverflowError) as error:
            raise ConfigError(f"{path} cannot be read as GGUF: {error}") from error

    def _parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not begin with the letters GGUF")
        version, num_tensors, num_fields = self._unpack("<IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} of the format is not supported")
        metadata = {}
        for _ in range(num_fields):
            key = self._string()
            metadata[key] = self._value(*self._unpack("<I"))
        headers = [self._tensor_header() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        start = -(-self._position // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in headers:
            if name in tensors:
                raise ValueError(f"it holds two tensors named {name}")
            tensors[name] = self._tensor(name, shape, kind, start + offset)
        return metadata, tensors

    def _tensor_header(self) -> tuple[str, tuple[int, ...], int, int]:
        """Returns a tensor's name, shape, type, and offset behind the header."""
        name = self._string()
        (dimensions,) = self._unpack("<I")
        *shape, kind, offset = self._unpack(f"<{dimensions}QIQ")
        return name, tuple(reversed(shape)), kind, offset

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        if not shape or shape[-1] % block_values:
            raise ValueError(f"the tensor {name} has the shape {list(shape)}, not whole blocks")
        size = prod(shape) // block_values * block_bytes
        if offset + size > len(self._data):
            raise ValueError(f"it ends before the tensor {name} does")
        stored = np.frombuffer(self._data, np.uint8, size, offset)
        num_rows = shape[0] if len(shape) > 1 or block_values == 1 else 1
        rows = stored.reshape(num_rows, size // num_rows if num_rows else 0)
        return GgufTensor(name, shape, gguf.GGMLQuantizationType(kind), rows)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._unpack("<IQ")
            if item == _STRING:
                return list(self._strings(count))
            if item == _ARRAY:
                return [self._value(item) for _ in range(count)]
            code = _SCALARS[gguf.GGUFValueType(item)]
            return list(self._unpack(f"<{count}{code}"))
        (value,) = self._unpack("<" + _SCALARS[gguf.GGUFValueType(kind)])
        return float(str(np.float32(value))) if kind == gguf.GGUFValueType.FLOAT32 else value

    def _strings(self, count: int) -> Iterator[str]:
        """Yields `count` strings that follow one another: the vocabulary, for the most part."""
        data, position, length_at = self._data, self._position, struct.Struct("<Q").unpack_from
        for _ in range(count):
            begin = position + 8
            position = begin + length_at(data, position)[0]
            if position > len(data):
                raise ValueError("it ends within a string")
            yield data[begin:position].decode()
        self._position = position

    def _string(self) -> str:
        (text,) = self._strings(1)
        return text

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._position)
        self._position += struct.calcsize(layout)
        return values

    def _bytes(self, count: int) -> bytes:
        self._position += count
        return self._data[self._position - count : self._position]
