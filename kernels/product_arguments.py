"""Checks the arguments that all products of linear layers have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from aioinfer.kernels.activation import GATE_RUN


def check_product(
    x: torch.Tensor,
    shape: tuple[int, int],
    *,
    gated: bool,
    max_rows: int | None = None,
    stored: Sequence[torch.Tensor] = (),
) -> int:
    """Returns the output features of x @ weight.T, or of the gated product of such a weight.

    Args:
        x: the argument; it must be [M, K] with contiguous rows.
        shape: of the weight: [N, K], with `gated` [2 * N, K], N a multiple of `GATE_RUN`.
        gated: see `few_rows_dense.few_rows_dense`.
        max_rows: M must be in 1 .. max_rows; None: any number of rows.
        stored: tensors of the weight that must be contiguous.

    Raises:
        ValueError: the arguments do not fit.
    """
    rows, inputs = x.shape
    if (
        (max_rows is not None and not 0 < rows <= max_rows)
        or inputs != shape[1]
        or x.stride(1) != 1
        or not all(tensor.is_contiguous() for tensor in stored)
    ):
        bound = "M" if max_rows is None else f"1 .. {max_rows}"
        raise ValueError(
            f"x must be [{bound}, K] with contiguous rows and weight [N, K], contiguous, not "
            f"{tuple(x.shape)} and {shape}"
        )
    if gated and shape[0] % (2 * GATE_RUN):
        raise ValueError(
            f"a gated weight must have 2 * N rows, N a multiple of {GATE_RUN}, not {shape[0]}"
        )
    return shape[0] // 2 if gated else shape[0]
