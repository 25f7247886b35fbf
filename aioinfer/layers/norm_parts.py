"""Parts of a layer that norm the residual stream itself, or a sum of parts before it is added to
the stream."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from aioinfer.layers.layer import Part
from aioinfer.layers.norm import Norm
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import Step


class StreamNorm(Part):
    """Puts the norm of the stream in the stream's place, behind a part that has added to it: in
    layers that are normed behind their parts (post-norm), as in the first transformers (Vaswani et
    al. 2017)."""

    def __init__(self, norm: Norm):
        self._norm = norm

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        return ()

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """See `Part`."""
        stream.become_normed(self._norm)


class NormedSum(Part):
    """Parts side by side, which all read the stream as it is before them, and the norm of their
    sum, which is added to it. In Gemma 4 a dense MLP and experts are such parts of one layer.

    Args:
        parts: none of which mixes tokens.
        norm: of the sum.
    """

    def __init__(self, parts: Sequence[Part], norm: Norm):
        self._parts, self._norm = tuple(parts), norm
        self.needs_all_ranks = any(part.needs_all_ranks for part in parts)

    @property
    def leaves(self) -> tuple[Part, ...]:
        """See `Part.leaves`."""
        return tuple(leaf for part in self._parts for leaf in part.leaves)

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """See `Part.kinds`."""
        return tuple(kind for part in self._parts for kind in part.kinds)

    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """See `Part`."""
        branch = stream.branch()
        for part in self._parts:
            if len(stream) or part.needs_all_ranks:
                part(branch, step)
        if len(stream):
            stream.hidden.add_(self._norm(branch.hidden))
