"""Thoughts: text between two markers at the beginning of an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aioinfer.errors import RequestError
from aioinfer.text.formats.draft import Draft
from aioinfer.text.formats.lark import Lark
from aioinfer.text.formats.reader import Markers, Reader, Steps

#: Tokens at the beginning of an output that may hold the marker of a thought, and white space.
_OPENING = 16
#: Tokens that are decoded at a time to find the end of a thought.
_PORTION = 64


@dataclass(frozen=True, slots=True)
class ThoughtMarkers:
    """The markers between which a family of models writes its reasoning.

    Attributes:
        open, close: the markers.
        label: the text behind `open`, which names what follows.
    """

    open: str
    close: str
    label: str = ""

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
            yield from reader.comes(self.label)
        draft.cut()
        if (yield from reader.until(Markers(self.close), draft.reasoning)):
            draft.cut()

    def num_tokens(
        self,
        tokens: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        close_id: int | None,
        *,
        in_thought: bool,
    ) -> int:
        """Returns how many tokens at the beginning of an output are the thought and its markers:
        all of them, where it is not closed.

        Args:
            tokens: of the output.
            decode: returns the text of tokens, special ones included.
            close_id: the token that closes a thought, or None where that takes several.
            in_thought: whether the prompt's end has opened it.
        """
        if not in_thought and not decode(tokens[:_OPENING]).lstrip().startswith(self.open):
            return 0
        if close_id is not None:
            return next((n for n, token in enumerate(tokens, 1) if token == close_id), len(tokens))
        for start in range(0, len(tokens), _PORTION):
            begin, end = max(0, start - len(self.close)), start + _PORTION
            if self.close in decode(tokens[begin:end]):
                ends = range(start + 1, end + 1)
                return next(n for n in ends if self.close in decode(tokens[begin:n]))
        return len(tokens)

    def term(self, lark: Lark, *, in_thought: bool, budget: int | None = None) -> str:
        """Returns the term for a thought: one that has to be closed, or one that may come; of
        `budget` tokens at most between its markers.

        Raises `RequestError` for a budget where the marker of the end is no token: a text that
        becomes one could not be cut off.
        """
        if budget is None:
            until_close = lark.free_until(self.close)
        elif lark.is_special(self.close):
            thought = lark.rule(lark.free(), max_tokens=budget) if budget else ""
            until_close = thought + lark.marker(self.close)
        else:
            raise RequestError(
                f"thinking_token_budget needs a model with a token for {self.close}",
                param="thinking_token_budget",
                code="unsupported_parameter",
            )
        if in_thought:
            return until_close
        body = lark.rule(f"{lark.marker(self.open)}{lark.text(self.label)}{until_close}")
        return f"({body})? "

    def begins_text(self, lark: Lark) -> str:
        """Returns the regular expression of how a text with a thought begins; "" if no text does,
        since the marker is a token."""
        return "" if lark.is_special(self.open) else f"/\\s*/ {lark.text(self.open)}"


THINK = ThoughtMarkers("<think>", "</think>")
#: Magistral's.
BRACKETS = ThoughtMarkers("[THINK]", "[/THINK]")
#: Gemma 4's.
CHANNEL = ThoughtMarkers("<|channel>", "<channel|>", "thought\n")
