"""The MLP of a layer: down(activation(up x)), or gated (SwiGLU and its like, Shazeer 2020):
down(activation(gate x) * up x)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

import torch
import torch.nn.functional as F

from aioinfer.layers.backend import Backend
from aioinfer.layers.layer import Part
from aioinfer.layers.linear import ColumnParallelLinear, RowParallelLinear
from aioinfer.layers.norm import Norm
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import Step

#: Activations by the names that configurations have for them.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


class MLP(Part):
    """An MLP without a gate, on one rank, with its norm and its sum into the residual stream.

    Args:
        up: the first projection, of this rank's channels.
        down: the second projection.
        channels: of this rank.
        activation: of `ACTIVATIONS`.
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
        self._activation = ACTIVATIONS[activation]
        self._norm, self._post_norm = norm, post_norm
        self._residual_scale = residual_scale

    def finalize(self) -> None:
        """Brings the channels into the order in which the second projection reads them. Called
        before the projections' own `finalize`."""
        channels = self.down.weight.take_input_order()
        if channels is not None:
            self.up.reorder_rows(channels)

    def warm_up(self, hidden_size: int) -> None:
        """See `Part.warm_up`."""
        self.up.warm_up(self._norm, hidden_size)
        self.down.warm_up(self._channels)

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        return self.up.weight.kind, self.down.weight.kind

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """See `Part`."""
        activated = self._activation(self.up.of_normed(stream, self._norm))
        self.down.add_to(stream, activated, norm=self._post_norm, scale=self._residual_scale)


class GatedMLP(Part):
    """The MLP of one layer on one rank, with its norm and its sum into the residual stream.

    With kernels the rows of gate and up are interleaved. Norm, product and SiLU are one launch
    where that is faster; other activations, and SiLU after a bias, take a launch of their own. On a
    CPU the format of the weight says whether its product takes the SiLU along.

    Args:
        gate_up: the merged projection: this rank's channels of the gate, then of up.
        down: the second projection.
        activation: of `ACTIVATIONS`.
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
        self._activation = ACTIVATIONS[activation]
        self._norm, self._post_norm = norm, post_norm
        self._residual_scale = residual_scale
        self._kernel: Callable[..., torch.Tensor] | None = None
        if backend.has_kernels:
            from aioinfer.kernels.activation import GATE_RUN, KINDS, gated_activation

            if channels % GATE_RUN == 0 and activation in KINDS:
                self._kernel = partial(gated_activation, kind=activation, pdl=backend.pdl)
        self._is_plain_silu = activation == "silu" and gate_up.bias is None
        self._is_fused = self._kernel is not None and self._is_plain_silu

    def finalize(self) -> None:
        """Interleaves the rows of gate and up where the kernels want it, and brings them into the
        order in which the second projection reads them. Called before the projections' own
        `finalize`."""
        if self._kernel is None:
            self._is_fused = self._is_plain_silu and self.gate_up.weight.prepare_gate()
        else:
            from aioinfer.kernels.gated_product import interleave

            channels = self.down.weight.take_input_order()
            channels = torch.arange(self._channels) if channels is None else channels.cpu()
            order = torch.cat((channels, channels + self._channels))
            self.gate_up.reorder_rows(interleave(order))

    def warm_up(self, hidden_size: int) -> None:
        """See `Part.warm_up`."""
        if self._is_fused:
            self.gate_up.weight.warm_up_gated()
        self.gate_up.warm_up(self._norm, hidden_size, gated=self._is_fused)
        self.down.warm_up(self._channels)

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        return self.gate_up.weight.kind, self.down.weight.kind

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """See `Part`."""
        if self._is_fused:
            gated = self.gate_up.of_normed_gated(stream, self._norm)
        elif self._kernel is not None:
            gated = self._kernel(self.gate_up.of_normed(stream, self._norm))
        else:
            gate, up = self.gate_up.of_normed(stream, self._norm).chunk(2, dim=-1)
            gated = self._activation(gate).mul_(up)
        self.down.add_to(stream, gated, norm=self._post_norm, scale=self._residual_scale)
