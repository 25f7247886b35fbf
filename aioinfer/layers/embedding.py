"""The vocabulary at both ends of the model, split over the ranks: token embedding and LM head."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from aioinfer.layers.backend import Backend
from aioinfer.layers.extension import Extension, RowExtension, Terms
from aioinfer.layers.formats.affine import (
    AffineRows,
    AffineWeight,
    can_lay_out,
    has_compiled_products,
)
from aioinfer.layers.formats.base import Epilogue, Weight
from aioinfer.layers.formats.dense import DenseWeight, has_half_products
from aioinfer.layers.formats.schemes import AffineScheme
from aioinfer.layers.norm import Norm
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.shards import NamedShards, Shard, Source, WeightShard


class Vocabulary:
    """The vocabulary, split over the ranks: shards of equal size, the last ones padded with zeros
    where the ranks do not divide the vocabulary.

    Attributes:
        vocab_size: of all ranks together.
        group: the ranks.
        shard_size: rows of each rank's weights, with padding.
        start, local_size: this rank's first token id, and how many it has.
    """

    def __init__(self, vocab_size: int, group: ParallelGroup):
        self.vocab_size = vocab_size
        self.group = group
        self.shard_size = -(-vocab_size // group.size)
        self.start = min(group.rank * self.shard_size, vocab_size)
        self.local_size = self.local_size_of(group.rank)

    def local_size_of(self, rank: int) -> int:
        """Returns how many token ids a rank has; the last ranks may have none of a small
        vocabulary."""
        return max(0, min(self.shard_size, self.vocab_size - rank * self.shard_size))

    @property
    def own_ids(self) -> Shard:
        """This rank's token ids."""
        return Shard(self.start, self.local_size, self.vocab_size)

    def weight_shard(self, weight: torch.Tensor) -> WeightShard:
        """Returns where this rank's rows of a checkpoint's [vocab_size, hidden_size] go in `weight`
        [shard_size, hidden_size]; padding stays zero."""
        return WeightShard(weight[: self.local_size], 0, self.start, self.vocab_size)

    def quantized_rows(
        self, name: str, hidden_size: int, scheme: AffineScheme, device: torch.device
    ) -> AffineRows:
        """Returns the memory for this rank's rows of a quantized checkpoint module."""
        return AffineRows(Source(name, self.own_ids), Shard.whole(hidden_size), scheme, device)


class LearnedPositions:
    """An embedding of each position, which every rank has whole (GPT-2, Radford et al. 2019).

    Args:
        name: of the checkpoint module.
        max_len: how many positions a text can have.
        hidden_size: of the model.
        offset: rows of the checkpoint's table before the row of the first position.
        backend: of the rank.
    """

    def __init__(
        self, name: str, max_len: int, hidden_size: int, backend: Backend, *, offset: int = 0
    ):
        shape = offset + max_len, hidden_size
        self._name, self._offset = name, offset
        self.weight = torch.zeros(shape, dtype=backend.dtype, device=backend.device)

    def weight_shards(self) -> NamedShards:
        """Yields the table."""
        yield f"{self._name}.weight", WeightShard(self.weight)

    def finalize(self) -> None:
        """Leaves the table as it is."""

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [T, hidden_size] of positions, int32 [T]."""
        return F.embedding(positions, self.weight[self._offset :])


class Embedding:
    """Looks token ids up. A rank gives zeros for ids out of its shard; the sum over the ranks is
    the embedding.

    Args:
        name: of the checkpoint module.
        vocabulary: which ids this rank has.
        hidden_size: of the model.
        scale: multiplied with every embedding, rounded to the model's dtype as Gemma does.
        scheme: how the module is quantized, or None. Such a weight stays quantized without
            kernels: rows are dequantized as they are looked up.
        backend: of the rank.
    """

    def __init__(
        self,
        name: str,
        vocabulary: Vocabulary,
        hidden_size: int,
        backend: Backend,
        *,
        scale: float = 1.0,
        scheme: AffineScheme | None = None,
    ):
        self.vocabulary = vocabulary
        shape = vocabulary.shard_size, hidden_size
        self._extension: RowExtension | None = None
        #: rows that stay quantized
        self.quantized: AffineRows | None = None
        if scheme is not None:
            self.quantized = vocabulary.quantized_rows(name, hidden_size, scheme, backend.device)
            shape = 0, hidden_size
        self.weight = torch.zeros(shape, dtype=backend.dtype, device=backend.device)
        self._name = name
        self._backend = backend
        self._scale = torch.tensor(scale, dtype=backend.dtype).item() if scale != 1.0 else 1.0
        self._kernel = None
        if backend.has_kernels:
            from aioinfer.kernels.prepare import embed

            self._kernel = embed

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's rows of the checkpoint's tensor go."""
        if self.quantized is not None:
            yield from self.quantized.weight_shards()
        else:
            yield f"{self._name}.weight", self.vocabulary.weight_shard(self.weight)

    def finalize(self) -> None:
        """Dequantizes a quantized weight for the kernels."""
        if self.quantized is not None and self._backend.has_kernels:
            self.weight = _dequantize(self.quantized, self.vocabulary, self.weight)
            self.quantized = None

    def extend(self, extension: Extension) -> None:
        """Lets an extension add to the embeddings."""
        own, width = self.vocabulary.own_ids, Shard.whole(self.weight.shape[1])
        self._extension = extension.extend_rows([Source(self._name, width)], own)

    def __call__(
        self, input_ids: torch.Tensor, out: torch.Tensor | None = None,
        terms: Terms | None = None,
    ) -> ResidualStream:  # fmt: skip
        """Returns the residual stream of the embeddings [T, hidden_size] of input_ids int32 [T].

        Args:
            out: [T, hidden_size] to write to; by default a new tensor.
            terms: of the extension, for the tokens; None where none has one.
        """
        stream = self._look_up(input_ids, out, terms)
        if self._scale != 1.0:
            stream.hidden.mul_(self._scale)
        return stream

    def rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [T, size] of input_ids int32 [T] as a tensor: for tables that are
        not as wide than the residual stream's."""
        return self._look_up_in_torch(input_ids) * self._scale

    def _look_up(
        self, input_ids: torch.Tensor, out: torch.Tensor | None, terms: Terms | None
    ) -> ResidualStream:
        backend, start = self._backend, self.vocabulary.start
        if self._kernel is None:
            hidden = self._look_up_in_torch(input_ids, terms)
            return ResidualStream(hidden if out is None else out.copy_(hidden), backend)
        if backend.all_reduce is None:
            hidden = self._kernel(input_ids, self.weight, first=start, out=out, pdl=backend.pdl)
            self._add_terms(input_ids, hidden, terms)
            return ResidualStream(hidden, backend)
        partial = backend.all_reduce.partial[: len(input_ids)]
        self._kernel(input_ids, self.weight, first=start, out=partial, pdl=backend.pdl)
        self._add_terms(input_ids, partial, terms)
        total = torch.empty_like(partial) if out is None else out
        return ResidualStream(total, backend, partial, is_first=True)

    def _add_terms(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, terms: Terms | None
    ) -> None:
        """Adds the extension of this rank's embeddings, before they are summed and scaled."""
        if self._extension is not None and terms is not None:
            self._extension.add_looked_up(input_ids, hidden, terms)

    def _look_up_in_torch(
        self, input_ids: torch.Tensor, terms: Terms | None = None
    ) -> torch.Tensor:
        vocabulary = self.vocabulary
        if vocabulary.group.size == 1:
            embedded = self._rows(input_ids)
            self._add_terms(input_ids, embedded, terms)
            return embedded
        if vocabulary.local_size == 0:
            size = len(input_ids), self.weight.shape[1]
            return vocabulary.group.all_reduce(self.weight.new_zeros(size))
        local = input_ids - vocabulary.start
        out_of_shard = (local < 0) | (local >= vocabulary.local_size)
        embedded = self._rows(local.masked_fill(out_of_shard, 0))
        embedded = embedded.masked_fill_(out_of_shard.unsqueeze(-1), 0)
        self._add_terms(input_ids, embedded, terms)
        return vocabulary.group.all_reduce(embedded)

    def _rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns rows of this rank's weight, by their numbers."""
        if self.quantized is None:
            return F.embedding(numbers, self.weight)
        return self.quantized.dequantized(numbers).to(self._backend.dtype)


class LMHead:
    """Scores the token ids that this rank has.

    Args:
        name: of the checkpoint module.
        vocabulary: which ids these are.
        hidden_size: of the model.
        tied: the embedding whose weight is the head's too, or None.
        scheme: how the module is quantized, or None; a tied one is as the embedding is. Such a
            weight stays so or becomes float16 on a CPU (`formats.affine`), and becomes the model's
            dtype on a GPU.
        scale: multiplied with the logits.
        soft_cap: logits become soft_cap * tanh(logit / soft_cap); 0 for none.
        bias: whether one is added to the logits, of a head that is not tied.
        backend: of the rank.

    Attributes:
        weight: what is multiplied with; known after `finalize`.
        held_bytes: bytes that the head takes on the device beside the embedding's.
    """

    def __init__(
        self,
        name: str,
        vocabulary: Vocabulary,
        hidden_size: int,
        backend: Backend,
        *,
        tied: Embedding | None = None,
        scale: float = 1.0,
        soft_cap: float = 0.0,
        scheme: AffineScheme | None = None,
        bias: bool = False,
    ):
        self._name, self._hidden_size = name, hidden_size
        self._vocabulary = vocabulary
        self._tied = tied
        self._scale, self._soft_cap = scale, soft_cap
        self._backend = backend
        self.held_bytes = 0
        zeros = partial(torch.zeros, dtype=backend.dtype, device=backend.device)
        self._extension: RowExtension | None = None
        self._bias: torch.Tensor | None = zeros(vocabulary.shard_size) if bias else None
        #: rows that are loaded as they are quantized
        self._quantized: AffineRows | None = None
        self.weight: Weight | None = None
        if scheme is not None and tied is None:
            self._quantized = vocabulary.quantized_rows(name, hidden_size, scheme, backend.device)
        elif tied is None:
            self.weight = self._dense(zeros(vocabulary.shard_size, hidden_size))

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's rows of the checkpoint's tensor go, if it is not tied."""
        if self._quantized is not None:
            yield from self._quantized.weight_shards()
        elif self._tied is None and isinstance(self.weight, DenseWeight):
            yield f"{self._name}.weight", self._vocabulary.weight_shard(self.weight.loaded)
        if self._bias is not None:
            yield f"{self._name}.bias", self._vocabulary.weight_shard(self._bias)

    def finalize(self) -> None:
        """Dequantizes a quantized weight. On a CPU, repacks the weight; a tied weight then also
        stays for the embedding. Called after the embedding's `finalize`."""
        backend, tied = self._backend, self._tied
        if tied is not None and self.weight is not None and backend.has_kernels:
            return  # loaded again: it is the embedding's memory
        quantized = self._quantized if tied is None else tied.quantized
        self._quantized = None
        if quantized is None:
            weight = self.weight if tied is None else self._dense(tied.weight)
        elif has_compiled_products(backend) and can_lay_out([quantized]):
            scheme, columns = quantized.scheme, Shard.whole(self._hidden_size)
            weight = AffineWeight([self._source], columns, backend, [scheme], [quantized])
        else:
            like = torch.empty(0, self._hidden_size, dtype=backend.dtype, device=backend.device)
            weight = self._dense(_dequantize(quantized, self._vocabulary, like), is_quantized=True)
        assert weight is not None
        weight.finalize()
        self.weight = weight
        if tied is None or quantized is not None:
            self.held_bytes = weight.held_bytes
        if self._bias is not None:
            self.held_bytes += self._bias.nbytes

    def begin_reload(self) -> None:
        """See `Weight.begin_reload`."""
        if self._tied is None and isinstance(self.weight, DenseWeight):
            self.weight.begin_reload()
            self.weight.loaded[self._vocabulary.local_size :].zero_()

    @property
    def _source(self) -> Source:
        """This rank's rows, with padding."""
        shape = self._vocabulary
        return Source(self._name, Shard(shape.start, shape.shard_size, shape.vocab_size))

    def _dense(self, weight: torch.Tensor, *, is_quantized: bool = False) -> DenseWeight:
        """Returns the product with a weight [shard_size, hidden_size]; as float16 on a CPU if it
        was quantized."""
        backend, columns = self._backend, Shard.whole(self._hidden_size)
        if backend.has_kernels:
            from aioinfer.layers.formats.kernel_dense import KernelHeadWeight

            return KernelHeadWeight([self._source], columns, backend, weight)
        is_half = is_quantized and has_half_products(backend)
        return DenseWeight([self._source], columns, backend, weight, is_half=is_half)

    def extend(self, extension: Extension) -> None:
        """Lets an extension add to the logits, also of a tied head: the embedding stays as it
        is."""
        rows = Source(self._name, self._vocabulary.own_ids)
        self._extension = extension.extend_rows([rows], Shard.whole(self._hidden_size))

    def __call__(
        self, hidden: torch.Tensor, norm: Norm | None, out: torch.Tensor | None = None,
        terms: Terms | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Returns the logits [S, local_size] of this rank's tokens, for hidden [S, hidden_size] and
        the model's last norm, or none: in the model's dtype with kernels, else in float32.

        Args:
            out: [S, shard_size] in the model's dtype to write to, of which the result is a part; by
                default a new tensor.
            terms: of the extension, for the rows; None where none has one.
        """
        assert self.weight is not None
        if self._extension is not None and terms is not None:
            hidden, norm = (hidden, None) if norm is None else (norm(hidden), None)
        logits = self.weight.multiply(hidden, Epilogue(norm, out=out))
        if self._extension is not None and terms is not None:
            self._extension.add_rows(hidden, logits[:, : self._vocabulary.local_size], terms)
        if not self._backend.has_kernels:
            logits = logits.float()
        if self._bias is not None:
            logits.add_(self._bias)
        if self._scale != 1.0:
            logits.mul_(self._scale)
        if self._soft_cap:
            logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        return logits[:, : self._vocabulary.local_size]


def _dequantize(quantized: AffineRows, vocabulary: Vocabulary, like: torch.Tensor) -> torch.Tensor:
    """Returns a rank's weight [shard_size, hidden_size] with the dtype and device of another; its
    padding is zero."""
    weight = like.new_zeros(vocabulary.shard_size, like.shape[1])
    quantized.dequantize_into(weight[: vocabulary.local_size])
    return weight
