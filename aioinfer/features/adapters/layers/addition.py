"""The sum y += (x A^T) B^T behind a product on a GPU, where x A^T is there: by the kernel
`kernels.adapters.expand`, which computes the columns of each token's adapter, or by cuBLAS, which
computes those of all adapters, as zeros for the others. Few adapters of low ranks have so few
columns that the one large product takes less time; which is faster is timed when a worker starts
(`worker.kernel_timing`), as for the products of weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from aioinfer.features.adapters.layers.tokens import AdapterTokens
from aioinfer.layers.kernel_choices import Candidate, Operation, Product

if TYPE_CHECKING:
    from aioinfer.kernels.adapter_tiles import AdapterTiles
    from aioinfer.kernels.adapters import Adapters

EXPAND, CUBLAS = Candidate("expand"), Candidate("cublas")
#: Of fewer rows the products of most weights have the adapters in their launch.
_MIN_ROWS = 16


class Addition:
    """What `KernelChoices` knows as the weight of such a sum.

    Args:
        matrices: of the product.
        tokens: of a step by adapter.

    Attributes:
        held_bytes: of the matrices B.
    """

    def __init__(self, matrices: Adapters, tokens: AdapterTokens):
        self._matrices, self._tokens = matrices, tokens
        self.held_bytes = matrices.up.nbytes
        out, columns = matrices.up.shape
        dtype = str(matrices.up.dtype).removeprefix("torch.")
        format = f"adapters {tokens.count}x{matrices.width}"
        product = Product("residual", format, out, columns, dtype)
        self._choices = tokens.backend.choices.register(product, self)

    def candidates(self, operation: Operation, rows: int) -> list[Candidate]:
        """See `Weight.candidates`."""
        is_timed = _MIN_ROWS <= rows <= self._tokens.max_columned
        return [EXPAND, CUBLAS] if is_timed else []

    def multiply(self, x: torch.Tensor, epilogue: Any) -> torch.Tensor:
        """See `Weight.multiply`, for x A^T [T, columns] and an addend alone. To be timed, for the
        rows of all adapters in equal parts, of which the kernel reads the step's x A^T."""
        tiles, ranks = self._tokens.even_tiles(len(x))
        self._add(x, epilogue.add_to, tiles, replace(self._matrices, ranks=ranks))
        return epilogue.add_to

    def warm_up(
        self, operation: Operation, norm: Any = None, *, has_single_row: bool = True
    ) -> None:
        """See `Weight.warm_up`: steps launch all configurations (`Extension.warm_up`)."""

    def add(self, y: torch.Tensor) -> None:
        """Adds to y [T, out], after `kernels.adapters.shrink` of the step's T tokens."""
        tiles = self._tokens.tiles_of(len(y))
        shrunk = tiles.shrunk_of(self._matrices.modules)[: len(y)]
        self._add(shrunk, y, tiles, self._matrices)

    def _add(
        self, shrunk: torch.Tensor, y: torch.Tensor, tiles: AdapterTiles, matrices: Adapters
    ) -> None:
        from aioinfer.kernels.adapters import expand

        chosen = self._choices.find(len(y))
        if chosen == CUBLAS and len(y) <= self._tokens.max_columned:
            y.addmm_(shrunk, matrices.up.t())
        else:
            expand(y, matrices, tiles, self._tokens.workspace)
