"""A norm of the residual stream itself, behind a part that has added to it: of layers that are
normed behind their parts (post-norm), as in the first transformers (Vaswani et al. 2017)."""

from __future__ import annotations

from collections.abc import Hashable

from aioinfer.layers.layer import Part
from aioinfer.layers.norm import Norm
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import Step


class StreamNorm(Part):
    """Puts the norm of the stream in the stream's place."""

    def __init__(self, norm: Norm):
        self._norm = norm

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        return ()

    def warm_up(self, hidden_size: int) -> None:
        """See `Part.warm_up`: there are no products."""

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """See `Part`."""
        stream.become_normed(self._norm)
