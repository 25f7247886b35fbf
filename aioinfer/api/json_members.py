"""The members of a large JSON object, found and counted without decoding it.

The decoder of JSON keeps the interpreter to itself while it works, and so does Python while it
frees the decoded values. That takes 20 ms for the longest text that a body may hold, and up to a
second for millions of small values. So the values of a large body are counted first: in slices,
with numpy, between which (and mostly within which) other threads run. It takes about 10 ms for a
megabyte. `token_list` uses it, in a thread.

The method, to classify bytes and to find quoted text by the parity of quotes, is simdjson's
(Langdale and Lemire 2019). The counts are exact up to the first error in the JSON, and the decoder
gets no further.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aioinfer.errors import RequestError

#: Members of an object; a request has some 40 fields.
MAX_MEMBERS = 1024
#: Bytes that are classified at a time, in about a millisecond.
_SLICE = 128 * 1024

_QUOTE, _BACKSLASH, _COMMA, _COLON, _OPEN, _CLOSE = range(1, 7)
_CLASSES = np.zeros(256, np.uint8)
for _bytes, _class in (
    (b'"', _QUOTE),
    (b"\\", _BACKSLASH),
    (b",", _COMMA),
    (b":", _COLON),
    (b"[{", _OPEN),
    (b"]}", _CLOSE),
):
    _CLASSES[list(_bytes)] = _class


@dataclass(slots=True)
class Member:
    """A member of a JSON object, by its place in the bytes.

    Attributes:
        key: the bytes between the object's brace, or the comma before, and the colon.
        start, end: where the bytes of its value begin and end, white space around it included.
        num_values: the values that it holds, itself and keys not counted: items at all depths.
    """

    key: bytes
    start: int
    end: int
    num_values: int


def find_members(raw: bytes) -> list[Member]:
    """Returns the members of a JSON object, or the members before the first error if it is not
    valid.

    Raises `RequestError` if there are more than `MAX_MEMBERS`.
    """
    members: list[Member] = []
    key_start = colon = values_before = 0
    for kind, position, num_values in _Scanner(raw).outer_marks():
        if kind == _OPEN:
            key_start = position + 1
        elif kind == _COLON:
            colon, values_before = position, num_values
        else:
            if colon >= key_start:
                key = raw[key_start:colon]
                num_values -= kind == _COMMA  # which stands behind the value
                members.append(Member(key, colon + 1, position, num_values - values_before))
            if len(members) > MAX_MEMBERS:
                raise RequestError(f"the body has more than {MAX_MEMBERS} fields")
            key_start = position + 1
    return members


def count_values(raw: bytes) -> int:
    """Returns how many values a JSON text holds in lists and objects, at all depths."""
    scanner = _Scanner(raw)
    for _ in scanner.outer_marks():
        pass
    return scanner.num_values


class _Scanner:
    """Walks over the bytes of a JSON text once.

    Attributes:
        num_values: the commas and opening brackets so far: as many as values, give or take one for
            each empty list.
    """

    def __init__(self, raw: bytes):
        self._data = np.frombuffer(raw, np.uint8)
        self.num_values = 0
        self._depth = 0
        self._in_text = False
        self._first_is_escaped = False

    def outer_marks(self) -> Iterator[tuple[int, int, int]]:
        """Yields class, position and `num_values` up to there of the outermost brackets, and of the
        colons and commas directly within them."""
        for start in range(0, len(self._data), _SLICE):
            data = self._data[start : start + _SLICE]
            classes = _CLASSES[data]
            places = np.flatnonzero(classes)
            kinds = classes[places]
            self._unescape(kinds, places, len(data))
            places, kinds = self._outside_texts(kinds, places)
            depths = np.where(kinds == _OPEN, 1, np.where(kinds == _CLOSE, -1, 0)).cumsum()
            depths += self._depth
            counts = ((kinds == _OPEN) | (kinds == _COMMA)).cumsum() + self.num_values
            marks = np.flatnonzero(depths == np.where(kinds == _CLOSE, 0, 1))
            for mark in marks:
                yield int(kinds[mark]), start + int(places[mark]), int(counts[mark])
            if len(kinds):
                self._depth, self.num_values = int(depths[-1]), int(counts[-1])

    def _unescape(
        self, kinds: npt.NDArray[np.uint8], places: npt.NDArray[np.int64], length: int
    ) -> None:
        """Clears the class of quotes that a backslash precedes which is no part of another pair."""
        if self._first_is_escaped and len(places) and places[0] == 0:
            kinds[0] = 0
        self._first_is_escaped = False
        slashes = np.flatnonzero(kinds == _BACKSLASH)
        if not len(slashes):
            return
        where = places[slashes]
        # a backslash escapes the next byte if an even number of them stands right before it
        begins = np.ones(len(where), bool)
        begins[1:] = np.diff(where) != 1
        order = np.arange(len(where))
        in_run = order - np.maximum.accumulate(np.where(begins, order, 0))
        escapes = in_run % 2 == 0
        self._first_is_escaped = bool(escapes[-1]) and int(where[-1]) == length - 1
        following = slashes[escapes] + 1
        following = following[following < len(places)]
        is_next = places[following] == places[following - 1] + 1
        kinds[following[is_next]] = 0

    def _outside_texts(
        self, kinds: npt.NDArray[np.uint8], places: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Returns places and classes of brackets, colons and commas that are not in quotes."""
        quotes = (kinds == _QUOTE).cumsum() + self._in_text
        if len(quotes):
            self._in_text = bool(quotes[-1] & 1)
        marks = (kinds >= _COMMA) & (quotes & 1 == 0)
        return places[marks], kinds[marks]
