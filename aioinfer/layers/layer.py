"""A layer of a model: a list of parts, one after the other or side by side, each of which adds to
the residual stream.

A part is attention, an MLP, or a mixture of experts. Parts that mix the tokens of a sequence
(`Mixer`) state what they keep of a sequence in the KV cache, as none, one or several `KVSpec`.
Side by side (`parallel`), all parts read the stream as it was before the layer, as in GPT-J (Wang
and Komatsuzaki 2021), Falcon and Cohere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from aioinfer.ipc.kv_spec import KVSpec
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import Step

if TYPE_CHECKING:
    from aioinfer.layers.kernel_attention import AttentionPlans
    from aioinfer.layers.kv_cache import KVScales
    from aioinfer.layers.mixture import ExpertCounter

from dataclasses import fields, is_dataclass


class LayerCache(NamedTuple):
    """What one layer keeps in a KV group.

    Attributes:
        spec: of the group.
        tensor: the layer's part of the group's memory: [parts, num_blocks, block_size, heads,
            channels], or of a state [num_blocks, *shape].
        group: the number of the group in `StepInputs.groups`.
        block_size: tokens a block.
    """

    spec: KVSpec
    tensor: torch.Tensor
    group: int
    block_size: int


class Part(ABC):
    """A part of a layer on one rank.

    Attributes:
        supports_graphs: whether a CUDA graph can hold it in a step of decodes.
        supports_prefill_graphs: whether one can hold it in a step with prompts.
        needs_all_ranks: whether other engines' ranks wait for this one, even if it has no tokens.
        counter: of the tokens of its experts, if it has experts.
    """

    supports_graphs = True
    supports_prefill_graphs = True
    needs_all_ranks = False
    counter: ExpertCounter | None = None

    @property
    def leaves(self) -> tuple[Part, ...]:
        """The parts that it consists of, in order: by default itself alone."""
        return (self,)

    @property
    @abstractmethod
    def kinds(self) -> tuple[Hashable, ...]:
        """The kinds of its weights: parts with equal kinds launch the same kernels."""

    def warm_up(self, hidden_size: int) -> None:  # noqa: B027  (most parts have no such products)
        """Launches products of which no step says how many rows they have, in every configuration
        that the number of rows selects: those of experts."""

    @abstractmethod
    def __call__(self, stream: ResidualStream, step: Step) -> None:
        """Adds the part's results for the stream's tokens to the stream."""


class Mixer(Part):
    """A part that mixes the tokens of a sequence: attention, or a recurrent state.

    Attributes:
        scales: of what it keeps, where that can be in float8.
        source_layer: the number of the layer whose KV cache it reads, if it keeps nothing itself.
    """

    scales: KVScales | None
    source_layer: int | None = None

    def read_from(self, source: Mixer) -> None:
        """Takes the mixer of `source_layer`, before anything is bound."""
        raise NotImplementedError

    @property
    @abstractmethod
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """What it keeps of a sequence in the KV cache."""

    @abstractmethod
    def bind(self, caches: Sequence[LayerCache], plans: AttentionPlans | None) -> None:
        """Gives the part its KV caches, one for each of `kv_specs`; with plans, for the kernels."""

    def lacks(self, block_size: int) -> str | None:
        """Returns what the kernels lack to compute the part with blocks of `block_size` tokens,
        such as "head size 48"; None if nothing."""
        return None

    def looks_ahead(self, *, on_kernels: bool) -> bool:
        """Whether a step may have lookahead rows (see `ipc.lookahead`), with the kernels or in
        plain torch."""
        return True

    @abstractmethod
    def __call__(self, stream: ResidualStream, step: Step, *, is_last: bool = False) -> None:
        """Adds the part's results for a step's tokens to the stream.

        Args:
            is_last: no later part mixes tokens: of a step with sampled rows, only the hidden states
                of these rows are kept in the stream. Of the other tokens only what the KV cache
                keeps will ever be read.
        """


class Layer:
    """One layer.

    Args:
        parts: in the order in which they are computed.
        parallel: whether all of them read the stream as it was before the layer.
        then: parts that follow, one after the other.
    """

    def __init__(self, parts: Sequence[Part], *, parallel: bool = False, then: Sequence[Part] = ()):
        self.parts = *parts, *then
        self.mixers = tuple(part for part in self.parts if isinstance(part, Mixer))
        self._parallel = len(parts) if parallel else 0

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """What the layer keeps of a sequence in the KV cache."""
        return tuple(spec for mixer in self.mixers for spec in mixer.kv_specs)

    def bind(self, caches: Sequence[LayerCache], plans: AttentionPlans | None) -> None:
        """Gives each part the caches of its specifications."""
        left = list(caches)
        for mixer in self.mixers:
            own = []
            for spec in mixer.kv_specs:
                own.append(next(cache for cache in left if cache.spec == spec))
                left.remove(own[-1])
            mixer.bind(own, plans)

    def __call__(self, stream: ResidualStream, step: Step, *, is_last: bool = False) -> None:
        """Adds the layer's results for a step's tokens to the stream.

        Args:
            is_last: no later layer reads the stream; see `Mixer`.
        """
        sampled = step.sampled if is_last and not self.mixers else None
        if sampled is not None and len(sampled.rows) < len(stream):
            stream.select(sampled.last)
        if self._parallel:
            with stream.parallel():
                self._add(self.parts[: self._parallel], stream, step, is_last=is_last)
        self._add(self.parts[self._parallel :], stream, step, is_last=is_last)

    def _add(
        self, parts: Sequence[Part], stream: ResidualStream, step: Step, *, is_last: bool
    ) -> None:
        for part in parts:
            if is_last and self.mixers and part is self.mixers[-1]:
                self.mixers[-1](stream, step, is_last=True)
            elif len(stream) or part.needs_all_ranks:
                part(stream, step)


def find_equal_layers(layers: Sequence[Layer], numbers: Sequence[int]) -> frozenset[int]:
    """Returns the numbers of layers that launch the kernels of layers before them: those that have
    the form of a layer before them which follows a layer of the same form, too. A form is what the
    kernels that a layer launches depend on."""
    forms = [_form_of_layer(layer) for layer in layers]
    seen, needed = set(), set()
    for index, pair in enumerate(zip([None, *forms], forms, strict=False)):
        if pair not in seen:
            seen.add(pair)
            needed |= {index - 1, index}  # a layer's first norm sums what is left of the former
    return frozenset(
        number for index, number in enumerate(numbers[: len(forms)]) if index not in needed
    )


def _form_of_layer(layer: Layer) -> Hashable:
    """Returns what a layer's kernels depend on; differences that no kernel depends on may make
    forms unequal."""
    leaves = [leaf for part in layer.parts for leaf in part.leaves]
    forms = [(type(leaf), *leaf.kinds, *_forms_of_attributes(leaf)) for leaf in leaves]
    return layer.kv_specs, *_forms_of_attributes(layer), *forms


def _forms_of_attributes(value: object) -> list[Hashable]:
    return [(name, _form_of(attribute)) for name, attribute in vars(value).items()]


def _form_of(value: object) -> Hashable:
    """Returns dtype and shape of a tensor, the forms of a dataclass's fields, the type of another
    object with attributes, and anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.dtype, *value.shape
    if isinstance(value, tuple | list):
        return tuple(map(_form_of, value))
    if is_dataclass(value) and isinstance(value, Hashable):
        return type(value), *(_form_of(getattr(value, each.name)) for each in fields(value))
    has_attributes = hasattr(value, "__dict__") and not isinstance(value, type)
    return value if isinstance(value, Hashable) and not has_attributes else type(value)
