"""Choice of the kernel for each product that several kernels can compute, by product and number of
rows.

A weight format that has several kernels (`formats.base.TimedWeight`) registers each product that it
computes, names the candidates, and asks here for each launch. At the start of a worker nothing is
chosen, and the format takes its default; `worker.kernel_timing` then measures the candidates on the
card and enters the fastest. One table serves all layers of a rank (`Backend.choices`).
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

#: The operation with a weight W besides x W^T. `plain`: nothing. `partial`: the same, written to
#: given memory. `biased`: a bias is added. `residual`: the product is added to the residual stream,
#: or left in parts to the norm that follows. `gated`: silu(gate) * up of the product. `normed` and
#: `normed gated`: of one row, which is normed in the same launch.
Operation = Literal["plain", "partial", "biased", "residual", "gated", "normed", "normed gated"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to compute a product.

    Attributes:
        kernel: its name.
        config: how it is compiled, a dataclass; None for a kernel that needs no compilation.
        gain_s: seconds that it saves the products around it in a step, where it is timed alone.
    """

    kernel: str
    config: Any = None
    gain_s: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        if self.config is None:
            return self.kernel
        values = (f"{each.name}={getattr(self.config, each.name)}" for each in fields(self.config))
        return " ".join((self.kernel, *values))


#: `kernels.few_rows_dense.few_rows_dense`, with a `FewRowsConfig`.
FEW_ROWS = "few_rows_dense"
#: `kernels.gated_product.gated_product`, with a `GatedConfig`.
GATED = "gated_product"
#: `kernels.split_product`, with a `SplitConfig`.
SPLIT = "split_product"
CUBLAS = Candidate("cublas")


@dataclass(frozen=True, slots=True)
class Product:
    """A product that kernels are chosen for: equal products launch the same kernels, whatever the
    layer.

    Attributes:
        operation: see `Operation`.
        format: of the weight, such as "dense".
        outputs, inputs: features of the weight on this rank.
        dtype: of the activations.
    """

    operation: Operation
    format: str
    outputs: int
    inputs: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.format} {self.operation} {self.outputs}x{self.inputs} {self.dtype}"


class ProductChoices:
    """The kernels that compute one product, by number of rows.

    Attributes:
        product: which.
        norm: the RMSNorm before a normed product, of one of the layers; else None.
        forced: the candidate that computes all rows, while it is set.
        has_single_row: whether it was asked for one row, for which many products have another
            operation.
        lookups: how many times it was asked.
    """

    def __init__(self, product: Product, norm: Any = None):
        self.product = product
        self.norm = norm
        self.forced: Candidate | None = None
        self.has_single_row = False
        self.lookups = 0
        self._sizes: list[int] = []
        self._candidates: list[Candidate] = []
        # weights may be converted and dropped, which this must not prevent
        self._weights: list[weakref.ref[Any]] = []

    @property
    def weights(self) -> list[Any]:
        """The weights that have computed the product, a `TimedWeight` each."""
        return [weight for weight in (there() for there in self._weights) if weight is not None]

    def add_weight(self, weight: Any) -> None:
        """Adds one more weight."""
        self._weights.append(weakref.ref(weight))

    def choose(self, by_rows: Mapping[int, Candidate]) -> None:
        """Enters the candidates by number of rows, in place of those before."""
        self._sizes = sorted(by_rows)
        self._candidates = [by_rows[size] for size in self._sizes]

    def replace(self, rows: int, candidate: Candidate) -> None:
        """Enters the candidate for one number of rows that was entered before."""
        self._candidates[self._sizes.index(rows)] = candidate

    def find(self, rows: int) -> Candidate | None:
        """Returns the candidate chosen for the next larger number of rows that was measured; None,
        for the format's default, above and below all of them."""
        self.lookups += 1
        if rows == 1:
            self.has_single_row = True
        if self.forced is not None:
            return self.forced
        index = bisect_left(self._sizes, rows)
        if index == len(self._sizes) or rows < self._sizes[0]:
            return None
        return self._candidates[index]


class KernelChoices:
    """The choices of all products of a rank.

    Attributes:
        products: in the order in which they were first computed.
    """

    def __init__(self) -> None:
        self.products: dict[Product, ProductChoices] = {}

    def register(self, product: Product, weight: Any, norm: Any = None) -> ProductChoices:
        """Returns the choices of a product that `weight` computes for the first time; `norm` as in
        `ProductChoices`."""
        choices = self.products.get(product)
        if choices is None:
            choices = self.products[product] = ProductChoices(product, norm)
        choices.add_weight(weight)
        return choices
