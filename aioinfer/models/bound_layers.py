"""Layers of a model on one rank, as far as a decoder and a model that drafts for it have them in
common: their KV caches, the attention plans of a step, and what they support."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from aioinfer.ipc.kv_spec import KVGroup, StateSpec
from aioinfer.layers.backend import Backend
from aioinfer.layers.kv_cache import KVScales
from aioinfer.layers.layer import Layer, LayerCache, Part
from aioinfer.layers.step import Step

if TYPE_CHECKING:
    from aioinfer.layers.kernel_attention import AttentionPlans


class BoundLayers:
    """Layers of one rank, in order.

    Attributes:
        backend: of the rank.
        hidden_size: of the residual stream.
        layers: the layers.
        layer_numbers: their numbers among all layers of the model.
    """

    backend: Backend
    hidden_size: int
    layers: Sequence[Layer]
    layer_numbers: range
    _plans: AttentionPlans | None = None

    @property
    def _layers_with_cache(self) -> Sequence[Layer]:
        """The layers of `layer_numbers`."""
        return self.layers

    def _connect_readers(self) -> None:
        """Gives mixers that read the KV cache of another layer the mixer of that layer."""
        for layer in self.layers:
            for mixer in layer.mixers:
                if mixer.source_layer is not None:
                    source = self.layers[mixer.source_layer - self.layer_numbers.start]
                    mixer.read_from(source.mixers[0])

    def _find_scales(self) -> dict[int, KVScales]:
        """Returns the scales of the keys and values of the layers that keep any; states beside them
        have a dtype of their own."""
        return {
            number: mixer.scales
            for number, layer in enumerate(self._layers_with_cache)
            for mixer in layer.mixers
            if mixer.scales is not None and mixer.source_layer is None
        }

    def bind(
        self,
        groups: Sequence[KVGroup],
        kv: Sequence[torch.Tensor],
        block_size: int,
        rows: int,
        tokens: int,
        programs: int | None = None,
    ) -> None:
        """See `CausalLM.bind`; `programs` as in `AttentionPlans`."""
        self._plans = self._make_plans(block_size, rows, tokens, programs)
        layers = self._layers_with_cache
        caches: list[list[LayerCache]] = [[] for _ in layers]
        for number, (group, tensors) in enumerate(zip(groups, kv, strict=True)):
            # behind the layers of a state are its blocks; keys and values have parts before them
            dim = 0 if isinstance(group.spec, StateSpec) else 1
            for index, layer in enumerate(group.layers):
                tensor = tensors.select(dim, index)
                caches[layer].append(LayerCache(group.spec, tensor, number, block_size))
        for bound, of_layer in zip(layers, caches, strict=True):
            bound.bind(of_layer, self._plans)

    def _make_plans(
        self, block_size: int, rows: int, tokens: int, programs: int | None
    ) -> AttentionPlans | None:
        """Returns the plans for attention by the kernels, or None if a layer's shape needs plain
        torch."""
        if not self.backend.has_kernels or self._lacking(block_size):
            return None
        from aioinfer.layers.kernel_attention import AttentionPlans

        backend = self.backend
        return AttentionPlans(rows, tokens, backend.dtype, programs, cascade=backend.cascade)

    def _lacking(self, block_size: int) -> list[str]:
        """Returns what the kernels lack to compute the layers' mixers with such blocks."""
        mixers = (mixer for layer in self._layers_with_cache for mixer in layer.mixers)
        return sorted(set(filter(None, (mixer.lacks(block_size) for mixer in mixers))))

    @property
    def supports_graphs(self) -> bool:
        """See `CausalLM.supports_graphs`."""
        return self._plans is not None and all(part.supports_graphs for part in self._parts)

    @property
    def supports_prefill_graphs(self) -> bool:
        """See `CausalLM.supports_prefill_graphs`."""
        return self.supports_graphs and all(part.supports_prefill_graphs for part in self._parts)

    @property
    def _parts(self) -> Iterator[Part]:
        """The parts of all layers, in order, without parts that consist of others."""
        layers = self._layers_with_cache
        return (leaf for layer in layers for part in layer.parts for leaf in part.leaves)

    def warm_up(self) -> None:
        """See `CausalLM.warm_up`."""
        seen = set()
        for part in self._parts:
            kinds = type(part), *part.kinds
            if kinds not in seen:
                seen.add(kinds)
                part.warm_up(self.hidden_size)

    def plan(self, step: Step) -> None:
        """See `CausalLM.plan`."""
        if self._plans is not None:
            self._plans.fill(step)
