"""Linear layers, whole or split over tensor-parallel ranks.

Weights are [out, in] as in checkpoints. A layer is loaded through `targets`, which says what part
of which checkpoint tensor goes where; `finalize` then prepares it for the device it computes on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from aioinfer.layers.parallel import ParallelGroup

#: The batch size for which oneDNN lays out packed weights. Its layouts for 1 to 32 rows are alike,
#: and those serve prefill as well.
_PACKED_ROWS = 8


@dataclass(frozen=True, slots=True)
class Target:
    """Where a part of a checkpoint tensor goes.

    Attributes:
        destination: a view of the parameter.
        dim: the dimension of the checkpoint tensor along which a part is taken.
        start: where the part begins; it is as long as the destination.
        whole: the length of the checkpoint tensor in that dimension, or None where the destination
            takes all of it.
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

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.weight: torch.Tensor | None = torch.empty(
            out_features, in_features, dtype=dtype, device=device
        )
        self.bias = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self._packed: PackedWeight | None = None

    def finalize(self) -> None:
        """On a CPU in float32, lays the weights out anew: see `PackedWeight`."""
        self._packed = pack_weight(self.weight)
        if self._packed is not None:
            self.weight = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [..., out_features] for x [..., in_features]."""
        return self._multiply(x, self.bias)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._packed is not None:
            return self._packed.multiply(x, bias)
        assert self.weight is not None
        return F.linear(x, self.weight, bias)


class RowParallelLinear(Linear):
    """A linear layer whose inputs are split over the ranks; its results are summed; then every rank
    adds the bias."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: ParallelGroup,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(
            in_features // group.size, out_features, bias=bias, dtype=dtype, device=device
        )
        self._group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [..., out_features], the same on every rank, for this rank's part of x."""
        total = self._group.all_reduce(self._multiply(x, None))
        return total if self.bias is None else total.add_(self.bias)


class PackedWeight:
    """A float32 weight on a CPU, laid out twice: for products with several rows, and with one.

    Several rows go to oneDNN, which wants blocks of its own. One row is bound by how fast the
    weight is read, and the fastest reader in torch is a batched product, which gives each thread a
    part of the batch: the weight is cut into as many parts as there are threads. Wide weights are
    cut along the output, as they are; others along the input, transposed, and the parts' results
    are summed. That reads a sixth faster than oneDNN, for the weight's size once more. With one
    thread there is the layout for several rows only.

    Args:
        weight: float32 [out, in].
    """

    def __init__(self, weight: torch.Tensor):
        out_features, in_features = weight.shape
        self._blocks: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
        self._by_output = in_features > out_features
        self._parts = math.gcd(
            torch.get_num_threads(), out_features if self._by_output else in_features
        )
        if self._parts == 1:  # one thread: nothing to divide
            return
        if self._by_output:
            self._row_layout = weight.view(self._parts, -1, in_features).transpose(1, 2)
        else:
            self._row_layout = weight.t().contiguous().view(self._parts, -1, out_features)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns x W^T + b [..., out] for x [..., in]."""
        if x.numel() != x.shape[-1] or self._parts == 1:
            return torch.ops.mkldnn._linear_pointwise(x, self._blocks, bias, "none", [], "")
        if self._by_output:
            product = torch.bmm(x.reshape(1, 1, -1).expand(self._parts, -1, -1), self._row_layout)
        else:
            product = torch.bmm(x.reshape(self._parts, 1, -1), self._row_layout).sum(0)
        product = product.view(*x.shape[:-1], -1)
        return product if bias is None else product.add_(bias)


def pack_weight(weight: torch.Tensor | None) -> PackedWeight | None:
    """Returns a float32 CPU weight [out, in] laid out for products, or None for any other."""
    if (
        weight is None
        or weight.device.type != "cpu"
        or weight.dtype != torch.float32
        or not torch.backends.mkldnn.is_available()
    ):
        return None
    return PackedWeight(weight)
