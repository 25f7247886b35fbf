"""Makes the parts of a model's layers for one rank, under the names of the checkpoint's modules, so
that a model's file defines what the model is and nothing of devices, ranks, weight formats or
loading. `part_maker` has what parts consist of."""

from __future__ import annotations

from aioinfer.layers.attention import make_attention
from aioinfer.layers.experts import MixtureMLP
from aioinfer.layers.latent_attention import make_latent_attention
from aioinfer.layers.linear import row_shard
from aioinfer.layers.mixture_maker import make_biased_mixture, make_mixture
from aioinfer.layers.mixture_shape import MixtureConfig
from aioinfer.layers.mlp import MLP, GatedMLP
from aioinfer.layers.norm import Norm
from aioinfer.layers.part_maker import PartMaker
from aioinfer.layers.shards import Source, merged_sources


class LayerMaker(PartMaker):
    """Makes parts of layers."""

    # functions of other modules, which take the maker as their first parameter
    attention = make_attention
    latent_attention = make_latent_attention
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
        sources = merged_sources(name, ("gate_proj", "up_proj"), (shard, shard), merged)
        mlp = GatedMLP(
            self.column(sources, bias=bias),
            self.row(f"{name}.down_proj", shard, bias=bias),
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
            activation: between the projections; see `mlp.ACTIVATIONS`.
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
