"""Makes the layers of a model for one rank, so that a model's file defines what the model is and
nothing of devices, ranks, weight formats or loading."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from aioinfer.errors import ConfigError
from aioinfer.layers.attention import Attention, AttentionSinks, heads_of_rank
from aioinfer.layers.backend import Backend
from aioinfer.layers.biased_experts import BiasedExpert, ClampedSwiGLU, ExpertPlaces
from aioinfer.layers.embedding import Embedding, LMHead, Vocabulary
from aioinfer.layers.experts import (
    Expert,
    MixtureMLP,
    MixtureShape,
    PlacedExperts,
    Router,
    Routing,
    SharedExpert,
)
from aioinfer.layers.formats.base import WeightFormat
from aioinfer.layers.formats.compiled import has_compiled_products
from aioinfer.layers.formats.half import has_half_products
from aioinfer.layers.formats.make import make_weight
from aioinfer.layers.formats.schemes import AffineScheme, MXFP4Scheme, Quantization
from aioinfer.layers.kv_cache import AttentionShape, KVScales
from aioinfer.layers.latent_attention import LatentAttention
from aioinfer.layers.latents import LatentExpansion, LatentShape
from aioinfer.layers.linear import ColumnParallelLinear, RowParallelLinear, row_shard
from aioinfer.layers.mlp import GatedMLP
from aioinfer.layers.norm import RMSNorm, SplitRMSNorm
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.rotary import RopeConfig, RotaryTable
from aioinfer.layers.shards import NamedShards, Shard, Source, StackIndex, WeightShard

if TYPE_CHECKING:
    from aioinfer.layers.expert_stacks import ProjectionShape, StackedExperts


#: What may be held in another form than it is stored: weights, heads and stacks of experts, with
#: `weight_shards` and `held_bytes`. Who uses it may drop it.
_Converted = weakref.ref[Any]


class Loadable(Protocol):
    """A layer with parameters."""

    def weight_shards(self) -> NamedShards: ...

    def finalize(self) -> None: ...


class MixtureConfig(Protocol):
    """What `LayerMaker.mixture_or_mlp` reads of a model's configuration."""

    @property
    def mixture(self) -> MixtureShape | None: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def activation(self) -> str: ...


class LayerMaker:
    """Makes layers and keeps those that have parameters.

    Attributes:
        backend: what the layers compute with.
        hidden_size: of the residual stream.
        quantization: which linear layers are quantized, and how.
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
        self._max_len, self._served_len = max_len, served_len
        self._norm_eps = norm_eps
        self.quantization = quantization
        self._layers: list[Loadable] = []
        self._converted: list[_Converted] = []
        self._to_prepare: list[Any] = []
        self._elsewhere: set[str] = set()
        self._tables: dict[Any, RotaryTable] = {}

    # ---------------------------------------------------------------- what was made

    def weight_shards(self) -> NamedShards:
        """Yields (checkpoint name, where this rank's part of it goes) of every tensor."""
        for layer in self._layers:
            yield from layer.weight_shards()

    @contextmanager
    def measuring(self) -> Iterator[list[tuple[str, WeightShard]]]:
        """Has layers made within the block without memory, as the first tensor-parallel rank has
        them, and forgotten. Yields a list that has their weights when the block has ended."""
        kept = self.backend, self._layers, self._converted, self._to_prepare, self._tables
        first = ParallelGroup(0, self.backend.group.size)
        self.backend = replace(self.backend, device=torch.device("meta"), group=first)
        self._layers, self._converted, self._to_prepare, self._tables = [], [], [], {}
        elsewhere = set(self._elsewhere)
        measured: list[tuple[str, WeightShard]] = []
        try:
            yield measured
            measured += self.weight_shards()
        finally:
            self.backend, self._layers, self._converted, self._to_prepare, self._tables = kept
            self._elsewhere = elsewhere

    def forget(self, layer: Loadable) -> None:
        """Forgets a layer that this rank does not need."""
        self._layers = [kept for kept in self._layers if kept is not layer]

    def is_elsewhere(self, name: str) -> bool:
        """Whether a checkpoint's tensor is of an expert that other ranks have."""
        return name.rpartition(".")[0] in self._elsewhere

    def finalize(self) -> int:
        """Prepares all loaded weights for the device. Returns by how many bytes they grew: what is
        dequantized takes more than it did, or less in float16."""
        stored = [_stored_bytes(one) for one in self._converted]
        self._finalize_layers()
        return sum(map(_growth, self._converted, stored))

    def _finalize_layers(self) -> None:
        """Weights that are laid out anew in as many threads as there are, since each is laid out by
        one."""
        for layer in self._to_prepare:
            layer.finalize()
        is_affine = self.quantization is not None and self.quantization.has_affine
        threads = torch.get_num_threads() if is_affine and has_half_products(self.backend) else 1
        if threads == 1:
            for layer in self._layers:
                layer.finalize()
            return
        with ThreadPoolExecutor(threads, "weights") as pool:
            for _ in pool.map(lambda layer: layer.finalize(), self._layers):
                pass

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

    # ---------------------------------------------------------------- layers

    def embedding(self, name: str, vocab_size: int, *, scale: float = 1.0) -> Embedding:
        """Returns the token embedding of the checkpoint module `name`."""
        vocabulary = Vocabulary(vocab_size, self.backend.group)
        embedding = Embedding(
            name,
            vocabulary,
            self.hidden_size,
            self.backend,
            scale=scale,
            scheme=self._affine_scheme(name),
        )
        return self._keep(embedding)

    def head(
        self, name: str, embedding: Embedding, *, tied: bool, scale: float = 1.0,
        soft_cap: float = 0.0,
    ) -> LMHead:  # fmt: skip
        """Returns the LM head; `tied` to the embedding's weight, or of the module `name`."""
        head = LMHead(
            name,
            embedding.vocabulary,
            self.hidden_size,
            self.backend,
            tied=embedding if tied else None,
            scale=scale,
            soft_cap=soft_cap,
            scheme=None if tied else self._affine_scheme(name),
        )
        self._converted.append(weakref.ref(head))
        return self._keep(head)

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
        eps = self._norm_eps if eps is None else eps
        norm = RMSNorm(name, size, eps, self.backend, unit_offset=unit_offset)
        return self._keep(norm)

    def attention(
        self,
        name: str,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        rope: RopeConfig,
        norm: RMSNorm | None,
        post_norm: RMSNorm | None = None,
        residual_scale: float = 1.0,
        bias: bool = False,
        output_bias: bool = False,
        head_norms: bool = False,
        projection_norms: bool = False,
        unit_offset: bool = False,
        window: int | None = None,
        scale: float | None = None,
        soft_cap: float = 0.0,
        sinks: bool = False,
        merged: str | None = None,
    ) -> Attention:
        """Returns the attention of the checkpoint module `name`.

        Args:
            num_heads, num_kv_heads, head_size: of all ranks together.
            rope: of this layer.
            norm, post_norm, residual_scale: as in `Attention`.
            bias: of queries, keys and values. output_bias: of the output projection.
            head_norms: whether queries and keys are normed by head (q_norm, k_norm).
            projection_norms: whether they are normed over all heads instead, by the same modules.
            unit_offset: of norms by head.
            window: the sliding window in tokens, or None.
            scale: of the scores; by default head_size ** -0.5.
            soft_cap: of the scores; 0 for none.
            sinks: whether heads have sinks; see `AttentionSinks`.
            merged: the module that holds queries, keys and values together in the checkpoint, if
                one does.
        """
        group = self.backend.group
        queries, keys = heads_of_rank(num_heads, num_kv_heads, group.rank, group.size)
        shards = [
            Shard(local.start * head_size, len(local) * head_size, count * head_size)
            for local, count in ((queries, num_heads), (keys, num_kv_heads), (keys, num_kv_heads))
        ]
        sources = self._sources(name, ("q_proj", "k_proj", "v_proj"), shards, merged)
        qkv = self._column(sources, bias=bias)
        output = self._row(f"{name}.o_proj", shards[0], bias=output_bias)
        shape = AttentionShape(
            len(queries), len(keys), head_size,
            head_size**-0.5 if scale is None else scale, window, soft_cap,
        )  # fmt: skip
        by_head = self._head_norms(name, head_size, unit_offset) if head_norms else None
        copies = max(1, group.size // num_kv_heads)
        whole = self._projection_norms(name, shards, copies) if projection_norms else None
        kv_heads = Shard(keys.start, len(keys), num_kv_heads)
        rotary = self._rotary(rope, head_size)
        # a sink's score is not shifted with the others
        shiftable = rotary if shape.is_shift_invariant and not sinks else None
        scales = KVScales(name, kv_heads, self.backend.device, shiftable)
        heads = Shard(queries.start, len(queries), num_heads)
        by_query = self._keep(AttentionSinks(name, heads, self.backend.device)) if sinks else None
        attention = Attention(
            shape, qkv, output, rotary, scales, head_norms=by_head, projection_norms=whole,
            sinks=by_query, norm=norm, post_norm=post_norm,
            residual_scale=residual_scale, backend=self.backend,
        )  # fmt: skip
        self._to_prepare.append(attention)
        return attention

    def latent_attention(
        self,
        name: str,
        *,
        shape: LatentShape,
        query_rank: int | None,
        rope: RopeConfig,
        norm: RMSNorm,
        norm_eps: float,
        bias: bool = False,
    ) -> LatentAttention:
        """Returns the latent attention of the checkpoint module `name`.

        Args:
            shape: of all ranks together.
            query_rank: channels between the two projections of the queries; None for one
                projection.
            rope: of the rotated channels.
            norm: as in `Attention`.
            norm_eps: of the norms within.
            bias: of the first projections, for which there have to be two of the queries, and of
                the output's.
        """
        heads = row_shard(shape.num_heads, self.backend)
        local, backend = replace(shape, num_heads=heads.size), self.backend

        def by_head(channels: int) -> Shard:
            return Shard(heads.start * channels, heads.size * channels, heads.total * channels)

        latents = Source(f"{name}.kv_a_proj_with_mqa", Shard.whole(shape.cached_size))
        query_up = None
        if query_rank is None:
            first = Source(f"{name}.q_proj", by_head(shape.head_size))
        else:
            first = Source(f"{name}.q_a_proj", Shard.whole(query_rank))
            query_up = (
                self.norm(f"{name}.q_a_layernorm", query_rank, eps=norm_eps),
                self._column([Source(f"{name}.q_b_proj", by_head(shape.head_size))], query_rank),
            )
        down = self._column([first, latents], bias=bias)
        latent_norm = self.norm(f"{name}.kv_a_layernorm", shape.latent_size, eps=norm_eps)
        expanded = [Source(f"{name}.kv_b_proj", by_head(shape.plain_size + shape.value_size))]
        weight = self._weight(expanded, Shard.whole(shape.latent_size))
        expansion = self._keep(LatentExpansion(weight, local, backend))
        output = self._row(f"{name}.o_proj", by_head(shape.value_size), bias=bias)
        rotary = self._rotary(rope, shape.rotary_size)
        attention = LatentAttention(
            local, down, query_up, latent_norm, expansion, output, rotary, norm=norm,
            backend=backend,
        )  # fmt: skip
        self._to_prepare.append(attention)
        return attention

    def gated_mlp(
        self,
        name: str,
        intermediate_size: int,
        *,
        norm: RMSNorm | None,
        activation: str = "silu",
        post_norm: RMSNorm | None = None,
        residual_scale: float = 1.0,
        bias: bool = False,
        merged: str | None = None,
    ) -> GatedMLP:
        """Returns the gated MLP of the checkpoint module `name`.

        Args:
            intermediate_size: of all ranks together.
            activation: of the gate; see `mlp.ACTIVATIONS`.
            norm, post_norm, residual_scale: as in `Attention`.
            bias: of all projections.
            merged: the module that holds gate and up together in the checkpoint, if one does.
        """
        shard = row_shard(intermediate_size, self.backend)
        sources = self._sources(name, ("gate_proj", "up_proj"), (shard, shard), merged)
        mlp = GatedMLP(
            self._column(sources, bias=bias),
            self._row(f"{name}.down_proj", shard, bias=bias),
            shard.size,
            activation=activation,
            norm=norm,
            post_norm=post_norm,
            residual_scale=residual_scale,
            backend=self.backend,
        )
        self._to_prepare.append(mlp)
        return mlp

    def mixture_or_mlp(
        self,
        name: str,
        number: int,
        config: MixtureConfig,
        norm: RMSNorm,
        *,
        shared: str = "shared_expert",
    ) -> MixtureMLP | GatedMLP:
        """Returns the mixture of experts of layer `number`, or its gated MLP if it has no experts;
        arguments as in `mixture`."""
        shape = config.mixture
        if shape is None or number in shape.dense_layers:
            size, activation = config.intermediate_size, config.activation
            return self.gated_mlp(name, size, norm=norm, activation=activation)
        return self.mixture(name, shape, norm=norm, activation=config.activation, shared=shared)

    def mixture(
        self,
        name: str,
        shape: MixtureShape,
        *,
        norm: RMSNorm,
        activation: str = "silu",
        projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        shared: str = "shared_expert",
    ) -> MixtureMLP:
        """Returns the mixture of experts of the checkpoint module `name`.

        Args:
            shape: of all ranks together.
            norm: of the residual stream before it.
            activation: of the gates; see `mlp.ACTIVATIONS`.
            projections: the modules of an expert: gate, up and down.
            shared: the module of the expert that all tokens take; with `_gate` behind it, that of
                its gate.
        """

        def expert(modules: tuple[str, str, str], shard: Shard) -> Expert:
            gate, up, down = modules
            weights = (
                self._weight([Source(gate, shard), Source(up, shard)], whole),
                self._weight([Source(down, whole)], shard),
            )
            return Expert(*weights, activation)

        whole = Shard.whole(self.hidden_size)
        routing, of_all = shape.routing, None
        if shape.shared_size:
            gate = f"{name}.{shared}_gate" if shape.is_shared_gated else None
            modules = _expert_modules(f"{name}.{shared}", projections)
            whole_expert = expert(modules, row_shard(shape.shared_size, self.backend))
            of_all = SharedExpert(whole_expert, gate, self.hidden_size, self.backend)
        prefixes = (f"{name}.experts.{number}" for number in range(routing.num_experts))
        names = [_expert_modules(prefix, projections) for prefix in prefixes]
        placed = PlacedExperts(name, shape, self.backend)
        channels = placed.channels
        here = [names[expert] for expert in placed.local_experts]
        self._elsewhere.update(*(set(names) - set(here)))
        if self._takes_stacked(routing, channels, activation):
            from aioinfer.layers.expert_stacks import ProjectionShape, interleaved_order

            order = interleaved_order(channels.size, in_turns=False)
            first = [[Source(gate, channels), Source(up, channels)] for gate, up, _ in here]
            second = [[Source(down, whole)] for *_, down in here]
            stacked = self._stacked(
                ProjectionShape(first, whole, order), ProjectionShape(second, channels)
            )
            return self._kernel_mixture(f"{name}.gate", routing, stacked, placed, of_all, norm)
        router = Router(f"{name}.gate", routing, self.hidden_size, self.backend)
        experts = [expert(modules, placed.channels) for modules in here]
        return self._keep(MixtureMLP(router, experts, placed, of_all, norm, self.backend))

    def biased_mixture(
        self, name: str, shape: MixtureShape, swiglu: ClampedSwiGLU, *, norm: RMSNorm
    ) -> MixtureMLP:
        """Returns the mixture of experts of the checkpoint module `name`, in which one tensor holds
        a projection of all experts; see `biased_experts`.

        Args:
            shape: of all ranks together; without an expert that all tokens take.
            swiglu: the activation.
            norm: of the residual stream before it.
        """
        placed, routing = PlacedExperts(name, shape, self.backend), shape.routing
        channels = placed.channels

        def places_of(number: int) -> ExpertPlaces:
            index = StackIndex(number, routing.num_experts)
            return ExpertPlaces(f"{name}.experts", index, channels, self.hidden_size)

        if self._takes_stacked(routing, channels):
            from aioinfer.kernels.expert_arguments import Activation
            from aioinfer.layers.expert_stacks import ProjectionShape, interleaved_order

            channels = self._whole_blocks(channels, f"{name}.experts.down_proj")
            every = [places_of(number) for number in placed.local_experts]
            order = interleaved_order(channels.size, in_turns=True)
            whole = Shard.whole(self.hidden_size)
            stacked = self._stacked(
                ProjectionShape([[places.gate_up] for places in every], whole, order),
                ProjectionShape([[places.down] for places in every], channels),
                has_biases=True,
                activation=Activation(swiglu.alpha, swiglu.limit),
            )
            return self._kernel_mixture(f"{name}.router", routing, stacked, placed, None, norm)
        router = Router(f"{name}.router", routing, self.hidden_size, self.backend)

        def expert(number: int) -> BiasedExpert:
            places = places_of(number)
            gate_up = self._weight([places.gate_up], Shard.whole(self.hidden_size))
            down = self._weight([places.down], channels)
            return BiasedExpert(places, gate_up, down, swiglu, self.backend)

        experts = [expert(number) for number in placed.local_experts]
        return self._keep(MixtureMLP(router, experts, placed, None, norm, self.backend))

    # ---------------------------------------------------------------- parts

    def _takes_stacked(self, routing: Routing, channels: Shard, activation: str = "silu") -> bool:
        """Whether the kernels compute a mixture: the same on every rank."""
        if not self.backend.has_kernels:
            return False
        from aioinfer.layers.kernel_experts import supports

        is_supported = supports(routing, channels.size, activation)
        if not is_supported and self.backend.expert_group is not None:
            raise ConfigError(
                "parallel.data_parallel_attention on GPUs needs experts that the kernels compute, "
                f"and not {channels.size} channels with {activation}: use "
                "parallel.tensor_parallel_size"
            )
        return is_supported

    def _whole_blocks(self, channels: Shard, name: str) -> Shard:
        """Returns the channels of an expert that this rank has: as given, or, of a module in MXFP4,
        those of whole blocks, as evenly as these can be divided."""
        from aioinfer.layers.formats.mxfp4 import BLOCK

        scheme = None if self.quantization is None else self.quantization.scheme_of(name)
        total, group = channels.total, self.backend.group
        is_whole = channels.size == total or channels.start % BLOCK == channels.size % BLOCK == 0
        if not isinstance(scheme, MXFP4Scheme) or is_whole or total % BLOCK:
            return channels
        blocks = Shard.near_equal(total // BLOCK, group.rank, group.size)
        return Shard(blocks.start * BLOCK, blocks.size * BLOCK, total)

    def _stacked(
        self, first: ProjectionShape, second: ProjectionShape, **options: Any
    ) -> StackedExperts:
        """Returns the weights of this rank's experts for the kernels."""
        from aioinfer.layers.expert_stacks import StackedExperts

        stacked = StackedExperts(first, second, self.backend, self.quantization, **options)
        self._converted.append(weakref.ref(stacked))
        return stacked

    def _kernel_mixture(
        self,
        router_name: str,
        routing: Routing,
        stacked: StackedExperts,
        placed: PlacedExperts,
        shared: SharedExpert | None,
        norm: RMSNorm,
    ) -> MixtureMLP:
        """Returns the mixture over the kernels."""
        from aioinfer.layers.exchanged_experts import ExchangedMixtureMLP
        from aioinfer.layers.kernel_experts import KernelMixtureMLP

        backend = self.backend
        router = Router(router_name, routing, self.hidden_size, backend, backend.dtype)
        kind = KernelMixtureMLP if backend.expert_group is None else ExchangedMixtureMLP
        return self._keep(kind(router, stacked, placed, shared, norm, backend))

    def _weight(self, sources: Sequence[Source], columns: Shard) -> WeightFormat:
        weight = make_weight(sources, columns, self.backend, self.quantization)
        self._converted.append(weakref.ref(weight))
        return weight

    def _affine_scheme(self, name: str) -> AffineScheme | None:
        """Returns how the embedding or the head is quantized; other schemes are not for them."""
        if self.quantization is None:
            return None
        return self.quantization.affine_schemes_of([name])[0]

    def _keep(self, layer: Any) -> Any:
        self._layers.append(layer)
        return layer

    def _head_norms(self, name: str, head_size: int, unit_offset: bool) -> tuple[RMSNorm, RMSNorm]:
        """Returns the norms of queries and keys by head."""
        query_norm = self.norm(f"{name}.q_norm", head_size, unit_offset=unit_offset)
        return query_norm, self.norm(f"{name}.k_norm", head_size, unit_offset=unit_offset)

    def _projection_norms(
        self, name: str, shards: Sequence[Shard], copies: int
    ) -> tuple[SplitRMSNorm, SplitRMSNorm]:
        """Returns the norms of queries and keys over all heads, of which this rank has `shards`;
        `copies` ranks have the same keys."""
        eps, backend = self._norm_eps, self.backend
        query_norm = SplitRMSNorm(f"{name}.q_norm", shards[0], 1, eps, backend)
        key_norm = SplitRMSNorm(f"{name}.k_norm", shards[1], copies, eps, backend)
        return self._keep(query_norm), self._keep(key_norm)

    @staticmethod
    def _sources(
        name: str, modules: Sequence[str], shards: Sequence[Shard], merged: str | None
    ) -> list[Source]:
        """Returns which rows of the checkpoint this rank has: `shards[i]` of `modules[i]` of module
        `name`, or of module `merged`, which holds the modules one after the other."""
        if merged is None:
            return [
                Source(f"{name}.{module}", shard)
                for module, shard in zip(modules, shards, strict=True)
            ]
        total, starts = 0, []
        for shard in shards:
            starts.append(total + shard.start)
            total += shard.total
        return [
            Source(f"{name}.{merged}", Shard(start, shard.size, total))
            for start, shard in zip(starts, shards, strict=True)
        ]

    def _column(
        self, sources: list[Source], in_features: int | None = None, *, bias: bool = False
    ) -> ColumnParallelLinear:
        """Returns a column-parallel layer, by default of the residual stream."""
        weight = self._weight(sources, Shard.whole(in_features or self.hidden_size))
        return self._keep(ColumnParallelLinear(sources, weight, bias=bias, backend=self.backend))

    def _row(self, name: str, columns: Shard, *, bias: bool) -> RowParallelLinear:
        source = Source(name, Shard.whole(self.hidden_size))
        weight = self._weight([source], columns)
        linear = RowParallelLinear(name, weight, self.hidden_size, bias=bias, backend=self.backend)
        return self._keep(linear)

    def _rotary(self, rope: RopeConfig, head_size: int) -> RotaryTable:
        """Returns the table of a variant, made once for all layers that have it."""
        key = rope.key, head_size
        if key not in self._tables:
            self._tables[key] = RotaryTable(
                rope, head_size, self._max_len, self.backend.device, self._served_len
            )
        return self._tables[key]


def _expert_modules(prefix: str, projections: tuple[str, str, str]) -> tuple[str, str, str]:
    """Returns the checkpoint modules of an expert: gate, up and down."""
    gate, up, down = projections
    return f"{prefix}.{gate}", f"{prefix}.{up}", f"{prefix}.{down}"


def _affine_products(backend: Backend) -> str:
    """Returns how weights with an `AffineScheme` are multiplied."""
    if has_compiled_products(backend):
        return "multiplied as they are, by kernels that numba compiles"
    return (
        "multiplied as float16"
        if has_half_products(backend)
        else "dequantized when they are loaded"
    )


def _stored_bytes(reference: _Converted) -> int:
    part = reference()
    shards = () if part is None else part.weight_shards()
    return sum(shard.destination.nbytes for _, shard in shards)


def _growth(reference: _Converted, stored: int) -> int:
    part = reference()
    return 0 if part is None else part.held_bytes - stored
