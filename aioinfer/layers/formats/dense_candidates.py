"""Candidates for products with a dense weight on a GPU: the kernels that are timed at the start,
and the default where nothing was timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from aioinfer.kernels import gated_product, split_product
from aioinfer.kernels.few_rows_dense import MAX_ROWS, few_rows_dense_config, other_configs
from aioinfer.kernels.gated_product import (
    FEW_TOKENS,
    TILE_TIMES,
    GatedConfig,
    gated_config,
    use_fused,
)
from aioinfer.kernels.hopper_pipeline import supports_product
from aioinfer.kernels.split_product import SplitConfig, split_config
from aioinfer.layers.kernel_choices import CUBLAS, FEW_ROWS, GATED, SPLIT, Candidate, Operation

#: Operations of one row that is normed in the same launch, and operations with a gate.
_NORMED, _GATED = ("normed", "normed gated"), ("gated", "normed gated")
#: Up to so many rows split products without parts are candidates.
_WHOLE_ROWS = 64
#: Split products of up to 128 rows, and gated ones, load weights while a norm waits for the sums
#: before it. In steps of 32 and 64 rows of Qwen3-8B split products were 2 us faster than timed
#: alone (docs/notes/products.md); for gated ones, which do the same, as much is assumed. Not
#: measured with smaller weights than these bytes.
_EARLY_GAIN_S, _GAIN_BYTES = 1.5e-6, 16 * 2**20


class DenseCandidates:
    """The kernels for one weight.

    Args:
        weight: [out, in], with `gated` products in the order of `gated_product.interleave`.
        few_rows: up to so many rows `few_rows_dense` is the default where nothing but a sum goes
            with the product.
    """

    def __init__(self, weight: torch.Tensor, few_rows: int):
        self._few_rows = few_rows
        self._weight = weight
        like_inputs = weight.new_empty(1, weight.shape[1])
        self._has_gated = gated_product.supports(like_inputs, weight)
        self._has_split = supports_product(like_inputs, weight)
        self._programs = 0  # where there is neither
        if self._has_split:  # the gated product supports less
            properties = torch.cuda.get_device_properties(weight.device)
            self._programs = properties.multi_processor_count

    def default(self, operation: Operation, rows: int) -> Candidate:
        """Returns the candidate that was the fastest for the weights of Qwen3-0.6B and Qwen3-8B on
        an H200; of gated products with large weights see `gated_product.use_fused`."""
        is_few = rows <= self._few_rows and operation in ("partial", "residual")
        if is_few or (rows == 1 and operation != "biased"):
            return self._few_rows_candidate(operation, rows)
        if operation in _GATED and self._has_gated and use_fused(rows, self._weight):
            return self._early(GATED, self._gated_config(rows), rows)
        return CUBLAS

    def default_gated(self) -> list[GatedConfig]:
        """Returns the configurations of the gated product that `default` takes for some number of
        rows."""
        few = (self._gated_config(rows) for rows in FEW_TOKENS)
        return list(dict.fromkeys([*TILE_TIMES, *few]))

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
            yield self._few_rows_candidate(operation, rows)
            for config in other_configs(**self._shape(operation, rows)):
                yield Candidate(FEW_ROWS, config)
        if operation == "gated" and rows > 1 and self._has_gated:
            for config in gated_product.candidates(rows):
                yield self._early(GATED, config, rows)
        if operation not in _GATED and rows > 1 and self._has_split:
            for config in self._splits(operation, rows):
                yield self._early(SPLIT, config, rows)

    def _gated_config(self, rows: int) -> GatedConfig:
        return gated_config(rows, len(self._weight) // 2, self._programs)

    def _early(self, kernel: str, config: Any, rows: int) -> Candidate:
        """Returns a candidate that loads weights while the kernels before it end."""
        gains = rows <= split_product.MAX_ROWS and self._weight.nbytes >= _GAIN_BYTES
        return Candidate(kernel, config, gain_s=_EARLY_GAIN_S if gains else 0.0)

    def _splits(self, operation: Operation, rows: int) -> list[SplitConfig]:
        """Returns configurations of the split product, in parts only where a norm can sum them: the
        configurations that were the fastest for some number of rows of Qwen3-8B on an H200, and
        tiles of 128 weight rows where their parts are smaller, since they fill the GPU better."""
        if operation != "residual":
            return [SplitConfig(consumers=1, parts=1)] if rows <= _WHOLE_ROWS else []
        if rows > split_product.MAX_ROWS:
            return []
        narrow, wide = (split_config(*self._weight.shape, self._programs, n) for n in (1, 2))
        is_smaller = wide.consumers / wide.parts < narrow.consumers / narrow.parts
        return [narrow, wide] if rows <= MAX_ROWS or is_smaller else [narrow]

    def _few_rows_candidate(self, operation: Operation, rows: int) -> Candidate:
        return Candidate(FEW_ROWS, few_rows_dense_config(**self._shape(operation, rows)))

    def _shape(self, operation: Operation, rows: int) -> dict[str, Any]:
        """Returns the arguments of `few_rows_dense_config`."""
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
