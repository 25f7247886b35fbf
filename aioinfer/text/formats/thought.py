"""Thoughts: text between two markers at the beginning of an answer."""

from __future__ import annotations

from dataclasses import dataclass

from aioinfer.text.formats.draft import Draft
from aioinfer.text.formats.lark import Lark
from aioinfer.text.formats.reader import Markers, Reader, Steps


@dataclass(frozen=True, slots=True)
class ThoughtMarkers:
    """Between what a family of models writes its thoughts."""

    open: str
    close: str

    def read(self, reader: Reader, draft: Draft, *, in_thought: bool) -> Steps[None]:
        """Reads a thought, if one comes next or `in_thought` says that the prompt has opened
        one."""
        if not in_thought:
            record: list[str] = []
            reader.record = record
            yield from reader.space()
            opened = yield from reader.comes(self.open)
            reader.record = None
            if not opened:
                draft.content("".join(record))
                return
        draft.cut()
        if (yield from reader.until(Markers(self.close), draft.reasoning)):
            draft.cut()

    def term(self, lark: Lark, *, in_thought: bool) -> str:
        """Returns the term for a thought: one that has to be closed, or one that may come."""
        until_close = lark.free_until(self.close)
        if in_thought:
            return until_close
        body = lark.rule(f"{lark.marker(self.open)}{until_close}")
        return f"({body})? "

    def begins_text(self, lark: Lark) -> str:
        """Returns the regular expression of how a text with a thought begins; "" if no text does,
        since the marker is a token."""
        return "" if lark.is_special(self.open) else f"/\\s*/ {lark.text(self.open)}"


THINK = ThoughtMarkers("<think>", "</think>")
#: Magistral's.
BRACKETS = ThoughtMarkers("[THINK]", "[/THINK]")
