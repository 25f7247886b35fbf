"""Weights in float16 on a CPU, multiplied with float32 activations and summed in float32.

FBGEMM (Khudia et al. 2021), which torch brings, converts them in registers: half as many bytes are
read as with float32, which is what bounds products of few rows (docs/quantization-cpu.md). Weights
are rounded to 11 bits once; activations are not rounded.
"""

from __future__ import annotations

from functools import cache

import torch

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.dense import DenseWeight


class HalfWeight:
    """A weight laid out for FBGEMM.

    Args:
        weight: float32 [out, in] on a CPU; magnitudes beyond 65 504 become that.
    """

    def __init__(self, weight: torch.Tensor):
        self._out = len(weight)
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, None)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns x W^T + b [..., out] in float32 for x [..., in]."""
        if x.numel() == 0:
            return x.new_zeros(*x.shape[:-1], self._out)
        product = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return product if bias is None else product.add_(bias)


class HalfDenseWeight(DenseWeight):
    """A weight computed with as `HalfWeight`. Arguments as in `DenseWeight`."""

    def finalize(self) -> None:
        """Repacks the weight for FBGEMM."""
        assert self.weight is not None
        self._packed = HalfWeight(self.weight)
        self._itemsize = torch.float16.itemsize
        self.weight = None


def has_half_products(backend: Backend) -> bool:
    """Whether float16 weights are multiplied faster than float32 ones here, as exact but for the
    weights' rounding."""
    is_plain = backend.device.type == "cpu" and not backend.has_kernels
    return is_plain and backend.dtype == torch.float32 and _has_half_operators()


@cache
def _has_half_operators() -> bool:
    """Whether torch was built with FBGEMM and the processor has AVX2, which it needs."""
    try:
        weight = HalfWeight(torch.eye(2, 16))
        return torch.equal(weight.multiply(torch.ones(1, 16), None), torch.ones(1, 2))
    except (RuntimeError, NotImplementedError):
        return False
