"""Makes the parts of a model's layers for one rank, under the names of the checkpoint's modules, so
that a model's file defines what the model is and nothing of devices, ranks, weight formats or
loading. `part_maker` has what parts consist of.

A mixture of experts is either a `MixtureMLP`, in plain torch, of experts with two weights each; or,
where the kernels compute the mixture (`_takes_stacked`), one over `StackedExperts`, which hold a
projection of all experts in one tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aioinfer.errors import ConfigError
from aioinfer.layers.attention import make_attention
from aioinfer.layers.backend import Backend
from aioinfer.layers.convolution import make_short_convolution
from aioinfer.layers.delta_net import make_gated_delta_net
from aioinfer.layers.experts import (
    BiasedExpert,
    ClampedSwiGLU,
    Expert,
    ExpertPlaces,
    MixtureMLP,
    SharedExpert,
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
    Routing,
)
from aioinfer.layers.mlp import MLP, GatedMLP
from aioinfer.layers.norm import Norm
from aioinfer.layers.part_maker import PartMaker
from aioinfer.layers.shards import Shard, Source, StackIndex, merged_sources

if TYPE_CHECKING:
    from aioinfer.layers.expert_stacks import StackedExperts

#: The checkpoint modules of an expert: gate, up and down.
Modules = tuple[str, str, str]
_NAMES = ExpertNames()
#: The rows of these modules that a rank has.
Sources = tuple[Source, Source, Source]


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
    routing, of_all = shape.routing, None
    if shape.shared_size:
        gate = f"{name}.{names.shared}_gate" if shape.is_shared_gated else None
        channels = row_shard(shape.shared_size, make.backend)
        modules = _expert_modules(f"{name}.{names.shared}", names.projections)
        expert = _make_expert(make, _expert_sources(make, modules, channels), channels, activation)
        of_all = SharedExpert(expert, gate, make.hidden_size, make.backend)
    prefixes = (f"{name}.experts.{number}" for number in range(routing.num_experts))
    every = [_expert_modules(prefix, names.projections) for prefix in prefixes]
    placed = PlacedExperts(name, shape, make.backend)
    here = [every[expert] for expert in placed.local_experts]
    make.add_elsewhere(module for each in set(every) - set(here) for module in each)
    if shape.is_stacked:
        indices = [StackIndex(number, routing.num_experts) for number in placed.local_experts]
        stack = f"{name}.experts"
        sources = [_stacked_sources(make, stack, index, placed.channels) for index in indices]
    else:
        sources = [_expert_sources(make, modules, placed.channels) for modules in here]
    takes_stacked = _takes_stacked(make.backend, routing, placed.channels, activation)
    router = ExpertRouter(
        f"{name}.{names.router}", routing, make.hidden_size, make.backend,
        make.backend.dtype if takes_stacked else torch.float32, f"{name}.{names.router_bias}",
    )  # fmt: skip
    if takes_stacked:
        stacked = _stacked_experts(make, sources, placed.channels)
        return _kernel_mixture(make, router, stacked, placed, of_all, norm)
    experts = [_make_expert(make, each, placed.channels, activation) for each in sources]
    return make.keep(MixtureMLP(router, experts, placed, of_all, norm, make.backend))


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
    takes_stacked = _takes_stacked(make.backend, routing, placed.channels)
    channels = placed.channels
    if takes_stacked:
        channels = _whole_blocks(make, channels, f"{name}.experts.down_proj")
    indices = [StackIndex(number, routing.num_experts) for number in placed.local_experts]
    here = [ExpertPlaces(f"{name}.experts", index, channels, make.hidden_size) for index in indices]
    router = ExpertRouter(
        f"{name}.router", routing, make.hidden_size, make.backend,
        make.backend.dtype if takes_stacked else torch.float32,
    )  # fmt: skip
    if takes_stacked:
        stacked = _stacked_biased_experts(make, here, channels, swiglu)
        return _kernel_mixture(make, router, stacked, placed, None, norm)
    experts = [_make_biased_expert(make, places, channels, swiglu) for places in here]
    return make.keep(MixtureMLP(router, experts, placed, None, norm, make.backend))


# -------------------------------------------------------------------- experts in plain torch


def _expert_modules(prefix: str, projections: Modules) -> Modules:
    """Returns the checkpoint modules of an expert: gate, up and down."""
    gate, up, down = projections
    return f"{prefix}.{gate}", f"{prefix}.{up}", f"{prefix}.{down}"


def _expert_sources(make: PartMaker, modules: Modules, channels: Shard) -> Sources:
    """Returns some channels of an expert that has checkpoint modules of its own."""
    gate, up, down = modules
    whole = Shard.whole(make.hidden_size)
    return Source(gate, channels), Source(up, channels), Source(down, whole)


def _stacked_sources(make: PartMaker, name: str, index: StackIndex, channels: Shard) -> Sources:
    """Returns some channels of an expert of stacked checkpoint tensors: the gates, then the ups."""
    total = channels.total
    gate, up = (Shard(start, channels.size, 2 * total) for start in (
        channels.start, total + channels.start,
    ))  # fmt: skip
    first, second = f"{name}.gate_up_proj", f"{name}.down_proj"
    whole = Shard.whole(make.hidden_size)
    return Source(first, gate, index), Source(first, up, index), Source(second, whole, index)


def _make_expert(make: PartMaker, sources: Sources, channels: Shard, activation: str) -> Expert:
    """Returns some channels of an expert."""
    gate, up, down = sources
    gate_up = make.weight([gate, up], Shard.whole(make.hidden_size))
    return Expert(gate_up, make.weight([down], channels), activation)


def _make_biased_expert(
    make: PartMaker, places: ExpertPlaces, channels: Shard, swiglu: ClampedSwiGLU
) -> BiasedExpert:
    """Returns some channels of an expert of stacked checkpoint tensors."""
    gate_up = make.weight([places.gate_up], Shard.whole(make.hidden_size))
    down = make.weight([places.down], channels)
    return BiasedExpert(places, gate_up, down, swiglu, make.backend)


# -------------------------------------------------------------------- experts for the kernels


def _takes_stacked(
    backend: Backend, routing: Routing, channels: Shard, activation: str = "silu"
) -> bool:
    """Whether the kernels compute a mixture: the same on every rank."""
    if not backend.has_kernels:
        return False
    from aioinfer.layers.kernel_experts import supports

    is_supported = supports(routing, channels.size, activation)
    if not is_supported and backend.expert_group is not None:
        raise ConfigError(
            "parallel.expert_parallel between engines on GPUs needs experts that the kernels "
            f"compute, and not {channels.size} channels with {activation}: use "
            "parallel.tensor_parallel_size"
        )
    return is_supported


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


def _stacked_experts(make: PartMaker, here: list[Sources], channels: Shard) -> StackedExperts:
    """Returns some channels of this rank's experts."""
    from aioinfer.layers.expert_stacks import ProjectionShape, StackedExperts, interleaved_order

    whole = Shard.whole(make.hidden_size)
    order = interleaved_order(channels.size, in_turns=False)
    first = [[gate, up] for gate, up, _ in here]
    second = [[down] for *_, down in here]
    stacked = StackedExperts(
        ProjectionShape(first, whole, order),
        ProjectionShape(second, channels),
        make.backend,
        make.quantization,
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
) -> MixtureMLP:
    """Returns the mixture over the kernels."""
    from aioinfer.layers.kernel_experts import ExchangedMixtureMLP, KernelMixtureMLP

    backend = make.backend
    kind = KernelMixtureMLP if backend.expert_group is None else ExchangedMixtureMLP
    return make.keep(kind(router, stacked, placed, shared, norm, backend))


class LayerMaker(PartMaker):
    """Makes parts of layers."""

    # functions, which take the maker as their first parameter
    attention = make_attention
    gated_delta_net = make_gated_delta_net
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
    ) -> GatedMLP:
        """Returns the gated MLP of the checkpoint module `name`.

        Args:
            intermediate_size: of all ranks together.
            activation: of the gate; see `formats.base.ACTIVATIONS`.
            norm, post_norm, residual_scale: as in `Attention`.
            bias: of all projections.
            projections: the modules of gate, up and down.
            merged: the module that holds gate and up together in the checkpoint, if one does.
        """
        shard = row_shard(intermediate_size, self.backend)
        sources = merged_sources(name, projections[:2], (shard, shard), merged)
        mlp = GatedMLP(
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
