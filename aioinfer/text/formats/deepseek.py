"""Calls as DeepSeek's models write them, between markers of their own. V3 and R1 write the word
"function", the name and the arguments as a block of code; V3.1 writes the name and the
arguments."""

from __future__ import annotations

from collections.abc import Mapping

from aioinfer.text.formats.call_object import read_arguments
from aioinfer.text.formats.draft import Draft
from aioinfer.text.formats.lark import Lark, Tool
from aioinfer.text.formats.reader import Markers, Reader, Steps, ignore

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeekCalls:
    """Tool calls in DeepSeek's formats; see the module. Both formats are parsed; a grammar writes
    the one of the model's template."""

    name = "deepseek"
    markers: tuple[str, ...] = (_BEGIN, _END, _CALL, _CALL_END, _SEPARATOR)
    ends: tuple[str, ...] = ()
    trigger = _BEGIN
    bare = ""
    begin, end, call, call_end, separator = _BEGIN, _END, _CALL, _CALL_END, _SEPARATOR
    _open = Markers(_BEGIN, _CALL)
    _separator = Markers(_SEPARATOR, _CALL_END, _CALL)
    _line = Markers("\n", _CALL_END)
    _close = Markers(_CALL_END, _CALL, _END)

    def __init__(self, *, fenced: bool):
        """`fenced`: whether the model writes arguments as blocks of code."""
        self._fenced = fenced

    def read(self, reader: Reader, draft: Draft, tools: Mapping[str, Tool]) -> Steps[None]:
        """See `CallFormat.read`."""
        found = yield from reader.until(self._open, draft.content)
        while found:
            reader.record = record = [found]
            if found == self.begin:
                yield from reader.space()
                if not (yield from reader.comes(self.call)):
                    reader.record = None
                    draft.content("".join(record))
                    found = yield from reader.until(self._open, draft.content)
                    continue
            is_call = yield from self._read_call(reader, draft)
            reader.record = None
            if is_call:
                found = yield from reader.until(self._close, ignore)
                while found in (self.call_end, self.end):
                    draft.cut()
                    found = yield from self._next(reader, draft)
            else:
                draft.content("".join(record))
                found = yield from reader.until(self._open, draft.content)

    def _next(self, reader: Reader, draft: Draft) -> Steps[str]:
        yield from reader.space()
        if (yield from reader.comes(self.end)):
            return self.end
        return (yield from reader.until(self._open, draft.content))

    def _read_call(self, reader: Reader, draft: Draft) -> Steps[bool]:
        found = yield from reader.short_until(self._separator)
        if found is None or found[1] != self.separator:
            return False
        name = self.function(found[0].strip())
        if name == "function":
            line = yield from reader.short_until(self._line)
            if line is None or line[1] != "\n":
                return False
            name = line[0].strip()
            yield from reader.space()
            if (yield from reader.comes("```")):
                yield from reader.comes("json")
        if not name:
            return False
        reader.record = None
        draft.begin_call(name)
        yield from reader.space()
        if (yield from read_arguments(reader, draft.arguments, stop="<")):
            draft.end_call()
        return True

    def function(self, text: str) -> str:
        """Returns the function that the text before the separator names; "" if none."""
        return text

    def named(self, lark: Lark, name: str) -> str:
        """Returns the term for the text that names a function."""
        return lark.text(name)

    def bare_calls(self, lark: Lark, tools: Mapping[str, Tool], *, parallel: bool) -> str:
        """See `CallFormat.bare_calls`."""
        raise NotImplementedError

    def calls(self, lark: Lark, tools: Mapping[str, Tool], *, parallel: bool) -> str:
        """See `CallFormat.calls`."""

        def call(name: str, tool: Tool) -> str:
            marker, end = lark.marker(self.separator), lark.marker(self.call_end)
            if self._fenced:
                return (
                    lark.text("function") + marker + lark.text(f"{name}\n```json\n")
                    + lark.schema(tool) + lark.text("\n```") + end
                )  # fmt: skip
            return self.named(lark, name) + marker + lark.schema(tool) + end

        each = lark.marker(self.call) + lark.any_of(call(*item) for item in tools.items())
        between = lark.text("\n" if self._fenced else "")
        more = f"({between}{each})* " if parallel else ""
        if self._fenced and parallel:  # behind a line break, another call need not follow
            more += f"({between})? "
        return each + more + lark.marker(self.end)
