"""Moves parts of a JSON schema into `$defs`, behind references.

llguidance's parser of JSON takes 127 levels; and the target of a reference outside of the keywords
that hold schemas would not be rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any
from urllib.parse import quote

from aioinfer.errors import RequestError
from aioinfer.text.json_schema import Schema, find_target, inner_schemas, map_inner, path_to

#: Levels of JSON that a part has before it is parted again, and of values within it that are no
#: schemas.
_MAX_LEVELS, _MAX_VALUE_LEVELS = 40, 50
#: References to what stays where it is.
_STABLE = re.compile(r"#(/(\$defs|definitions)/[^/]+)+$")
#: Keywords that change the base of the references within them.
_IDS = ("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor")


def with_parts(schema: Schema) -> Schema | None:
    """Returns a schema of which no part has more levels than llguidance's parser takes, and whose
    references within the schema all lead to members of `$defs` and `definitions`, which stay where
    they are when the schema is rewritten. The same object where nothing has to be moved; the
    argument is not changed. None where an `$id` in the schema says what references are relative to.

    Raises `RequestError` for levels that cannot be parted: of constants, or beside an `$id`.
    """
    parts = _Parts(schema)
    if parts.has_ids and parts.is_deep:
        raise RequestError(
            "a JSON schema with an '$id' or an '$anchor' in it may not be nested this deeply"
        )
    if parts.is_bound:
        return None
    if not parts.names:
        return schema
    if not isinstance(schema.get("$defs", {}), dict):
        raise RequestError("'$defs' of a JSON schema must be an object")
    return parts.build()


class _Parts:
    """The parts that a schema is divided into, and their names."""

    def __init__(self, root: Schema):
        self._root = root
        self._known: dict[int, Schema] = {}
        self._levels: dict[int, int] = {}  # at most, of an object that is there several times
        self.names: dict[int, str] = {}
        self.has_ids = self.is_deep = self.is_bound = False
        self._visit(root)
        pending = self._references()
        self.is_bound = self.has_ids and bool(pending)
        while pending:
            reference = pending.pop()
            if _STABLE.search(reference) or reference == "#":
                continue
            target = find_target(root, reference)
            if not reference.startswith("#/"):
                self.is_bound |= "#/" in reference  # from an `$id`, which may be that of the schema
            elif isinstance(target, dict) and target is not root and id(target) not in self.names:
                before = self._known.keys() | set()
                self._visit(target)
                self._name(target)
                pending += self._references(before)

    def _references(self, but: Set[int] = frozenset()) -> list[str]:
        """Returns the references of the schemas that were looked at, but for some."""
        return [
            each["$ref"]
            for number, each in self._known.items()
            if number not in but and isinstance(each.get("$ref"), str)
        ]

    def _name(self, schema: Schema) -> None:
        taken = self._root.get("$defs", {})
        name = f"part-{len(self.names)}"
        while name in taken:
            name += "-"
        self.names[id(schema)] = name

    def _visit(self, schema: Schema) -> None:
        """Looks at a schema and its subschemas, and names the ones that are too deep."""
        pending: list[tuple[Schema, int]] = [(schema, 1)]
        while pending:
            item, level = pending.pop()
            if id(item) in self.names or level <= self._levels.get(id(item), 0):
                continue
            self._known[id(item)] = item
            self._levels[id(item)] = level
            if level > _MAX_LEVELS and any(True for _ in inner_schemas(item)):
                self._name(item)
                self.is_deep, level = True, 1
            inner = list(inner_schemas(item))
            self.has_ids |= item is not self._root and any(
                isinstance(item.get(each), str) for each in _IDS
            )
            _check_values(item, {id(each) for _, each in inner})
            pending += [
                (each, level + len(place)) for place, each in inner if isinstance(each, dict)
            ]

    def build(self) -> Schema:
        """Returns the schema with its parts in `$defs`."""
        whole = self._copy(self._root)
        named = {name: self._copy(self._known[number]) for number, name in self.names.items()}
        return {**whole, "$defs": {**whole.get("$defs", {}), **named}}

    def _copy(self, schema: Schema) -> Schema:
        """Returns a schema with references to the parts within it."""
        copied = map_inner(schema, self._refer)
        reference = copied.get("$ref")
        if isinstance(reference, str) and (moved := self._moved(reference)) != reference:
            copied = {**copied, "$ref": moved}
        return copied

    def _refer(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        if (name := self.names.get(id(schema))) is not None:
            return {"$ref": f"#/$defs/{name}"}
        return self._copy(schema)

    def _moved(self, reference: str) -> str:
        """Returns the new form of a reference within the schema."""
        moved = "#"
        path = path_to(self._root, reference)
        for place, item in path:
            part = self.names.get(id(item))
            moved = f"{moved}/{quote(place, safe='$~')}" if part is None else f"#/$defs/{part}"
        return moved if path else reference


def _check_values(schema: Schema, inner: set[int]) -> None:
    """Raises `RequestError` for a value in a schema, such as a constant, that is nested too
    deeply. `inner` are the schemas within it."""
    pending: list[tuple[Any, int]] = [(schema, 0)]
    while pending:
        item, level = pending.pop()
        if level > _MAX_VALUE_LEVELS:
            raise RequestError(
                f"a value in a JSON schema that is no schema, such as a constant, may be nested "
                f"through at most {_MAX_VALUE_LEVELS} levels"
            )
        children = item.values() if isinstance(item, dict) else item
        pending += [
            (each, level + 1)
            for each in children
            if isinstance(each, dict | list) and id(each) not in inner
        ]
