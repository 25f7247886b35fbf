"""Calls as Gemma 4 and FunctionGemma write them: `call:NAME{key:value,...}` between two markers, in
which texts stand between delimiters of their own and names of members stand bare.

Gemma 4: `<|tool_call>call:f{city:<|"|>Paris<|"|>,n:1}<tool_call|>`. FunctionGemma:
`<start_function_call>call:f{city:<escape>Paris<escape>}<end_function_call>`. The sources are the
chat template of Gemma 4 and Google's page on FunctionGemma's format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aioinfer.text.formats.draft import Draft
from aioinfer.text.formats.gemma_values import ValueTerms
from aioinfer.text.formats.lark import Lark, Tool
from aioinfer.text.formats.literals import DelimitedLiterals
from aioinfer.text.formats.reader import Markers, Reader, Steps, ignore

_CALL = "call:"


@dataclass(frozen=True, slots=True)
class GemmaTokens:
    """The special tokens of a generation of models.

    Attributes:
        open, close: around a call.
        delimiter: on both sides of a text.
        response: what begins the result of a call: where the model writes it, its turn ends.
    """

    open: str
    close: str
    delimiter: str
    response: str


GEMMA_4 = GemmaTokens("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")
FUNCTION_GEMMA = GemmaTokens(
    "<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>"
)


class GemmaCalls:
    """Tool calls in Gemma's format; see the module."""

    name = "gemma"
    bare = ""

    def __init__(self, tokens: GemmaTokens):
        """Takes the tokens of the model's generation."""
        self.markers: tuple[str, ...] = (tokens.open, tokens.close, tokens.delimiter)
        self.ends: tuple[str, ...] = (tokens.response,)
        self.trigger = tokens.open
        self._tokens = tokens
        self._open, self._close = Markers(tokens.open), Markers(tokens.close)
        self._behind_name = Markers("{", "}", "\n", tokens.open, tokens.close, tokens.delimiter)
        self._literals = DelimitedLiterals(tokens.delimiter, tokens.close)

    def read(self, reader: Reader, draft: Draft, tools: Mapping[str, Tool]) -> Steps[None]:
        """See `CallFormat.read`."""
        while (yield from reader.until(self._open, draft.content)):
            reader.record = record = [self._tokens.open]
            yield from reader.space()
            found = None
            if (yield from reader.comes(_CALL)):
                found = yield from reader.short_until(self._behind_name)
            reader.record = None
            if found is None or found[1] != "{" or not (name := found[0].strip()):
                draft.content("".join(record))
                continue
            reader.unread()
            draft.begin_call(name)
            if (yield from self._literals.value(reader, draft.arguments)):
                draft.end_call()
            yield from reader.until(self._close, ignore)
            draft.cut()

    def bare_calls(self, lark: Lark, tools: Mapping[str, Tool], *, parallel: bool) -> str:
        """See `CallFormat.bare_calls`."""
        raise NotImplementedError

    def calls(self, lark: Lark, tools: Mapping[str, Tool], *, parallel: bool) -> str:
        """See `CallFormat.calls`."""
        each = lark.any_of(
            lark.text(f"{_CALL}{name}")
            + ValueTerms(lark, tool.schema, self._tokens.delimiter).arguments()
            + lark.marker(self._tokens.close)
            for name, tool in tools.items()
        )
        return each + (f"({lark.marker(self._tokens.open)}{each})* " if parallel else "")
