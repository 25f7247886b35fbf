"""What a slot of adapters holds beside the matrices of linear layers: those of experts
(`experts`) and soft prompts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from aioinfer.layers.shards import Shard, Source

#: In the place of a module: an adapter is a soft prompt. Its `up` are the vectors [tokens,
#: hidden_size], its `down` has no rank.
PROMPT = "prompt_embeddings"
#: Tensors in a packed slot begin at multiples of so many numbers.
_ALIGNMENT = 64


class AdapterWeights(NamedTuple):
    """The matrices of an adapter for one module of the checkpoint.

    Attributes:
        down: A [rank, in], or of a stack of experts [experts, rank, in].
        up: B [out, rank] or [experts, out, rank].
        scale: of the product.
        merged: how many modules it merges (`ModuleShape.merged`).
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    merged: int = 1


class ModuleShape(NamedTuple):
    """The shape of a checkpoint module that adapters may change.

    Attributes:
        out, inputs: its features.
        experts: of how many experts it is a stack; 0 for a module without.
        merged: how many modules it merges, each of which may have the maximum rank.
    """

    out: int
    inputs: int
    experts: int = 0
    merged: int = 1

    def of_rank(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of an adapter's matrices."""
        stack = (self.experts,) if self.experts else ()
        return {"down": (*stack, rank, self.inputs), "up": (*stack, self.out, rank)}


class Piece(NamedTuple):
    """A part of a matrix and where it goes in a packed slot, two views of one shape.

    Attributes:
        target: the view of the slot.
        source: of the matrix.
        scale: multiplied with the source.
    """

    target: torch.Tensor
    source: torch.Tensor
    scale: float = 1.0


class AdapterPart(ABC):
    """A part of a slot.

    Attributes:
        shapes: of its tensors in a slot.
        tensors: [slots, *shape] of each shape; made by `AdapterSlots.allocate`.
    """

    shapes: Sequence[tuple[int, ...]]
    tensors: Sequence[torch.Tensor]

    @property
    def sizes(self) -> list[int]:
        """Numbers of its tensors in a packed slot."""
        return [aligned(math.prod(shape)) for shape in self.shapes]

    @property
    @abstractmethod
    def modules(self) -> Mapping[str, ModuleShape]:
        """The checkpoint's modules that an adapter may change by it."""

    @abstractmethod
    def pieces(
        self, tensors: Sequence[torch.Tensor], weights: Mapping[str, AdapterWeights], rank: int
    ) -> Iterator[Piece]:
        """Yields what is to be copied of an adapter into tensors of zeros, of `shapes`.

        Args:
            weights: by checkpoint module.
            rank: the largest of the adapter's modules.
        """

    def enter(self, slot: int, tensors: Sequence[torch.Tensor]) -> None:
        """Copies tensors of `shapes` on the host to a slot."""
        for target, given in zip(self.tensors, tensors, strict=True):
            target[slot].copy_(given, non_blocking=True)


class SoftPrompts(AdapterPart):
    """Soft prompts (Lester et al. 2021): vectors in the place of the first tokens' embeddings, one
    tensor [slots, max_tokens, hidden_size].

    Args:
        max_tokens: of a prompt.
        hidden_size: of the model.
    """

    def __init__(self, max_tokens: int, hidden_size: int):
        self.max_tokens, self._hidden_size = max_tokens, hidden_size
        self.shapes = [(max_tokens, hidden_size)]

    @property
    def modules(self) -> Mapping[str, ModuleShape]:
        """See `AdapterPart.modules`."""
        return {PROMPT: ModuleShape(self.max_tokens, self._hidden_size)}

    def pieces(
        self, tensors: Sequence[torch.Tensor], weights: Mapping[str, AdapterWeights], rank: int
    ) -> Iterator[Piece]:
        """See `AdapterPart.pieces`."""
        if (found := weights.get(PROMPT)) is not None:
            yield Piece(tensors[0][: len(found.up)], found.up)


def pieces_of_rows(
    down: torch.Tensor, up: torch.Tensor, sources: Sequence[Source], columns: Shard,
    given: Mapping[str, tuple[AdapterWeights, int]],
) -> Iterator[Piece]:  # fmt: skip
    """Yields the pieces of modules' matrices for those of a product.

    Args:
        down, up: A [ranks, in] and B [out, ranks], zeros.
        sources: the rows of the product.
        columns: the input features that this rank has.
        given: by module, its matrices and the place of their first rank among all ranks.
    """
    end = 0
    for source in sources:
        first, end = end, end + source.rows.size
        if source.name not in given:
            continue
        weights, first_rank = given[source.name]
        ranks = slice(first_rank, first_rank + len(weights.down))
        own = weights.down[:, columns.start : columns.start + columns.size]
        yield Piece(down[ranks], own)
        own = weights.up[source.rows.start : source.rows.start + source.rows.size]
        yield Piece(up[first:end, ranks], own, weights.scale * source.scale)


class PieceCopies:
    """Copies pieces into packed slots.

    They are few operations on many matrices, and each of them does without Python's lock: else
    threads that read adapters, and the one that launches kernels, would wait for each other.

    Args:
        pieces: with any tensors.

    Attributes:
        pieces: in the order of the tensors that are copied.
    """

    def __init__(self, pieces: Iterable[Piece]):
        self.pieces = sorted(pieces, key=lambda piece: piece.scale == 1.0)
        self._scales = [piece.scale for piece in self.pieces if piece.scale != 1.0]

    def run(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copies sources, which have one dtype, each times its scale, into their targets. Those of
        another dtype than the targets' are multiplied in float32, and rounded once."""
        if not targets:
            return
        if sources[0].dtype not in (targets[0].dtype, torch.float32):
            sources = [source.float() for source in sources]
        if scales := self._scales:
            scaled = torch._foreach_mul(sources[: len(scales)], scales)
            sources = [*scaled, *sources[len(scales) :]]
        torch._foreach_copy_(targets, sources)


def aligned(numbers: int) -> int:
    """Returns so many numbers, or a few more: where the next tensor of a packed slot may begin."""
    return -(-numbers // _ALIGNMENT) * _ALIGNMENT


def rank_of(weights: Mapping[str, AdapterWeights]) -> int:
    """Returns the largest rank of an adapter's modules."""
    return max(-(-each.down.shape[-2] // each.merged) for each in weights.values())
