"""A drafter: a small model that predicts further tokens behind the one that a step has sampled.

It runs at the end of each step that looks ahead (`features.speculation.drafting`), in passes. The
first pass computes the rows of the step once more: the input of position i is the token of
position i + 1, which is known by then, and hidden states of the target, if the drafter reads any.
The hidden state of a request's last kept row gives draft 1. Each further pass has one row a
request, with the draft before and the drafter's own hidden state, and gives the next draft.

A drafter keeps keys in the KV cache of the target: its layers are numbered behind the target's, and
share block tables with the target's layers of an equal specification. What one pass writes for a
draft, the next step writes again, for the token that was kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from aioinfer.ipc.kv_spec import KVGroup, KVSpec
from aioinfer.layers.backend import Backend
from aioinfer.layers.embedding import Vocabulary
from aioinfer.layers.kv_cache import KVScales
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.shards import NamedShards
from aioinfer.layers.step import Step
from aioinfer.models.bound_layers import BoundLayers
from aioinfer.models.loader import load_weights


class Drafter(ABC):
    """One rank's part of a drafter. All ranks of a target have a part of it, as of the target.

    Attributes:
        backend: of the rank; the target's, if the hidden states are as wide as the target's.
        hidden_size: of its residual stream.
        vocabulary: which token ids of the target this rank scores.
        weights_bytes: of this rank's parameters, without those that are the target's.
        tapped_layers: the layers of the target before which it reads the residual stream; empty if
            it reads none.
        reads_hidden: whether it reads the hidden states of the target before its last norm.
        keeps_first: whether the input of position 0 is the first token of the text all the same:
            models attend to it from everywhere, whatever it is, or were trained with a token there
            that begins a text.
    """

    backend: Backend
    hidden_size: int
    vocabulary: Vocabulary
    weights_bytes: int
    tapped_layers: Sequence[int] = ()
    reads_hidden = False
    keeps_first = False

    @property
    @abstractmethod
    def kv_specs(self) -> Sequence[Sequence[KVSpec]]:
        """What each of its layers keeps in the KV cache; known once it is loaded."""

    @property
    @abstractmethod
    def supports_graphs(self) -> bool:
        """See `CausalLM.supports_graphs`."""

    @abstractmethod
    def load(
        self, folder: Path, load_format: str, seed: int, on_progress: Callable[[int, int], None]
    ) -> None:
        """Loads the weights and prepares them for the device; see `CausalLM.load`.

        Args:
            folder: of the drafter's checkpoint: the target's own, if it has none.
        """

    @abstractmethod
    def bind(
        self, groups: Sequence[KVGroup], kv: Sequence[torch.Tensor], block_size: int, rows: int,
        tokens: int,
    ) -> None:  # fmt: skip
        """Gives the layers their KV cache; see `CausalLM.bind`. The groups' layers are numbered
        from the drafter's first layer on."""

    @abstractmethod
    def warm_up(self) -> None:
        """See `CausalLM.warm_up`."""

    @abstractmethod
    def plan(self, step: Step) -> None:
        """See `CausalLM.plan`. Called before each pass."""

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the hidden states [T, size] that the first pass takes, for what the drafter reads
        of the target: the streams [T, taps, hidden_size] before `tapped_layers`, or the hidden
        states [T, hidden_size] before the last norm. Not called if it reads nothing."""
        return hidden

    @abstractmethod
    def forward(self, hidden: torch.Tensor | None, step: Step) -> torch.Tensor:
        """Computes a pass and writes the KV cache.

        Args:
            hidden: [T, size] of `combine` in the first pass, and what the pass before has returned
                in the others; None in the first pass if it reads nothing of the target.
            step: of the pass, with the token of position i + 1 as the input of position i.

        Returns:
            hidden states for `logits` and the next pass: [S, size] of the sampled rows, or [T,
            size] of a step without.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits [S, local_size] of the token ids that this rank has by `vocabulary`,
        for hidden states [S, size]: minus infinity for a token that is never drafted."""


class LayerDrafter(BoundLayers, Drafter):
    """A drafter that consists of layers of ours.

    A subclass makes `layers` with `make`, sets `vocabulary`, and calls `_count_weights` at the end
    of its constructor.
    """

    def __init__(self, make: LayerMaker):
        self._make = make
        self.backend, self.hidden_size = make.backend, make.hidden_size

    def _count_weights(self) -> None:
        self.layer_numbers = range(len(self.layers))
        self.kv_scales: Mapping[int, KVScales] = self._find_scales()
        self.weights_bytes = sum(shard.destination.nbytes for _, shard in self.weight_shards())

    @property
    def kv_specs(self) -> Sequence[Sequence[KVSpec]]:
        """See `Drafter.kv_specs`."""
        return [layer.kv_specs for layer in self.layers]

    def weight_shards(self) -> NamedShards:
        """Yields (checkpoint name, where this rank's part of it goes) of every tensor, before
        `finalize`."""
        return self._make.weight_shards()

    def load(
        self, folder: Path, load_format: str, seed: int, on_progress: Callable[[int, int], None]
    ) -> None:
        """See `Drafter.load`. A checkpoint may have any tensors beside the drafter's."""
        shards = list(self.weight_shards())
        load_weights(shards, folder, load_format, seed, on_progress, lambda name: True)
        del shards  # loaded tensors are freed layer by layer
        self.weights_bytes += self._make.finalize()
