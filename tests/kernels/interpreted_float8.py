"""Rounding to float8 in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def round_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes conversions of float32 to float8e4nv round to the nearest value, ties to even, as a GPU
    does.

    The interpreter of Triton 3.6 loses the carry: what would round up to a power of two becomes
    half of it.
    """
    convert = interpreter._convert_float

    def convert_correctly(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target != tl.float8e4nv:
            return convert(data, source, target, rounding)
        rounded = torch.from_numpy(np.ascontiguousarray(data)).to(torch.float8_e4m3fn)
        return rounded.view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert_correctly)
