"""Conversion to and from float8 in Triton's interpreter, by torch.

The interpreter's own (3.6) loses the carry of what is rounded up to the next power of two,
truncates subnormal numbers and makes NaN of what is beyond the range; from float8 it makes 480 of
NaN. torch converts as the GPU does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_DTYPES = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
}
_BITS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
_convert_others = interpreter._convert_float


def install() -> None:
    """Replaces the interpreter's conversion of floating-point numbers."""
    interpreter._convert_float = _convert


def _convert(source: np.ndarray, source_type: Any, target_type: Any, rounding: Any) -> np.ndarray:
    """Returns the bits of numbers in another type, as the function that it stands in for does."""
    if tl.float8e4nv not in (source_type, target_type):
        return _convert_others(source, source_type, target_type, rounding)
    bits = torch.from_numpy(np.frombuffer(source.tobytes(), np.uint8).copy())
    numbers = bits.view(_DTYPES[source_type]).to(torch.float32)
    target = numbers.to(_DTYPES[target_type]).view(_BITS[target_type.primitive_bitwidth]).numpy()
    return target.view(f"u{target.dtype.itemsize}").reshape(source.shape)
