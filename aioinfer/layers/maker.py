"""Makes the layers of a model for one rank, so that a model's file defines what the model is and
nothing of devices, ranks, weight formats or loading.

Here are the embedding, the head and the MLP, and the operations on all layers together;
`attention_maker` and `mixture_maker` have the layers that take more, `part_maker` the parts that
layers consist of, `made_layers` the list of made layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from aioinfer.layers.attention_maker import make_attention, make_latent_attention
from aioinfer.layers.backend import Backend
from aioinfer.layers.embedding import Embedding, LMHead, Vocabulary
from aioinfer.layers.experts import MixtureMLP
from aioinfer.layers.formats.compiled import has_compiled_products
from aioinfer.layers.formats.half import has_half_products
from aioinfer.layers.formats.schemes import AffineScheme
from aioinfer.layers.linear import row_shard
from aioinfer.layers.made_layers import Loadable, MadeLayers
from aioinfer.layers.mixture_maker import make_biased_mixture, make_mixture
from aioinfer.layers.mixture_shape import MixtureConfig
from aioinfer.layers.mlp import MLP, GatedMLP
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.part_maker import PartMaker
from aioinfer.layers.shards import NamedShards, Source, WeightShard, merged_sources


class LayerMaker(PartMaker):
    """Makes layers of parts, under the names of the checkpoint's modules, and keeps those that have
    parameters."""

    # functions of other modules, which take the maker as their first parameter
    attention = make_attention
    latent_attention = make_latent_attention
    mixture = make_mixture
    biased_mixture = make_biased_mixture

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
        return self.made.keep(embedding)

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
        return self.made.keep(self.made.count(head))

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
        return self.made.prepare(mlp)

    def mlp(
        self,
        up: str,
        down: str,
        intermediate_size: int,
        *,
        norm: RMSNorm | None,
        activation: str,
        post_norm: RMSNorm | None = None,
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
        return self.made.prepare(mlp)

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

    def _affine_scheme(self, name: str) -> AffineScheme | None:
        """Returns how the embedding or the head is quantized; other schemes are not for them."""
        if self.quantization is None:
            return None
        return self.quantization.affine_schemes_of([name])[0]

    # ---------------------------------------------------------------- all layers together

    def weight_shards(self) -> NamedShards:
        """Yields (checkpoint name, where this rank's part of it goes) of every tensor."""
        return self.made.weight_shards()

    @contextmanager
    def measuring(self) -> Iterator[list[tuple[str, WeightShard]]]:
        """Context in which layers are made without memory, as the first tensor-parallel rank has
        them, and then forgotten. Yields a list that has their weights when the block has ended."""
        kept = self.backend, self.made, self._tables
        first = ParallelGroup(0, self.backend.group.size)
        self.backend = replace(self.backend, device=torch.device("meta"), group=first)
        self.made, self._tables = MadeLayers(), {}
        measured: list[tuple[str, WeightShard]] = []
        try:
            yield measured
            measured += self.weight_shards()
        finally:
            self.backend, self.made, self._tables = kept

    def forget(self, layer: Loadable) -> None:
        """Forgets a layer that this rank does not need."""
        self.made.forget(layer)

    def is_elsewhere(self, name: str) -> bool:
        """Whether a checkpoint's tensor is of an expert that other ranks have."""
        return self.made.is_elsewhere(name)

    def finalize(self) -> int:
        """Prepares all loaded weights for the device. Returns by how many bytes they grew.

        Weights that are repacked are prepared in as many threads as there are, since one thread
        repacks each."""
        is_affine = self.quantization is not None and self.quantization.has_affine
        threads = torch.get_num_threads() if is_affine and has_half_products(self.backend) else 1
        return self.made.finalize(threads)

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


def _affine_products(backend: Backend) -> str:
    """Returns how weights with an `AffineScheme` are multiplied."""
    if has_compiled_products(backend):
        return "multiplied as they are, by kernels that numba compiles"
    return (
        "multiplied as float16"
        if has_half_products(backend)
        else "dequantized when they are loaded"
    )
