"""A weight's products of a few to 64 rows on Hopper GPUs: see `kernels.streamed_product`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aioinfer.layers.backend import Backend


class StreamedWeight:
    """The products of one weight through the streamed kernel, where it is supported and the number
    of rows is one for which it is used (`kernels.streamed_tiles.use_streamed`).

    Args:
        weight: [out, in].
        backend: of the rank, with kernels.
    """

    def __init__(self, weight: torch.Tensor, backend: Backend):
        from aioinfer.kernels.streamed_product import streamed_product, supports
        from aioinfer.kernels.streamed_tiles import use_streamed, warm_up_rows

        self._weight, self._backend = weight, backend
        self._product, self._supports = streamed_product, supports
        self._use, self._warm_up_rows = use_streamed, warm_up_rows
        like_inputs = weight.new_empty(1, weight.shape[1])
        self._workspace = (
            backend.product_memory.workspace(weight.device)
            if supports(like_inputs, weight)
            else None
        )

    def takes(self, rows: int, *, gated: bool = False) -> bool:
        """Whether `multiply` takes so many rows, if they are aligned."""
        is_supported = self._workspace is not None
        return is_supported and self._use(rows, self._weight.nbytes, gated=gated)

    def warm_up_rows(self) -> Sequence[int]:
        """Returns a number of rows for each configuration."""
        rows = self._warm_up_rows()
        return [n for n in rows if self.takes(n) or self.takes(n, gated=True)]

    def multiply(
        self,
        x: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Returns x W^T + bias + residual, or the gate of it, [T, out] for x [T, in]; None where
        another kernel has to be used. Arguments as in `streamed_product`."""
        workspace = self._workspace
        if workspace is None or x.dim() != 2 or not self.takes(len(x), gated=gated):
            return None
        if not self._supports(x, self._weight, out, residual):
            return None
        return self._product(
            x, self._weight, workspace, bias=bias, residual=residual, gated=gated, out=out,
            pdl=self._backend.pdl,
        )  # fmt: skip
