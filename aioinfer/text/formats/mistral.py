"""Calls as Mistral's models write them: `[TOOL_CALLS]` and a JSON list of objects with `name` and
`arguments`; newer ones write `[TOOL_CALLS]name[ARGS]{...}` for each call, with `[CALL_ID]` and an
id between in some. A call's id has nine characters, letters and digits: their templates demand
that."""

from __future__ import annotations

from collections.abc import Mapping

from aioinfer.text.formats.call_object import read_arguments, read_call
from aioinfer.text.formats.draft import Draft
from aioinfer.text.formats.lark import Lark, Tool
from aioinfer.text.formats.reader import Markers, Reader, Steps

_CALLS, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralCalls:
    """Tool calls in Mistral's formats; see the module. Both formats are parsed; a grammar writes
    the one of the model's template."""

    name = "mistral"
    markers: tuple[str, ...] = (_CALLS, _ARGS, _ID)
    ends: tuple[str, ...] = ()
    trigger = _CALLS
    bare = ""
    _open = Markers(_CALLS)
    _behind_name = Markers(_ARGS, _ID, "{", _CALLS)
    _behind_id = Markers(_ARGS, "{", _CALLS)

    def __init__(self, *, by_name: bool):
        """`by_name`: whether the model writes the newer form."""
        self._by_name = by_name

    def read(self, reader: Reader, draft: Draft, tools: Mapping[str, Tool]) -> Steps[None]:
        """See `CallFormat.read`."""
        while (yield from reader.until(self._open, draft.content)):
            reader.record = record = [_CALLS]
            yield from reader.space()
            following = yield from reader.peek()
            is_call = yield from (
                self._read_list(reader, draft)
                if following in ("[", "{")
                else self._read_named(reader, draft)
            )
            reader.record = None
            if not is_call:
                draft.content("".join(record))

    def _read_list(self, reader: Reader, draft: Draft) -> Steps[bool]:
        yield from reader.comes("[")
        any_call = False
        while True:
            yield from reader.space()
            if not (yield from read_call(reader, draft)):
                return any_call
            any_call = True
            yield from reader.space()
            if not (yield from reader.comes(",")):
                yield from reader.comes("]")
                return True

    def _read_named(self, reader: Reader, draft: Draft) -> Steps[bool]:
        found = yield from reader.short_until(self._behind_name)
        if found is None:
            return False
        name, marker = found
        if marker == _ID:
            found = yield from reader.short_until(self._behind_id)
            marker = found[1] if found is not None else ""
        name = name.strip()
        if not name or marker not in (_ARGS, "{"):
            return False
        reader.record = None
        draft.begin_call(name)
        if marker == "{":
            reader.unread()
        yield from reader.space()
        if (yield from read_arguments(reader, draft.arguments)):
            draft.end_call()
        draft.cut()
        return True

    def bare_calls(self, lark: Lark, tools: Mapping[str, Tool], *, parallel: bool) -> str:
        """See `CallFormat.bare_calls`."""
        raise NotImplementedError

    def calls(self, lark: Lark, tools: Mapping[str, Tool], *, parallel: bool) -> str:
        """See `CallFormat.calls`."""
        if self._by_name:
            each = lark.any_of(
                lark.text(name) + lark.marker(_ARGS) + lark.schema(tool)
                for name, tool in tools.items()
            )
            return each + (f"({lark.marker(_CALLS)}{each})*" if parallel else "")
        each = lark.any_of(
            lark.text(f'{{"name": {lark.json(name)}, "arguments": ')
            + lark.schema(tool)
            + lark.text("}")
            for name, tool in tools.items()
        )
        more = f"({lark.text(', ')}{each})* " if parallel else ""
        return f"/ ?\\[/ {each}{more}{lark.text(']')}"
