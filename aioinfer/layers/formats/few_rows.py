"""Products of few rows with 4-bit weights on a CPU with AVX-512, by torch's own operator.

It reads a quarter of what float16 weights are, and rounds activations, scales and results to
bfloat16: with one row it is 1.4 times as fast for a whole model, with many it is slower than
`half`, and with AVX2 at any (docs/quantization-cpu.md).
"""

from __future__ import annotations

import torch

#: Up to so many rows it is used.
MAX_ROWS = 4
#: The inputs that share a scale, and what the operator takes output features by.
GROUP_SIZE, _ROW_TILE = 32, 16
#: The operator takes integers less this.
_MIDDLE = 8


class FewRowsWeight:
    """A weight laid out for `_weight_int4pack_mm_for_cpu`.

    Args:
        integers: uint8 [out, in], below 16.
        scales, offsets: float32 [out, in / 32].
    """

    def __init__(self, integers: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor):
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers.int(), 1)
        both = torch.stack((scales, offsets + _MIDDLE * scales), dim=-1)
        self._scales = both.transpose(0, 1).contiguous().bfloat16()

    @staticmethod
    def supports(out_features: int) -> bool:
        """Whether it is faster here, and takes so many output features."""
        has_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        return has_avx512 and out_features > 0 and out_features % _ROW_TILE == 0

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns x W^T + b [..., out] in float32 for x [..., in]."""
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows, self._packed, GROUP_SIZE, self._scales
        )
        product = product.float().view(*x.shape[:-1], -1)
        return product if bias is None else product.add_(bias)
