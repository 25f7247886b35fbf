"""The layout of the KV cache: what each layer keeps of a token, and which layers share block
tables.

A layer states what it keeps as none, one or several `KVSpec`. Layers with equal specifications form
a group: the blocks of a group are numbered together, and a request has one block table a group (the
scheme of vLLM's hybrid KV cache manager). The model makes the specifications, the worker allocates
by them, and the scheduler plans with them; so they are plain data that goes from process to
process.

Keys, values and latent vectors are kept of every token; a recurrent layer keeps a state of fixed
size of every sequence (`StateSpec`). A block of a group of states holds one whole state, and entry
i of such a block table is the state at the end of block i's tokens, or at the last computed token
in the block that it lies in. A step that computes the tokens [start, end) of a sequence:

- reads the state from entry (start - 1) // block_size. With start = 0 there is none: the state is
  zero, so that no block ever has to be zeroed;
- writes the state after token end - 1 to entry (end - 1) // block_size;
- writes the state at the end of block i's tokens to every other entry i, from start // block_size
  on, that is a block: a **snapshot**, from which another sequence with the same first tokens can go
  on. Other entries in between are `NULL_BLOCK`, which is negative.

So a decode that begins a block reads one block and writes another, and the block that it leaves is
a snapshot at its end, made without a copy.

A decoder that attends to the output of an encoder keeps keys and values of that **source**, which
are written in the step that first computes a token of the request and then only read
(`SourceSpec`). A block of such a group holds one whole source, whatever its length: entry 0 of a
block table is that block, and all other entries are `NULL_BLOCK`.
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

    def bytes_per_block(self, block_size: int, itemsize: int) -> int:
        """Returns the bytes of a layer's block of `block_size` tokens, with `itemsize` bytes an
        element."""
        return block_size * math.prod(self.token_shape) * itemsize

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

    def bytes_per_block(self, block_size: int, itemsize: int) -> int:
        """Returns the bytes of a layer's block of `block_size` tokens, with `itemsize` bytes an
        element."""
        return block_size * math.prod(self.token_shape) * itemsize

    def __str__(self) -> str:
        return f"latent vectors of size {self.size}"


#: Bytes of an element of a state, by the names of dtypes.
_STATE_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One tensor of the state of a recurrent layer, such as the last inputs of a short convolution,
    or a matrix a head.

    Attributes:
        shape: of a layer's state of one sequence, on this rank.
        dtype: the name of its torch dtype: "float32", "bfloat16" or "float16".
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def window(self) -> int:
        """2: a token reads the block table's entry of the token before it, and writes its own."""
        return 2

    @property
    def nbytes(self) -> int:
        """Bytes of a layer's state of one sequence."""
        return math.prod(self.shape) * _STATE_ITEMSIZES[self.dtype]

    def bytes_per_block(self, block_size: int, itemsize: int) -> int:
        """Returns the bytes of a layer's block: one state, whatever the arguments."""
        return self.nbytes

    def __str__(self) -> str:
        return f"states of {' x '.join(map(str, self.shape))} in {self.dtype}"


#: Tokens of a source that are stored together: a page of the attention kernels.
SOURCE_PAGE = 64


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """Keys and values of a request's source, for cross attention.

    Attributes:
        num_kv_heads: of this rank.
        head_size: channels of a head, the same for keys and values.
        max_len: the maximum of a source's tokens.
    """

    num_kv_heads: int
    head_size: int
    max_len: int

    @property
    def window(self) -> int:
        """0: no token's entries are needed, but entry 0 of each table."""
        return 0

    @property
    def num_pages(self) -> int:
        """Pages of `SOURCE_PAGE` tokens that a block has."""
        return -(-self.max_len // SOURCE_PAGE)

    @property
    def token_shape(self) -> tuple[int, int, int]:
        """The shape that a layer keeps of a token; see `AttentionSpec.token_shape`."""
        return 2, self.num_kv_heads, self.head_size

    def bytes_per_block(self, block_size: int, itemsize: int) -> int:
        """Returns the bytes of a layer's block: one source, whatever `block_size` is."""
        return self.num_pages * SOURCE_PAGE * math.prod(self.token_shape) * itemsize

    def __str__(self) -> str:
        heads = f"{self.num_kv_heads} head{'s' if self.num_kv_heads > 1 else ''}"
        return f"keys and values of {heads} of size {self.head_size} of a source"


#: Attention kernels read tiles of up to so many tokens whole, from a multiple of it on, and mask
#: the tokens behind the window.
MAX_ATTENTION_TILE = 64

KVSpec = AttentionSpec | LatentSpec | StateSpec | SourceSpec
#: Stands in a block table where a sequence has no block: no step reads the entry any more, or no
#: state is kept there.
NULL_BLOCK = -1


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
        """How many tokens' block table entries a token needs, its own included; None: of all before
        it."""
        return self.spec.window

    @property
    def keeps_states(self) -> bool:
        """Whether a block holds a state, in the place of what is kept of each token."""
        return isinstance(self.spec, StateSpec)

    @property
    def keeps_source(self) -> bool:
        """Whether a block holds keys and values of a whole source."""
        return isinstance(self.spec, SourceSpec)

    def max_blocks(self, num_tokens: int, block_size: int, max_chunk: int) -> int:
        """Returns the most blocks that a request of `num_tokens` tokens owns at once.

        With a window these are the blocks that hold the tokens of a step and the `window - 1`
        before them, wherever in a block the first of them lies. Of a source it is one. Of states
        they are two: one that a step reads, and one that it writes. Snapshots beside these are made
        where blocks are free.

        Args:
            num_tokens: prompt and output together, at least 1.
            block_size: tokens a block.
            max_chunk: the maximum of a request's tokens that one step computes.
        """
        blocks = -(-num_tokens // block_size)
        if self.window is None:
            return blocks
        if self.keeps_states:
            return min(blocks, 2)
        if self.keeps_source:
            return 1
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
        return len(self.layers) * self.spec.bytes_per_block(block_size, itemsize)


def group_layers(specs: Sequence[Sequence[KVSpec]]) -> tuple[KVGroup, ...]:
    """Returns the groups of a model in which layer i keeps `specs[i]`, ordered by their first
    layers, groups of states behind the others and of sources behind these. A layer that keeps
    several things is in several groups."""
    layers: dict[KVSpec, list[int]] = {}
    for number, of_layer in enumerate(specs):
        for spec in of_layer:
            layers.setdefault(spec, []).append(number)
    groups = (KVGroup(spec, tuple(numbers)) for spec, numbers in layers.items())
    return tuple(sorted(groups, key=lambda group: (group.keeps_source, group.keeps_states)))


def groups_of_stage(groups: Sequence[KVGroup], layers: range) -> tuple[KVGroup, ...]:
    """Returns the groups, each with the layers that a pipeline stage has of it, numbered from the
    stage's first layer on. A group may have none there; its blocks then take no memory."""
    return tuple(
        KVGroup(group.spec, tuple(n - layers.start for n in group.layers if n in layers))
        for group in groups
    )


def blocks_in(memory: int, num_blocks: Sequence[int], kv_cache_bytes: int) -> tuple[int, ...]:
    """Returns how many blocks of each group `memory` bytes hold, in the proportion of the KV
    cache's `num_blocks`, which take `kv_cache_bytes`; none of any group where `memory` is 0.

    A rank whose cache takes fewer bytes than another's has room for at least as many.
    """
    if not memory:
        return ()
    return tuple(count * memory // max(1, kv_cache_bytes) for count in num_blocks)


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
