"""The MLP of a layer: down(activation(up x)), or gated (SwiGLU and its like, Shazeer 2020):
down(activation(gate x) * up x)."""

from __future__ import annotations

from collections.abc import Hashable
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.base import ACTIVATIONS
from aioinfer.layers.layer import Part
from aioinfer.layers.linear import ColumnParallelLinear, RowParallelLinear
from aioinfer.layers.norm import Norm
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import Step


class MLP(Part):
    """An MLP without a gate, on one rank, with its norm and its sum into the residual stream.

    Args:
        up: the first projection, of this rank's channels.
        down: the second projection.
        channels: of this rank.
        activation: of `formats.base.ACTIVATIONS`.
        norm, post_norm, residual_scale: as in `Attention`.
    """

    def __init__(
        self,
        up: ColumnParallelLinear,
        down: RowParallelLinear,
        channels: int,
        *,
        activation: str,
        norm: Norm | None = None,
        post_norm: Norm | None = None,
        residual_scale: float = 1.0,
    ):
        self.up, self.down = up, down
        self._channels = channels
        self._activation = activation
        self._norm, self._post_norm = norm, post_norm
        self._residual_scale = residual_scale

    def finalize(self) -> None:
        """Brings the channels into the order in which the second projection reads them. Called
        before the projections' own `finalize`."""
        channels = self.down.weight.input_order()
        if channels is not None:
            self.up.reorder_rows(channels)
            self.down.read_in_order(channels)

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        return self.up.weight.kind, self.down.weight.kind

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """See `Part`."""
        activated = self.up.of_normed(stream, self._norm, activation=self._activation)
        self.down.add_to(stream, activated, norm=self._post_norm, scale=self._residual_scale)


class GatedMLP(Part):
    """The MLP of one layer on one rank, with its norm and its sum into the residual stream.

    With kernels the rows of gate and up are interleaved. Norm, product and SiLU are one launch
    where that is faster; other activations, and SiLU after a bias, take a launch of their own.

    Args:
        gate_up: the merged projection: this rank's channels of the gate, then of up.
        down: the second projection.
        activation: of `formats.base.ACTIVATIONS`.
        norm, post_norm, residual_scale: as in `Attention`.
        backend: of the rank.
    """

    def __init__(
        self,
        gate_up: ColumnParallelLinear,
        down: RowParallelLinear,
        channels: int,
        *,
        activation: str = "silu",
        norm: Norm | None = None,
        post_norm: Norm | None = None,
        residual_scale: float = 1.0,
        backend: Backend,
    ):
        self.gate_up, self.down = gate_up, down
        self._channels = channels
        self._activation = activation
        self._norm, self._post_norm = norm, post_norm
        self._residual_scale = residual_scale
        if backend.has_kernels:
            from aioinfer.kernels.activation import GATE_RUN, KINDS

            if channels % GATE_RUN == 0 and activation in KINDS:
                gate_up.weight.gate = "interleaved"
        elif activation == "silu" and gate_up.bias is None:
            gate_up.weight.gate = "halves"

    def finalize(self) -> None:
        """Interleaves the rows of gate and up where the kernels want it, and brings them into the
        order in which the second projection reads them. Called before the projections' own
        `finalize`."""
        if self.gate_up.weight.gate != "interleaved":
            return
        from aioinfer.kernels.gated_product import interleave

        channels = self.down.weight.input_order()
        if channels is not None:
            self.down.read_in_order(channels)
        channels = torch.arange(self._channels) if channels is None else channels.cpu()
        self.gate_up.reorder_rows(interleave(torch.cat((channels, channels + self._channels))))

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        return self.gate_up.weight.kind, self.down.weight.kind

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """See `Part`."""
        gated = self.gate_up.of_normed(stream, self._norm, self._activation)
        self.down.add_to(stream, gated, norm=self._post_norm, scale=self._residual_scale)


class SparseGatedMLP(GatedMLP):
    """A gated MLP in which few channels are active: from each gate is taken what about a part
    `sparsity` of a token's gates does not exceed, if these are normally distributed, and what is
    left is 0 at least (the statistical top-k of Gemma 3n).

    Args:
        total: channels of all ranks together.
        sparsity: the part, above 0 and below 1.
        others: as in `GatedMLP`.
    """

    def __init__(self, *others: Any, total: int, sparsity: float, backend: Backend, **options: Any):
        super().__init__(*others, backend=backend, **options)
        self.gate_up.weight.gate = ""  # the product is of gates that are not activated
        self._group, self._total = backend.group, total
        self._deviations = NormalDist().inv_cdf(sparsity)

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """See `Part`."""
        gate, up = self.gate_up.of_normed(stream, self._norm).chunk(2, dim=-1)
        gated = ACTIVATIONS[self._activation](self._cut(gate)).mul_(up)
        self.down.add_to(stream, gated, norm=self._post_norm, scale=self._residual_scale)

    def _cut(self, gate: torch.Tensor) -> torch.Tensor:
        """Returns gates [T, channels] less the cutoff, and at least 0."""
        wide = gate.float()
        mean = self._mean(wide)
        deviation = self._mean((wide - mean).square_()).sqrt_()
        return F.relu(wide - (mean + self._deviations * deviation)).to(gate.dtype)

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the mean over the channels of all ranks [T, 1] of x [T, channels]."""
        return self._group.all_reduce(x.sum(-1, keepdim=True)) / self._total
