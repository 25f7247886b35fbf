"""Weights in 4 or 8 bits in groups, computed with by our kernels: `kernels.grouped_product`, and on
Hopper `kernels.few_rows_grouped` for few rows and `kernels.grouped_hopper` for dozens to hundreds.

When it is loaded, a weight is brought into the order that the kernels read, layer by layer on the
device, and the checkpoint's tensors are freed. Where groups are of inputs in another order (GPTQ's
`desc_act`), the inputs are sorted by group then, and activations are gathered in that order: by the
rows of the projection before, if the layer can have them so, else by a launch of its own.

More rows are bound by arithmetic: for these the weight is dequantized into memory that all layers
share, and multiplied by cuBLAS.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from aioinfer.kernels.few_rows_grouped import MAX_ROWS as MAX_FEW_ROWS
from aioinfer.kernels.few_rows_grouped import few_rows_grouped, few_rows_grouped_config, fuses_norm
from aioinfer.kernels.few_rows_grouped import supports as few_rows_supports
from aioinfer.kernels.grouped_hopper import MAX_ROWS, grouped_hopper, use_hopper
from aioinfer.kernels.grouped_hopper import supports as hopper_supports
from aioinfer.kernels.grouped_hopper_configs import grouped_hopper_config
from aioinfer.kernels.grouped_product import (
    MAX_FUSED_ROWS,
    grouped_config,
    grouped_product,
    use_fused,
)
from aioinfer.kernels.grouped_weight import (
    PackedGroups,
    dequantize,
    pack_groups,
    supports_group,
)
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.dense import KernelDenseWeight
from aioinfer.layers.formats.grouped import GroupedWeight
from aioinfer.layers.formats.schemes import GroupScheme
from aioinfer.layers.kernel_choices import (
    Candidate,
    KernelChoices,
    Operation,
    Product,
    ProductChoices,
)
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.shards import Shard, Source

_log = logging.getLogger(__name__)

_FEW_ROWS, _HOPPER, _FUSED = "few_rows_grouped", "grouped_hopper", "grouped_product"
_KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    _FEW_ROWS: few_rows_grouped,
    _HOPPER: grouped_hopper,
    _FUSED: grouped_product,
}
#: The weight is dequantized, and multiplied by cuBLAS.
_DEQUANTIZED = Candidate("dequantized")
#: Fewer rows never take as long as writing and reading the dequantized weight.
_MIN_DEQUANTIZED_ROWS = 64


def use_few_rows(x: torch.Tensor, weight: PackedGroups) -> bool:
    """Whether the product is `few_rows_grouped`'s: for 1 to 8 rows on Hopper."""
    return few_rows_supports(x, weight)


class KernelGroupedWeight(GroupedWeight):
    """A weight of 4-bit or 8-bit integers that stays as small as it is: a `TimedWeight`.

    A weight that the kernels cannot read is dequantized when it is loaded, which is logged.
    """

    def __init__(
        self, sources: Sequence[Source], columns: Shard, backend: Backend, scheme: GroupScheme
    ):
        super().__init__(sources, columns, backend, scheme)
        self._weight: PackedGroups | None = None
        #: the place of each input in the order of groups, or None for the same order
        self._input_order: torch.Tensor | None = None
        self._inputs_are_ordered = False
        #: over the memory that all layers share
        self._expanded_product: KernelDenseWeight | None = None
        self._choices: dict[Operation, ProductChoices] = {}
        backend.scratch.reserve(self._out * columns.size)

    # ---------------------------------------------------------------- loading

    def take_input_order(self) -> torch.Tensor | None:
        """See `WeightFormat.take_input_order`."""
        if not self._scheme.has_order or self._why_dequantized() is not None:
            return None
        self._inputs_are_ordered = True
        return self._order_of_inputs()

    def finalize(self) -> None:
        """Brings the weight into the kernels' order; see `QuantizedWeight.finalize`."""
        reason = self._why_dequantized()
        if reason is not None:
            names = ", ".join(source.name for source in self._sources)
            _log.info("%s: dequantized when loaded: %s", names, reason)
            super().finalize()
            return
        integers, scales, joined_zeros = self.joined()
        if self._scheme.has_order:
            order = self._order_of_inputs()
            groups = self._group_of(self._parts[0])[order].unique_consecutive()
            integers, scales = integers[:, order], scales[:, groups]
            joined_zeros = None if joined_zeros is None else joined_zeros[:, groups]
            if not self._inputs_are_ordered:
                self._input_order = order
        self.release()
        if self._row_order is not None:
            rows = self._row_order.to(integers.device)
            integers, scales = integers[rows], scales[rows]
            joined_zeros = None if joined_zeros is None else joined_zeros[rows]
        bits, size = self._scheme.bits, self._scheme.group_size
        self._weight = pack_groups(integers, scales, joined_zeros, bits, size)

    @property
    def held_bytes(self) -> int:
        """See `WeightFormat.held_bytes`."""
        weight = self._weight
        if weight is None:
            return super().held_bytes
        return sum(kept.nbytes for kept in (weight.integers, weight.scales, weight.counters))

    def _order_of_inputs(self) -> torch.Tensor:
        """Returns the inputs, int64 [in], sorted by group."""
        return self._group_of(self._parts[0]).argsort(stable=True)

    def _why_dequantized(self) -> str | None:
        """Returns why the kernels cannot read the loaded weight, or None."""
        size = self._scheme.group_size
        if not supports_group(size):
            return f"the kernels lack groups of {size} inputs"
        if size is None:
            return None
        if not self._scheme.has_order:
            if self._columns.start % size:
                return f"this rank's inputs do not begin with a group of {size}"
            return None
        orders = [self._group_of(part) for part in self._parts]
        if any(not torch.equal(order, orders[0]) for order in orders):
            return "its modules have inputs in different orders"
        counts = torch.unique(orders[0], return_counts=True)[1]
        # the last of all groups, which may be shorter, is the last in the order, too
        if bool((counts[:-1] != size).any()) or int(counts[-1]) > size:
            return f"this rank's inputs are not whole groups of {size}"
        return None

    # ---------------------------------------------------------------- what is multiplied

    @property
    def _loaded(self) -> PackedGroups:
        assert self._weight is not None, "finalize was not called"
        return self._weight

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._input_order is None else x.index_select(1, self._input_order)

    def _expanded(self) -> KernelDenseWeight:
        """Dequantizes the weight into the shared memory and returns it: until another weight is.

        Products with it are not launched before that has ended.
        """
        backend = self._backend
        if self._expanded_product is None:
            memory = backend.scratch.view(
                self._out, self._columns.size, backend.dtype, backend.device
            )
            # in the L2 cache, other than weights of its shape whose kernels are timed
            own = replace(backend, pdl=False, choices=KernelChoices())
            self._expanded_product = KernelDenseWeight(self._sources, self._columns, own, memory)
        assert self._expanded_product.weight is not None
        dequantize(self._loaded, self._expanded_product.weight, pdl=backend.pdl)
        return self._expanded_product

    # ---------------------------------------------------------------- which kernel

    def candidates(self, operation: Operation, rows: int) -> Sequence[Candidate]:
        """See `TimedWeight.candidates`."""
        backend = self._backend

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=backend.dtype, device=backend.device)

        out = empty(rows, self._out) if operation in ("partial", "residual") else None
        residual = out if operation == "residual" else None
        if operation == "biased":
            residual = empty(self._out).expand(rows, -1)
        options = {"residual": residual, "gated": operation == "gated", "out": out}
        x = empty(rows, self._columns.size)
        default = self._default(x, **options)
        return [default, *(other for other in self._all(x, **options) if other != default)]

    def _all(self, x: torch.Tensor, **options: Any) -> Iterator[Candidate]:
        """Yields all candidates, each in the configuration that it is the fastest in by its own
        estimate; arguments as in `grouped_product`."""
        rows, weight = len(x), self._loaded
        if few_rows_supports(x, weight):
            yield Candidate(_FEW_ROWS, few_rows_grouped_config(weight))
        if MAX_FEW_ROWS < rows <= MAX_ROWS and hopper_supports(x, weight, **options):
            yield self._hopper(rows, options["gated"])
        if rows <= MAX_FUSED_ROWS:
            yield Candidate(_FUSED, grouped_config(rows, weight, x.element_size()))
        if rows > _MIN_DEQUANTIZED_ROWS:
            yield _DEQUANTIZED

    def _default(self, x: torch.Tensor, **options: Any) -> Candidate:
        """Returns the candidate for a product where nothing was timed; arguments as in
        `grouped_product`."""
        weight = self._loaded
        if use_few_rows(x, weight):
            return Candidate(_FEW_ROWS, few_rows_grouped_config(weight))
        if use_hopper(x, weight, **options):
            return self._hopper(len(x), options["gated"])
        if use_fused(len(x)):
            return Candidate(_FUSED, grouped_config(len(x), weight, x.element_size()))
        return _DEQUANTIZED

    def _hopper(self, rows: int, gated: bool) -> Candidate:
        properties = torch.cuda.get_device_properties(self._backend.device)
        programs = properties.multi_processor_count
        config = grouped_hopper_config(rows, self._loaded, programs, gated=gated)
        return Candidate(_HOPPER, config)

    def _select(self, operation: Operation, x: torch.Tensor, **options: Any) -> Candidate:
        """Returns the candidate that computes a product; options as in `grouped_product`."""
        choices = self._choices.get(operation)
        if choices is None:
            size, bits = self._scheme.group_size, self._scheme.bits
            format = f"{bits} bits in groups of {size}{' with zeros' * self._loaded.has_zeros}"
            dtype = str(self._backend.dtype).removeprefix("torch.")
            product = Product(operation, format, self._out, self._columns.size, dtype)
            choices = self._backend.choices.register(product, self)
            self._choices[operation] = choices
        chosen, weight = choices.find(len(x)), self._loaded
        if (
            chosen is None
            or (chosen.kernel == _FEW_ROWS and not few_rows_supports(x, weight))
            or (chosen.kernel == _HOPPER and not hopper_supports(x, weight, **options))
        ):
            return self._default(x, **options)
        return chosen

    # ---------------------------------------------------------------- products

    def _product_of_integers(
        self,
        operation: Operation,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        gated: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Returns the product by a kernel that reads the integers, or None where a dequantized
        weight is faster."""
        options = {"residual": residual, "gated": gated, "out": out}
        selected = self._select(operation, x, **options)
        if selected == _DEQUANTIZED:
            return None
        kernel = _KERNELS[selected.kernel]
        pdl = self._backend.pdl
        return kernel(x, self._loaded, **options, pdl=pdl, config=selected.config)

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `WeightFormat.multiply`."""
        if self._dense is not None:
            return super().multiply(x, bias, out)
        x = self._ordered(x)
        added = None if bias is None else bias.expand(len(x), -1)
        operation: Operation = "plain" if out is None else "partial"
        if bias is not None:
            operation = "biased"
        product = self._product_of_integers(operation, x, residual=added, out=out)
        return self._expanded().multiply(x, bias, out) if product is None else product

    def fuses_norm(self, rows: int) -> bool:
        """See `WeightFormat.fuses_norm`. Of one row on Hopper alone: in `grouped_product` the norm
        took 10 us of a gated product on an H200, and 2 us as a launch of its own."""
        if self._dense is not None:
            return super().fuses_norm(rows)
        return self._backend.is_hopper and fuses_norm(rows, self._loaded, self._backend.dtype)

    def _norms(self, x: torch.Tensor) -> bool:
        """Whether the product's kernel norms x at no cost."""
        weight = self._loaded
        is_ordered = self._input_order is None
        return is_ordered and fuses_norm(len(x), weight, x.dtype) and use_few_rows(x, weight)

    def multiply_normed(
        self, x: torch.Tensor, norm: RMSNorm, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `WeightFormat.multiply_normed`. Several rows are normed by a launch of their own."""
        if self._dense is not None:
            return super().multiply_normed(x, norm, out)
        if not self._norms(x):
            return self.multiply(norm(x), out=out)
        return few_rows_grouped(
            x, self._loaded, norm_weight=norm.weight, eps=norm.eps, out=out, pdl=self._backend.pdl
        )

    def multiply_gated(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        """See `WeightFormat.multiply_gated`."""
        if self._dense is not None:
            return super().multiply_gated(x, norm)
        if norm is not None and self._norms(x):
            given = {"norm_weight": norm.weight, "eps": norm.eps, "pdl": self._backend.pdl}
            return few_rows_grouped(x, self._loaded, gated=True, **given)
        x = self._ordered(x if norm is None else norm(x))
        product = self._product_of_integers("gated", x, gated=True)
        return self._expanded().multiply_gated(x) if product is None else product

    def warm_up_gated(self) -> None:
        """See `WeightFormat.warm_up_gated`."""
        (self._expanded() if self._dense is None else self._dense).warm_up_gated()

    def warm_up_rows(self) -> Sequence[int]:
        """See `WeightFormat.warm_up_rows`."""
        if self._dense is not None:
            return super().warm_up_rows()
        return 1, 2, *range(8, MAX_FUSED_ROWS + 1, 8), *range(MAX_FUSED_ROWS + 64, MAX_ROWS + 1, 64)

    def add_product(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor | None:
        """See `WeightFormat.add_product`."""
        if self._dense is not None:
            return super().add_product(x, total)
        x = self._ordered(x)
        if self._product_of_integers("residual", x, residual=total, out=total) is None:
            return self._expanded().add_product(x, total)
        return None
