"""The message that a parser makes: what is new in it since it was last asked."""

from __future__ import annotations

from aioinfer.text.message_parser import CallDelta, MessageDelta


class Draft:
    """A message in the making. White space beside thoughts and calls is left out of it: models put
    line breaks there that belong to no text.

    Attributes:
        num_calls: calls that have begun.
    """

    def __init__(self, *, parallel: bool = True):
        """Without `parallel`, calls after the first are left out."""
        self.num_calls = 0
        self._parallel = parallel
        self._delta = MessageDelta()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._arguments: list[str] = []
        self._spaces: list[str] = []
        self._before_spaces = self._content
        self._trims = False  # whether white space is to be left out until other text comes
        self._drops_call = False

    def content(self, text: str) -> None:
        """Appends to the answer. White space at its end waits for what follows."""
        self._append(self._content, text)

    def reasoning(self, text: str) -> None:
        """Appends to the thought."""
        self._append(self._reasoning, text)

    def _append(self, parts: list[str], text: str) -> None:
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
        self.cut()
        self._drops_call = bool(self.num_calls) and not self._parallel
        if not self._drops_call:
            self._end_arguments()
            self._delta.calls.append(CallDelta(self.num_calls, name))
            self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Appends to the arguments of the call that was begun last."""
        if text and not self._drops_call:
            self._arguments.append(text)

    def _end_arguments(self) -> None:
        if not self._arguments:
            return
        calls, number = self._delta.calls, self.num_calls - 1
        if not calls or calls[-1].index != number:
            calls.append(CallDelta(number))
        calls[-1].arguments += "".join(self._arguments)
        self._arguments.clear()

    def finish(self) -> None:
        """Ends the message: white space at the end of an answer without calls belongs to it."""
        if not self.num_calls and self._before_spaces is self._content:
            self._content.extend(self._spaces)
        self._spaces.clear()

    def take(self) -> MessageDelta:
        """Returns what is new since the last call."""
        self._end_arguments()
        delta, self._delta = self._delta, MessageDelta()
        if self._content:
            delta.content = "".join(self._content)
            self._content.clear()
        if self._reasoning:
            delta.reasoning = "".join(self._reasoning)
            self._reasoning.clear()
        return delta
