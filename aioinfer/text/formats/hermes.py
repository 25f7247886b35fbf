"""Calls as Hermes, Qwen 2.5 and 3, Granite 4 and Falcon-H1 write them: `<tool_call>{"name": ...,
"arguments": ...}</tool_call>`, one for each call, or one list of all calls between the markers.
Nemotron-H and Nemotron Nano 2 write such a list between `<TOOLCALL>` and `</TOOLCALL>`.

Small models forget the markers: an object that begins the message and names one of the tools is a
call as well, also in a block of code between fences."""

from __future__ import annotations

from collections.abc import Mapping

from aioinfer.text.formats.call_object import read_call
from aioinfer.text.formats.draft import Draft
from aioinfer.text.formats.lark import Lark, Tool
from aioinfer.text.formats.reader import Markers, Reader, Steps

_FENCE = "```"
#: Characters of a name of a language.
_MAX_LANGUAGE = 16
#: How a message begins that is a call between fences, up to the name.
_FENCED_NAME = r'/\s{0,20}```[A-Za-z_]{0,16}\n\s{0,20}\{\s{0,20}"name"\s{0,20}:\s{0,20}/ '
#: White space in calls between fences.
_SPACE = r"/[ \n]{0,20}/ "


class HermesCalls:
    """Tool calls as objects between markers; see the module. Objects and lists are both parsed; a
    grammar writes what the model's template shows."""

    ends: tuple[str, ...] = ()
    bare = '{"name": "'
    _line_end = Markers("\n")

    def __init__(self, name: str = "hermes", tag: str = "tool_call", *, listed: bool = False):
        """Takes the name of the format, the tag of the markers, and whether the model writes a list
        of calls."""
        self.name = name
        self._listed = listed
        self.trigger, self._close = f"<{tag}>", f"</{tag}>"
        self.markers: tuple[str, ...] = (self.trigger, self._close)
        self._open = Markers(self.trigger)

    def read(self, reader: Reader, draft: Draft, tools: Mapping[str, Tool]) -> Steps[None]:
        """See `CallFormat.read`."""
        while (yield from self._read_bare(reader, draft, tools)):
            pass
        while (yield from reader.until(self._open, draft.content)):
            yield from self._read_calls(reader, draft)

    def _read_bare(self, reader: Reader, draft: Draft, tools: Mapping[str, Tool]) -> Steps[bool]:
        """Reads a call without markers, if one comes next. Returns whether one did, between fences:
        then another may follow."""
        record: list[str] = []
        reader.record = record
        yield from reader.space()
        fenced = yield from reader.comes(_FENCE)
        if fenced:  # a name of the language may stand behind it
            yield from reader.short_until(self._line_end, _MAX_LANGUAGE)
            yield from reader.space()
        is_call = False
        if fenced or not draft.num_calls:
            is_call = yield from read_call(reader, draft, names=tools)
        reader.record = None
        if not is_call:
            draft.content("".join(record))
        elif fenced:
            yield from reader.space()
            yield from reader.comes(_FENCE)
        return fenced and is_call

    def _read_calls(self, reader: Reader, draft: Draft) -> Steps[None]:
        reader.record = record = [self.trigger]
        yield from reader.space()
        if (yield from reader.comes("[")):
            yield from reader.space()
        if not (yield from read_call(reader, draft, stop="<")):
            reader.record = None
            draft.content("".join(record))
            return
        while True:  # some models write several objects between the markers
            yield from reader.space()
            if (yield from reader.comes(",")) or (yield from reader.comes("]")):
                yield from reader.space()
            if (yield from reader.comes(self._close)) or (yield from reader.peek()) != "{":
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

    def fenced_calls(
        self, lark: Lark, tools: Mapping[str, Tool], *, parallel: bool
    ) -> tuple[str, str]:
        """Returns the regular expression for the beginning of a message that is a call between
        fences, behind which the grammar takes over, and the term for one such call, or more if
        `parallel`."""
        begins = {name: f"{_FENCED_NAME}{lark.text(lark.json(name))}" for name in tools}
        each = lark.any_of(
            lark.terminal(begins[name])
            + f'{_SPACE}"," {_SPACE}"\\"arguments\\"" {_SPACE}":" {_SPACE}'
            + lark.schema(tool)
            + f'{_SPACE}"}}" {_SPACE}{lark.text(_FENCE)}'
            for name, tool in tools.items()
        )
        more = f"({each})* {_SPACE}" if parallel else ""
        return f"({' | '.join(begins.values())})", each + more

    def calls(self, lark: Lark, tools: Mapping[str, Tool], *, parallel: bool) -> str:
        """See `CallFormat.calls`."""
        each = lark.any_of(
            lark.text(f'{{"name": {lark.json(name)}, "arguments": ')
            + lark.schema(tool)
            + lark.text("}")
            for name, tool in tools.items()
        )
        if self._listed:
            more = f"({lark.text(', ')}{each})* " if parallel else ""
            calls = f"{lark.text('[')}{each}{more}{lark.text(']')}"
            return f"/\\n?/ {calls}/\\n?/ {lark.marker(self._close)}"
        line_break = lark.text("\n")
        each = lark.rule(f"{line_break}{each}{line_break}{lark.marker(self._close)}")
        return lark.lines_of(each, self.trigger) if parallel else each
