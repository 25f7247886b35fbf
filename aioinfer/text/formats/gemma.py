"""Calls as Gemma 4 and FunctionGemma write them: `call:NAME{key:value,...}` between two markers, in
which texts stand between delimiters of their own and names of members stand bare.

Gemma 4: `<|tool_call>call:f{city:<|"|>Paris<|"|>,n:1}<tool_call|>`. FunctionGemma:
`<start_function_call>call:f{city:<escape>Paris<escape>}<end_function_call>`. The sources are the
chat template of Gemma 4 and Google's page on FunctionGemma's format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aioinfer.text.formats.draft import Draft
from aioinfer.text.formats.lark import Lark, Tool, names_properties, properties
from aioinfer.text.formats.literals import DelimitedLiterals
from aioinfer.text.formats.reader import Markers, Reader, Steps, ignore

_CALL = "call:"
#: Types whose values are written as in JSON.
_PLAIN = frozenset(("integer", "number", "boolean", "null"))
_TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
#: Longer lengths and counts are not enforced: the grammar would be too large.
_MAX_COUNT = 1000


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
            + _ValueTerms(lark, tool.schema, self._tokens.delimiter).arguments()
            + lark.marker(self._tokens.close)
            for name, tool in tools.items()
        )
        return each + (f"({lark.marker(self._tokens.open)}{each})* " if parallel else "")


class _ValueTerms:
    """Makes the terms for the values of one tool's arguments, in Gemma's notation, by their schema.

    llguidance holds JSON to a schema, not this notation, so the terms are made here. They enforce
    types, enums, required members, counts of items, lengths of texts and bounds of numbers.
    Patterns and formats of texts are not enforced, and a schema that is none of these (`allOf`,
    `not`, ...) takes any value.
    """

    def __init__(self, lark: Lark, schema: Any, delimiter: str):
        """Takes the schema of the arguments, and the marker on both sides of a text."""
        self._lark = lark
        self._root = schema
        self._delimiter = delimiter
        self._referred: dict[str, str] = {}  # rules of subschemas, by their references
        self._any = ""  # the rule of any value, once there is one

    def arguments(self) -> str:
        """Returns the term for the arguments, an object."""
        return self._object(self._root if isinstance(self._root, Mapping) else {})

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            return self._anything()
        if isinstance(reference := schema.get("$ref"), str):
            return self._reference(reference)
        if "const" in schema:
            return self._literal(schema["const"])
        if isinstance(choices := schema.get("enum"), list) and choices:
            return self._lark.any_of(map(self._literal, choices))
        for keyword in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(keyword), list) and branches:
                return self._lark.any_of(map(self._value, branches))
        kinds = schema.get("type", "object" if "properties" in schema else None)
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not kinds or not set(kinds) <= set(_TYPES):
            return self._anything()
        return self._lark.any_of(self._of_type(kind, schema) for kind in kinds)

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind in _PLAIN:
            bounded = kind in ("integer", "number")
            bounds = {name: schema[name] for name in _BOUNDS if bounded and name in schema}
            return self._lark.json_value({"type": kind, **bounds})
        if kind == "string":
            return self._text(schema)
        return self._object(schema) if kind == "object" else self._array(schema)

    def _text(self, schema: Mapping[str, Any]) -> str:
        marker = self._lark.marker(self._delimiter)
        least, most = _count(schema, "minLength"), _count(schema, "maxLength")
        if most is None and not least:
            return marker + self._lark.free_until(self._delimiter)
        inside = f"/(.|\\n){{{least or 0},{'' if most is None else most}}}/"
        if not self._lark.is_special(self._delimiter):
            inside += f" & ~(/(.|\\n)*/ {json.dumps(self._delimiter)} /(.|\\n)*/)"
        return marker + self._lark.terminal(inside) + marker

    def _array(self, schema: Mapping[str, Any]) -> str:
        least, most = _count(schema, "minItems") or 0, _count(schema, "maxItems")
        if most == 0:
            return self._lark.text("[]")
        item = self._lark.rule(self._value(schema.get("items")))
        comma, upper = self._lark.text(","), "" if most is None else most - 1
        items = f"{item}({comma}{item}){{{max(least - 1, 0)},{upper}}} "
        inside = items if least else f"({items})? "
        return self._lark.text("[") + inside + self._lark.text("]")

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Templates write the members in the order of their names, and so do models."""
        known = sorted(properties(schema), key=lambda member: str(member[0]).lower())
        members = [
            (self._lark.text(f"{key}:") + self._value(inner), required)
            for key, inner, required in known
        ]
        more = schema.get("additionalProperties")
        if not names_properties(schema) and more is not False:
            return self._map(more)
        return self._lark.text("{") + self._lark.members(members, ",") + self._lark.text("}")

    def _map(self, schema: Any) -> str:
        """Returns the term for an object whose names are free."""
        key = f"/[A-Za-z0-9_ .-]{{1,64}}/ {self._lark.text(':')}"
        member = self._lark.rule(f"{key}{self._value(schema)}")
        comma = self._lark.text(",")
        return f"{self._lark.text('{')}({member}({comma}{member})*)? {self._lark.text('}')}"

    def _reference(self, reference: str) -> str:
        """Returns the rule of a subschema of the root, which may refer to itself."""
        if reference not in self._referred:
            found: Any = self._root
            for name in reference.removeprefix("#").split("/")[1:]:
                name = name.replace("~1", "/").replace("~0", "~")
                found = found.get(name) if isinstance(found, Mapping) else None
            rule, define = self._lark.later_rule()
            self._referred[reference] = rule
            define(self._value(found) if reference.startswith("#") else self._anything())
        return self._referred[reference]

    def _anything(self) -> str:
        """Returns the rule of any value."""
        if not self._any:
            self._any, define = self._lark.later_rule()
            plain = {"type": ["number", "boolean", "null"]}
            array = self._array({})
            define(f"{self._text({})}| {self._lark.json_value(plain)}| {array}| {self._map(None)}")
        return self._any

    def _literal(self, value: Any) -> str:
        """Returns the term for one value."""
        text, lark = self._lark.text, self._lark
        if isinstance(value, str):
            marker = lark.marker(self._delimiter)
            return marker + text(value) + marker
        if isinstance(value, Mapping):
            ordered = sorted(value.items(), key=lambda member: str(member[0]).lower())
            members = [(text(f"{key}:") + self._literal(inner), True) for key, inner in ordered]
            return text("{") + lark.members(members, ",") + text("}")
        if isinstance(value, Sequence):
            items = [(self._literal(item), True) for item in value]
            return text("[") + lark.members(items, ",") + text("]")
        return text(lark.json(value))


def _count(schema: Mapping[str, Any], keyword: str) -> int | None:
    """Returns a bound of a length or count that a grammar can hold, or None."""
    found = schema.get(keyword)
    return found if isinstance(found, int) and 0 <= found <= _MAX_COUNT else None
