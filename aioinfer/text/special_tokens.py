"""The special tokens that a tokenizer puts around a text, and around two texts that are encoded
together: prompts of encoders are cut between them, and pairs of texts are joined by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import tokenizers


class Pair(NamedTuple):
    """Two texts as one prompt.

    Attributes:
        ids: the token ids.
        second_text: see `SamplingParams.second_text`; 0 where the tokenizer gives both texts the
            same type.
    """

    ids: list[int]
    second_text: int


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens around texts.

    Attributes:
        prefix, suffix: before and behind one text.
        of_pair: before, between and behind two texts; None where the tokenizer takes no pairs.
        type_start: where the tokens of the second type begin in a pair, counted from the first
            token of the second text; None where there is one type alone.
    """

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    of_pair: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None = None
    type_start: int | None = None

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> SpecialTokens:
        """Returns the special tokens of a tokenizer, found by encoding a text and a pair; none of
        one that cannot encode these."""
        try:
            single, pair = backend.encode("a"), backend.encode("a", "a")
        except Exception:  # tokenizers raises bare exceptions
            return cls()
        texts = [sequence is not None for sequence in single.sequence_ids]
        if True not in texts:
            return cls()
        prefix, suffix = texts.index(True), texts[::-1].index(True)
        ids = single.ids
        around = tuple(ids[:prefix]), tuple(ids[len(ids) - suffix :])
        sequences, ids, types = pair.sequence_ids, pair.ids, pair.type_ids
        if not {0, 1} <= set(sequences):
            return cls(*around)
        first, second = sequences.index(0), sequences.index(1)
        between = len(sequences) - sequences[::-1].index(0)
        end = len(sequences) - sequences[::-1].index(1)
        of_pair = tuple(ids[:first]), tuple(ids[between:second]), tuple(ids[end:])
        return cls(*around, of_pair, types.index(1) - second if 1 in types else None)

    def cut(self, ids: list[int], kept: int, side: Literal["left", "right"]) -> list[int]:
        """Returns `kept` tokens of a text at most, the special tokens around it among them, if it
        has these. What is left out is on the `side`."""
        if len(ids) <= kept:
            return ids
        prefix, suffix = list(self.prefix), list(self.suffix)
        around = len(prefix) + len(suffix)
        is_whole = ids[: len(prefix)] == prefix and (not suffix or ids[-len(suffix) :] == suffix)
        if not is_whole or kept < around:
            return ids[:kept] if side == "right" else ids[-kept:]
        text, room = ids[len(prefix) : len(ids) - len(suffix)], kept - around
        return prefix + (text[:room] if side == "right" else text[len(text) - room :]) + suffix

    def join(self, first: list[int], second: list[int], kept: int | None = None) -> Pair:
        """Returns two texts, which have no special tokens yet, as one prompt: joined by the
        tokenizer's rule, or without one the second behind the first.

        Args:
            kept: of how many tokens at most; the longer text is cut first, on the right, as
                transformers' `longest_first` does. None: of all.
        """
        before, between, behind = self.of_pair or ((), (), ())
        if kept is not None:
            room = max(0, kept - len(before) - len(between) - len(behind))
            first, second = _cut_longest(first, second, room)
        start = len(before) + len(first) + len(between)
        ids = [*before, *first, *between, *second, *behind]
        return Pair(ids, 0 if self.type_start is None else start + self.type_start)


def _cut_longest(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """Returns the beginnings of two texts that have `room` tokens together: the shorter one stays
    whole as long as it has no more than half of them."""
    if len(first) + len(second) <= room:
        return first, second
    shorter = min(len(first), len(second), room // 2)
    if len(first) <= len(second):
        return first[:shorter], second[: room - shorter]
    return first[: room - shorter], second[:shorter]
