"""Incremental parsing of text while it is generated.

A format reads its text with generators: wherever more text is needed they yield, and go on when it
has come. So a format is written as if the whole text were there, and each character is looked at
once, however the text is cut. `TextParser` drives one such generator.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Generator
from typing import TypeVar

from aioinfer.text.formats.draft import Draft
from aioinfer.text.message_parser import MessageDelta

T = TypeVar("T")
#: A generator that reads text: it yields where more text is needed, and returns a result.
Steps = Generator[None, None, T]
Emit = Callable[[str], None]

#: A longer text is no name of a function or of a key.
MAX_NAME = 256
_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_TEXT = re.compile(r'["\\]')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NOT_SPACE = re.compile(r"\S")
_SCALAR_END = re.compile(r"[\s,}\]<]")
_log = logging.getLogger(__name__)


def ignore(text: str) -> None:
    """Drops text."""


class Markers:
    """Texts to look for. None of them may be part of another."""

    def __init__(self, *texts: str):
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        self._beginnings = frozenset(
            text[:length] for text in texts for length in range(1, len(text))
        )
        self._longest = max(map(len, texts)) - 1

    def find(self, text: str, position: int) -> re.Match[str] | None:
        """Returns the first marker at or behind `position`."""
        return self._pattern.search(text, position)

    def held(self, text: str, position: int) -> int:
        """Returns how many characters at the end of `text`, behind `position`, may begin a
        marker."""
        for length in range(min(self._longest, len(text) - position), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


class Reader:
    """The text of a choice, as it comes.

    Attributes:
        record: gets all that is read, while it is a list: to take it back.
    """

    def __init__(self) -> None:
        self.record: list[str] | None = None
        self._text = ""
        self._position = 0
        self._ended = False

    def append(self, text: str) -> None:
        """Adds the next piece."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self) -> None:
        """Declares that no more text comes."""
        self._ended = True

    def take_rest(self) -> str:
        """Returns all that has come and was not read."""
        return self._take(len(self._text))

    def _take(self, end: int) -> str:
        """Reads up to `end`."""
        piece = self._text[self._position : end]
        self._position = end
        if self.record is not None and piece:
            self.record.append(piece)
        return piece

    def skip(self, length: int = 1) -> None:
        """Reads characters that have been looked at."""
        self._take(self._position + length)

    def unread(self, length: int = 1) -> None:
        """Takes back characters that the call before this one has read."""
        self._position -= length

    def peek(self) -> Steps[str]:
        """Returns the next character without reading it; "" at the end of the text."""
        while self._position >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._position]

    def space(self) -> Steps[str]:
        """Reads white space and returns it."""
        parts: list[str] = []
        while True:
            found = _NOT_SPACE.search(self._text, self._position)
            parts.append(self._take(found.start() if found else len(self._text)))
            if found or self._ended:
                return "".join(parts)
            yield

    def comes(self, text: str) -> Steps[bool]:
        """Whether `text` comes next; then it is read."""
        while True:
            if self._text.startswith(text, self._position):
                self.skip(len(text))
                return True
            come = self._text[self._position : self._position + len(text)]
            if self._ended or not text.startswith(come):
                return False
            yield

    def until(self, markers: Markers, emit: Emit) -> Steps[str]:
        """Reads up to and including the first of the markers, and returns the marker; "" at the end
        of the text. `emit` gets the text before it, as it comes."""
        while True:
            text, position = self._text, self._position
            if found := markers.find(text, position):
                if found.start() > position:
                    emit(self._take(found.start()))
                self.skip(len(found[0]))
                return found[0]
            end = len(text) if self._ended else len(text) - markers.held(text, position)
            if end > position:
                emit(self._take(end))
            if self._ended:
                return ""
            yield

    def short_until(self, markers: Markers, limit: int = MAX_NAME) -> Steps[tuple[str, str] | None]:
        """Returns the text before the first of the markers, and that, both of which are read; None,
        with nothing read, if it is not within `limit` characters."""
        while True:
            text, position = self._text, self._position
            if found := markers.find(text, position):
                if found.start() - position > limit:
                    return None
                before = self._take(found.start())
                self.skip(len(found[0]))
                return before, found[0]
            if self._ended or len(text) - position - markers.held(text, position) > limit:
                return None
            yield

    def rest(self, emit: Emit) -> Steps[None]:
        """Reads to the end of the text."""
        while True:
            if text := self.take_rest():
                emit(text)
            if self._ended:
                return
            yield

    def string(self) -> Steps[str | None]:
        """Returns the text of a JSON string that comes next; None, with nothing read, if none of up
        to `MAX_NAME` characters does."""
        while True:
            end = self._position + MAX_NAME
            if found := _STRING.match(self._text, self._position, end):
                try:
                    value = json.loads(found[0])
                except ValueError:
                    return None
                self._take(found.end())
                return str(value)
            come = self._text[self._position : self._position + 1]
            if self._ended or come not in ("", '"') or len(self._text) - self._position > MAX_NAME:
                return None
            yield

    def value(self, emit: Emit, stop: str = "") -> Steps[bool]:
        """Reads a JSON value as text, which `emit` gets as it comes, and returns whether it is
        complete. Only quotes and brackets are looked at: text that is no JSON passes as it is.

        Args:
            emit: gets the text.
            stop: a character that, outside of quotes, ends the value even where brackets are open.
        """
        first = yield from self.peek()
        if first and first not in '"{[':
            return (yield from self._scalar(emit))
        marks = re.compile(_STRUCTURE.pattern[:-1] + re.escape(stop) + "]") if stop else _STRUCTURE
        scan = _ValueScan(marks, stop)
        while True:
            end = scan.run(self._text, self._position)
            if end > self._position:
                emit(self._take(end))
            if scan.state != "open" or self._ended:
                return scan.state == "done"
            yield

    def _scalar(self, emit: Emit) -> Steps[bool]:
        while True:
            found = _SCALAR_END.search(self._text, self._position)
            end = found.start() if found else len(self._text)
            if end > self._position:
                emit(self._take(end))
            if found or self._ended:
                return found is not None
            yield


class _ValueScan:
    """Finds the end of a JSON value that begins with a quote or a bracket.

    Attributes:
        state: "open" until the end is found, then "done", or "broken" where the stop was.
    """

    def __init__(self, marks: re.Pattern[str], stop: str):
        self.state = "open"
        self._marks = marks
        self._stop = stop
        self._depth = 0
        self._quoted = self._escaped = False

    def run(self, text: str, position: int) -> int:
        """Returns where in `text` the value ends, or the length of `text`."""
        if self._escaped and position < len(text):
            position, self._escaped = position + 1, False
        while found := (_IN_TEXT if self._quoted else self._marks).search(text, position):
            mark, position = found[0], found.end()
            if mark == "\\":
                if position == len(text):
                    self._escaped = True
                position += 1
                continue
            if mark == self._stop and not self._quoted:
                self.state = "broken"
                return position - 1
            if mark == '"':
                self._quoted = not self._quoted
            else:
                self._depth += 1 if mark in "{[" else -1
            if not self._quoted and self._depth <= 0:
                self.state = "done"
                return position
        return len(text)


class TextParser:
    """A message parser driven by a generator that reads the text; implements `MessageParser`."""

    def __init__(self, read: Callable[[Reader, Draft], Steps[None]], *, parallel: bool = True):
        self._reader = Reader()
        self._draft = Draft(parallel=parallel)
        self._steps: Steps[None] | None = read(self._reader, self._draft)

    @property
    def num_calls(self) -> int:
        """See `MessageParser.num_calls`."""
        return self._draft.num_calls

    @property
    def repeats_call(self) -> bool:
        """See `MessageParser.repeats_call`."""
        return self._draft.repeats_call

    def feed(self, text: str) -> MessageDelta:
        """See `MessageParser.feed`."""
        if text:
            self._reader.append(text)
            self._step()
        return self._draft.take()

    def flush(self) -> MessageDelta:
        """See `MessageParser.flush`."""
        self._reader.end()
        self._step()
        self._draft.finish()
        return self._draft.take()

    def _step(self) -> None:
        """Reads the text that has come. Text that a format leaves is content; so is all text after
        an error in the format's parser, which must end neither the step loop nor the other
        requests."""
        if self._steps is not None:
            try:
                next(self._steps)
                return
            except StopIteration:
                pass
            except Exception:
                _log.exception("the parser of messages failed; the text goes on as content")
            self._steps, self._reader.record = None, None
        if text := self._reader.take_rest():
            self._draft.content(text)
