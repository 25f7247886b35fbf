"""Makes the parts of a model's layers for one rank, under the names of the checkpoint's modules, so
that a model's file defines what the model is and nothing of devices, ranks, weight formats or
loading. `part_maker` has what parts consist of.

A mixture of experts is either a `MixtureMLP`, in plain torch, of experts with two weights each; or,
where the kernels compute the mixture (`_takes_stacked`), one over `StackedExperts`, which hold a
projection of all experts in one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from aioinfer.errors import ConfigError
from aioinfer.layers.attention_maker import make_attention
from aioinfer.layers.backend import Backend
from aioinfer.layers.bidirectional_attention import (
    make_bidirectional_attention,
    make_distance_bias,
)
from aioinfer.layers.convolution import make_short_convolution
from aioinfer.layers.cross_attention import make_cross_attention
from aioinfer.layers.delta_net import make_gated_delta_net, make_kimi_delta_attention
from aioinfer.layers.experts import (
    BiasedExpert,
    ClampedSwiGLU,
    Expert,
    ExpertLatents,
    ExpertPlaces,
    MixtureMLP,
    SharedExpert,
    SharedGate,
)
from aioinfer.layers.formats.schemes import MXFP4Scheme
from aioinfer.layers.latent_attention import make_latent_attention
from aioinfer.layers.linear import row_shard
from aioinfer.layers.mamba import make_mamba2
from aioinfer.layers.mixture import (
    ExpertNames,
    ExpertRouter,
    MixtureConfig,
    MixtureShape,
    PlacedExperts,
    RouterNorm,
)
from aioinfer.layers.mlp import MLP, GatedMLP, SparseGatedMLP
from aioinfer.layers.norm import Norm
from aioinfer.layers.part_maker import PartMaker
from aioinfer.layers.per_layer import (
    make_per_layer_embedding,
    make_per_layer_input,
    make_stream_scale,
)
from aioinfer.layers.shards import Shard, Source, StackIndex, merged_sources
from aioinfer.layers.shared_attention import make_shared_attention

if TYPE_CHECKING:
    from aioinfer.layers.expert_stacks import StackedExperts

#: The checkpoint modules of an expert: gate, up and down; see `ExpertNames.projections`.
Modules = tuple[str, str, str]
_NAMES = ExpertNames()
#: The rows that a rank has of an expert's modules, of which the last one is down.
Sources = list[Source]


def make_mixture(
    make: PartMaker,
    name: str,
    shape: MixtureShape,
    *,
    norm: Norm,
    activation: str = "silu",
    names: ExpertNames = _NAMES,
) -> MixtureMLP:
    """Returns the mixture of experts of the checkpoint module `name`.

    Args:
        shape: of all ranks together.
        norm: of the residual stream before it.
        activation: of the gates; see `formats.base.ACTIVATIONS`.
        names: in the checkpoint.
    """
    routing = shape.routing
    placed = PlacedExperts(name, shape, make.backend)
    root = f"{name}.{names.experts}"
    sources = _local_sources(make, root, shape, placed, names)
    is_gated = shape.is_stacked or bool(names.projections[0])
    takes_stacked = _takes_stacked(
        make.backend, shape, placed.channels, activation, is_gated=is_gated
    )
    router = ExpertRouter(
        f"{name}.{names.router}", routing, make.hidden_size, make.backend,
        make.backend.dtype if takes_stacked else torch.float32, f"{name}.{names.router_bias}",
        _make_router_norm(make, f"{name}.{names.router}") if routing.has_own_norm else None,
    )  # fmt: skip
    gate = None
    if shape.is_shared_gated:
        gate = SharedGate(f"{name}.{names.shared}_gate", make.hidden_size, make.backend)
    of_all = _shared_sources(make, name, shape, names) if shape.shared_size else []
    stacks = f"{root}.{names.stacked[0]}", f"{root}.{names.stacked[1]}"
    extended, extension = None, make.backend.extension
    if extension is not None:
        extended = extension.extend_experts(stacks, sources, placed, takes_stacked=takes_stacked)
    if takes_stacked and of_all and _is_alike(make, shape, sources[0], of_all):
        stacked = _stacked_experts(make, [*sources, of_all], placed.channels, activation)
        return _kernel_mixture(
            make, router, stacked, placed, None, norm, stacks_shared=True, shared_gate=gate
        )
    shared = None
    if of_all:
        channels = row_shard(shape.shared_size, make.backend)
        expert = _make_expert(make, of_all, channels, activation)
        make.extend(expert.gate_up, of_all[:-1], Shard.whole(make.hidden_size))
        make.extend(expert.down, of_all[-1:], channels)
        shared = SharedExpert(expert, gate, shape.shared_scale)
    latents = _make_latents(make, name, shape, names) if shape.latent_size else None
    if takes_stacked:
        stacked = _stacked_experts(make, sources, placed.channels, activation)
        return _kernel_mixture(
            make, router, stacked, placed, shared, norm, latents=latents, extension=extended
        )
    experts = [_make_expert(make, each, placed.channels, activation) for each in sources]
    return make.keep(
        MixtureMLP(router, experts, placed, shared, norm, make.backend, latents, extended)
    )


def make_biased_mixture(
    make: PartMaker, name: str, shape: MixtureShape, swiglu: ClampedSwiGLU, *, norm: Norm
) -> MixtureMLP:
    """Returns the mixture of experts of the checkpoint module `name`, in which one tensor holds a
    projection of all experts; see `experts.BiasedExpert`.

    Args:
        shape: of all ranks together; without an expert that all tokens take.
        swiglu: the activation.
        norm: of the residual stream before it.
    """
    placed, routing = PlacedExperts(name, shape, make.backend), shape.routing
    takes_stacked = _takes_stacked(make.backend, shape, placed.channels)
    channels = placed.channels
    if takes_stacked:
        channels = _whole_blocks(make, channels, f"{name}.experts.down_proj")
    indices = [StackIndex(number, routing.num_experts) for number in placed.local_experts]
    here = [ExpertPlaces(f"{name}.experts", index, channels, make.hidden_size) for index in indices]
    router = ExpertRouter(
        f"{name}.router", routing, make.hidden_size, make.backend,
        make.backend.dtype if takes_stacked else torch.float32,
    )  # fmt: skip
    extension, extended = make.backend.extension, None
    if extension is not None:
        extended = extension.extend_experts(
            (f"{name}.experts.gate_up_proj", f"{name}.experts.down_proj"),
            [[places.gate_up, places.down] for places in here], placed,
            takes_stacked=takes_stacked, in_turns=True, channels=channels,
        )  # fmt: skip
    if takes_stacked:
        stacked = _stacked_biased_experts(make, here, channels, swiglu)
        return _kernel_mixture(make, router, stacked, placed, None, norm, extension=extended)
    experts = [_make_biased_expert(make, places, channels, swiglu) for places in here]
    return make.keep(
        MixtureMLP(router, experts, placed, None, norm, make.backend, extension=extended)
    )


# -------------------------------------------------------------------- experts in plain torch


def _make_router_norm(make: PartMaker, name: str) -> RouterNorm:
    """Returns the norm of the router whose product is the checkpoint module `name`."""
    scale = f"{name.rpartition('.')[0]}.scale"
    return make.keep(RouterNorm(scale, make.hidden_size, make.norm_eps, make.backend))


def _local_sources(
    make: PartMaker, name: str, shape: MixtureShape, placed: PlacedExperts, names: ExpertNames
) -> list[Sources]:
    """Returns this rank's channels of its experts, which lie below the checkpoint module `name`;
    enters the modules of the others."""
    local, channels, total = placed.local_experts, placed.channels, shape.routing.num_experts
    others = sorted(set(range(total)).difference(local))
    modules = [module for module in names.projections if module]
    make.add_elsewhere(f"{name}.{number}.{module}" for number in others for module in modules)
    if shape.is_stacked:
        indices = [StackIndex(number, total, shape.is_out_first) for number in local]
        return [_stacked_sources(make, name, names.stacked, index, channels) for index in indices]
    size = shape.latent_size or make.hidden_size
    every = [
        _expert_sources(f"{name}.{number}", names.projections, channels, size)
        for number in range(total)
    ]
    return [every[number] for number in local]


def _expert_sources(prefix: str, projections: Modules, channels: Shard, size: int) -> Sources:
    """Returns some channels of an expert that has checkpoint modules of its own, and takes `size`
    channels of a token."""
    gate, up, down = projections
    second = Source(f"{prefix}.{down}", Shard.whole(size))
    if gate == up:
        return [*merged_sources(prefix, ("", ""), (channels, channels), up), second]
    return [*(Source(f"{prefix}.{module}", channels) for module in (gate, up) if module), second]


def _stacked_sources(
    make: PartMaker, name: str, tensors: tuple[str, str], index: StackIndex, channels: Shard
) -> Sources:
    """Returns some channels of an expert of stacked checkpoint tensors: the gates, then the ups."""
    first, second = tensors
    both = merged_sources(name, ("", ""), (channels, channels), first)
    down = Source(f"{name}.{second}", Shard.whole(make.hidden_size))
    return [replace(source, stack=index) for source in (*both, down)]


def _make_expert(make: PartMaker, sources: Sources, channels: Shard, activation: str) -> Expert:
    """Returns some channels of an expert."""
    *first, down = sources
    gate_up = make.weight(first, Shard.whole(down.rows.total))
    down_weight = make.weight([down], channels)
    return Expert(gate_up, down_weight, activation, is_gated=len(first) > 1)


def _shared_sources(make: PartMaker, name: str, shape: MixtureShape, names: ExpertNames) -> Sources:
    """Returns this rank's channels of the expert that every token takes; arguments as in
    `make_mixture`."""
    channels = row_shard(shape.shared_size, make.backend)
    projections = names.shared_projections or names.projections
    return _expert_sources(f"{name}.{names.shared}", projections, channels, make.hidden_size)


def _make_latents(
    make: PartMaker, name: str, shape: MixtureShape, names: ExpertNames
) -> ExpertLatents:
    """Returns the projections around the experts; arguments as in `make_mixture`."""
    size, (down, up) = shape.latent_size, names.latents
    first = make.column([Source(f"{name}.{down}", Shard.whole(size))])
    second = make.column([Source(f"{name}.{up}", Shard.whole(make.hidden_size))], size)
    return ExpertLatents(first, second)


def _make_biased_expert(
    make: PartMaker, places: ExpertPlaces, channels: Shard, swiglu: ClampedSwiGLU
) -> BiasedExpert:
    """Returns some channels of an expert of stacked checkpoint tensors."""
    gate_up = make.weight([places.gate_up], Shard.whole(make.hidden_size))
    down = make.weight([places.down], channels)
    return BiasedExpert(places, gate_up, down, swiglu, make.backend)


# -------------------------------------------------------------------- experts for the kernels


def _takes_stacked(
    backend: Backend, shape: MixtureShape, channels: Shard, activation: str = "silu", *,
    is_gated: bool = True,
) -> bool:  # fmt: skip
    """Whether the kernels compute a mixture: the same on every rank."""
    if not backend.has_kernels:
        return False
    from aioinfer.layers.kernel_experts import supports

    is_supported = supports(shape.routing, channels.size, activation, is_gated=is_gated)
    if backend.expert_group is not None and (shape.latent_size or shape.routing.has_own_norm):
        is_supported = False
    if not is_supported and backend.expert_group is not None:
        raise ConfigError(
            "parallel.expert_parallel between engines on GPUs needs experts that the kernels "
            f"compute, and not {channels.size} channels with {activation}: use "
            "parallel.tensor_parallel_size"
        )
    return is_supported


def _is_alike(make: PartMaker, shape: MixtureShape, expert: Sources, of_all: Sources) -> bool:
    """Whether the expert that every token takes can lie among the others of a rank, which has
    channels of every expert: it has their size, their format, and their order of rows."""
    if make.backend.extension is not None:
        return False  # its linear layers are extended like those of any MLP
    is_different = shape.shared_size != shape.expert_size or shape.latent_size
    if is_different or shape.shared_scale != 1.0:
        return False
    backend = make.backend
    has_whole_experts = backend.expert_parallel or backend.expert_group is not None
    if has_whole_experts or len(expert) != len(of_all):
        return False
    quantization = make.quantization
    if quantization is None:
        return True
    return len({quantization.scheme_of(source.name) for source in (*expert, *of_all)}) == 1


def _whole_blocks(make: PartMaker, channels: Shard, name: str) -> Shard:
    """Returns the channels of an expert that this rank has: as given, or, of a module in MXFP4, the
    channels of whole blocks, as evenly as the blocks can be divided."""
    from aioinfer.layers.formats.mxfp4 import BLOCK

    scheme = None if make.quantization is None else make.quantization.scheme_of(name)
    total, group = channels.total, make.backend.group
    is_whole = channels.size == total or channels.start % BLOCK == channels.size % BLOCK == 0
    if not isinstance(scheme, MXFP4Scheme) or is_whole or total % BLOCK:
        return channels
    blocks = Shard.near_equal(total // BLOCK, group.rank, group.size)
    return blocks.times(BLOCK)


def _stacked_experts(
    make: PartMaker, here: list[Sources], channels: Shard, activation: str
) -> StackedExperts:
    """Returns some channels of this rank's experts."""
    from aioinfer.layers.expert_stacks import ProjectionShape, StackedExperts, interleaved_order
    from aioinfer.layers.kernel_experts import ACTIVATIONS

    first, second = [each[:-1] for each in here], [each[-1:] for each in here]
    is_gated, whole = len(first[0]) > 1, Shard.whole(second[0][0].rows.total)
    order = interleaved_order(channels.size, in_turns=False) if is_gated else None
    stacked = StackedExperts(
        ProjectionShape(first, whole, order),
        ProjectionShape(second, channels),
        make.backend,
        make.quantization,
        activation=ACTIVATIONS[activation, is_gated],
    )
    return make.count(stacked)


def _stacked_biased_experts(
    make: PartMaker, here: list[ExpertPlaces], channels: Shard, swiglu: ClampedSwiGLU
) -> StackedExperts:
    """Returns some channels of this rank's experts, whose places in checkpoint tensors are
    `here`."""
    from aioinfer.kernels.expert_arguments import Activation
    from aioinfer.layers.expert_stacks import ProjectionShape, StackedExperts, interleaved_order

    whole = Shard.whole(make.hidden_size)
    order = interleaved_order(channels.size, in_turns=True)
    stacked = StackedExperts(
        ProjectionShape([[places.gate_up] for places in here], whole, order),
        ProjectionShape([[places.down] for places in here], channels),
        make.backend,
        make.quantization,
        has_biases=True,
        activation=Activation(swiglu.alpha, swiglu.limit),
    )
    return make.count(stacked)


def _kernel_mixture(
    make: PartMaker,
    router: ExpertRouter,
    stacked: StackedExperts,
    placed: PlacedExperts,
    shared: SharedExpert | None,
    norm: Norm,
    **options: Any,
) -> MixtureMLP:
    """Returns the mixture over the kernels; `options` as in `KernelMixtureMLP`."""
    from aioinfer.layers.exchanged_experts import ExchangedMixtureMLP
    from aioinfer.layers.kernel_experts import KernelMixtureMLP

    backend = make.backend
    kind = KernelMixtureMLP if backend.expert_group is None else ExchangedMixtureMLP
    return make.keep(kind(router, stacked, placed, shared, norm, backend, **options))


class LayerMaker(PartMaker):
    """Makes parts of layers."""

    # functions, which take the maker as their first parameter
    attention = make_attention
    bidirectional_attention = make_bidirectional_attention
    cross_attention = make_cross_attention
    distance_bias = make_distance_bias
    shared_attention = make_shared_attention
    per_layer_embedding = make_per_layer_embedding
    per_layer_input = make_per_layer_input
    stream_scale = make_stream_scale
    gated_delta_net = make_gated_delta_net
    kimi_delta_attention = make_kimi_delta_attention
    latent_attention = make_latent_attention
    mamba2 = make_mamba2
    short_convolution = make_short_convolution
    mixture = make_mixture
    biased_mixture = make_biased_mixture

    def gated_mlp(
        self,
        name: str,
        intermediate_size: int,
        *,
        norm: Norm | None,
        activation: str = "silu",
        post_norm: Norm | None = None,
        residual_scale: float = 1.0,
        bias: bool = False,
        projections: Modules = ("gate_proj", "up_proj", "down_proj"),
        merged: str | None = None,
        gate_scale: float = 1.0,
        sparsity: float = 0.0,
    ) -> GatedMLP:
        """Returns the gated MLP of the checkpoint module `name`.

        Args:
            intermediate_size: of all ranks together.
            activation: of the gate; see `formats.base.ACTIVATIONS`.
            norm, post_norm, residual_scale: as in `Attention`.
            bias: of all projections.
            projections: the modules of gate, up and down.
            merged: the module that holds gate and up together in the checkpoint, if one does.
            gate_scale: multiplied with the gate, before the activation.
            sparsity: as in `SparseGatedMLP`; 0 for none.
        """
        shard = row_shard(intermediate_size, self.backend)
        sources = merged_sources(name, projections[:2], (shard, shard), merged)
        sources[0] = replace(sources[0], scale=gate_scale)
        kind: Callable[..., GatedMLP] = GatedMLP
        if sparsity:
            kind = partial(SparseGatedMLP, total=intermediate_size, sparsity=sparsity)
        mlp = kind(
            self.column(sources, bias=bias),
            self.row(f"{name}.{projections[2]}", shard, bias=bias),
            shard.size,
            activation=activation,
            norm=norm,
            post_norm=post_norm,
            residual_scale=residual_scale,
            backend=self.backend,
        )
        return self.prepare(mlp)

    def mlp(
        self,
        up: str,
        down: str,
        intermediate_size: int,
        *,
        norm: Norm | None,
        activation: str,
        post_norm: Norm | None = None,
        residual_scale: float = 1.0,
        bias: bool = False,
    ) -> MLP:
        """Returns the MLP without a gate of the checkpoint modules `up` and `down`.

        Args:
            intermediate_size: of all ranks together.
            activation: between the projections; see `formats.base.ACTIVATIONS`.
            norm, post_norm, residual_scale: as in `Attention`.
            bias: of both projections.
        """
        shard = row_shard(intermediate_size, self.backend)
        mlp = MLP(
            self.column([Source(up, shard)], bias=bias),
            self.row(down, shard, bias=bias),
            shard.size,
            activation=activation,
            norm=norm,
            post_norm=post_norm,
            residual_scale=residual_scale,
        )
        return self.prepare(mlp)

    def mixture_or_mlp(
        self,
        name: str,
        number: int,
        config: MixtureConfig,
        norm: Norm,
        names: ExpertNames = _NAMES,
    ) -> MixtureMLP | GatedMLP:
        """Returns the mixture of experts of layer `number`, or its gated MLP if it has no experts;
        arguments as in `mixture`."""
        shape = config.mixture
        if shape is None or number in shape.dense_layers:
            size, activation, modules = (
                config.intermediate_size,
                config.activation,
                names.projections,
            )
            return self.gated_mlp(name, size, norm=norm, activation=activation, projections=modules)
        return self.mixture(name, shape, norm=norm, activation=config.activation, names=names)


if TYPE_CHECKING:
    from aioinfer.layers.expert_stacks import StackedExperts
    from aioinfer.layers.part_maker import PartMaker
