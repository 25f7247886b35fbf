"""Calls as Llama 3 writes them: the whole message is `{"name": ..., "parameters": ...}`, or several
of them with `;` between; `<|python_tag|>` may come first."""

from __future__ import annotations

from collections.abc import Mapping

from aioinfer.text.formats.call_object import read_call
from aioinfer.text.formats.draft import Draft
from aioinfer.text.formats.lark import Lark, Tool
from aioinfer.text.formats.reader import Reader, Steps

_TAG = "<|python_tag|>"


class LlamaCalls:
    """Tool calls in Llama 3's format; see the module. An object counts as a call if it names one of
    the tools: a message may be JSON that is no call."""

    name = "llama"
    markers: tuple[str, ...] = (_TAG,)
    ends: tuple[str, ...] = ()
    #: The grammar of a call takes over behind it, at the beginning of a message.
    trigger = bare = '{"name": "'

    def read(self, reader: Reader, draft: Draft, tools: Mapping[str, Tool]) -> Steps[None]:
        """See `CallFormat.read`."""
        while True:
            record: list[str] = []
            reader.record = record
            yield from reader.space()
            if not draft.num_calls:
                yield from reader.comes(_TAG)
            elif (yield from reader.comes(";")) or (yield from reader.comes(",")):
                yield from reader.space()
            is_call = yield from read_call(reader, draft, names=tools)
            reader.record = None
            if not is_call:
                draft.content("".join(record))
                break
        yield from reader.rest(draft.content)

    def bare_calls(self, lark: Lark, tools: Mapping[str, Tool], *, parallel: bool) -> str:
        """See `CallFormat.bare_calls`."""
        return self.calls(lark, tools, parallel=parallel)

    def calls(self, lark: Lark, tools: Mapping[str, Tool], *, parallel: bool) -> str:
        """See `CallFormat.calls`."""
        each = lark.any_of(
            lark.text(f'{lark.json(name)[1:]}, "parameters": ') + lark.schema(tool) + lark.text("}")
            for name, tool in tools.items()
        )
        again = f"/; ?/ {lark.text(self.trigger)}{each}"
        return each + (f"({again})*" if parallel else "")
