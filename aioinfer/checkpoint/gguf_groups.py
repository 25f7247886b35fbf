"""Takes GGUF's quantized blocks apart: integers, and a scale and an offset for each group of them.

value = integer * scale + offset, computed in float32, is what the `gguf` package's `dequantize`
gives, bit for bit. The layouts of blocks follow `ggml-common.h` and `ggml-quants.c` in llama.cpp's
repository.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import gguf
import numpy as np


class Groups(NamedTuple):
    """The parts of some blocks.

    Attributes:
        integers: uint8 (4 bits each) or int8 [blocks, values of a block].
        scales: float16 or float32 [blocks, groups of a block].
        offsets: likewise, or None for a type without.
    """

    integers: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None


class GroupedType(NamedTuple):
    """The stored form of a quantized GGUF type after conversion.

    Attributes:
        bits: of an integer: 4, unsigned, or 8, signed.
        group_size: neighbouring values that share a scale and an offset.
        has_offsets: whether there are offsets; otherwise 4-bit integers are the type's integers
            plus 8.
        scale_dtype: of scales and offsets in safetensors: the type in which they are exact.
        take_apart: from uint8 [blocks, bytes of a block] to the parts.
    """

    bits: int
    group_size: int
    has_offsets: bool
    scale_dtype: str
    take_apart: Callable[[np.ndarray], Groups]


def pack_pairs(integers: np.ndarray) -> np.ndarray:
    """Returns 4-bit integers [n, values] two to a byte, uint8 [n, values / 2], the first in the low
    bits."""
    return integers[:, ::2] | (integers[:, 1::2] << 4)


def _nibbles(stored: np.ndarray, run: int) -> np.ndarray:
    """Returns the 4-bit integers of bytes [blocks, n], uint8 [blocks, 2 n]: of each `run` bytes the
    low halves come first, and then the high ones."""
    runs = stored.reshape(len(stored), -1, 1, run)
    both = np.concatenate((runs & np.uint8(15), runs >> np.uint8(4)), axis=2)
    return both.reshape(len(stored), -1)


def _halves(blocks: np.ndarray, begin: int, count: int) -> np.ndarray:
    """Returns `count` float16 [blocks, count] that begin at a byte of each block."""
    return np.ascontiguousarray(blocks[:, begin : begin + 2 * count]).view(np.float16)


def _q4_0(blocks: np.ndarray) -> Groups:
    return Groups(_nibbles(blocks[:, 2:], 16), _halves(blocks, 0, 1), None)


def _q4_1(blocks: np.ndarray) -> Groups:
    return Groups(_nibbles(blocks[:, 4:], 16), _halves(blocks, 0, 1), _halves(blocks, 2, 1))


def _fifth_bits(stored: np.ndarray) -> np.ndarray:
    """Returns the bits of 4 bytes [blocks, 4], the lowest first, as 0 or 16."""
    return np.unpackbits(stored, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: np.ndarray) -> Groups:
    integers = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return Groups(integers.view(np.int8) - np.int8(16), _halves(blocks, 0, 1), None)


def _q5_1(blocks: np.ndarray) -> Groups:
    integers = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return Groups(integers.view(np.int8), _halves(blocks, 0, 1), _halves(blocks, 2, 1))


def _q8_0(blocks: np.ndarray) -> Groups:
    return Groups(blocks[:, 2:].view(np.int8), _halves(blocks, 0, 1), None)


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns scales and offsets, float32 [blocks, 8], of a block of Q4_K or Q5_K: two float16,
    multiplied with integers of 6 bits, of which 12 bytes hold eight and eight."""
    low, high, rest = (blocks[:, begin : begin + 4] for begin in (4, 8, 12))
    six, four = np.uint8(0x3F), np.uint8(0x0F)
    top = np.uint8(0x30)
    scales = np.concatenate((low & six, (rest & four) | ((low >> 2) & top)), axis=1)
    minima = np.concatenate((high & six, (rest >> 4) | ((high >> 2) & top)), axis=1)
    factors = _halves(blocks, 0, 2).astype(np.float32)
    return factors[:, :1] * scales.astype(np.float32), -(factors[:, 1:] * minima.astype(np.float32))


def _q4_k(blocks: np.ndarray) -> Groups:
    return Groups(_nibbles(blocks[:, 16:], 32), *_k_scales(blocks))


def _q5_k(blocks: np.ndarray) -> Groups:
    # byte i of 32 has the fifth bits of the integers i, i + 32, i + 64 ...
    bits = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").swapaxes(1, 2)
    integers = _nibbles(blocks[:, 48:], 32) | bits.reshape(len(blocks), -1) << np.uint8(4)
    return Groups(integers.view(np.int8), *_k_scales(blocks))


def _q6_k(blocks: np.ndarray) -> Groups:
    low = _nibbles(blocks[:, :128], 64)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(len(blocks), 2, 1, 32) >> shifts) & np.uint8(3)
    integers = (low | high.reshape(len(blocks), -1) << np.uint8(4)).view(np.int8) - np.int8(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return Groups(integers, _halves(blocks, 208, 1).astype(np.float32) * scales, None)


#: The types that stay quantized. Others are dequantized when the file is converted.
GROUPED_TYPES = {
    gguf.GGMLQuantizationType.Q4_0: GroupedType(4, 32, False, "F16", _q4_0),
    gguf.GGMLQuantizationType.Q4_1: GroupedType(4, 32, True, "F16", _q4_1),
    gguf.GGMLQuantizationType.Q5_0: GroupedType(8, 32, False, "F16", _q5_0),
    gguf.GGMLQuantizationType.Q5_1: GroupedType(8, 32, True, "F16", _q5_1),
    gguf.GGMLQuantizationType.Q8_0: GroupedType(8, 32, False, "F16", _q8_0),
    gguf.GGMLQuantizationType.Q4_K: GroupedType(4, 32, True, "F32", _q4_k),
    gguf.GGMLQuantizationType.Q5_K: GroupedType(8, 32, True, "F32", _q5_k),
    gguf.GGMLQuantizationType.Q6_K: GroupedType(8, 16, False, "F32", _q6_k),
}
