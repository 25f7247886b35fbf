"""Calls as Qwen3-Coder, Qwen 3.5 and 3.6 and Nemotron 3 write them: `<tool_call><function=name>
<parameter=key>value</parameter>…</function></tool_call>`, in which values are plain text. They
become JSON by the types of the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aioinfer.text.formats.draft import Draft
from aioinfer.text.formats.lark import Lark, Tool, names_properties, properties
from aioinfer.text.formats.reader import Markers, Reader, Steps, ignore

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"

#: Templates show these words of the history in Python's notation, and so do models.
_WORDS = {"True": "true", "False": "false", "None": "null"}


class QwenCoderCalls:
    """Tool calls in Qwen3-Coder's format; see the module."""

    name = "qwen_coder"
    markers: tuple[str, ...] = (_OPEN, _CLOSE)
    ends: tuple[str, ...] = ()
    trigger = _OPEN
    bare = ""
    _open = Markers(_OPEN, _FUNCTION)
    _name_end = Markers(">", "\n", "<")
    _next = Markers(_PARAMETER, _FUNCTION_END, _CLOSE)
    _value_end = Markers(_PARAMETER_END, _FUNCTION_END)

    def read(self, reader: Reader, draft: Draft, tools: Mapping[str, Tool]) -> Steps[None]:
        """See `CallFormat.read`."""
        while found := (yield from reader.until(self._open, draft.content)):
            reader.record = record = [found]
            if found == _OPEN:
                yield from reader.space()
            if found == _FUNCTION or (yield from reader.comes(_FUNCTION)):
                name = yield from reader.short_until(self._name_end)
                if name is not None and name[1] == ">" and name[0].strip():
                    reader.record = None
                    draft.begin_call(name[0].strip())
                    yield from self._read_parameters(reader, draft, tools.get(name[0].strip()))
                    continue
            reader.record = None
            draft.content("".join(record))

    def _read_parameters(self, reader: Reader, draft: Draft, tool: Tool | None) -> Steps[None]:
        before = "{"
        found = yield from reader.until(self._next, ignore)
        while found == _PARAMETER:
            key = yield from reader.short_until(self._name_end)
            if key is None or key[1] != ">":
                break
            parts: list[str] = []
            end = yield from reader.until(self._value_end, parts.append)
            value = _value("".join(parts), tool, key[0].strip())
            draft.arguments(f"{before}{json.dumps(key[0].strip(), ensure_ascii=False)}: {value}")
            before = ", "
            found = end
            if end == _PARAMETER_END:
                found = yield from reader.until(self._next, ignore)
        draft.arguments("{}" if before == "{" else "}")
        if found in (_FUNCTION_END, _CLOSE):
            draft.end_call()
        if found == _FUNCTION_END:
            yield from reader.space()
            yield from reader.comes(_CLOSE)
        draft.cut()

    def bare_calls(self, lark: Lark, tools: Mapping[str, Tool], *, parallel: bool) -> str:
        """See `CallFormat.bare_calls`."""
        raise NotImplementedError

    def calls(self, lark: Lark, tools: Mapping[str, Tool], *, parallel: bool) -> str:
        """See `CallFormat.calls`."""
        each = lark.any_of(
            lark.text(f"\n{_FUNCTION}{name}>\n")
            + _parameters(lark, tool)
            + lark.text(f"{_FUNCTION_END}\n")
            + lark.marker(_CLOSE)
            for name, tool in tools.items()
        )
        return lark.lines_of(each, _OPEN) if parallel else each


def _is_text(schema: Any) -> bool:
    """Whether values of a schema are texts, which are written without quotes."""
    if not isinstance(schema, Mapping):
        return False
    if isinstance(choices := schema.get("enum"), list):
        return all(isinstance(choice, str) for choice in choices)
    return schema.get("type") == "string"


def _value(text: str, tool: Tool | None, key: str) -> str:
    """Returns the JSON of a value: a line break on either side belongs to the format."""
    text = text.removeprefix("\n").removesuffix("\n")
    schema = next((s for name, s, _ in properties(tool and tool.schema) if name == key), None)
    if not _is_text(schema):
        if schema is not None and (word := _WORDS.get(text.strip())):
            return word
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            return text.strip()
    return json.dumps(text, ensure_ascii=False)


def _parameters(lark: Lark, tool: Tool) -> str:
    """Returns the term for the parameters of a call, in the order of the schema; any parameters
    where the schema names none."""
    if not names_properties(tool.schema):
        name = f"{lark.text(_PARAMETER)}/[A-Za-z0-9_.-]{{1,64}}/ " + lark.text(">\n")
        each = lark.rule(name + lark.free_until(f"\n{_PARAMETER_END}\n"))
        return f"({each})* "
    terms = []
    for key, schema, is_required in properties(tool.schema):
        end = f"\n{_PARAMETER_END}\n"
        if _is_text(schema) and isinstance(schema.get("enum"), list):
            value = lark.any_of(lark.text(choice) or '""' for choice in schema["enum"]) + lark.text(
                end
            )
        elif _is_text(schema):
            value = lark.free_until(end)
        else:
            value = lark.json_value(schema) + lark.text(end)
        term = lark.text(f"{_PARAMETER}{key}>\n") + value
        terms.append(term if is_required else f"({term})? ")
    return "".join(terms)
