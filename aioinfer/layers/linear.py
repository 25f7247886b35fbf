"""Linear layers, whole or split over tensor-parallel ranks in the manner of Megatron (Shoeybi et
al. 2019): a column-parallel layer gives each rank some output features, a row-parallel layer takes
some input features of each rank and sums its results over the ranks. The projection from the
latent vectors of latent attention to keys and values is applied from either side.

How a weight is stored, loaded and multiplied is up to its format (`formats`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from aioinfer.layers.backend import Backend
from aioinfer.layers.extension import RowExtension, Terms
from aioinfer.layers.formats import make_weight
from aioinfer.layers.formats.base import Epilogue, Weight
from aioinfer.layers.formats.dense import DenseWeight
from aioinfer.layers.formats.schemes import Quantization
from aioinfer.layers.kv_cache import LatentShape
from aioinfer.layers.norm import Norm
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.shards import NamedShards, Shard, Source, WeightShard
from aioinfer.layers.step import Step


class ColumnParallelLinear:
    """y = x W^T + b, of this rank's output features. Several checkpoint modules may be merged.

    Args:
        sources: the checkpoint modules of the output features, one after the other.
        weight: of these, for all input features.
        bias: whether there is one.
        backend: of the rank.
    """

    def __init__(self, sources: Sequence[Source], weight: Weight, *, bias: bool, backend: Backend):
        self._sources = sources
        self._backend = backend
        self.weight = weight
        self.bias: torch.Tensor | None = None
        self._order: torch.Tensor | None = None  # of the rows
        if bias:
            rows = sum(source.rows.size for source in sources)
            self.bias = torch.zeros(rows, dtype=backend.dtype, device=backend.device)
        #: of the step before, since all steps have the same but for the ranks' sums
        self._epilogue = Epilogue(None, self.bias)

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's parts of the checkpoint's tensors go."""
        yield from self.weight.weight_shards()
        first = 0
        for source in self._sources:
            if self.bias is not None:
                part = self.bias[first : first + source.rows.size]
                first += source.rows.size
                if not source.has_bias:
                    continue
                rows, store = source.rows, source.scaling(part)
                yield f"{source.name}.bias", WeightShard(part, 0, rows.start, rows.total, store)

    def reorder_rows(self, order: torch.Tensor) -> None:
        """Puts output feature `order[i]` (int64 [out]) at place i. Called before `finalize`."""
        self.weight.row_order = self._order = order
        if self.weight.extension is not None:
            self.weight.extension.row_order = order

    def finalize(self) -> None:
        """Prepares the loaded weight and bias for the device."""
        self.weight.finalize()
        if self.bias is not None and self._order is not None:
            self.bias.copy_(self.bias[self._order.to(self.bias.device)])

    def begin_reload(self) -> None:
        """See `Weight.begin_reload`."""
        self.weight.begin_reload()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [..., out] for x [..., in]."""
        return self.weight.multiply(x, Epilogue(None, self.bias))

    def of_normed(
        self,
        stream: ResidualStream,
        norm: Norm | None,
        gate: str | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        """Returns the product [T, out] with the normed stream; with `gate`, an activation of
        `formats.base.ACTIVATIONS`, that of the gate times up [T, out / 2]; with `activation` that
        of the product.

        The norm is left to the product, unless parts side by side have it in common, or an
        outstanding sum computes it along the way, and quantizes what the weight takes so."""
        x: Any
        if norm is None or (stream.is_reduced and not stream.is_parallel):
            x = stream.inputs
        else:
            extension = self.weight.extension  # which takes inputs as they are
            is_plain = extension is None or not extension.is_active
            format = self.weight.input_format(len(stream)) if is_plain else None
            x = stream.normed(norm) if format is None else stream.normed_for(norm, format)
            norm = None
        last = self._epilogue
        if last.norm is not norm or last.gate is not gate or last.activation is not activation:
            self._epilogue = Epilogue(norm, self.bias, gate, activation=activation)
        return self.weight.multiply(x, self._epilogue)


class RowParallelLinear:
    """A linear layer whose input features are split over the ranks: its results are summed, and the
    bias is added once.

    Args:
        name: of the checkpoint module.
        weight: of all output features, for this rank's input features.
        out_features: how many.
        bias: whether there is one.
        backend: of the rank.
    """

    def __init__(
        self, name: str, weight: Weight, out_features: int, *, bias: bool, backend: Backend
    ):
        self._name = name
        self._out_features = out_features
        self.weight = weight
        self._backend = backend
        self.bias: torch.Tensor | None = None
        if bias:
            self.bias = torch.zeros(out_features, dtype=backend.dtype, device=backend.device)

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's parts of the checkpoint's tensors go."""
        yield from self.weight.weight_shards()
        if self.bias is not None:
            yield f"{self._name}.bias", WeightShard(self.bias)

    def finalize(self) -> None:
        """Prepares the loaded weight for the device."""
        self.weight.finalize()

    def begin_reload(self) -> None:
        """See `Weight.begin_reload`."""
        self.weight.begin_reload()

    def read_in_order(self, order: torch.Tensor) -> None:
        """Has the input `order[i]` (int64 [in]) at place i: that of `Weight.input_order`. Called
        before `finalize`."""
        self.weight.reads_in_order = True
        if self.weight.extension is not None:
            self.weight.extension.input_order = order

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, out], the same on every rank, for this rank's part of x [T, in]."""
        all_reduce = self._backend.all_reduce
        if all_reduce is None:
            total = self._backend.group.all_reduce(self.weight.multiply(x))
            return total if self.bias is None else total.add_(self.bias)
        partial = self._partial(x)
        total = torch.empty_like(partial)
        all_reduce.add(partial, total, None, 0.0, is_first=True, pdl=self._backend.pdl)
        return total

    def add_to(
        self,
        stream: ResidualStream,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        scale: float = 1.0,
    ) -> None:
        """Adds the product of this rank's part of x [T, in], summed over the ranks, to the stream.

        Args:
            norm: applied to the sum before it is added, if given.
            scale: multiplied with the addend.
        """
        if norm is not None or scale != 1.0:
            product = self(x)
            stream.hidden.add_(product if norm is None else norm(product), alpha=scale)
        elif self._backend.all_reduce is not None:
            stream.add_partial(self._partial(x))
        elif self._backend.group.size > 1:
            stream.hidden.add_(self(x))
        elif stream.is_normed_behind and self._backend.has_kernels:
            stream.add_later(self.weight.multiply(x, Epilogue(None, self.bias)))
        else:
            hidden = stream.hidden
            product = self.weight.multiply(x, Epilogue(None, self.bias, None, hidden))
            if product is not hidden:
                stream.add_parts(product)

    def _partial(self, x: Any) -> torch.Tensor:
        """Writes this rank's part of the product to symmetric memory and returns it; rank 0 adds
        the bias."""
        backend = self._backend
        assert backend.all_reduce is not None
        out = backend.all_reduce.partial[: len(x)]
        partial = self.weight.multiply(x, Epilogue(out=out))
        if self.bias is not None and backend.group.rank == 0:
            partial += self.bias
        return partial


class LatentExpansion:
    """The projection from latent vectors to the keys (without the rotated one) and values of this
    rank's heads.

    It is kept in the dtype of the arithmetic, whatever the checkpoint's format: absorbed, it is
    applied from the other side.

    Args:
        weight: of the projection, as it is loaded; head by head the keys' channels, then the
            values'.
        shape: of this rank.
        source: the checkpoint module.
        backend: of the rank.
        quantization: of the model, or None.
    """

    def __init__(
        self,
        weight: Weight,
        shape: LatentShape,
        source: Source,
        backend: Backend,
        quantization: Quantization | None = None,
    ):
        self._weight: Weight | None = weight
        self._source, self._quantization = source, quantization
        #: what is added to the products, and the terms of the rows at hand
        self._extension: RowExtension | None = None
        self._terms: Terms | None = None
        if backend.extension is not None:
            columns = Shard.whole(shape.latent_size)
            self._extension = backend.extension.extend_rows([source], columns)
        self._shape = shape
        self._backend = backend
        self._matrix: torch.Tensor | None = None

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's part of the checkpoint's tensors goes, before `finalize`."""
        assert self._weight is not None
        yield from self._weight.weight_shards()

    def finalize(self) -> None:
        """Dequantizes the weight, if it is quantized."""
        assert self._weight is not None
        matrix = self._weight.dequantized().to(self._backend.dtype)
        if isinstance(self._weight, DenseWeight):
            self._matrix = matrix
            return
        self._weight = None  # what was dequantized is not needed any more
        self._matrix = matrix if self._matrix is None else self._matrix.copy_(matrix)

    def begin_reload(self) -> None:
        """See `Weight.begin_reload`: a weight that is not quantized is the matrix."""
        if self._weight is None:
            columns = Shard.whole(self._shape.latent_size)
            self._weight = make_weight([self._source], columns, self._backend, self._quantization)

    @property
    def matrix(self) -> torch.Tensor:
        """The weight [num_heads * (plain_size + value_size), latent_size], after `finalize`."""
        assert self._matrix is not None, "finalize was not called"
        return self._matrix

    def of_tokens(self, step: Step, tokens: slice | torch.Tensor) -> LatentExpansion:
        """Returns the projection as some tokens of a step have it, with its extension: for as many
        latents, queries or sums; `tokens`: which of the step's, integers [N] or a slice."""
        given = None if self._extension is None else self._extension.terms_of(step)
        return self if given is None else self._with(given[tokens])

    def of_rows(self, step: Step, rows: torch.Tensor) -> LatentExpansion:
        """Returns the projection as the sequences of some rows of a step have it, integers [N];
        see `of_tokens`."""
        given = None if self._extension is None else self._extension.terms_of(step)
        if given is None:
            return self
        return self._with(given[step.inputs.query_starts[rows]])

    def _with(self, terms: Terms) -> LatentExpansion:
        bound = copy.copy(self)
        bound._terms = terms
        return bound

    def _keys_of(self, matrix: torch.Tensor) -> torch.Tensor:
        """Returns the rows of keys [num_heads, plain_size, columns] of [out, columns]."""
        return matrix.unflatten(0, (self._shape.num_heads, -1))[:, : self._shape.plain_size]

    def _values_of(self, matrix: torch.Tensor) -> torch.Tensor:
        """Returns the rows of values [num_heads, value_size, columns] of [out, columns]."""
        return matrix.unflatten(0, (self._shape.num_heads, -1))[:, self._shape.plain_size :]

    def expand(
        self, latents: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys [N, num_heads, plain_size] and values [N, num_heads, value_size] of latents
        [N, latent_size], as views of one tensor.

        Args:
            out: [N, num_heads * (plain_size + value_size)] to write to; by default a new tensor.
        """
        shape = self._shape
        if out is None:
            out = F.linear(latents, self.matrix)
        else:
            torch.mm(latents, self.matrix.t(), out=out)
        if self._extension is not None and self._terms is not None:
            self._extension.add_rows(latents, out, self._terms)
        both = out.view(len(latents), shape.num_heads, shape.plain_size + shape.value_size)
        keys, values = both.split((shape.plain_size, shape.value_size), dim=-1)
        return keys, values

    def absorb(self, queries: torch.Tensor) -> torch.Tensor:
        """Returns queries over latents [T, num_heads, latent_size] for queries [T, num_heads,
        plain_size]."""
        shape = len(queries), self._shape.num_heads, self._shape.latent_size
        absorbed = queries.new_empty(shape)
        weight = self._keys_of(self.matrix)
        torch.bmm(queries.transpose(0, 1), weight, out=absorbed.transpose(0, 1))
        if self._extension is not None and self._terms is not None:
            self._extension.add_from_outputs(queries, absorbed, self._terms, self._keys_of)
        return absorbed

    def values_of(self, sums: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns outputs [T, num_heads, value_size] for sums of latents [T, num_heads,
        latent_size].

        Args:
            out: to write to; by default a new tensor.
        """
        weight = self._values_of(self.matrix)
        if out is None:
            out = sums.new_empty(len(sums), self._shape.num_heads, self._shape.value_size)
        torch.bmm(sums.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
        if self._extension is not None and self._terms is not None:
            self._extension.add_by_heads(sums, out, self._terms, self._values_of)
        return out


def row_shard(total: int, backend: Backend) -> Shard:
    """Returns this rank's input features of a row-parallel layer with `total` of them."""
    return Shard.of_rank(total, backend.group.rank, backend.group.size)
