"""Texts of JSON schemas: formats, and the regular expression of all texts but some."""

from __future__ import annotations

import re
from collections.abc import Collection

from aioinfer.text.json_schema import Schema

#: Formats that llguidance enforces.
_KNOWN = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
_CHARACTER = r"[A-Za-z0-9._~!$&'()*+,;=@-]"
_PATH = rf"/?{_CHARACTER}+(/{_CHARACTER}*)*(\?{_CHARACTER}*)?(#{_CHARACTER}*)?"
_POINTER = r"(/([^~/]|~[01])*)*"
_SET = r"\[\^?([A-Za-z0-9_@:;,=]|a-z|A-Z|0-9|\\[dws])+\]"
_ATOM = rf"([A-Za-z0-9_@:;,=<>/ -]|\.|\\[dwsDWS.*+?()\[\]{{}}|^$\\]|{_SET})"
_PIECE = rf"{_ATOM}([*+?]|\{{[1-9]\}})?"
_BRANCHES = rf"({_PIECE})+(\|({_PIECE})+)*"
#: Replacements of the other formats of the standard: a pattern, or a format that allows less.
_PATTERNS = {
    "uri-reference": f"^({_PATH})$",
    "iri-reference": f"^({_PATH})$",
    "uri-template": rf"^({_CHARACTER}|[/:?#]|\{{[A-Za-z0-9_]+\}})+$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{_POINTER})$",
    "regex": rf"^\^?({_PIECE}|\(({_BRANCHES})\)[*+?]?)+\$?$",
}
_FORMATS = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri"}
#: Characters of all texts that a regular expression may exclude, and of each.
_MAX_CHARS, _MAX_LENGTH = 400, 80


def plain_format(schema: Schema) -> Schema:
    """Returns a schema with only the `format`s that llguidance enforces. Others of the standard
    become patterns, some of which allow less. Unknown ones are annotations, as the standard has
    it."""
    name = schema.get("format")
    if not isinstance(name, str) or name in _KNOWN:
        return schema
    changed = {keyword: value for keyword, value in schema.items() if keyword != "format"}
    if (known := _FORMATS.get(name)) is not None:
        changed["format"] = known
    if (pattern := _PATTERNS.get(name)) is not None:
        if "pattern" not in changed:
            changed["pattern"] = pattern
        else:
            changed["allOf"] = [*changed.get("allOf", []), {"pattern": pattern}]
    return changed


def pattern_unlike(texts: Collection[str]) -> str | None:
    """Returns a regular expression of all texts but these, or None where it would be too long."""
    if sum(map(len, texts)) > _MAX_CHARS or max(map(len, texts)) > _MAX_LENGTH:
        return None
    return f"^({_unlike(set(texts))})$"


def _unlike(texts: set[str]) -> str:
    """Returns the alternatives of texts but these: to end where none of them does, a character
    with which none begins, or one with which some do, and no rest of these."""
    following: dict[str, set[str]] = {}
    for text in texts - {""}:
        following.setdefault(text[0], set()).add(text[1:])
    options = [] if "" in texts else [""]
    others = f"[^{''.join(map(_escape, sorted(following)))}]" if following else "(?s:.)"
    options.append(f"{others}(?s:.*)")
    options += [f"{_escape(first)}({_unlike(following[first])})" for first in sorted(following)]
    return "|".join(options)


def _escape(character: str) -> str:
    """Returns a character as regular expressions have it, within brackets or without."""
    return f"\\x{ord(character):02X}" if ord(character) < 0x20 else re.escape(character)
