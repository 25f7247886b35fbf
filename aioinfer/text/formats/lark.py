"""The grammar of a message as text in llguidance's dialect of Lark (its `docs/syntax.md`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aioinfer.text.schema_rewriting import close_objects, rewrite

#: Between the tokens of JSON: a model that may write endless white space sooner or later does.
_WHITESPACE = {"whitespace_pattern": r" |\n{1,2} {0,20}"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called.

    Attributes:
        name: of the function.
        schema: the JSON schema of its arguments.
    """

    name: str
    schema: Mapping[str, Any]


class Lark:
    """Makes the terms of a grammar, each with a space behind it, and keeps the rules that they
    need."""

    def __init__(self, special_ids: Mapping[str, int]):
        """`special_ids` are the ids of the special tokens, by their texts."""
        self._special_ids = special_ids
        self._rules: list[str] = []

    def grammar(self, start: str) -> str:
        """Returns the text of the grammar that begins with `start`."""
        return "\n".join([f"start: {start}", *self._rules, ""])

    def rule(self, body: str, *, lazy: bool = False, max_tokens: int | None = None) -> str:
        """Adds a rule and returns the term for it. A lazy one is a single lexeme that ends as soon
        as it can; one with `max_tokens` ends behind so many tokens at the latest."""
        name = f"r{len(self._rules)}"
        option = "[lazy]" if lazy else "" if max_tokens is None else f"[max_tokens={max_tokens}]"
        self._rules.append(f"{name}{option}: {body}")
        return f"{name} "

    def later_rule(self) -> tuple[str, Callable[[str], None]]:
        """Returns the term for a rule that may refer to itself, and what sets its body."""
        name, place = f"r{len(self._rules)}", len(self._rules)
        self._rules.append("")

        def define(body: str) -> None:
            self._rules[place] = f"{name}: {body}"

        return f"{name} ", define

    def is_special(self, text: str) -> bool:
        """Whether a text is a special token, which no text can spell."""
        return text in self._special_ids

    def terminal(self, body: str) -> str:
        """Adds a terminal, a regular expression, and returns the term for it."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return f"{name} "

    def any_of(self, bodies: Iterable[str]) -> str:
        """Returns the term for one of several."""
        return self.rule(" | ".join(bodies))

    def text(self, text: str) -> str:
        """Returns the term for a text, which holds no special token."""
        return f"{quote(text)} " if text else ""

    def marker(self, text: str) -> str:
        """Returns the term for a text that may be a special token."""
        token = self._special_ids.get(text)
        return self.text(text) if token is None else f"<[{token}]> "

    def free_until(self, text: str, *, but: str = "") -> str:
        """Returns the term for any text up to and including the first `text`. The whole does not
        begin with a match of the regular expression `but`."""
        if self.is_special(text):
            return self.free(text, but=but) + self.marker(text)
        return self.rule(self.terminal(f"(/(.|\\n)*/ {quote(text)}){_unlike(but)}"), lazy=True)

    def free(self, *without: str, but: str = "") -> str:
        """Returns the term for any text without these texts in it, as in `free_until`."""
        inside = [f" & ~(/(.|\\n)*/ {quote(text)} /(.|\\n)*/)" for text in without]
        return self.terminal(f"/(.|\\n)*/{''.join(inside)}{_unlike(but)}")

    def lines_of(self, each: str, opening: str) -> str:
        """Returns the term for one or more of `each`, of which all but the first come on lines that
        begin with the marker `opening`. The last line may end with a line break, which does not
        commit to another line."""
        line_break = self.text("\n")
        return f"{each}({line_break}{self.marker(opening)}{each})* ({line_break})? "

    def members(self, members: Sequence[tuple[str, bool]], separator: str) -> str:
        """Returns the term for members in this order with a separator between them. Each is a term
        and whether it is required; others may be left out."""
        between = self.text(separator)
        first = behind = ""  # the members from here on, without any before them, and with some
        for term, required in reversed(members):
            member = self.rule(term)
            without = first or '""'
            first = self.rule(f"{member}{behind}" if required else f"{member}{behind}| {without}")
            further = f"{between}{member}"
            behind = self.rule(f"{further if required else f'({further})? '}{behind}")
        return first

    def schema(self, tool: Tool) -> str:
        """Returns the term for the JSON of a tool's arguments."""
        return self.json_value(tool.schema)

    def json_value(self, schema: Any) -> str:
        """Returns the term for JSON by a schema."""
        if not isinstance(schema, Mapping):
            schema = {} if schema else {"enum": []}
        options = {**schema, "x-guidance": _WHITESPACE}
        return f"%json {json.dumps(close_objects(rewrite(options)))} "

    def json(self, value: Any) -> str:
        """Returns the JSON of a value as models write it."""
        return json.dumps(value, ensure_ascii=False)


def names_properties(schema: Any) -> bool:
    """Whether an object's schema names its properties; without, they may be any."""
    return isinstance(schema, Mapping) and isinstance(schema.get("properties"), Mapping)


def properties(schema: Any) -> list[tuple[str, Any, bool]]:
    """Returns the properties of an object's schema in its order: the name, the schema, and whether
    it is required."""
    if not names_properties(schema):
        return []
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    return [(key, inner, key in names) for key, inner in schema["properties"].items()]


def quote(text: str) -> str:
    """Returns a text as a literal."""
    return json.dumps(text, ensure_ascii=False)


def _unlike(pattern: str) -> str:
    return f" & ~({pattern} /(.|\\n)*/)" if pattern else ""
