"""Calls as LFM2's models write them: `<|tool_call_start|>[name(key="value"), ...]
<|tool_call_end|>`, with the values in Python's notation. Asked for JSON, the models write a list of
objects with `name` and `arguments` between the same markers.

The markers and the notation are those of the chat templates of LFM2 and LFM2.5.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from aioinfer.text.formats.call_object import read_call
from aioinfer.text.formats.draft import Draft
from aioinfer.text.formats.lark import Lark, Tool, names_properties, properties
from aioinfer.text.formats.literals import PythonLiterals
from aioinfer.text.formats.reader import Markers, Reader, Steps, ignore

_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_NAME = re.compile(r"[\w.-]+")
#: Words of Python in the place of JSON's, by the schema's type.
_WORDS = {"boolean": '"True" | "False"', "null": '"None"'}


class Lfm2Calls:
    """Tool calls in LFM2's format; see the module."""

    name = "lfm2"
    markers: tuple[str, ...] = (_OPEN, _CLOSE)
    ends: tuple[str, ...] = ()
    trigger = _OPEN
    bare = ""
    _open = Markers(_OPEN)
    _close = Markers(_CLOSE)
    _behind_name = Markers("(", ")", "[", "]", "{", "<", ",", "=", "'", '"', "\n")
    _behind_key = Markers("=", "(", ")", "[", "]", "{", "<", ",", "'", '"', "\n")
    _literals = PythonLiterals()

    def read(self, reader: Reader, draft: Draft, tools: Mapping[str, Tool]) -> Steps[None]:
        """See `CallFormat.read`."""
        while (yield from reader.until(self._open, draft.content)):
            reader.record = record = [_OPEN]
            yield from reader.space()
            yield from reader.comes("[")
            any_call = False
            while True:
                yield from reader.space()
                is_object = (yield from reader.peek()) == "{"
                is_call = yield from (
                    read_call(reader, draft, stop="<")
                    if is_object
                    else self._read_call(reader, draft)
                )
                any_call = any_call or is_call
                if not is_call:
                    break
                yield from reader.space()
                if not (yield from reader.comes(",")):
                    break
            reader.record = None
            if not any_call:
                draft.content("".join(record))
                continue
            yield from reader.until(self._close, ignore)
            draft.cut()

    def _read_call(self, reader: Reader, draft: Draft) -> Steps[bool]:
        """Reads `name(key=value, ...)`. What has neither a key nor the end of the call behind its
        name is no call."""
        found = yield from reader.short_until(self._behind_name)
        if found is None or found[1] != "(" or not _NAME.fullmatch(name := found[0].strip()):
            return False
        before = "{"
        while True:
            yield from reader.space()
            if (yield from reader.comes(")")):
                if before == "{":
                    draft.begin_call(name)
                draft.arguments("{}" if before == "{" else "}")
                draft.end_call()
                return True
            if before == ", ":
                yield from reader.comes(",")
            key = yield from reader.short_until(self._behind_key)
            if key is None or key[1] != "=":
                return before == ", "
            if before == "{":
                reader.record = None
                draft.begin_call(name)
            draft.arguments(f"{before}{json.dumps(key[0].strip(), ensure_ascii=False)}: ")
            before = ", "
            if not (yield from self._literals.value(reader, draft.arguments)):
                return True

    def bare_calls(self, lark: Lark, tools: Mapping[str, Tool], *, parallel: bool) -> str:
        """See `CallFormat.bare_calls`."""
        raise NotImplementedError

    def calls(self, lark: Lark, tools: Mapping[str, Tool], *, parallel: bool) -> str:
        """See `CallFormat.calls`."""
        each = lark.any_of(
            lark.text(f"{name}(") + _keywords(lark, tool) + lark.text(")")
            for name, tool in tools.items()
        )
        more = f"({lark.text(', ')}{each})* " if parallel else ""
        return lark.text("[") + each + more + lark.text("]") + lark.marker(_CLOSE)


def _keywords(lark: Lark, tool: Tool) -> str:
    """Returns the term for the keywords of a call, in the order of the schema; any keywords where
    the schema names none."""
    if not names_properties(tool.schema):
        each = lark.rule(f"/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ {lark.text('=')}{lark.json_value({})}")
        return f"({each}({lark.text(', ')}{each})*)? "
    members = [
        (f"{lark.text(f'{key}=')}{_value(lark, schema)}", required)
        for key, schema, required in properties(tool.schema)
    ]
    return lark.members(members, ", ")


def _value(lark: Lark, schema: Any) -> str:
    """Returns the term for a value: JSON, but for Python's words in the place of JSON's where they
    are the whole value."""
    if not isinstance(schema, Mapping) or "enum" in schema or "const" in schema:
        return lark.json_value(schema)
    given = schema.get("type")
    kinds = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    ways = [_WORDS[kind] for kind in kinds if kind in _WORDS]
    rest = [kind for kind in kinds if kind not in _WORDS]
    if rest or not ways:
        ways.append(lark.json_value({**schema, "type": rest} if rest and ways else schema))
    return f"({' | '.join(ways)}) "
