"""Dense weights on a GPU: few rows go through our own products, which take a norm before and a
residual sum after them along, and the rest through cuBLAS. Which kernel multiplies how many rows is
timed at the start; here are the candidates, and the default where nothing was timed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from aioinfer.kernels import gated_product, split_product
from aioinfer.kernels.adapters import RowOperand
from aioinfer.kernels.few_rows_dense import (
    MAX_ROWS,
    few_rows_dense,
    few_rows_dense_config,
    other_configs,
)
from aioinfer.kernels.gated_product import (
    FEW_TOKENS,
    TILE_TIMES,
    GatedConfig,
    gated_config,
    use_fused,
)
from aioinfer.kernels.hopper_pipeline import rows_are_aligned, supports_product
from aioinfer.kernels.split_product import SplitConfig, split_config
from aioinfer.layers.formats.base import ACTIVATIONS, Epilogue
from aioinfer.layers.formats.dense import MAX_FEW_ROWS, DenseWeight
from aioinfer.layers.kernel_choices import Candidate, Operation

#: Kernels, by the names of candidates. `FEW_ROWS` is `kernels.few_rows_dense` with a
#: `FewRowsConfig`; with the norm before it in a launch of its own it is `NORM_FEW_ROWS`.
FEW_ROWS, NORM_FEW_ROWS = "few_rows_dense", "norm + few_rows_dense"
#: `kernels.gated_product` with a `GatedConfig`, and `kernels.split_product` with a `SplitConfig`.
GATED, SPLIT = "gated_product", "split_product"
CUBLAS = Candidate("cublas", fuses=frozenset({"bias", "add_to", "out", "activation"}))
_FUSES = {
    FEW_ROWS: frozenset({"norm", "bias", "gate", "add_to", "out", "operand"}),
    NORM_FEW_ROWS: frozenset({"bias", "gate", "add_to", "out", "operand"}),
    GATED: frozenset({"gate", "out", "operand"}),
    SPLIT: frozenset({"bias", "add_to", "out", "operand"}),
}
#: Operations of one row that is normed before, and operations with a gate.
_NORMED, _GATED = ("normed", "normed gated"), ("gated", "normed gated")
#: Up to so many rows split products without parts are candidates.
_WHOLE_ROWS = 64
#: Split products of up to 128 rows, and gated ones, load weights while a norm waits for the sums
#: before it. In steps of 32 and 64 rows of Qwen3-8B split products were 2 us faster than timed
#: alone (notes/products.md); for gated ones, which do the same, as much is assumed. Not
#: measured with smaller weights than these bytes.
_EARLY_GAIN_S, _GAIN_BYTES = 1.5e-6, 16 * 2**20


class KernelDenseWeight(DenseWeight):
    """A weight computed with by our kernels and cuBLAS.

    With a gate its rows are in the order of `gated_product.interleave`. Arguments as in
    `DenseWeight`.
    """

    only = None
    format = "dense"

    @cached_property
    def _has_gated(self) -> bool:
        """Whether `gated_product` takes the weight."""
        return gated_product.supports(self.loaded[:1], self.loaded)

    @cached_property
    def _has_split(self) -> bool:
        """Whether `split_product` takes the weight; it takes all that the gated product takes."""
        return supports_product(self.loaded[:1], self.loaded)

    @cached_property
    def _programs(self) -> int:
        """Programs of these kernels that run at the same time."""
        return torch.cuda.get_device_properties(self.loaded.device).multi_processor_count

    def finalize(self) -> None:
        """See `Weight.finalize`."""
        self._reorder()

    # ---------------------------------------------------------------- which kernel

    def kernels(self, operation: Operation, x: torch.Tensor, epilogue: Epilogue) -> Iterator[Any]:
        """See `Weight.kernels`. Each configuration of a kernel takes a compilation, at the first
        start of a model."""
        rows = len(x)
        yield self.default(operation, rows)
        yield CUBLAS
        if rows <= MAX_ROWS:
            yield self._few_rows(FEW_ROWS, operation, rows)
            for config in other_configs(**self._shape(operation, rows)):
                yield Candidate(FEW_ROWS, config, _FUSES[FEW_ROWS])
        if operation in _NORMED:
            yield self._few_rows(NORM_FEW_ROWS, "plain" if operation == "normed" else "gated", rows)
        if operation in _GATED and self._has_gated:
            for gated in gated_product.candidates(rows):
                yield self._early(GATED, gated, rows)
        if operation not in _GATED and self._has_split:
            for split in self._splits(operation, rows):
                yield self._early(SPLIT, split, rows)

    def default(self, operation: Operation, rows: int) -> Candidate:
        """Returns the candidate that was the fastest for the weights of Qwen3-0.6B and Qwen3-8B on
        an H200; of gated products with large weights see `gated_product.use_fused`."""
        is_few = rows <= MAX_FEW_ROWS and operation in ("partial", "residual")
        if is_few or (rows == 1 and operation != "biased"):
            return self._few_rows(FEW_ROWS, operation, rows)
        if operation in _GATED and self._has_gated and use_fused(rows, self.loaded):
            return self._early(GATED, self._gated_config(rows), rows)
        return CUBLAS

    def takes(self, candidate: Candidate, x: torch.Tensor, epilogue: Epilogue) -> bool:
        """See `Weight.takes`."""
        is_few = candidate.kernel not in (SPLIT, GATED)
        return is_few or (rows_are_aligned(x) and not isinstance(epilogue.operand, RowOperand))

    def extended_candidate(self, operation: Operation, rows: int) -> Candidate | None:
        """See `Weight.extended_candidate`. Where these kernels do not take the rows, or are slower
        by more than they save, the extension is launches of its own."""
        if rows <= MAX_ROWS:
            return self._few_rows(FEW_ROWS, operation, rows)
        if operation in _GATED:
            config = self._gated_config(rows)
            return self._early(GATED, config, rows) if self._has_gated else None
        if rows > split_product.MAX_ROWS or not self._has_split:
            return None
        splits = self._splits(operation, rows) or [SplitConfig(consumers=1, parts=1)]
        return self._early(SPLIT, splits[0], rows)

    def warm_up_cases(self, operation: Operation) -> Iterable[tuple[int, Candidate | None]]:
        """See `Weight.warm_up_cases`: decode steps and the timing launch the kernels of few rows,
        so these are the configurations of the gated product that are the default for some number of
        rows."""
        if operation != "gated" or not self._has_gated:
            return
        few = (self._gated_config(rows) for rows in FEW_TOKENS)
        for config in dict.fromkeys([*TILE_TIMES, *few]):
            yield config.tokens, Candidate(GATED, config, _FUSES[GATED])

    def _gated_config(self, rows: int) -> GatedConfig:
        return gated_config(rows, self._out // 2, self._programs)

    def _early(self, kernel: str, config: Any, rows: int) -> Candidate:
        """Returns a candidate that loads weights while the kernels before it end."""
        gains = rows <= split_product.MAX_ROWS and self.loaded.nbytes >= _GAIN_BYTES
        return Candidate(kernel, config, _FUSES[kernel], _EARLY_GAIN_S if gains else 0.0)

    def _splits(self, operation: Operation, rows: int) -> list[SplitConfig]:
        """Returns configurations of the split product, in parts only where a norm can sum them: the
        configurations that were the fastest for some number of rows of Qwen3-8B on an H200, and
        tiles of 128 weight rows where their parts are smaller, since they fill the GPU better."""
        if operation != "residual":
            return [SplitConfig(consumers=1, parts=1)] if rows <= _WHOLE_ROWS else []
        if rows == 1 or rows > split_product.MAX_ROWS:
            return []
        narrow, wide = (split_config(*self.loaded.shape, self._programs, n) for n in (1, 2))
        is_smaller = wide.consumers / wide.parts < narrow.consumers / narrow.parts
        return [narrow, wide] if rows <= MAX_ROWS or is_smaller else [narrow]

    def _few_rows(self, kernel: str, operation: Operation, rows: int) -> Candidate:
        config = few_rows_dense_config(**self._shape(operation, rows))
        return Candidate(kernel, config, _FUSES[kernel])

    def _shape(self, operation: Operation, rows: int) -> dict[str, Any]:
        """Returns the arguments of `few_rows_dense_config`."""
        is_gated = operation in _GATED
        return {
            "rows": rows,
            "features": self._out // 2 if is_gated else self._out,
            "inputs": self._columns.size,
            "normed": operation in _NORMED,
            "gated": is_gated,
            "itemsize": self.loaded.element_size(),
        }

    # ---------------------------------------------------------------- products

    def launch(self, candidate: Candidate, x: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
        """See `Weight.launch`."""
        kernel, config = candidate.kernel, candidate.config
        weight, bias, total, out = self.loaded, epilogue.bias, epilogue.add_to, epilogue.out
        options: dict[str, Any] = {
            "config": config, "pdl": self._backend.pdl, "operand": epilogue.operand
        }  # fmt: skip
        if kernel in (FEW_ROWS, NORM_FEW_ROWS):
            given = fused_arguments(epilogue, len(x))
            return few_rows_dense(x, weight, **given, **options)
        if kernel == GATED:
            return gated_product.gated_product(x, weight, out=out, **options)
        if kernel == SPLIT and total is not None:
            return split_product.split_product(x, weight, **options)
        if kernel == SPLIT:
            return split_product.whole_product(x, weight, bias=bias, out=out, **options)
        if total is not None:
            return total.addmm_(x, weight.t())
        if epilogue.activation is not None:
            product = _activated_product(x, weight, bias, epilogue.activation)
            return product if out is None else out.copy_(product)
        if out is None:
            return F.linear(x, weight, bias)
        product = torch.mm(x, weight.t(), out=out)
        return product if bias is None else product.add_(bias)


def _activated_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """Returns the activation of x W^T + b. cuBLAS computes GELU along the way, by its tanh form:
    its difference from the other form, 5e-4 at most, is less than what products of 16 bits round
    activations of the magnitude 1 by."""
    if activation.startswith("gelu") and bias is not None and x.element_size() == 2:
        fused: torch.Tensor = torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
        return fused
    return ACTIVATIONS[activation](F.linear(x, weight, bias))


class KernelHeadWeight(KernelDenseWeight):
    """The weight of the LM head, whose products are not timed: each candidate would read as many
    bytes as several layers."""

    def select(self, x: torch.Tensor, epilogue: Epilogue) -> Candidate:
        """See `Weight.select`."""
        if len(x) > MAX_FEW_ROWS:
            return CUBLAS
        operation: Operation = "plain" if epilogue.norm is None else "normed"
        return self._few_rows(FEW_ROWS, operation, len(x))


def fused_arguments(epilogue: Epilogue, rows: int) -> dict[str, Any]:
    """Returns an epilogue as the kernels of few rows take it: `residual`, `gated`, `out`, and, if
    there is a norm, `norm_weight` and `eps`."""
    out = epilogue.out if epilogue.add_to is None else epilogue.add_to
    given: dict[str, Any] = {
        "residual": epilogue.added(rows), "gated": epilogue.gate is not None, "out": out
    }  # fmt: skip
    norm: Any = epilogue.norm
    return given if norm is None else {**given, "norm_weight": norm.weight, "eps": norm.eps}
