"""Interface of weight formats: the products that a linear layer needs, and the places to load
weights to.

A linear layer knows which part of which checkpoint modules this rank has (`Source`); its weight
format knows which tensors such a module has in the checkpoint, where their parts go
(`WeightShard`), and how to multiply with them. A new format is a class like `dense.DenseWeight`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from aioinfer.layers.kernel_choices import Candidate, Operation
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.shards import NamedShards

if TYPE_CHECKING:
    from aioinfer.kernels.quantize import InputFormat


class WeightFormat(Protocol):
    """The weight of one linear layer on one rank: `out` output features of `in` input features.

    The fused products are optional: a format that lacks one returns false from `fuses_norm`, or
    computes it in several launches.
    """

    @property
    def kind(self) -> Hashable:
        """Weights of the same kind launch the same kernels."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes that the weight takes on the device, after `finalize`."""
        ...

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's parts of the checkpoint's tensors go, before `finalize`."""
        ...

    def dequantized(self) -> torch.Tensor:
        """Returns the loaded weight [out, in] in 16 or 32 bits, its rows in checkpoint order.
        Called instead of `finalize`, for weights that `multiply` does not multiply."""
        ...

    def reorder_rows(self, order: torch.Tensor) -> None:
        """Puts row `order[i]` (int64 [out]) at place i. Called before `finalize`."""
        ...

    def take_input_order(self) -> torch.Tensor | None:
        """Returns the order in which the weight reads its inputs (int64 [in]: the input at each
        place), if it is another than the checkpoint's and the caller can give it inputs in that
        order, which from then on it must; else None. Called before `finalize`."""
        ...

    def prepare_gate(self) -> bool:
        """Says that the products are to be SiLU of the first half of the outputs times the second
        half. Returns whether `multiply_gated` gives them from rows in checkpoint order; otherwise
        it is not called with these. Called before `finalize`, without kernels only."""
        ...

    def finalize(self) -> None:
        """Prepares the loaded weight for the device."""
        ...

    def warm_up_rows(self) -> Sequence[int]:
        """Returns a number of rows for each configuration of kernels that the other methods
        select."""
        ...

    def multiply(
        self, x: Any, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns x W^T + bias [..., out] for x [..., in]."""
        ...

    def fuses_norm(self, rows: int) -> bool:
        """Whether `multiply_normed` is one launch for so many rows."""
        ...

    def input_format(self, rows: int) -> InputFormat | None:
        """Returns how products of so many rows are quantized before, or None if they are not. Such
        a weight takes `ScaledInputs` in the place of x."""
        ...

    def multiply_normed(
        self, x: torch.Tensor, norm: RMSNorm, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns norm(x) W^T [T, out] for x [T, in]."""
        ...

    def multiply_gated(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        """Returns silu(gate) * up [T, out / 2] for x [T, in], or for norm(x).

        Only for a weight whose rows are in the order of `kernels.gated_product.interleave`, or
        after `prepare_gate`.
        """
        ...

    def warm_up_gated(self) -> None:
        """Launches `multiply_gated` in every configuration that the number of rows selects."""
        ...

    def add_product(self, x: Any, total: torch.Tensor) -> torch.Tensor | None:
        """Adds x W^T to `total` [T, out], in place, for x [T, in]; or leaves `total` as it is and
        returns parts (float32 [P, T, out]) whose sum over the first dimension is the product."""
        ...


class TimedWeight(WeightFormat, Protocol):
    """A weight that several kernels can multiply. It registers its products with
    `Backend.choices` when it first computes them, and takes the kernels that are chosen there."""

    def candidates(self, operation: Operation, rows: int) -> Sequence[Candidate]:
        """Returns the ways to compute a product of so many rows, without repetition, the default
        first; none where the operation has no such products."""
        ...
