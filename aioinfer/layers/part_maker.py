"""Makes what parts of layers consist of, for one rank: weights, linear layers, norms, tables of
rotary embeddings, the embedding and the head.

A maker keeps what has parameters: where weights are to be loaded (`weight_shards`), and their
preparation for the device afterwards (`finalize`). `maker.LayerMaker` is one that makes parts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.embedding import Embedding, LearnedPositions, LMHead, Vocabulary
from aioinfer.layers.formats import make_weight
from aioinfer.layers.formats.affine import has_compiled_products
from aioinfer.layers.formats.base import Weight
from aioinfer.layers.formats.dense import has_half_products
from aioinfer.layers.formats.schemes import AffineScheme, Quantization
from aioinfer.layers.linear import ColumnParallelLinear, RowParallelLinear
from aioinfer.layers.norm import LayerNorm, RMSNorm
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.rotary import RopeConfig, RotaryTable
from aioinfer.layers.shards import NamedShards, Shard, Source, WeightShard


class Loadable(Protocol):
    """A layer with parameters."""

    def weight_shards(self) -> NamedShards: ...

    def finalize(self) -> None: ...


class Preparable(Protocol):
    """A layer that reorders the weights of its parts before these are finalized."""

    def finalize(self) -> None: ...


class Converted(Protocol):
    """A part that may be held in another form than it is stored in: weights, heads and stacks of
    experts."""

    def weight_shards(self) -> NamedShards: ...

    @property
    def held_bytes(self) -> int: ...


_Loadable = TypeVar("_Loadable", bound=Loadable)
_Preparable = TypeVar("_Preparable", bound=Preparable)
_Converted = TypeVar("_Converted", bound=Converted)


class Made:
    """What a `PartMaker` has made, in order: `layers` with parameters, layers `to_prepare` before
    these are finalized, parts that may be `converted`, and checkpoint modules that are
    `elsewhere`, on other ranks."""

    def __init__(self) -> None:
        self.layers: list[Loadable] = []
        self.to_prepare: list[Preparable] = []
        #: The layer that uses a weight may drop it.
        self.converted: list[weakref.ref[Any]] = []
        self.elsewhere: set[str] = set()


class PartMaker:
    """Makes what parts consist of. `keep`, `prepare` and `count` return their argument.

    Attributes:
        backend: of the rank.
        hidden_size: of the residual stream.
        norm_eps: of every norm, unless a layer has its own.
        quantization: which linear layers are quantized, and how.
        is_transposed: whether the checkpoint has the weights of linear layers as [in, out], as
            GPT-2's; set by a family before it makes any.
    """

    def __init__(
        self,
        backend: Backend,
        hidden_size: int,
        max_len: int,
        norm_eps: float,
        served_len: int | None = None,
        quantization: Quantization | None = None,
    ):
        """
        Args:
            backend: of the rank.
            hidden_size: of the residual stream.
            max_len: the maximum number of positions of a sequence.
            norm_eps: of every RMSNorm.
            served_len: the longest sequence that is served; `max_len` by default.
            quantization: which linear layers are quantized, and how.
        """
        self.backend = backend
        self.hidden_size = hidden_size
        self.norm_eps = norm_eps
        self.quantization = quantization
        self.is_transposed = False
        self._made = Made()
        self._max_len, self._served_len = max_len, served_len
        self._tables: dict[Any, RotaryTable] = {}

    def embedding(
        self, name: str, vocab_size: int, *, scale: float = 1.0, size: int | None = None
    ) -> Embedding:
        """Returns the token embedding of the checkpoint module `name`, by default with as many
        channels as the residual stream."""
        embedding = Embedding(
            name,
            Vocabulary(vocab_size, self.backend.group),
            size or self.hidden_size,
            self.backend,
            scale=scale,
            scheme=self._affine_scheme(name),
        )
        return self.keep(embedding)

    def positions(self, name: str, max_len: int, *, offset: int = 0) -> LearnedPositions:
        """Returns the learned embeddings of positions of the checkpoint module `name`; arguments as
        in `LearnedPositions`."""
        size, backend = self.hidden_size, self.backend
        return self.keep(LearnedPositions(name, max_len, size, backend, offset=offset))

    def head(
        self, name: str, embedding: Embedding, *, tied: bool, scale: float = 1.0,
        soft_cap: float = 0.0, bias: bool = False,
    ) -> LMHead:  # fmt: skip
        """Returns the LM head; `tied` to the embedding's weight, or of the module `name`, which may
        have a `bias`."""
        head = LMHead(
            name,
            embedding.vocabulary,
            self.hidden_size,
            self.backend,
            tied=embedding if tied else None,
            scale=scale,
            soft_cap=soft_cap,
            bias=bias,
            scheme=None if tied else self._affine_scheme(name),
        )
        return self.keep(self.count(head))

    def _affine_scheme(self, name: str) -> AffineScheme | None:
        """Returns how the embedding or the head is quantized; other schemes are not for them."""
        if self.quantization is None:
            return None
        return self.quantization.affine_schemes_of([name])[0]

    # ---------------------------------------------------------------- what parts consist of

    def weight(self, sources: Sequence[Source], columns: Shard) -> Weight:
        """Returns the weight of a linear layer; see `make_weight`. The layer that uses it loads
        it."""
        if self.is_transposed:
            if self.quantization is not None:
                raise ConfigError("transposed weights of linear layers cannot be quantized")
            sources = [replace(source, is_transposed=True) for source in sources]
        return self.count(make_weight(sources, columns, self.backend, self.quantization))

    def is_one_product(self, modules: Sequence[str]) -> bool:
        """Whether checkpoint modules of the same inputs can be computed as one product: quantizers
        may leave some of them as they are."""
        quantization = self.quantization
        if quantization is None or any(quantization.affine_schemes_of(modules)):
            return True
        return len({quantization.scheme_of(module) for module in modules}) == 1

    @property
    def has_compiled_weights(self) -> bool:
        """Whether some weights are multiplied by kernels that numba compiles for CPUs."""
        quantization = self.quantization
        is_affine = quantization is not None and quantization.has_affine
        return is_affine and has_compiled_products(self.backend)

    def column(
        self, sources: list[Source], in_features: int | None = None, *, bias: bool = False
    ) -> ColumnParallelLinear:
        """Returns a column-parallel layer, by default of the residual stream."""
        columns = Shard.whole(in_features or self.hidden_size)
        weight = self.extend(self.weight(sources, columns), sources, columns)
        return self.keep(ColumnParallelLinear(sources, weight, bias=bias, backend=self.backend))

    def row(self, name: str, columns: Shard, *, bias: bool) -> RowParallelLinear:
        """Returns a row-parallel layer; its outputs are the residual stream's."""
        source = Source(name, Shard.whole(self.hidden_size))
        weight = self.extend(self.weight([source], columns), [source], columns)
        linear = RowParallelLinear(name, weight, self.hidden_size, bias=bias, backend=self.backend)
        return self.keep(linear)

    def extend(self, weight: Weight, sources: Sequence[Source], columns: Shard) -> Weight:
        """Returns a weight, with what the backend's extension adds to its products."""
        if self.backend.extension is not None:
            weight.extension = self.backend.extension.extend(sources, columns)
        return weight

    def rotary(self, rope: RopeConfig, head_size: int) -> RotaryTable:
        """Returns the table of a variant, made once for all layers that have it."""
        key = rope.key, head_size
        if key not in self._tables:
            self._tables[key] = RotaryTable(
                rope, head_size, self._max_len, self.backend.device, self._served_len
            )
        return self._tables[key]

    @property
    def has_rotary_sections(self) -> bool:
        """Whether a table rotates pairs of channels by different positions (M-RoPE)."""
        return any(table.sections is not None for table in self._tables.values())

    def layer_norm(self, name: str, size: int | None = None, *, bias: bool = True) -> LayerNorm:
        """Returns a LayerNorm, by default of the residual stream."""
        size = self.hidden_size if size is None else size
        return self.keep(LayerNorm(name, size, self.norm_eps, self.backend, bias=bias))

    def norm(
        self,
        name: str,
        size: int | None = None,
        *,
        unit_offset: bool = False,
        eps: float | None = None,
    ) -> RMSNorm:
        """Returns an RMSNorm, by default of the residual stream; `eps`: if not the model's."""
        size = self.hidden_size if size is None else size
        eps = self.norm_eps if eps is None else eps
        norm = RMSNorm(name, size, eps, self.backend, unit_offset=unit_offset)
        return self.keep(norm)

    # ---------------------------------------------------------------- all layers together

    def keep(self, layer: _Loadable) -> _Loadable:
        """Keeps a layer with parameters."""
        self._made.layers.append(layer)
        return layer

    def prepare(self, layer: _Preparable) -> _Preparable:
        """Enters a layer to be finalized before all layers that have parameters."""
        self._made.to_prepare.append(layer)
        return layer

    def count(self, part: _Converted) -> _Converted:
        """Makes `finalize` count by how many bytes a part has grown."""
        self._made.converted.append(weakref.ref(part))
        return part

    def add_elsewhere(self, modules: Iterable[str]) -> None:
        """Enters checkpoint modules of experts that other ranks have."""
        self._made.elsewhere.update(modules)

    def is_elsewhere(self, name: str) -> bool:
        """Whether a checkpoint's tensor is of an expert that other ranks have."""
        return name.rpartition(".")[0] in self._made.elsewhere

    def forget(self, layer: Loadable) -> None:
        """Forgets a layer that this rank does not need."""
        self._made.layers = [kept for kept in self._made.layers if kept is not layer]

    @contextmanager
    def apart(self) -> Iterator[Made]:
        """Context in which what is made is entered in an object of its own, too, which it
        yields."""
        whole, self._made = self._made, Made()
        try:
            yield self._made
        finally:
            own, self._made = self._made, whole
            whole.layers += own.layers
            whole.to_prepare += own.to_prepare
            whole.converted += own.converted
            whole.elsewhere |= own.elsewhere

    def without(self, groups: Sequence[Made]) -> Made:
        """Returns what has been made and is in none of `groups`."""
        rest = Made()
        for name in ("layers", "to_prepare", "converted"):
            others = {id(each) for group in groups for each in getattr(group, name)}
            setattr(rest, name, [e for e in getattr(self._made, name) if id(e) not in others])
        return rest

    @property
    def loadable(self) -> Sequence[Loadable]:
        """The layers with parameters."""
        return self._made.layers

    def weight_shards(self) -> NamedShards:
        """Yields (checkpoint name, where this rank's part of it goes) of every tensor."""
        for layer in self._made.layers:
            yield from layer.weight_shards()

    @contextmanager
    def measuring(self) -> Iterator[list[tuple[str, WeightShard]]]:
        """Context in which layers are made without memory, as the first tensor-parallel rank has
        them, and then forgotten. Yields a list that has their weights when the block has ended."""
        kept = self.backend, self._made, self._tables
        first = ParallelGroup(0, self.backend.group.size)
        meta = torch.device("meta")
        self.backend = replace(self.backend, device=meta, group=first, extension=None)
        self._made, self._tables = Made(), {}
        measured: list[tuple[str, WeightShard]] = []
        try:
            yield measured
            measured += self.weight_shards()
        finally:
            self.backend, self._made, self._tables = kept

    def finalize(self, made: Made | None = None) -> int:
        """Prepares loaded weights, by default all, for the device. Returns by how many bytes they
        grew: dequantized weights take more than before, or less in float16.

        Weights that are repacked are prepared in as many threads as there are, since one thread
        repacks each."""
        made = made or self._made
        is_affine = self.quantization is not None and self.quantization.has_affine
        threads = torch.get_num_threads() if is_affine and has_half_products(self.backend) else 1
        stored = [_stored_bytes(one) for one in made.converted]
        for layer in made.to_prepare:
            layer.finalize()
        if threads == 1:
            for kept in made.layers:
                kept.finalize()
        else:
            with ThreadPoolExecutor(threads, "weights") as pool:
                for _ in pool.map(lambda layer: layer.finalize(), made.layers):
                    pass
        return sum(map(_growth, made.converted, stored))

    def describe_weights(self) -> str:
        """Returns how weights are quantized, for the start-up table; "" if they are not."""
        if self.quantization is None:
            return ""
        text = f"quantized weights ({self.quantization.summary})"
        if self.quantization.has_affine:
            text += f", {_affine_products(self.backend)}"
        if self.quantization.has_mxfp4 and not self.backend.has_kernels:
            dtype = str(self.backend.dtype).removeprefix("torch.")
            text += f", dequantized to {dtype} when they are loaded"
        return text


def describe_mixers(lacking: Sequence[str], block_size: int) -> str:
    """Returns whether kernels compute attention and states of a model on a GPU, given what they
    lack with blocks of `block_size` tokens (see `Mixer.lacks`)."""
    if not lacking:
        return "Triton kernels"
    return (
        f"Triton kernels, but attention and states in plain torch: they lack {', '.join(lacking)} "
        f"with blocks of {block_size} tokens"
    )


def _affine_products(backend: Backend) -> str:
    """Returns how weights with an `AffineScheme` are multiplied."""
    if has_compiled_products(backend):
        return "multiplied as they are, by kernels that numba compiles"
    return (
        "multiplied as float16"
        if has_half_products(backend)
        else "dequantized when they are loaded"
    )


def _stored_bytes(reference: weakref.ref[Any]) -> int:
    part = reference()
    shards = () if part is None else part.weight_shards()
    return sum(shard.destination.nbytes for _, shard in shards)


def _growth(reference: weakref.ref[Any], stored: int) -> int:
    part = reference()
    return 0 if part is None else part.held_bytes - stored
