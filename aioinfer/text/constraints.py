"""The allowed next tokens of a sequence: the interface between whatever restricts the output of a
request (a grammar, a list of allowed tokens, banned words) and the engine.

A request's `SamplingParams` name its restrictions; they are compiled once, in a thread, before the
request is admitted (`CompiledConstraint`), and each of its sequences starts a `Constraint` of its
own. The engine then alternates, for each sequence: `fill` the mask of the next token, sample under
it, `accept` the token. Masks are packed: a token id is bit `id % 32` of word `id // 32`, of int32
words; a set bit allows the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from aioinfer.ipc.masks import mask_words

__all__ = ["CompiledConstraint", "Constraint", "Mask", "MaskFiller", "mask_words"]

Mask = npt.NDArray[np.int32]


class Constraint(Protocol):
    """The state of one sequence. Its methods are called one after the other, not from two threads
    at a time; `fill` and `accept` may run in a thread while the event loop goes on."""

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete: only an end token could follow."""
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Appends sampled tokens. Raises `GenerationError` if one of them is not allowed, or if a
        limit of the grammar's parser was exceeded."""
        ...

    def fill(self, mask: Mask) -> None:
        """Writes the mask of the next token into `mask`, int32 [words]. End tokens are allowed
        where the output may end. Raises `GenerationError` as `accept` does."""
        ...

    def copy(self) -> Constraint:
        """Returns a copy that goes on by itself, for tokens that may turn out to be none of the
        sequence's. It may be later than the sequence to find that the output is complete."""
        ...

    def forced(self) -> list[int]:
        """Returns the tokens that must come next, because nothing else is possible, as the
        tokenizer would encode their text; empty where there is a choice."""
        ...


class CompiledConstraint(Protocol):
    """The restrictions of a request, compiled; shared by its sequences and by equal requests."""

    def start(self) -> Constraint:
        """Returns the state of a new sequence, before its first generated token. It takes
        microseconds."""
        ...


class MaskFiller(Protocol):
    """Accepts the tokens and fills the masks of many sequences at a time."""

    def accept(self, tokens: Sequence[tuple[Constraint, int]]) -> list[Exception | None]:
        """Has each (constraint, token) accept its token; returns the errors, in the order of
        `tokens`. Called on the event loop: it takes microseconds a token at most."""
        ...

    def fill(self, rows: Sequence[tuple[Constraint, int]], masks: Mask) -> list[Exception | None]:
        """Fills `masks[row]` for each (constraint, row), side by side in threads of its own without
        the GIL where constraints allow it; returns the errors, in the order of `rows`.

        Args:
            masks: int32 [rows, words], contiguous; other rows are not touched.

        It blocks: the engine calls it in a thread, or on the event loop for very few rows.
        """
        ...
