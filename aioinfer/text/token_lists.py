"""Tokens that a request allows or forbids by themselves, whatever grammar it has: a list of allowed
ones, words that may not be written, tokens that may or may not end the text.

They narrow masks (`TokenFilter`); `text.restrictions` combines them with each other and with a
grammar.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from aioinfer.text.constraints import Mask, mask_words
from aioinfer.text.tokenizer import Tokenizer


class TokenFilter(Protocol):
    """A filter that narrows the token masks of a sequence. It keeps no state and is passed the
    output's tokens, so sequences share it."""

    #: The tokens at the end of the output that `narrow` looks at.
    max_context: int
    #: Whether it may forbid a token that the only possible text needs.
    may_forbid_text: bool

    def narrow(self, mask: Mask, output: Sequence[int]) -> None:
        """Clears bits of `mask`; `output` are the last tokens of the output, `max_context` of them
        or more, or all."""
        ...


def mask_of(tokens: Iterable[int], vocab_size: int) -> Mask:
    """Returns the mask, int32 [words], that allows these tokens."""
    bits = np.zeros(32 * mask_words(vocab_size), np.uint8)
    bits[np.fromiter(tokens, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def mask_of_all(vocab_size: int) -> Mask:
    """Returns the mask that allows every token."""
    return mask_of(range(vocab_size), vocab_size)


class AllowedTokens:
    """Allows only some tokens."""

    max_context = 0
    may_forbid_text = True

    def __init__(self, tokens: Iterable[int], vocab_size: int):
        """All `tokens` are below `vocab_size`."""
        self._mask = mask_of(tokens, vocab_size)

    def narrow(self, mask: Mask, output: Sequence[int]) -> None:
        """See `TokenFilter.narrow`."""
        mask &= self._mask


class StopTokens:
    """Allows a request's own stop tokens wherever an end token may end the output: for a grammar
    they are no text."""

    max_context = 0
    may_forbid_text = False

    def __init__(self, stop_tokens: Iterable[int], end_tokens: Iterable[int], vocab_size: int):
        """Takes the stop tokens, of which ids from `vocab_size` on do not count, and the end tokens
        that a grammar allows."""
        known = [token for token in stop_tokens if 0 <= token < vocab_size]
        stops, ends = mask_of(known, vocab_size), mask_of(end_tokens, vocab_size)
        self._end_words, self._stop_words = np.flatnonzero(ends), np.flatnonzero(stops)
        self._ends, self._stops = ends[self._end_words], stops[self._stop_words]

    def narrow(self, mask: Mask, output: Sequence[int]) -> None:
        """See `TokenFilter.narrow`; this one sets bits."""
        if (mask[self._end_words] & self._ends).any():
            mask[self._stop_words] |= self._stops


class NoEndTokens:
    """Forbids end tokens where anything else is allowed."""

    max_context = 0
    may_forbid_text = False

    def __init__(self, end_tokens: Iterable[int], vocab_size: int):
        ends = mask_of(end_tokens, vocab_size)
        self._words = np.flatnonzero(ends)
        self._bits = ends[self._words]

    def narrow(self, mask: Mask, output: Sequence[int]) -> None:
        """See `TokenFilter.narrow`. The mask is looked at as a whole only where the output may
        end: all others cost 2 us."""
        words = mask[self._words]
        ends = words & self._bits
        if ends.any():
            mask[self._words] = words ^ ends
            if not mask.any():
                mask[self._words] = words


class BadWords:
    """Forbids the last token of a word whose other tokens the output ends in, as vLLM's `bad_words`
    does. A word that is encoded in another way is not found."""

    may_forbid_text = True

    def __init__(self, words: Sequence[Sequence[int]], vocab_size: int):
        """`words` are the tokens of each word, at least one, all below `vocab_size`."""
        self._others = ~mask_of((word[0] for word in words if len(word) == 1), vocab_size)
        self._ends: defaultdict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for word in words:
            *start, last = word
            if start:
                self._ends[start[-1]].append((start, last))
        self.max_context = max(map(len, words)) - 1

    @classmethod
    def of(cls, words: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> BadWords:
        """Encodes words as they stand after other text, with a space before them and without.

        Raises `RequestError` for half of a surrogate pair.
        """
        encoded = {
            tuple(tokenizer.encode(text, False, param="bad_words"))
            for word in words
            for text in (word.lstrip(), " " + word.lstrip())
        }
        return cls([word for word in sorted(encoded) if word], vocab_size)

    def narrow(self, mask: Mask, output: Sequence[int]) -> None:
        """See `TokenFilter.narrow`."""
        mask &= self._others
        if not output or not self._ends:
            return
        for start, last in self._ends.get(output[-1], ()):
            if list(output[-len(start) :]) == start:
                mask[last // 32] &= ~np.int32(1 << (last % 32) if last % 32 < 31 else -(2**31))
