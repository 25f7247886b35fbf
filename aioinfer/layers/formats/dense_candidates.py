"""Which kernels multiply a dense weight on a GPU: the candidates that are timed at the start, and
which of them is taken where nothing was timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from aioinfer.kernels.gated_product import (
    TILE_TIMES,
    gated_config,
    supports,
    use_fused,
)
from aioinfer.kernels.linear import MAX_ROWS, linear_config, other_configs
from aioinfer.layers.kernel_choices import CUBLAS, GATED, SKINNY, Candidate, Operation

#: Operations of one row that is normed in the same launch, and those with a gate.
_NORMED, _GATED = ("normed", "normed gated"), ("gated", "normed gated")


class DenseCandidates:
    """The kernels for one weight.

    Args:
        weight: [out, in], with `gated` products in the order of `gated_product.interleave`.
        few_rows: up to so many rows `skinny_linear` is the default where nothing but a sum goes
            with the product.
    """

    def __init__(self, weight: torch.Tensor, few_rows: int):
        self._few_rows = few_rows
        self._weight = weight
        self._programs = 0  # where there is no `gated_product`
        if supports(weight.new_empty(1, weight.shape[1]), weight):
            properties = torch.cuda.get_device_properties(weight.device)
            self._programs = properties.multi_processor_count

    def default(self, operation: Operation, rows: int) -> Candidate:
        """Returns the candidate that was the fastest for the weights of Qwen3-0.6B and Qwen3-8B on
        an H200."""
        is_few = rows <= self._few_rows and operation in ("partial", "residual")
        if is_few or (rows == 1 and operation != "biased"):
            return self._skinny(operation, rows)
        if operation in _GATED and self._programs and use_fused(rows, self._weight):
            features = len(self._weight) // 2
            return Candidate(GATED, gated_config(rows, features, self._programs))
        return CUBLAS

    def of(self, operation: Operation, rows: int) -> list[Candidate]:
        """See `TimedWeight.candidates`."""
        if rows > 1 and operation in _NORMED:
            return []  # normed by a launch of its own
        default = self.default(operation, rows)
        return [default, *(other for other in self._all(operation, rows) if other != default)]

    def _all(self, operation: Operation, rows: int) -> Iterator[Candidate]:
        """Yields all candidates. Each configuration of a kernel takes a compilation, at the first
        start of a model."""
        if operation not in _NORMED:
            yield CUBLAS
        if rows <= MAX_ROWS:
            yield self._skinny(operation, rows)
            for config in other_configs(**self._shape(operation, rows)):
                yield Candidate(SKINNY, config)
        if operation == "gated" and rows > 1 and self._programs:
            for tiles in TILE_TIMES:
                if tiles.tokens <= max(64, 2 * rows):
                    yield Candidate(GATED, tiles)

    def _skinny(self, operation: Operation, rows: int) -> Candidate:
        return Candidate(SKINNY, linear_config(**self._shape(operation, rows)))

    def _shape(self, operation: Operation, rows: int) -> dict[str, Any]:
        """Returns the arguments of `linear_config`."""
        out, inputs = self._weight.shape
        is_gated = operation in _GATED
        return {
            "rows": rows,
            "features": out // 2 if is_gated else out,
            "inputs": inputs,
            "normed": operation in _NORMED,
            "gated": is_gated,
            "itemsize": self._weight.element_size(),
        }
