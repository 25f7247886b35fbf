"""Drafts from a request's own tokens (prompt lookup decoding, Saxena 2023): where its last few
tokens stand earlier in prompt or output, or in a text that was predicted for the output, what
followed them there is likely to follow again."""

from __future__ import annotations

from array import array

import numpy as np

from aioinfer.config_sections import SpeculationConfig
from aioinfer.ipc.sections import I32

#: Tokens of the suffix that is looked up, at least and at most. What follows `MAX_SUFFIX` tokens is
#: kept more often than what a model or a head drafts, and goes before it (notes/speculation.md).
MIN_SUFFIX, MAX_SUFFIX = 2, 7
#: How long a match is: there is none, it is shorter than `_LONG_SUFFIX` tokens, or not.
NONE, SHORT, LONG = range(3)
_LONG_SUFFIX = 4
#: Tokens of a text that `find_match` looks at: the last ones. It takes 4 to 40 microseconds.
MAX_TEXT = 16_384
#: Tokens of a predicted text that count: the first ones.
MAX_PREDICTED = 4096


def min_suffix_of(speculation: SpeculationConfig) -> int:
    """Returns how long a match has to be for drafts: where a model or a head drafts, `MAX_SUFFIX`
    tokens."""
    return MAX_SUFFIX if speculation.has_drafter else MIN_SUFFIX


def kind_of(size: int, min_suffix: int = MIN_SUFFIX) -> int:
    """Returns how long a match of `size` tokens is, where drafts need one of `min_suffix` tokens:
    `NONE`, `SHORT` or `LONG`."""
    return NONE if size < min_suffix else LONG if size >= _LONG_SUFFIX else SHORT


def find_match(tokens: array[int], predicted: I32 | None = None) -> int:
    """Returns how many tokens the match has behind which `find_drafts` finds drafts, 0 if there is
    none."""
    text = np.frombuffer(tokens, np.int32)[-MAX_TEXT:]
    size, _ = _longest(text, text)
    if predicted is not None:
        size = max(size, _longest(text, predicted)[0])
    return size


def find_drafts(
    tokens: I32, count: int, predicted: I32 | None = None, min_suffix: int = MIN_SUFFIX
) -> I32 | None:
    """Returns `count` tokens that may follow `tokens` (int32 [n]): those behind the latest earlier
    occurrence of their longest suffix of up to `MAX_SUFFIX` tokens that occurs earlier; None if
    not even the last `min_suffix` tokens do. An occurrence in `predicted` (int32 [p]) goes before
    one of the same length in `tokens`.

    What the end of the tokens cuts off goes on with the drafts: a text that repeats itself is
    expected to go on so. Behind the end of `predicted` its part behind the occurrence comes again.
    """
    source, (size, found) = tokens, _longest(tokens, tokens)
    if predicted is not None:
        in_predicted = _longest(tokens, predicted)
        if in_predicted[0] >= size:
            source, (size, found) = predicted, in_predicted
    if size < min_suffix:
        return None
    return source[found + 1 + np.arange(count) % (len(source) - 1 - found)]


def _longest(tokens: I32, source: I32) -> tuple[int, int]:
    """Returns the length of the longest suffix of `tokens` that occurs before the last token of
    `source`, and where its latest occurrence ends; (0, -1) if none does."""
    last, best = len(tokens) - 1, (0, -1)
    ends = np.flatnonzero(source[:-1] == tokens[last])
    for back in range(1, min(MAX_SUFFIX, len(tokens))):  # occurrences of the last `back` + 1 tokens
        ends = ends[np.searchsorted(ends, back) :]
        ends = ends[source[ends - back] == tokens[last - back]]
        if not len(ends):
            break
        if back + 1 >= MIN_SUFFIX:
            best = back + 1, int(ends[-1])
    return best
