"""The layout of the KV cache: what each layer keeps of a token, and which layers share block
tables.

A layer states what it keeps as none, one or several `KVSpec`. Layers with equal specifications form
a group: the blocks of a group are numbered together, and a request has one block table a group (the
scheme of vLLM's hybrid KV cache manager). The model makes the specifications, the worker allocates
by them, and the scheduler plans with them; so they are plain data that goes from process to
process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Keys and values of every token.

    Attributes:
        num_kv_heads: of this rank.
        head_size: channels of a head, the same for keys and values.
        window: how many tokens a token attends to, itself included, at least 1; None for all
            before it.
    """

    num_kv_heads: int
    head_size: int
    window: int | None = None

    @property
    def token_shape(self) -> tuple[int, int, int]:
        """The shape that a layer keeps of a token: two tensors, keys and values, of so many heads
        and channels."""
        return 2, self.num_kv_heads, self.head_size

    def bytes_per_token(self, itemsize: int) -> int:
        """Returns the bytes that a layer keeps of a token, with `itemsize` bytes an element."""
        return math.prod(self.token_shape) * itemsize

    def __str__(self) -> str:
        heads = f"{self.num_kv_heads} head{'s' if self.num_kv_heads > 1 else ''}"
        window = "" if self.window is None else f", a window of {self.window} tokens"
        return f"keys and values of {heads} of size {self.head_size}{window}"


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """One latent vector of every token, of which keys and values are projections (multi-head latent
    attention, DeepSeek-V2, 2024). Every rank has it whole.

    Attributes:
        size: channels of the vector, the rotated part included.
    """

    size: int

    @property
    def token_shape(self) -> tuple[int, int, int]:
        """The shape that a layer keeps of a token: one tensor, of one head and so many channels."""
        return 1, 1, self.size

    @property
    def window(self) -> None:
        """None: a token attends to all before it."""
        return None

    def bytes_per_token(self, itemsize: int) -> int:
        """Returns the bytes that a layer keeps of a token, with `itemsize` bytes an element."""
        return math.prod(self.token_shape) * itemsize

    def __str__(self) -> str:
        return f"latent vectors of size {self.size}"


#: Attention kernels read tiles of up to so many tokens whole, from a multiple of it on, and mask
#: the tokens behind the window.
MAX_ATTENTION_TILE = 64

KVSpec = AttentionSpec | LatentSpec


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of equal specification.

    Attributes:
        spec: the specification of each layer.
        layers: the numbers of the layers in the model, ascending.
    """

    spec: KVSpec
    layers: tuple[int, ...]

    @property
    def window(self) -> int | None:
        """The sliding window of the layers in tokens, or None."""
        return self.spec.window

    def max_blocks(self, num_tokens: int, block_size: int, max_chunk: int) -> int:
        """Returns the most blocks that a request of `num_tokens` tokens owns at once.

        With a window these are the blocks that hold the tokens of a step and the `window - 1`
        before them, wherever in a block the first of them lies.

        Args:
            num_tokens: prompt and output together, at least 1.
            block_size: tokens a block.
            max_chunk: the maximum of a request's tokens that one step computes.
        """
        blocks = -(-num_tokens // block_size)
        if self.window is None:
            return blocks
        return min(blocks, (self.window + max_chunk - 3 + block_size) // block_size + 1)

    def max_tokens(self, num_blocks: int, block_size: int, max_chunk: int) -> int | None:
        """Returns the length of the longest request for which `num_blocks` blocks suffice, or None
        for any length. See `max_blocks` for the arguments."""
        if self.window is None:
            return num_blocks * block_size
        needed = self.max_blocks(num_blocks * block_size + 1, block_size, max_chunk)
        return None if needed <= num_blocks else num_blocks * block_size

    def bytes_per_block(self, block_size: int, itemsize: int) -> int:
        """Returns the bytes of a block of all layers."""
        return len(self.layers) * block_size * self.spec.bytes_per_token(itemsize)


def group_layers(specs: Sequence[Sequence[KVSpec]]) -> tuple[KVGroup, ...]:
    """Returns the groups of a model in which layer i keeps `specs[i]`, ordered by their first
    layers. A layer that keeps several things is in several groups."""
    layers: dict[KVSpec, list[int]] = {}
    for number, of_layer in enumerate(specs):
        for spec in of_layer:
            layers.setdefault(spec, []).append(number)
    return tuple(KVGroup(spec, tuple(numbers)) for spec, numbers in layers.items())


def groups_of_stage(groups: Sequence[KVGroup], layers: range) -> tuple[KVGroup, ...]:
    """Returns the groups, each with the layers that a pipeline stage has of it, numbered from the
    stage's first layer on. A group may have none there; its blocks then take no memory."""
    return tuple(
        KVGroup(group.spec, tuple(n - layers.start for n in group.layers if n in layers))
        for group in groups
    )


def longest_request(
    groups: Sequence[KVGroup], num_blocks: Sequence[int], block_size: int, max_chunk: int
) -> int | None:
    """Returns the length of the longest request that can run when it is alone, or None for any
    length.

    Args:
        groups: of the model's layers.
        num_blocks: blocks of each group.
        block_size: tokens a block.
        max_chunk: the maximum of a request's tokens that one step computes.
    """
    lengths = [
        group.max_tokens(count, block_size, max_chunk)
        for group, count in zip(groups, num_blocks, strict=True)
    ]
    return min((length for length in lengths if length is not None), default=None)
