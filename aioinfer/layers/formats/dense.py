"""Weights as they are: float32, bfloat16 or float16, [out, in] as in checkpoints.

On a CPU a float32 weight is repacked for oneDNN (`PackedWeight`). On a GPU with kernels few rows go
through our own products, which take a norm before and a residual sum after them along, and the rest
through cuBLAS (`KernelDenseWeight`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from aioinfer.layers.backend import Backend
from aioinfer.layers.kernel_choices import (
    FEW_ROWS,
    GATED,
    SPLIT,
    Candidate,
    Operation,
    Product,
    ProductChoices,
)
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.shards import NamedShards, Shard, Source, WeightShard, sharded_part

if TYPE_CHECKING:
    from aioinfer.kernels.quantize import InputFormat
    from aioinfer.layers.formats.dense_candidates import DenseCandidates

#: The batch size for which oneDNN lays out packed weights. Its layouts for 1 to 32 rows are alike,
#: and these serve prefill as well.
_PACKED_ROWS = 8
#: Up to so many rows our own products beat cuBLAS where nothing but a residual sum goes with them
#: (docs/notes/products.md): where nothing was timed (`dense_candidates`).
MAX_FEW_ROWS = 8


class DenseWeight:
    """A weight computed with by torch.

    Args:
        sources: the checkpoint modules of its rows, one after the other.
        columns: the input features that this rank has.
        backend: of the rank.
        weight: [out, in], for a weight that is loaded in another format; by default a new tensor.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        columns: Shard,
        backend: Backend,
        weight: torch.Tensor | None = None,
    ):
        self._sources = sources
        self._columns = columns
        rows = sum(source.rows.size for source in sources)
        if weight is None:
            weight = torch.empty(rows, columns.size, dtype=backend.dtype, device=backend.device)
        self.weight: torch.Tensor | None = weight
        self._num_weights = weight.numel()
        self._packed: Packed | None = None
        self._itemsize = weight.itemsize

    @property
    def held_bytes(self) -> int:
        """See `WeightFormat.held_bytes`."""
        return self._num_weights * self._itemsize

    @property
    def kind(self) -> Hashable:
        """See `WeightFormat.kind`."""
        return "dense"

    def weight_shards(self) -> NamedShards:
        """See `WeightFormat.weight_shards`."""
        assert self.weight is not None
        first = 0
        for source in self._sources:
            part = self.weight[first : first + source.rows.size]
            first += source.rows.size
            dim, shard = sharded_part(source.rows, self._columns)
            if source.is_transposed:
                transposed = WeightShard(part.t(), 1 - dim, shard.start, shard.total)
                yield f"{source.name}.weight", transposed
            elif source.stack is None:
                yield f"{source.name}.weight", WeightShard(part, dim, shard.start, shard.total)
            else:
                yield (
                    source.name,
                    WeightShard(part.t(), 1 - dim, shard.start, shard.total, stack=source.stack),
                )

    def dequantized(self) -> torch.Tensor:
        """See `WeightFormat.dequantized`."""
        assert self.weight is not None
        return self.weight

    def reorder_rows(self, order: torch.Tensor) -> None:
        """See `WeightFormat.reorder_rows`."""
        assert self.weight is not None
        self.weight.copy_(self.weight[order.to(self.weight.device)])

    def take_input_order(self) -> torch.Tensor | None:
        """See `WeightFormat.take_input_order`."""
        return None

    def prepare_gate(self) -> bool:
        """See `WeightFormat.prepare_gate`."""
        return False

    def finalize(self) -> None:
        """On a CPU in float32, repacks the weight: see `PackedWeight`."""
        self._packed = pack_weight(self.weight)
        if self._packed is not None:
            self.weight = None

    def warm_up_rows(self) -> Sequence[int]:
        """See `WeightFormat.warm_up_rows`."""
        return ()

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `WeightFormat.multiply`."""
        if self._packed is not None:
            product = self._packed.multiply(x, bias)
        else:
            assert self.weight is not None
            product = F.linear(x, self.weight, bias)
        return product if out is None else out.copy_(product)

    def fuses_norm(self, rows: int) -> bool:
        """See `WeightFormat.fuses_norm`."""
        return False

    def input_format(self, rows: int) -> InputFormat | None:
        """See `WeightFormat.input_format`."""
        return None

    def multiply_normed(
        self, x: torch.Tensor, norm: RMSNorm, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `WeightFormat.multiply_normed`."""
        return self.multiply(norm(x), out=out)

    def multiply_gated(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        """Not here: rows are interleaved for kernels alone."""
        raise NotImplementedError

    def warm_up_gated(self) -> None:
        """Does nothing: there are no kernels to compile."""

    def add_product(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor | None:
        """See `WeightFormat.add_product`."""
        total += self.multiply(x)
        return None


class KernelDenseWeight(DenseWeight):
    """A weight computed with by our kernels and cuBLAS; a `TimedWeight`."""

    def __init__(
        self,
        sources: Sequence[Source],
        columns: Shard,
        backend: Backend,
        weight: torch.Tensor | None = None,
    ):
        super().__init__(sources, columns, backend, weight)
        from aioinfer.kernels.activation import gated_activation
        from aioinfer.kernels.few_rows_dense import few_rows_dense
        from aioinfer.kernels.gated_product import gated_product, supports
        from aioinfer.kernels.hopper_pipeline import rows_are_aligned
        from aioinfer.kernels.split_product import split_product, whole_product

        self._pdl = backend.pdl
        self._few_rows_dense, self._gated_activation = few_rows_dense, gated_activation
        self._gated_product = gated_product
        self._split_product, self._whole_product = split_product, whole_product
        self._can_split = rows_are_aligned
        assert self.weight is not None
        like_inputs = self.weight.new_empty(1, columns.size)
        self._has_gated_product = supports(like_inputs, self.weight)
        self._all_choices = backend.choices
        self._choices: dict[Operation, ProductChoices] = {}

    @property
    def _loaded(self) -> torch.Tensor:
        assert self.weight is not None
        return self.weight

    def finalize(self) -> None:
        """Leaves the weight as it is."""

    # ---------------------------------------------------------------- which kernel

    @cached_property
    def _candidates(self) -> DenseCandidates:
        from aioinfer.layers.formats.dense_candidates import DenseCandidates

        return DenseCandidates(self._loaded, MAX_FEW_ROWS)

    def candidates(self, operation: Operation, rows: int) -> Sequence[Candidate]:
        """See `TimedWeight.candidates`."""
        return self._candidates.of(operation, rows)

    def _select(self, operation: Operation, rows: int, norm: RMSNorm | None = None) -> Candidate:
        """Returns the candidate that computes a product; `norm`: that is fused into it."""
        choices = self._choices.get(operation)
        if choices is None:
            (out, inputs), dtype = self._loaded.shape, str(self._loaded.dtype)
            product = Product(operation, "dense", out, inputs, dtype.removeprefix("torch."))
            choices = self._all_choices.register(product, self, norm)
            self._choices[operation] = choices
        return choices.find(rows) or self._candidates.default(operation, rows)

    # ---------------------------------------------------------------- products

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `WeightFormat.multiply`."""
        weight = self._loaded
        operation: Operation = "plain" if out is None else "partial"
        selected = self._select(operation if bias is None else "biased", len(x))
        if selected.kernel == FEW_ROWS:
            added = None if bias is None else bias.expand(len(x), -1)
            return self._few_rows_dense(
                x, weight, residual=added, out=out, pdl=self._pdl, config=selected.config
            )
        if selected.kernel == SPLIT and self._can_split(x):
            return self._whole_product(
                x, weight, selected.config, bias=bias, out=out, pdl=self._pdl
            )
        if out is None:
            return F.linear(x, weight, bias)
        product = torch.mm(x, weight.t(), out=out)
        return product if bias is None else product.add_(bias)

    def fuses_norm(self, rows: int) -> bool:
        """See `WeightFormat.fuses_norm`."""
        return rows == 1

    def multiply_normed(
        self, x: torch.Tensor, norm: RMSNorm, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `WeightFormat.multiply_normed`. Several rows are normed by a launch of their own."""
        if len(x) > 1:
            return self.multiply(norm(x), out=out)
        config = self._select("normed", 1, norm).config
        return self._few_rows_dense(
            x, self._loaded, norm_weight=norm.weight, eps=norm.eps, out=out, pdl=self._pdl,
            config=config,
        )  # fmt: skip

    def multiply_gated(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        """See `WeightFormat.multiply_gated`."""
        weight = self._loaded
        if len(x) == 1 and norm is not None:
            config = self._select("normed gated", 1, norm).config
            return self._few_rows_dense(
                x, weight, norm_weight=norm.weight, eps=norm.eps, gated=True, pdl=self._pdl,
                config=config,
            )  # fmt: skip
        selected = self._select("gated", len(x))
        normed = x if norm is None else norm(x)
        if selected.kernel == FEW_ROWS:
            return self._few_rows_dense(
                normed, weight, gated=True, pdl=self._pdl, config=selected.config
            )
        if selected.kernel == GATED:
            return self._gated_product(normed, weight, pdl=self._pdl, config=selected.config)
        return self._gated_activation(F.linear(normed, weight), pdl=self._pdl)

    def warm_up_gated(self) -> None:
        """See `WeightFormat.warm_up_gated`."""
        if self._has_gated_product:
            weight = self._loaded
            for config in self._candidates.default_gated():
                self._gated_product(weight[: config.tokens], weight, pdl=self._pdl, config=config)

    def add_product(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor | None:
        """See `WeightFormat.add_product`."""
        selected = self._select("residual", len(x))
        if selected.kernel == SPLIT and self._can_split(x):
            return self._split_product(x, self._loaded, selected.config, pdl=self._pdl)
        if selected.kernel == FEW_ROWS:
            self._few_rows_dense(
                x, self._loaded, residual=total, out=total, pdl=self._pdl, config=selected.config
            )
        else:
            total.addmm_(x, self._loaded.t())
        return None


def make_dense(
    sources: Sequence[Source],
    columns: Shard,
    backend: Backend,
    weight: torch.Tensor | None = None,
) -> DenseWeight:
    """Returns the dense weight for the backend; arguments as in `DenseWeight`."""
    kind = KernelDenseWeight if backend.has_kernels else DenseWeight
    return kind(sources, columns, backend, weight)


class Packed(Protocol):
    """A weight on a CPU that was repacked."""

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns x W^T + b [..., out] for x [..., in]."""
        ...


class PackedWeight:
    """A float32 weight on a CPU, laid out twice: for products with several rows, and with one.

    Several rows go to oneDNN, which wants blocks of its own. One row is bound by how fast the
    weight is read, and the fastest reader in torch is a batched product, which gives each thread a
    part of the batch: the weight is cut into as many parts as there are threads. Wide weights are
    cut along the output, as they are; others along the input, transposed, and the parts' results
    are summed. That reads a sixth faster than oneDNN, for the weight's size once more. With one
    thread there is the layout for several rows only.

    Args:
        weight: float32 [out, in].
    """

    def __init__(self, weight: torch.Tensor):
        out_features, in_features = weight.shape
        self._blocks: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
        self._by_output = in_features > out_features
        divided = out_features if self._by_output else in_features
        self._parts = math.gcd(torch.get_num_threads(), divided)
        if self._parts == 1:  # one thread: nothing to divide
            return
        if self._by_output:
            self._row_layout = weight.view(self._parts, -1, in_features).transpose(1, 2)
        else:
            self._row_layout = weight.t().contiguous().view(self._parts, -1, out_features)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns x W^T + b [..., out] for x [..., in]."""
        if x.numel() != x.shape[-1] or self._parts == 1:
            return self._multiply_blocks(x, bias)
        if self._by_output:
            expanded = x.reshape(1, 1, -1).expand(self._parts, -1, -1)
            product = torch.bmm(expanded, self._row_layout)
        else:
            product = torch.bmm(x.reshape(self._parts, 1, -1), self._row_layout).sum(0)
        product = product.view(*x.shape[:-1], -1)
        return product if bias is None else product.add_(bias)

    def _multiply_blocks(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns x W^T + b [..., out] for x [..., in], computed by oneDNN for `padded_rows`."""
        rows = x.reshape(-1, x.shape[-1])
        missing = padded_rows(len(rows)) - len(rows)
        padded = F.pad(rows, (0, 0, 0, missing)) if missing else rows
        product = torch.ops.mkldnn._linear_pointwise(padded, self._blocks, bias, "none", [], "")
        return product[: len(rows)].view(*x.shape[:-1], -1)


def padded_rows(rows: int) -> int:
    """Returns the number of rows that a product of `rows` rows is computed with: the same up to 16,
    and above that the next of eight numbers an octave, at most an eighth more.

    oneDNN makes kernels for every number of rows that it meets, and keeps them: about 2.4 MB for
    the four weights of a layer, and 1.5 ms at the first product (docs/reliability.md). Without
    rounding, the memory of a server that meets ever new batch sizes grows for hours.
    """
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


def pack_weight(weight: torch.Tensor | None) -> PackedWeight | None:
    """Returns a float32 CPU weight [out, in] laid out for products, or None for any other."""
    if (
        weight is None
        or weight.device.type != "cpu"
        or weight.dtype != torch.float32
        or not torch.backends.mkldnn.is_available()
    ):
        return None
    return PackedWeight(weight)
