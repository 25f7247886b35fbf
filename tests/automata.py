"""Constraints for tests: an automaton over residues of token ids, and requests that have one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from aioinfer.engine.frontend import Frontend
from aioinfer.engine.output import OutputSequence
from aioinfer.errors import GenerationError
from aioinfer.features.masks.planning import Constrained
from aioinfer.text.constraints import Constraint, Mask, mask_words


def pack(allowed: np.ndarray) -> np.ndarray:
    """Returns the mask of bool [vocab_size], one entry a token id."""
    bits = np.zeros(32 * mask_words(len(allowed)), np.bool_)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.int32)


class Residues:
    """Behind a token with residue s (modulo `modulus`; 0 at first) come only tokens with the
    residues 3 s + 1 and s + 2. The output is complete after `length` tokens.

    `fails_at` is the number of tokens after which `fill` raises.
    """

    def __init__(
        self,
        vocab_size: int,
        modulus: int = 7,
        length: int | None = None,
        fails_at: int | None = None,
    ):
        self.vocab_size = vocab_size
        self.modulus, self.length, self.fails_at = modulus, length, fails_at
        self.tokens: list[int] = []

    @property
    def mask(self) -> np.ndarray:
        """The packed mask of the next token."""
        residues = np.arange(self.vocab_size) % self.modulus
        allowed = ((3 * self._state + 1) % self.modulus, (self._state + 2) % self.modulus)
        return pack(np.isin(residues, allowed))

    @property
    def _state(self) -> int:
        return self.tokens[-1] % self.modulus if self.tokens else 0

    @property
    def is_finished(self) -> bool:
        return len(self.tokens) == self.length

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not self.mask[token // 32] >> token % 32 & 1:
                raise GenerationError(f"token {token} is not allowed after {self.tokens}")
            self.tokens.append(token)

    def fill(self, mask: Mask) -> None:
        if len(self.tokens) == self.fails_at:
            raise GenerationError("the automaton fails")
        mask[:] = self.mask

    def copy(self) -> Self:
        copied = copy.copy(self)
        copied.tokens = [*self.tokens]
        return copied

    def forced(self) -> list[int]:
        return []


class Runs(Residues):
    """As `Residues`, but behind a token that 5 divides come `length_of_run` tokens without a
    choice. `forced` tells of them only if `tells`: the output is the same either way."""

    def __init__(self, vocab_size: int, *, tells: bool = True, length_of_run: int = 6, **more: Any):
        super().__init__(vocab_size, **more)
        self.vocab_size, self.tells, self.length_of_run = vocab_size, tells, length_of_run
        self.run: list[int] = []

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self.run:
                if token != self.run.pop(0):
                    raise GenerationError(f"token {token} is not the one that was left")
                self.tokens.append(token)
                continue
            super().accept([token])
            if token % 5 == 0:
                self.run = [(3 * token + i * i) % self.vocab_size
                            for i in range(1, self.length_of_run + 1)]  # fmt: skip

    def fill(self, mask: Mask) -> None:
        if self.run:
            mask[:] = pack(np.arange(self.vocab_size) == self.run[0])
        else:
            super().fill(mask)

    def copy(self) -> Self:
        copied = super().copy()
        copied.run = [*self.run]
        return copied

    def forced(self) -> list[int]:
        left = None if self.length is None else self.length - len(self.tokens)
        return self.run[:left] if self.tells else []


def accepts(tokens: Sequence[int], vocab_size: int, **automaton: Any) -> bool:
    """Whether an automaton accepts all of `tokens`."""
    try:
        Residues(vocab_size, **automaton).accept(tokens)
    except GenerationError:
        return False
    return True


def constrain(
    frontend: Frontend, choose: Callable[[OutputSequence], Constraint | None]
) -> Callable[[], None]:
    """Gives each sequence of the requests that come the constraint that `choose` returns for it,
    where the frontend would compile one. Returns a function that ends that."""
    sequences = frontend._sequences
    make = sequences.make

    def make_and_constrain(*arguments: Any) -> None:
        make(*arguments)
        for sequence in arguments[0].sequences:
            constraint = choose(sequence)
            if constraint is not None:
                sequence.request.uses += (Constrained(constraint),)

    def undo() -> None:
        del sequences.make  # type: ignore[method-assign]

    sequences.make = make_and_constrain  # type: ignore[method-assign]
    return undo
