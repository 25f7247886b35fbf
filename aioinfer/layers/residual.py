"""The residual stream: the hidden states between the layers, to which every layer adds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from aioinfer.layers.backend import Backend
from aioinfer.layers.norm import LayerNorm, Norm, RMSNorm

if TYPE_CHECKING:
    from aioinfer.kernels.all_reduce import AllReduce
    from aioinfer.kernels.quantize import InputFormat, ScaledInputs


class ResidualStream:
    """The hidden states of a step's tokens.

    On several GPUs a row-parallel product leaves its partial sum in symmetric memory, and the
    all-reduce is put off until the stream is read next: if a norm reads it, one kernel sums over
    the ranks, adds to the stream and norms. So no layer needs to know which norm follows it.

    Args:
        hidden: [T, hidden_size], added to in place.
        backend: of the rank.
        partial: [T, hidden_size], this rank's part of a sum that is yet to be reduced.
        is_first: `hidden` has not been written yet; the reduced sum will be its first value.
        side: [T, side_size], what parts of a model keep of each token beside the hidden states,
            and read and write in place; None for nothing.

    Attributes:
        is_normed_behind: whether a norm of the stream itself follows each part (`become_normed`):
            with kernels, what a part adds waits for it.
    """

    is_normed_behind = False

    def __init__(
        self,
        hidden: torch.Tensor,
        backend: Backend,
        partial: torch.Tensor | None = None,
        *,
        is_first: bool = False,
        side: torch.Tensor | None = None,
    ):
        self.side = side
        self._hidden = hidden
        self._backend = backend
        self._partial = partial
        self._parts: torch.Tensor | None = None
        self._addend: torch.Tensor | None = None
        self._is_first = is_first
        self._inputs: torch.Tensor | None = None
        self._normed: dict[Norm, torch.Tensor] = {}

    @classmethod
    def unpacked(cls, packed: torch.Tensor, hidden_size: int, backend: Backend) -> ResidualStream:
        """Returns the stream of `packed` [T, hidden_size + side_size], in whose memory it stays but
        for hidden states with a side, which are copied: kernels take rows without gaps."""
        if packed.shape[1] == hidden_size:
            return cls(packed, backend)
        hidden, side = packed[:, :hidden_size], packed[:, hidden_size:]
        return cls(hidden.contiguous(), backend, side=side)

    def packed(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns hidden states and side as one tensor [T, hidden_size + side_size].

        Args:
            out: to write to; by default a new tensor, or the hidden states if there is no side.
        """
        if self.side is None:
            return self.hidden if out is None else out.copy_(self.hidden)
        return torch.cat((self.hidden, self.side), dim=1, out=out)

    def __len__(self) -> int:
        return len(self._hidden)

    @property
    def hidden(self) -> torch.Tensor:
        """[T, hidden_size], all sums reduced."""
        self._sum(None)
        return self._hidden

    @property
    def inputs(self) -> torch.Tensor:
        """[T, hidden_size], what the parts of a layer read: the stream, or within `parallel` the
        stream as it was before them."""
        return self.hidden if self._inputs is None else self._inputs

    @property
    def is_reduced(self) -> bool:
        """Whether `inputs` has no outstanding sum."""
        is_whole = self._partial is self._parts is self._addend is None
        return is_whole or self._inputs is not None

    @property
    def is_parallel(self) -> bool:
        """Whether parts side by side read `inputs`."""
        return self._inputs is not None

    @contextmanager
    def parallel(self) -> Iterator[None]:
        """Context of parts side by side, which all read the stream as it was before them, and all
        add to it. Parts that have a norm in common compute it once."""
        self._inputs = self.hidden.clone()
        yield
        self._inputs = None
        self._normed = {}

    @contextmanager
    def reading(self, inputs: torch.Tensor) -> Iterator[None]:
        """Context of a part that reads `inputs` [T, size] instead of the stream that it adds to."""
        self._inputs = inputs
        yield
        self._inputs = None

    def branch(self) -> ResidualStream:
        """Returns a stream of zeros whose parts read `inputs` as they are now."""
        inputs = self.inputs
        branch = ResidualStream(torch.zeros_like(inputs), self._backend)
        branch._inputs = inputs
        return branch

    def normed(self, norm: Norm | None) -> torch.Tensor:
        """Returns the norm of `inputs` [T, hidden_size]; without a norm `inputs` itself."""
        if self._inputs is not None and norm is not None:
            if norm not in self._normed:
                self._normed[norm] = norm(self._inputs)
            return self._normed[norm]
        if norm is None:
            return self.inputs
        if isinstance(norm, RMSNorm) and self._sums_with(norm):
            normed = self._sum(norm)
            assert normed is not None
            return normed
        return norm(self.hidden)

    def become_normed(self, norm: Norm) -> None:
        """Puts the norm of the stream in the stream's place."""
        if self._addend is None or not isinstance(norm, LayerNorm):
            self._hidden = norm(self.hidden)
            return
        from aioinfer.kernels.norm import add_layer_norm

        addend, self._addend = self._addend, None
        add_layer_norm(self._hidden, addend, norm.weight, norm.bias, norm.eps)

    def normed_for(self, norm: Norm, format: InputFormat) -> torch.Tensor | ScaledInputs:
        """Returns the norm of `inputs` for a product whose inputs have a format: quantized if an
        all-reduce is outstanding, which can do it; otherwise as `normed` does."""
        if not isinstance(norm, RMSNorm) or self._partial is None or not self._sums_with(norm):
            return self.normed(norm)
        inputs = self._all_reduce.add_quantized(
            self._partial, self._hidden, norm.weight, norm.eps, format,
            is_first=self._is_first, pdl=self._backend.pdl,
        )  # fmt: skip
        self._partial, self._is_first = None, False
        return inputs

    def _sums_with(self, norm: RMSNorm) -> bool:
        """Whether a sum is outstanding that can compute the norm: a product's parts, or over the
        ranks, where the all-reduce reads the norm's weight in words of the stream's dtype."""
        if self.is_reduced:
            return False
        return self._partial is None or norm.weight.dtype == self._hidden.dtype

    @property
    def _all_reduce(self) -> AllReduce:
        assert self._backend.all_reduce is not None
        return self._backend.all_reduce

    def add_partial(self, partial: torch.Tensor) -> None:
        """Adds a sum over the ranks. `partial` [T, hidden_size] is the beginning of
        `Backend.all_reduce.partial`, which is not written again before the stream is read."""
        assert self._partial is None
        assert self._parts is None
        self._partial = partial
        if self._inputs is not None:  # the next part writes there, too
            self._sum(None)

    def add_later(self, addend: torch.Tensor) -> None:
        """Adds `addend` [T, hidden_size] before the stream is read next."""
        self._sum(None)
        self._addend = addend

    def add_parts(self, parts: torch.Tensor) -> None:
        """Adds the sum of `parts` (float32 [P, T, hidden_size]) over the first dimension."""
        self._sum(None)  # of a part beside this one
        self._parts = parts

    def add_over_ranks(self, part: torch.Tensor) -> None:
        """Adds the sum of the ranks' `part` [T, hidden_size], which may be written to."""
        all_reduce = self._backend.all_reduce
        if all_reduce is not None:
            self.add_partial(all_reduce.partial[: len(part)].copy_(part))
        else:
            self.hidden.add_(self._backend.group.all_reduce(part))

    def select(self, rows: torch.Tensor) -> None:
        """Keeps the tokens `rows` (int32 [S]) alone."""
        self._hidden = self.hidden.index_select(0, rows)
        if self.side is not None:
            self.side = self.side.index_select(0, rows)
        if self._inputs is not None:
            self._inputs = self._inputs.index_select(0, rows)
            self._normed = {norm: x.index_select(0, rows) for norm, x in self._normed.items()}

    def _sum(self, norm: RMSNorm | None) -> torch.Tensor | None:
        """Computes the outstanding sum, if there is one, and returns its norm, if one is given."""
        if self._addend is not None:
            self._hidden.add_(self._addend)
            self._addend = None
            return None if norm is None else norm(self._hidden)
        if self._partial is not None:
            return self._reduce(self._partial, norm)
        if self._parts is not None:
            return self._sum_parts(self._parts, norm)
        return None

    def _reduce(self, partial: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor | None:
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        normed = self._all_reduce.add(
            partial, self._hidden, weight, eps, is_first=self._is_first, pdl=self._backend.pdl
        )
        self._partial, self._is_first = None, False
        return normed

    def _sum_parts(self, parts: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor | None:
        from aioinfer.kernels.norm import add_parts, add_parts_rms_norm

        self._parts = None
        if norm is None:
            add_parts(parts, self._hidden, pdl=self._backend.pdl)
            return None
        return add_parts_rms_norm(parts, self._hidden, norm.weight, norm.eps, pdl=self._backend.pdl)
