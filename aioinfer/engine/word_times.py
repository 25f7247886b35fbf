"""Times of words: where in the sound the tokens of a transcript are, by dynamic time warping over
how much each attends to each frame (Radford et al. 2022, and OpenAI's code)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
#: Languages that are written without spaces: each character, or what a token holds, is a word.
_WITHOUT_SPACES = ("zh", "ja", "th", "lo", "my", "yue")
#: Where a path comes from: the token and the frame before, the token before, the frame before.
_BOTH, _TOKEN, _FRAME = 0, 1, 2


class Word(NamedTuple):
    """A word of a transcript, with its punctuation.

    Attributes:
        text: without spaces around it.
        start, end: in seconds.
    """

    text: str
    start: float
    end: float


def first_frames(weights: F32) -> list[int]:
    """Returns the frame with which each token begins: on the path through the matrix, from the
    first token and frame to the last ones, whose weights have the largest sum.

    Args:
        weights: float32 [tokens, frames].
    """
    tokens, frames = weights.shape
    origins = _origins(-weights.astype(np.float64))
    found = [0] * tokens
    token, frame = tokens, frames
    while token > 0 and frame > 0:
        found[token - 1] = frame - 1
        origin = int(origins[token + frame, token])
        token -= origin != _FRAME
        frame -= origin != _TOKEN
    return found


def _origins(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.int8]:
    """Returns where the cheapest path to each place comes from, int8 [tokens + frames + 1, tokens +
    1]: row t + f has at t the place of the first t tokens and f frames. So the rows, diagonals of
    the matrix, are computed one after the other."""
    tokens, frames = costs.shape
    origins = np.full((tokens + frames + 1, tokens + 1), _FRAME, np.int8)
    before = last = np.full(tokens + 1, np.inf, np.float32)
    last = last.copy()
    last[0] = 0  # of no tokens and no frames
    for diagonal in range(1, tokens + frames + 1):
        # tokens with at least one frame, and no more than all
        own = np.arange(max(1, diagonal - frames), min(tokens, diagonal - 1) + 1)
        both, token, frame = before[own - 1], last[own - 1], last[own]
        origin = np.where(token < np.minimum(both, frame), _TOKEN, _FRAME)
        origin = np.where(both < np.minimum(token, frame), _BOTH, origin)
        origins[diagonal, own] = origin
        before, last = last, np.full(tokens + 1, np.inf, np.float32)
        last[own] = costs[own - 1, diagonal - own - 1] + np.choose(origin, (both, token, frame))
    return origins


def words(
    tokens: Sequence[int], times: Sequence[float], language: str, decode: Callable[..., str]
) -> Iterator[Word]:
    """Yields the words of a text.

    Args:
        tokens: of the text.
        times: seconds with which each begins, and one more: with which the last one ends.
        language: its code.
        decode: returns the text of tokens.
    """
    spaced, first, text = language not in _WITHOUT_SPACES, 0, ""
    for number, (begin, unit) in enumerate(units := [*_units(tokens, decode)]):
        is_mark = not any(character.isalnum() for character in unit)
        is_new = unit.startswith(" ") if spaced else not is_mark
        if is_new and text.strip():
            yield Word(text.strip(), times[first], times[begin])
            text = ""
        if not text.strip():
            first = begin
        text += unit
        if number + 1 == len(units) and text.strip():
            yield Word(text.strip(), times[first], times[len(tokens)])


def _units(tokens: Sequence[int], decode: Callable[..., str]) -> Iterator[tuple[int, str]]:
    """Yields the smallest runs of tokens whose text is whole: the number of the first one, and the
    text. A character may have several tokens."""
    first = 0
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[first:end])
        if "\ufffd" not in text or end == len(tokens):
            yield first, text
            first = end
