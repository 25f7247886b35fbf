"""Whether the end of a request's text stands earlier in it, as far as the engine knows the text.

The workers look for drafts there (`ngram`) when the engine has planned their step already. How
likely drafts are kept depends most on how long the match is, and a match mostly goes on: so
acceptance is learned by the match of the text that was known when the step was planned.
"""

from __future__ import annotations

from array import array

import numpy as np

#: How long a match is: there is none, of two or three tokens, or longer.
NONE, SHORT, LONG = range(3)
#: Tokens of a match that is long.
_LONG = 4
#: Tokens of a prompt that are looked at: the last ones (16 000 take 2 ms).
_MAX_PROMPT = 16_384


class Matches:
    """The pairs of tokens of one request's text, with the place of the last occurrence of each. A
    token takes half a microsecond."""

    __slots__ = ("_known", "_place", "_places")

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._known = 0  # tokens that were taken in
        self._place = -1  # where the last two of them end earlier

    def find(self, tokens: array[int]) -> int:
        """Takes in the tokens that are new, and returns how long the match of the last ones is."""
        places, count = self._places, len(tokens)
        if not self._known:
            first = max(0, count - 1 - _MAX_PROMPT)
            ids = np.array(tokens[first : count - 1], np.int64)
            pairs = (ids[:-1] << 32) | ids[1:]
            places.update(zip(pairs.tolist(), range(first + 1, count - 1), strict=True))
            self._known = max(1, count - 1)
        for at in range(self._known, count):
            pair = tokens[at - 1] << 32 | tokens[at]
            self._place = places.get(pair, -1)
            places[pair] = at
        self._known = count
        if self._place < 0:
            return NONE
        start, end = self._place + 1 - _LONG, self._place - 1
        is_long = start >= 0 and tokens[start:end] == tokens[count - _LONG : count - 2]
        return LONG if is_long else SHORT
