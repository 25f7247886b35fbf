"""Drafts from a request's own tokens (prompt lookup decoding, Saxena 2023): where its last few
tokens stand earlier in prompt or output, what followed them there is likely to follow again."""

from __future__ import annotations

import numpy as np

from aioinfer.ipc.sections import I32

#: Tokens of the suffix that is looked up, at least and at most.
MIN_SUFFIX, MAX_SUFFIX = 2, 4


def find_drafts(tokens: I32, count: int) -> I32 | None:
    """Returns `count` tokens that may follow `tokens` (int32 [n]): those behind the latest earlier
    occurrence of their longest suffix of up to `MAX_SUFFIX` tokens that occurs earlier; None if
    not even the last `MIN_SUFFIX` tokens do.

    What the end of the tokens cuts off goes on with the drafts: a text that repeats itself is
    expected to go on so.
    """
    last = len(tokens) - 1
    ends, found = np.flatnonzero(tokens[:last] == tokens[last]), -1
    for back in range(1, MAX_SUFFIX):  # occurrences of the last `back` + 1 tokens
        ends = ends[np.searchsorted(ends, back) :]
        ends = ends[tokens[ends - back] == tokens[last - back]]
        if not len(ends):
            break
        if back + 1 >= MIN_SUFFIX:
            found = int(ends[-1])
    if found < 0:
        return None
    return tokens[found + 1 + np.arange(count) % (last - found)]
