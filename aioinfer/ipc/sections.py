"""The optional parts of a plan or a result, and how messages are read.

A step feature (`aioinfer.features`) that needs more than the fixed part of a message declares a
`Section`: a dataclass of arrays. Encoding and decoding follow from the declaration:

    @dataclass(frozen=True, slots=True)
    class Logprobs(Section):
        sampled: F32 = array(np.float32)
        top_tokens: I32 = array(np.int32, ndim=2)
        top_logprobs: F32 = array(np.float32, ndim=2)

Wire form of a section, in units of 4 bytes: its kind; the shape of each array, in the order of the
declaration; then the arrays themselves, in the same order. Every dtype is a multiple of 4 bytes.
The kind is a hash of the class's name, so that no number has to be given out: both sides of a ring
have imported the same features.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]


def array(dtype: npt.DTypeLike, *, ndim: int = 1) -> Any:
    """Declares an array of a section: its dtype, of 4 bytes or a multiple, and its dimensions."""
    return dataclasses.field(metadata={"dtype": np.dtype(dtype), "ndim": ndim})


class ArrayReader:
    """Takes arrays one after the other from a message. They are views into it."""

    def __init__(self, message: bytes | bytearray | memoryview, offset: int):
        self._message = message
        self._offset = offset

    def take(self, count: int) -> I32:
        """Returns the next `count` int32."""
        taken = np.frombuffer(self._message, np.int32, count, self._offset)
        self._offset += 4 * count
        return taken

    def take_array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Returns the next array of this dtype and shape."""
        return self.take(math.prod(shape) * dtype.itemsize // 4).view(dtype).reshape(shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """An optional part of a message.

    Attributes:
        kind: the number of the section in a message: 31 bits of a hash of its class's name.
    """

    kind: ClassVar[int]
    _kinds: ClassVar[dict[int, type[Section]]] = {}

    def __init_subclass__(cls) -> None:
        """Enters the class among the sections that messages may have. Raises TypeError if another
        class has the same hash."""
        name = f"{cls.__module__}.{cls.__qualname__}"
        cls.kind = zlib.crc32(name.encode()) & 0x7FFFFFFF
        other = Section._kinds.get(cls.kind)
        # `dataclass(slots=True)` makes a second class of the same name, which counts
        if other is not None and f"{other.__module__}.{other.__qualname__}" != name:
            raise TypeError(f"sections {name} and {other.__qualname__} have one hash: rename one")
        Section._kinds[cls.kind] = cls

    def encode(self) -> list[memoryview]:
        """Returns the buffers that make up the section, to be written one after the other."""
        arrays = [getattr(self, each.name) for each in dataclasses.fields(self)]
        head = np.array([self.kind, *(size for part in arrays for size in part.shape)], np.int32)
        return [as_bytes(part) for part in (head, *arrays) if part.size]

    @classmethod
    def decode(cls, reader: ArrayReader) -> Self:
        """Reads a section behind its kind; arrays are views into the message."""
        declared = [each.metadata for each in dataclasses.fields(cls)]
        sizes = iter(reader.take(sum(each["ndim"] for each in declared)).tolist())
        shapes = [tuple(next(sizes) for _ in range(each["ndim"])) for each in declared]
        return cls(
            *(
                reader.take_array(each["dtype"], shape)
                for each, shape in zip(declared, shapes, strict=True)
            )
        )


def as_bytes(part: npt.NDArray[Any]) -> memoryview:
    """Returns an array's bytes without a copy, unless it is not contiguous."""
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8).data


def decode_sections(reader: ArrayReader, count: int, message: str) -> list[Section]:
    """Reads `count` sections of a message.

    Args:
        message: the name of the message, for errors.

    Raises:
        ValueError: a section is of a kind that no imported class has.
    """
    found: list[Section] = []
    for _ in range(count):
        kind = int(reader.take(1)[0])
        section = Section._kinds.get(kind)
        if section is None:
            names = ", ".join(sorted(each.__name__ for each in Section._kinds.values()))
            raise ValueError(f"a {message} with a section of kind {kind}; known are {names}")
        found.append(section.decode(reader))
    return found
