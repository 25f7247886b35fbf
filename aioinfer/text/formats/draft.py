"""The message that a parser builds, delivered as deltas since the last read."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection

from aioinfer.text.message_parser import CallDelta, MessageDelta

#: Latest calls of a function with which another one is compared, while the event loop waits.
_MAX_COMPARED = 64


class _Arguments:
    """The arguments of a complete call, and their text without white space: how calls are compared
    while they come."""

    __slots__ = ("dense", "text")

    def __init__(self, text: str):
        self.text, self.dense = text, _without_spaces(text)

    def equals(self, text: str) -> bool:
        """Whether `text` is the same JSON, whose white space may differ."""
        if text == self.text:
            return True
        try:
            return bool(json.loads(text) == json.loads(self.text))
        except (ValueError, RecursionError):
            return False


def _without_spaces(text: str) -> str:
    return "".join(text.split())


class Draft:
    """A message in the making. White space beside thoughts and calls is left out of it: models put
    line breaks there that belong to no text.

    A call that has the name and the arguments of an earlier one ends the message, and is no part of
    it: small models that do not find the end repeat themselves. So what may still become a repeated
    call is held back.

    Attributes:
        num_calls: calls that have begun.
        repeats_call: whether a call was repeated. Whatever follows is left out.
    """

    def __init__(self, *, parallel: bool = True):
        """Without `parallel`, calls after the first are left out."""
        self.num_calls = 0
        self.repeats_call = False
        self._parallel = parallel
        self._delta = MessageDelta()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._arguments: list[str] = []
        self._spaces: list[str] = []
        self._before_spaces = self._content
        self._trims = False  # whether white space is to be left out until other text comes
        self._drops_call = False
        self._name, self._written, self._length = "", list[str](), 0  # of the call that is open
        self._earlier: dict[str, deque[_Arguments]] = {}  # of the complete calls, by name
        # arguments that the open call may repeat: it is held back until none are left
        self._repeatable: Collection[_Arguments] | None = None

    def content(self, text: str) -> None:
        """Appends to the answer. White space at its end waits for what follows."""
        self._append(self._content, text)

    def reasoning(self, text: str) -> None:
        """Appends to the thought."""
        self._append(self._reasoning, text)

    def _append(self, parts: list[str], text: str) -> None:
        if self.repeats_call:
            return
        self._release()
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        kept = text.rstrip()
        if kept:
            parts.extend(self._spaces)
            parts.append(kept)
            self._spaces.clear()
        if len(kept) < len(text):
            self._spaces.append(text[len(kept) :])
            self._before_spaces = parts

    def cut(self) -> None:
        """Ends a thought or a call, or begins one: white space on either side is left out."""
        self._spaces.clear()
        self._trims = True

    def begin_call(self, name: str) -> None:
        """Begins the next call."""
        self._release()
        self.cut()
        self._drops_call = self.repeats_call or (bool(self.num_calls) and not self._parallel)
        if self._drops_call:
            return
        self._end_arguments()
        self._name, self._written, self._length = name, [], 0
        self._repeatable = self._earlier.get(name)
        if self._repeatable is None:
            self._open_call()

    def arguments(self, text: str) -> None:
        """Appends to the arguments of the call that was begun last."""
        if not text or self._drops_call:
            return
        self._written.append(text)
        if self._repeatable is None:
            self._arguments.append(text)
            return
        start, dense = self._length, _without_spaces(text)
        self._length += len(dense)
        self._repeatable = [
            each for each in self._repeatable if each.dense.startswith(dense, start)
        ]
        if not self._repeatable:
            self._release()

    def end_call(self) -> None:
        """Ends the call that was begun last: its arguments are complete."""
        if self._drops_call:
            return
        text = "".join(self._written)
        whole = [each for each in self._repeatable or () if len(each.dense) == self._length]
        if any(each.equals(text) for each in whole):
            self._repeatable, self.repeats_call, self._drops_call = None, True, True
            return
        self._release()
        earlier = self._earlier.setdefault(self._name, deque(maxlen=_MAX_COMPARED))
        earlier.append(_Arguments(text))

    def _release(self) -> None:
        """Adds the call that was held back, which repeats none."""
        if self._repeatable is not None:
            self._repeatable = None
            self._open_call()
            self._arguments += self._written

    def _open_call(self) -> None:
        self._delta.calls.append(CallDelta(self.num_calls, self._name))
        self.num_calls += 1

    def _end_arguments(self) -> None:
        if not self._arguments:
            return
        calls, number = self._delta.calls, self.num_calls - 1
        if not calls or calls[-1].index != number:
            calls.append(CallDelta(number))
        calls[-1].arguments += "".join(self._arguments)
        self._arguments.clear()

    def finish(self) -> None:
        """Ends the message: white space at the end of an answer without calls belongs to it, and a
        call that is cut off repeats none."""
        self._release()
        if not self.num_calls and self._before_spaces is self._content:
            self._content.extend(self._spaces)
        self._spaces.clear()

    def take(self) -> MessageDelta:
        """Returns the delta since the last call."""
        self._end_arguments()
        delta, self._delta = self._delta, MessageDelta()
        if self._content:
            delta.content = "".join(self._content)
            self._content.clear()
        if self._reasoning:
            delta.reasoning = "".join(self._reasoning)
            self._reasoning.clear()
        return delta
