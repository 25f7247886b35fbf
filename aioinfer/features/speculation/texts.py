"""Outputs of requests that have ended, as drafts for others: the turn of a conversation that is
generated again, a file that another request has written, the form of an answer.

The engine looks for the end of a request's text in them, and sends what follows there to the
workers as the text's prediction, in which they find drafts as in any other. So a device holds no
text but of its own requests, and whose texts may be used is decided in one place: those of requests
that may share KV blocks (see `key_of`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aioinfer.features.speculation.ngram import MAX_PREDICTED, MAX_SUFFIX
from aioinfer.ipc.sections import I32
from aioinfer.scheduler.request import Request

#: Tokens that two texts must have in common before one is taken for the other's prediction.
MIN_COMMON = 12
#: Tokens of all texts, at most; the oldest texts go first.
MAX_TOKENS = 2**19
#: Entries of the index, and by what an entry has the number of a text before a position.
_INDEX_BITS, _POSITION_BITS = 20, 24

#: What texts have in common that may be used for each other.
Key = tuple[bytes, int]


def key_of(request: Request) -> Key:
    """Returns what the text of a request may be used for: requests of the same salt, adapter and
    source, as their KV blocks, since the prefix cache was last emptied."""
    return request.hash_root, request.cache_era


class _Text(NamedTuple):
    key: Key
    tokens: I32


class EndedTexts:
    """Texts, found by their n-grams: `MIN_COMMON` adjacent tokens.

    The index has the latest place of an n-gram, whose tokens are compared: two n-grams of one hash
    cost a match, and bring no wrong one.
    """

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}  # by a number from 1 on, the oldest first
        self._num_tokens = self._last = 0
        self._index = np.zeros(1 << _INDEX_BITS, np.int64)
        factors = np.random.default_rng().integers(2**64, size=MIN_COMMON, dtype=np.uint64)
        self._factors = factors | np.uint64(1)

    def add(self, request: Request) -> None:
        """Adds the output of a request that has ended, with the end of its prompt before it."""
        first = max(0, request.prompt_len - MIN_COMMON)
        tokens = np.array(request.tokens[first : first + MAX_TOKENS], np.int32)
        if len(tokens) <= MIN_COMMON:
            return
        key = key_of(request)
        self._last += 1
        self._texts[self._last] = _Text(key, tokens)
        self._num_tokens += len(tokens)
        while self._num_tokens > MAX_TOKENS:
            oldest = self._texts.pop(next(iter(self._texts)))
            self._num_tokens -= len(oldest.tokens)
        ngrams = np.lib.stride_tricks.sliding_window_view(tokens[:-1], MIN_COMMON)
        begin = self._last << _POSITION_BITS
        self._index[self._places(key, ngrams)] = np.arange(begin, begin + len(ngrams))

    def find(self, request: Request) -> I32 | None:
        """Returns the part of another text that is likely to go on as a request's, with the tokens
        that both have: the text that ended last of those with its last `MIN_COMMON` tokens; None if
        there is none."""
        if not self._texts or len(request.tokens) < MIN_COMMON:
            return None
        key, end = key_of(request), np.array(request.tokens[-MIN_COMMON:], np.int32)
        number, first = divmod(int(self._index[self._places(key, end)]), 1 << _POSITION_BITS)
        text = self._texts.get(number)
        if text is None or text.key != key:
            return None
        behind = first + MIN_COMMON
        if not np.array_equal(text.tokens[first:behind], end):
            return None
        return text.tokens[behind - MAX_SUFFIX : behind + MAX_PREDICTED]

    def _places(self, key: Key, ngrams: I32) -> npt.NDArray[np.uint64]:
        """Returns where the index has n-grams, integers [..., MIN_COMMON], of texts with a key."""
        hashes = ngrams.astype(np.uint64) @ self._factors ^ np.uint64(hash(key) % 2**64)
        places: npt.NDArray[np.uint64] = hashes >> np.uint64(64 - _INDEX_BITS)
        return places
