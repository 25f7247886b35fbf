"""What the layers of a model keep in the KV cache, and which of them share block tables.

A layer states its `KVSpec`. Layers with equal specifications form a group: the blocks of a group
are numbered together, and a request has one block table a group (the scheme of vLLM's hybrid KV
cache manager). The model makes the specifications, the worker allocates by them, and the scheduler
plans with them; so they are plain data that crosses processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Keys and values of every token.

    Attributes:
        num_kv_heads: of this rank.
        head_size: channels of a head, the same for keys and values.
        window: how many tokens a token attends to, itself included; None for all before it.
    """

    num_kv_heads: int
    head_size: int
    window: int | None = None

    def bytes_per_token(self, itemsize: int) -> int:
        """Returns the bytes that a layer keeps of a token, with `itemsize` bytes an element."""
        return 2 * self.num_kv_heads * self.head_size * itemsize


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """One latent vector of every token, of which keys and values are projections (multi-head latent
    attention, DeepSeek-V2, 2024).

    Attributes:
        size: channels of the vector, the rotated part included.
    """

    size: int

    @property
    def window(self) -> None:
        """None: a token attends to all before it."""
        return None

    def bytes_per_token(self, itemsize: int) -> int:
        """Returns the bytes that a layer keeps of a token, with `itemsize` bytes an element."""
        return self.size * itemsize


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A state of fixed size for every request, whatever its length (linear attention, Mamba).

    Attributes:
        nbytes: of a layer's state of one request.
    """

    nbytes: int


KVSpec = AttentionSpec | LatentSpec | StateSpec


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of equal specification.

    Attributes:
        spec: theirs.
        layers: their numbers in the model, ascending.
    """

    spec: KVSpec
    layers: tuple[int, ...]

    @property
    def window(self) -> int | None:
        """The sliding window of the layers in tokens, or None."""
        return None if isinstance(self.spec, StateSpec) else self.spec.window

    def bytes_per_block(self, block_size: int, itemsize: int) -> int:
        """Returns the bytes of a block of all layers; of a state, of the states of one request."""
        if isinstance(self.spec, StateSpec):
            return len(self.layers) * self.spec.nbytes
        return len(self.layers) * block_size * self.spec.bytes_per_token(itemsize)


def group_layers(specs: Sequence[KVSpec]) -> tuple[KVGroup, ...]:
    """Returns the groups of a model whose layer i keeps `specs[i]`, by their first layers."""
    layers: dict[KVSpec, list[int]] = {}
    for number, spec in enumerate(specs):
        layers.setdefault(spec, []).append(number)
    return tuple(KVGroup(spec, tuple(numbers)) for spec, numbers in layers.items())
