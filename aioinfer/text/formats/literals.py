"""Values that models write in notations other than JSON, read as they come and emitted as JSON.

`Literals` reads nested objects, lists and scalars; what differs between notations (quotes, brackets
and what ends a scalar) is in its two subclasses: `PythonLiterals` and `DelimitedLiterals`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

from aioinfer.text.formats.reader import Emit, Markers, Reader, Steps

#: Values nested deeper than this are broken: no tool's arguments are, and a model that repeats
#: itself opens brackets without end.
_MAX_DEPTH = 64
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_LITERAL = frozenset("\\'\"/")
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")


def scalar(text: str) -> str:
    """Returns the JSON of a value without quotes: a word for true, false or null, a number, or else
    a text."""
    text = text.strip()
    if (word := _WORDS.get(text.lower())) is not None:
        return word
    if _JSON_NUMBER.fullmatch(text):
        return text
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if math.isfinite(number):
            return repr(number)
    return json.dumps(text, ensure_ascii=False)


class Literals:
    """The reader of one notation."""

    #: The brackets of the notation and their ends. Braces hold members, others items.
    _brackets: Mapping[str, str] = {}
    #: What ends a value without quotes.
    _ends: Markers

    def string(self, reader: Reader, emit: Emit) -> Steps[bool | None]:
        """Reads a text in quotes. Returns whether it is complete; None, with nothing read, if no
        text comes next. `emit` gets the text as JSON."""
        raise NotImplementedError

    def value(self, reader: Reader, emit: Emit) -> Steps[bool]:
        """Reads one value, whose JSON `emit` gets as it comes, and returns whether it is
        complete."""
        closers: list[str] = []  # the ends of the brackets that are open
        between = ""  # what separates the next element from the one before it
        needs_comma = False
        while True:
            yield from reader.space()
            following = yield from reader.peek()
            if closers and following == closers[-1]:
                reader.skip()
                emit("}" if closers.pop() == "}" else "]")
            elif needs_comma:
                if not (yield from reader.comes(",")):
                    return False
                between, needs_comma = ", ", False
                continue
            else:
                emit(between)
                if closers and closers[-1] == "}" and not (yield from self._key(reader, emit)):
                    return False
                yield from reader.space()
                following = yield from reader.peek()
                if closer := self._brackets.get(following):
                    if len(closers) == _MAX_DEPTH:
                        return False
                    reader.skip()
                    closers.append(closer)
                    emit("{" if following == "{" else "[")
                    between = ""
                    continue
                if not (yield from self._scalar(reader, emit)):
                    return False
            if not closers:
                return True
            needs_comma = True

    def _key(self, reader: Reader, emit: Emit) -> Steps[bool]:
        quoted = yield from self.string(reader, emit)
        if quoted is None:
            found = yield from reader.short_until(self._ends)
            if found is None or found[1] != ":" or not found[0].strip():
                return False
            emit(json.dumps(found[0].strip(), ensure_ascii=False))
        else:
            yield from reader.space()
            if not quoted or not (yield from reader.comes(":")):
                return False
        emit(": ")
        return True

    def _scalar(self, reader: Reader, emit: Emit) -> Steps[bool]:
        quoted = yield from self.string(reader, emit)
        if quoted is not None:
            return quoted
        parts: list[str] = []
        found = yield from reader.until(self._ends, parts.append)
        reader.unread(len(found))
        emit(scalar("".join(parts)))
        return bool(found)


class PythonLiterals(Literals):
    """Python's notation, in which JSON is read as well.

    Models leave quotes inside of texts unescaped, as templates do that write their history: a quote
    ends a text only where a comma, a colon or a bracket's end follows."""

    _brackets: Mapping[str, str] = {"{": "}", "[": "]", "(": ")"}
    _ends = Markers(",", ":", ")", "]", "}")
    _inside: Mapping[str, Markers] = {quote: Markers(quote, "\\") for quote in "'\""}

    def string(self, reader: Reader, emit: Emit) -> Steps[bool | None]:
        """See `Literals.string`."""
        quote = yield from reader.peek()
        if quote not in self._inside or not quote:
            return None
        reader.skip()
        emit('"')

        def emit_text(text: str) -> None:
            emit(_inner(text))

        while found := (yield from reader.until(self._inside[quote], emit_text)):
            if found == "\\":
                yield from self._escape(reader, emit)
                continue
            space = yield from reader.space()
            if (yield from reader.peek()) in ("", ",", ":", ")", "]", "}"):
                emit('"')
                return True
            emit_text(quote + space)
        return False

    def _escape(self, reader: Reader, emit: Emit) -> Steps[None]:
        """Reads what follows a backslash."""
        letter = yield from reader.peek()
        if not letter:
            return
        reader.skip()
        if letter in _ESCAPES or letter in _LITERAL:
            emit(_inner(_ESCAPES.get(letter, letter)))
        elif length := _HEX.get(letter):
            digits = ""
            while len(digits) < length and (yield from reader.peek()) in _HEX_DIGITS:
                digits += yield from reader.peek()
                reader.skip()
            code = int(digits or "0", 16)
            if len(digits) < length or code > 0x10FFFF:
                emit(_inner(f"\\{letter}{digits}"))
            else:  # two that are a pair of surrogates become one character when the JSON is read
                emit(f"\\u{code:04x}" if code < 0x10000 else json.dumps(chr(code))[1:-1])
        else:
            emit(_inner(f"\\{letter}"))


class DelimitedLiterals(Literals):
    """A notation without escapes: a text stands between two equal markers, and names of members
    stand as they are."""

    _brackets: Mapping[str, str] = {"{": "}", "[": "]"}

    def __init__(self, delimiter: str, end: str):
        """Takes the marker on both sides of a text, and the marker behind all values."""
        self._delimiter = delimiter
        self._inside = Markers(delimiter)
        self._ends = Markers(",", ":", "]", "}", end)

    def string(self, reader: Reader, emit: Emit) -> Steps[bool | None]:
        """See `Literals.string`."""
        if not (yield from reader.comes(self._delimiter)):
            return None
        emit('"')
        if not (yield from reader.until(self._inside, lambda text: emit(_inner(text)))):
            return False
        emit('"')
        return True


def _inner(text: str) -> str:
    """Returns the JSON of a text without its quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
