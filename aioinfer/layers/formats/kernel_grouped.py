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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
)
from aioinfer.kernels.grouped_weight import (
    PackedGroups,
    dequantize,
    pack_groups,
    supports_group,
)
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.base import Epilogue
from aioinfer.layers.formats.grouped import GroupedWeight
from aioinfer.layers.formats.kernel_dense import KernelDenseWeight, fused_arguments
from aioinfer.layers.formats.schemes import GroupScheme
from aioinfer.layers.kernel_choices import Candidate, KernelChoices, Operation
from aioinfer.layers.norm import Norm
from aioinfer.layers.shards import Shard, Source

_log = logging.getLogger(__name__)

_FEW_ROWS, _HOPPER, _FUSED = "few_rows_grouped", "grouped_hopper", "grouped_product"
_KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    _FEW_ROWS: few_rows_grouped,
    _HOPPER: grouped_hopper,
    _FUSED: grouped_product,
}
_FUSES = frozenset({"bias", "gate", "add_to", "out"})
#: The weight is dequantized, and multiplied by cuBLAS.
_DEQUANTIZED = Candidate("dequantized", fuses=_FUSES)
#: Fewer rows never take as long as writing and reading the dequantized weight.
_MIN_DEQUANTIZED_ROWS = 64


class KernelGroupedWeight(GroupedWeight):
    """A weight of 4-bit or 8-bit integers that stays as small as it is.

    A weight that the kernels cannot read is dequantized when it is loaded, which is logged.
    """

    def __init__(
        self, sources: Sequence[Source], columns: Shard, backend: Backend, scheme: GroupScheme
    ):
        super().__init__(sources, columns, backend, scheme)
        self._weight: PackedGroups | None = None
        #: the place of each input in the order of groups, or None for the same order
        self._input_order: torch.Tensor | None = None
        #: over the memory that all layers share
        self._expanded_product: KernelDenseWeight | None = None
        backend.scratch.reserve(self._out * columns.size)

    # ---------------------------------------------------------------- loading

    def input_order(self) -> torch.Tensor | None:
        """See `Weight.input_order`."""
        if not self._scheme.has_order or self._why_dequantized() is not None:
            return None
        return self._group_of(self._parts[0]).argsort(stable=True)

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
            order = self._group_of(self._parts[0]).argsort(stable=True)
            groups = self._group_of(self._parts[0])[order].unique_consecutive()
            integers, scales = integers[:, order], scales[:, groups]
            joined_zeros = None if joined_zeros is None else joined_zeros[:, groups]
            if not self.reads_in_order:
                self._input_order = order
        self.release()
        if self.row_order is not None:
            rows = self.row_order.to(integers.device)
            integers, scales = integers[rows], scales[rows]
            joined_zeros = None if joined_zeros is None else joined_zeros[rows]
        bits, size = self._scheme.bits, self._scheme.group_size
        self._weight = pack_groups(integers, scales, joined_zeros, bits, size)

    @property
    def held_bytes(self) -> int:
        """See `Weight.held_bytes`."""
        weight = self._weight
        if weight is None:
            return super().held_bytes
        return sum(kept.nbytes for kept in (weight.integers, weight.scales, weight.counters))

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
            self._expanded_product.gate = self.gate
        assert self._expanded_product.weight is not None
        dequantize(self._loaded, self._expanded_product.weight, pdl=backend.pdl)
        return self._expanded_product

    # ---------------------------------------------------------------- the product

    @property
    def format(self) -> str:
        """See `Weight.format`. A weight whose inputs are gathered first fuses no norm."""
        text = f"{self._scheme.bits} bits in groups of {self._scheme.group_size}"
        text += " with zeros" * self._loaded.has_zeros
        return text + " in another order" * (self._input_order is not None)

    def kernels(
        self, operation: Operation, x: torch.Tensor, epilogue: Epilogue
    ) -> Iterator[Candidate]:
        """See `Weight.kernels`: each kernel in the configuration that it is the fastest in by its
        own estimate.

        Of one row `few_rows_grouped` computes the norm. In `grouped_product` the norm took 10 us of
        a gated product on an H200, and 2 us as a launch of its own.
        """
        rows, weight = len(x), self._loaded
        options = _options(epilogue, rows)
        if few_rows_supports(x, weight):
            norms = self._input_order is None and fuses_norm(rows, weight)
            fuses = _FUSES | {"norm"} if norms else _FUSES
            yield Candidate(_FEW_ROWS, few_rows_grouped_config(weight), fuses)
        is_for_hopper = MAX_FEW_ROWS < rows <= MAX_ROWS and hopper_supports(x, weight, **options)
        if is_for_hopper and use_hopper(x, weight, **options):
            yield self._hopper(rows, options["gated"])
        if rows <= MAX_FUSED_ROWS:
            yield Candidate(_FUSED, grouped_config(rows, weight, x.element_size()), _FUSES)
        if rows > _MIN_DEQUANTIZED_ROWS:
            yield _DEQUANTIZED
        if is_for_hopper:
            yield self._hopper(rows, options["gated"])

    def _hopper(self, rows: int, gated: bool) -> Candidate:
        properties = torch.cuda.get_device_properties(self._backend.device)
        programs = properties.multi_processor_count
        config = grouped_hopper_config(rows, self._loaded, programs, gated=gated)
        return Candidate(_HOPPER, config, _FUSES)

    def takes(self, candidate: Candidate, x: torch.Tensor, epilogue: Epilogue) -> bool:
        """See `Weight.takes`."""
        if candidate.kernel == _HOPPER:
            return hopper_supports(x, self._loaded, **_options(epilogue, len(x)))
        return candidate.kernel != _FEW_ROWS or few_rows_supports(x, self._loaded)

    def launch(self, candidate: Candidate, x: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
        """See `Weight.launch`."""
        if self._input_order is not None:
            x = x.index_select(1, self._input_order)
        if candidate == _DEQUANTIZED:
            return self._expanded().multiply(x, epilogue)
        given = fused_arguments(epilogue, len(x))
        kernel, pdl = _KERNELS[candidate.kernel], self._backend.pdl
        return kernel(x, self._loaded, **given, pdl=pdl, config=candidate.config)

    def warm_up_cases(self, operation: Operation) -> Iterable[tuple[int, Candidate | None]]:
        """See `Weight.warm_up_cases`."""
        few = range(8, MAX_FUSED_ROWS + 1, 8)
        many = range(MAX_FUSED_ROWS + 64, MAX_ROWS + 1, 64)
        return [(rows, None) for rows in (1, 2, *few, *many)]

    def warm_up(
        self, operation: Operation, norm: Norm | None = None, *, has_single_row: bool = True
    ) -> None:
        """See `Weight.warm_up`; the products of the dequantized weight among them."""
        super().warm_up(operation, norm, has_single_row=has_single_row)
        self._expanded().warm_up(operation, norm)


def _options(epilogue: Epilogue, rows: int) -> dict[str, Any]:
    """Returns an epilogue as `grouped_hopper.supports` takes it."""
    return {
        "residual": epilogue.added(rows), "gated": epilogue.gate is not None, "out": epilogue.out
    }  # fmt: skip
