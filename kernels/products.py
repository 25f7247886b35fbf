"""The host side that all products of dense layers have in common: the checks of the arguments, and
the tensor that the result is written to."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from aioinfer.kernels.activation import GATE_RUN


def product_output(
    x: torch.Tensor,
    shape: tuple[int, ...],
    out: torch.Tensor | None,
    *,
    gated: bool,
    max_rows: int | None = None,
    stored: Iterable[torch.Tensor] = (),
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns where the product x @ weight.T is written, `out` or a new tensor [M, N].

    Args:
        x: the argument; it must be [M, K] with contiguous rows.
        shape: of the weight: [N, K], with `gated` [2 * N, K], N a multiple of `GATE_RUN`.
        out: [M, N], or None.
        gated: whether the weight's rows are those of a gate and of up, interleaved.
        max_rows: M must be in 1 .. max_rows; None: any number of rows.
        stored: tensors of the weight that must be contiguous.
        dtype: of the result; by default x's.

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
            f"{tuple(x.shape)} and {tuple(shape)}"
        )
    if gated and shape[0] % (2 * GATE_RUN):
        raise ValueError(
            f"a gated weight must have 2 * N rows, N a multiple of {GATE_RUN}, not {shape[0]}"
        )
    if out is not None:
        return out
    features = shape[0] // 2 if gated else shape[0]
    return torch.empty((rows, features), dtype=dtype or x.dtype, device=x.device)
