"""Calls as Hermes and Qwen 2.5 and 3 write them: `<tool_call>{"name": ..., "arguments": ...}
</tool_call>`, one for each call. Small models forget the markers: an object that begins the message
and names one of the tools is a call as well."""

from __future__ import annotations

from collections.abc import Mapping

from aioinfer.text.formats.call_object import read_call
from aioinfer.text.formats.draft import Draft
from aioinfer.text.formats.lark import Lark, Tool
from aioinfer.text.formats.reader import Markers, Reader, Steps

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesCalls:
    """See the module."""

    name = "hermes"
    markers: tuple[str, ...] = (_OPEN, _CLOSE)
    trigger = _OPEN
    bare = '{"name": "'
    _open = Markers(_OPEN)

    def read(self, reader: Reader, draft: Draft, tools: Mapping[str, Tool]) -> Steps[None]:
        """See `CallFormat.read`."""
        record: list[str] = []
        reader.record = record
        yield from reader.space()
        is_call = yield from read_call(reader, draft, names=tools)
        reader.record = None
        if not is_call:
            draft.content("".join(record))
        while (yield from reader.until(self._open, draft.content)):
            yield from self._read_calls(reader, draft)

    def _read_calls(self, reader: Reader, draft: Draft) -> Steps[None]:
        reader.record = record = [_OPEN]
        yield from reader.space()
        if not (yield from read_call(reader, draft, stop="<")):
            reader.record = None
            draft.content("".join(record))
            return
        while True:  # some models write several objects between the markers
            yield from reader.space()
            if (yield from reader.comes(_CLOSE)) or (yield from reader.peek()) != "{":
                return
            reader.record = record = []
            if not (yield from read_call(reader, draft, stop="<")):
                reader.record = None
                draft.content("".join(record))
                return

    def bare_calls(self, lark: Lark, tools: Mapping[str, Tool], *, parallel: bool) -> str:
        """See `CallFormat.bare_calls`. One call for a message."""
        return lark.any_of(
            lark.text(f'{lark.json(name)[1:]}, "arguments": ') + lark.schema(tool) + lark.text("}")
            for name, tool in tools.items()
        )

    def calls(self, lark: Lark, tools: Mapping[str, Tool], *, parallel: bool) -> str:
        """See `CallFormat.calls`."""
        each = lark.any_of(
            lark.text(f'\n{{"name": {lark.json(name)}, "arguments": ')
            + lark.schema(tool)
            + lark.text("}\n")
            + lark.marker(_CLOSE)
            for name, tool in tools.items()
        )
        again = lark.text("\n") + lark.marker(_OPEN) + each
        return each + (f"({again})*" if parallel else "")
