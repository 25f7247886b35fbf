"""Linear layers, whole or split over tensor-parallel ranks.

Weights are [out, in] as in checkpoints. A layer is loaded through `targets`, which says what part of which
checkpoint tensor goes where; `finalize` then prepares it for the device it computes on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from aioinfer.layers.parallel import ParallelGroup

#: The batch size for which oneDNN lays out packed weights. Its layouts for 1 to 32 rows are alike, and those serve prefill as well.
_PACKED_ROWS = 8


@dataclass(frozen=True, slots=True)
class Target:
    """Where a part of a checkpoint tensor goes.

    Attributes:
        destination: a view of the parameter.
        dim: the dimension of the checkpoint tensor along which a part is taken.
        start: where the part begins; it is as long as the destination.
        whole: the length of the checkpoint tensor in that dimension, or None where the destination takes all of it.
    """

    destination: torch.Tensor
    dim: int = 0
    start: int = 0
    whole: int | None = None

    @property
    def checkpoint_shape(self) -> list[int]:
        """The shape that the checkpoint tensor must have."""
        shape = list(self.destination.shape)
        if self.whole is not None:
            shape[self.dim] = self.whole
        return shape


class Linear:
    """y = x W^T + b.

    Args:
        in_features, out_features: of this rank.
        bias: whether there is one.
        dtype, device: of the weights.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device):
        self.weight: torch.Tensor | None = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self._packed: torch.Tensor | None = None

    def finalize(self) -> None:
        """On a CPU in float32, lays the weights out as oneDNN reads them: half the time of `F.linear` with one row."""
        self._packed = pack_weight(self.weight)
        if self._packed is not None:
            self.weight = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [..., out_features] for x [..., in_features]."""
        return self._multiply(x, self.bias)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        assert self.weight is not None
        return F.linear(x, self.weight, bias)


class RowParallelLinear(Linear):
    """A linear layer whose inputs are split over the ranks; its results are summed; then every rank adds the bias."""

    def __init__(self, in_features: int, out_features: int, group: ParallelGroup, *, bias: bool, dtype: torch.dtype, device: torch.device):
        super().__init__(in_features // group.size, out_features, bias=bias, dtype=dtype, device=device)
        self._group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [..., out_features], the same on every rank, for this rank's part of x."""
        total = self._group.all_reduce(self._multiply(x, None))
        return total if self.bias is None else total.add_(self.bias)


def pack_weight(weight: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a float32 CPU weight [out, in] packed for oneDNN, or None for any other."""
    if weight is None or weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
