"""Rewrites keywords of JSON Schema that say what a value must not be (`not`, `if`, `oneOf`,
`dependentRequired` and the like) into alternatives.

The negation of a schema is the union of the negations of its keywords. Some of these cannot be
expressed, and are left out: a negation allows nothing that the schema allows, but perhaps not all
that the schema forbids. So it is made of schemas as they were given: the negation of one that has
been rewritten, and allows less, would allow more.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator
from typing import Any

from aioinfer.text.json_schema import Schema, find_target
from aioinfer.text.schema_numbers import inclusive_bounds, is_number

TYPES = ("null", "boolean", "number", "string", "array", "object")
#: Keywords that forbid values and that `_negations` has no negation of.
_OPAQUE = frozenset(
    ["pattern", "format", "multipleOf", "items", "prefixItems", "additionalItems", "contains",
     "uniqueItems", "additionalProperties", "patternProperties", "propertyNames", "if",
     "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
     "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"]
)  # fmt: skip
#: Limits of what one schema may cost: comparisons and negations, references within each other,
#: alternatives of `oneOf`, and conditional keywords of one object.
_MAX_STEPS, _MAX_DEPTH, _MAX_BRANCHES, _MAX_DEPENDENCIES = 20_000, 12, 40, 12
#: Values that a range of integers may have to be listed, and numbers that a negation may exclude.
_MAX_LISTED = 12
#: Characters of all texts that a regular expression may exclude, and of each.
_MAX_CHARS, _MAX_LENGTH = 400, 80


class TooComplexError(Exception):
    """A schema needs more steps than it may."""


class Logic:
    """The steps of rewriting that need the whole schema, to follow references."""

    def __init__(self, root: Schema):
        self._root = root
        self._num_steps = 0

    def dependencies(self, schema: Schema) -> Schema:
        """Returns a schema without `dependentRequired`, `dependentSchemas` and `dependencies`: for
        each name, the property is absent, or what depends on it holds."""
        names = ("dependentRequired", "dependentSchemas", "dependencies")
        given = [schema[name] for name in names if name in schema]
        if not given or not all(isinstance(each, dict) for each in given):
            return schema
        found = [pair for each in given for pair in each.items()]
        if len(found) > _MAX_DEPENDENCIES:
            return schema
        required = schema.get("required", [])
        added = []
        for name, then in found:
            if isinstance(then, list):
                then = {"required": [name, *then]}
            elif isinstance(then, dict):
                then = {"allOf": [{"required": [name]}, then]}
            elif not isinstance(then, bool):
                return schema
            if isinstance(required, list) and name in required:
                added.append(then)
            elif then is not True:
                absent = {"properties": {name: False}}
                added.append({"anyOf": [absent, then]} if then else absent)
        return _with(schema, added, *names)

    def negation(self, schema: Schema) -> Schema:
        """Returns a schema without `not`."""
        if "not" not in schema or (negated := self.negate(schema["not"])) is None:
            return schema
        return _with(schema, [negated], "not")

    def condition(self, schema: Schema) -> Schema:
        """Returns a schema without `if`: it holds with `then`, or its negation with `else`."""
        if "if" not in schema:
            return _without(schema, "then", "else")
        condition, then, other = (schema.get(name, True) for name in ("if", "then", "else"))
        added: list[Any] = []
        if then is not True or other is not True:
            if (negated := self.negate(condition)) is None:
                return schema
            added = [{"anyOf": [_both(condition, then), _both(negated, other)]}]
        return _with(schema, added, "if", "then", "else")

    def conditions(self, schema: Schema) -> Schema:
        """Returns a schema with alternatives in the place of members of `allOf` that are `if` with
        `then`, if no two of their conditions can hold: one alternative for each, and one without
        them all. (One after the other, they would become a product of alternatives.)"""
        members = _schemas(schema.get("allOf"))
        found = [
            each
            for each in members
            if isinstance(each, dict) and "if" in each and each.keys() <= {"if", "then", "$comment"}
        ]
        if not 1 < len(found) <= _MAX_BRANCHES:
            return schema
        within = [_both(_around(schema), each["if"]) for each in found]
        if not all(self.are_disjoint(*pair) for pair in itertools.combinations(within, 2)):
            return schema
        negated = [self.negate(each["if"]) for each in found]
        if None in negated:
            return schema
        options = [_both(each["if"], each.get("then", True)) for each in found]
        rest = [each for each in members if not any(each is other for other in found)]
        return {**schema, "allOf": [*rest, {"anyOf": [*options, _all(negated)]}]}

    def alternatives(self, schema: Schema) -> Schema:
        """Returns a schema with `anyOf` in the place of `oneOf`: each alternative holds with the
        negation of the alternatives that are not evidently disjoint from it."""
        given = schema.get("oneOf")
        if not isinstance(given, list) or not 0 < len(given) <= _MAX_BRANCHES:
            return schema
        within = [_both(_around(schema), each) for each in given]
        others: list[list[Any]] = [[] for _ in given]
        for first, second in itertools.combinations(range(len(given)), 2):
            if self.are_disjoint(within[first], within[second]):
                continue
            for one, other in ((first, second), (second, first)):
                if (negated := self.negate(given[other])) is None:
                    return schema
                others[one].append(negated)
        branches = [
            {"allOf": [each, *negated]} if negated else each
            for each, negated in zip(given, others, strict=True)
        ]
        if "anyOf" in schema:
            return _with(schema, [{"anyOf": branches}], "oneOf")
        # in its place, which counts for the order of properties
        return {
            "anyOf" if name == "oneOf" else name: branches if name == "oneOf" else value
            for name, value in schema.items()
        }

    def negate(self, schema: Any, depth: int = 0) -> Any:
        """Returns a schema of values that another one forbids: of most of them, or of all. None
        where no such value can be described."""
        self._count_step()
        if not isinstance(schema, dict):
            return not schema if isinstance(schema, bool) else None
        if depth > _MAX_DEPTH:
            return None
        parts: list[Any] = []
        is_opaque = bool(_OPAQUE & schema.keys())
        for part in self._negations(schema, depth + 1):
            if part is None:
                is_opaque = True
            elif part is True:
                return True
            elif part is not False:
                parts.append(part)
        if not parts:
            return None if is_opaque else False
        return parts[0] if len(parts) == 1 else {"anyOf": parts}

    def _negations(self, schema: Schema, depth: int) -> Iterator[Any]:
        """Yields the negations of the keywords of a schema; None for one that has none."""
        if "type" in schema:
            types = _types_of(schema["type"])
            rest = [name for name in TYPES if name not in types]
            yield {"type": rest} if types and rest else None
        if (values := _listed(schema)) is not None:
            self._count_step(len(values))
            yield _all_but(values)
        for name in _strings(schema.get("required")):
            yield {"type": "object", "properties": {name: False}}
        yield from self._negations_of_properties(schema, depth)
        yield from _negations_of_numbers(schema)
        yield from _negations_of_lengths(schema)
        for each in _schemas(schema.get("allOf")):
            yield self.negate(each, depth)
        for keyword in ("anyOf", "oneOf"):
            if _schemas(schema.get(keyword)):
                negated = [self.negate(each, depth) for each in schema[keyword]]
                yield None if None in negated else _all(negated)
        if "not" in schema:
            yield schema["not"]
        if "$ref" in schema:
            yield self.negate(self._target(schema["$ref"]), depth)

    def _negations_of_properties(self, schema: Schema, depth: int) -> Iterator[Any]:
        named = schema.get("properties")
        for name, each in named.items() if isinstance(named, dict) else ():
            negated = self.negate(each, depth)
            if negated is None or negated is False:
                yield negated
            else:
                yield {"type": "object", "required": [name], "properties": {name: negated}}

    def are_disjoint(self, first: Any, second: Any, depth: int = 0) -> bool:
        """Whether it is evident that no value follows both of two schemas."""
        self._count_step()
        if first is False or second is False:
            return True
        if depth > _MAX_DEPTH:
            return False
        one, other = self._conjuncts(first), self._conjuncts(second)
        for these, whole in ((one, second), (other, first)):
            for each in these:
                for keyword in ("anyOf", "oneOf"):
                    options = _schemas(each.get(keyword))
                    if options and all(
                        self.are_disjoint(option, whole, depth + 1) for option in options
                    ):
                        return True
        return self._differ(one + other, depth)

    def _differ(self, conjuncts: list[Schema], depth: int) -> bool:
        """Whether it is evident that no value follows all of some schemas."""
        if False in conjuncts:
            return True
        types = set(TYPES)
        listed: set[Any] | None = None
        for each in conjuncts:
            if "type" in each:
                types &= _types_of(each["type"])
            if (values := _listed(each)) is not None:
                self._count_step(len(values))
                known = {_comparable(value) for value in values}
                listed = known if listed is None else listed & known
        if listed is not None:
            types &= {kind for kind, _ in listed}
        return all(
            _has_empty_range(conjuncts, _RANGES[kind])
            if kind in _RANGES
            else kind == "object" and self._have_no_object(conjuncts, depth)
            for kind in types
        )

    def _have_no_object(self, conjuncts: list[Schema], depth: int) -> bool:
        """Whether it is evident that a required property cannot follow all of some schemas."""
        required = {name for each in conjuncts for name in _strings(each.get("required"))}
        for name in required:
            members = [_member(each, name) for each in conjuncts]
            for first, second in itertools.combinations(
                [each for each in members if each != {}], 2
            ):
                if self.are_disjoint(first, second, depth + 1):
                    return True
            if False in members:
                return True
        return False

    def _conjuncts(self, schema: Any) -> list[Any]:
        """Returns the schemas that must all hold where a schema holds: itself, the target of its
        reference, and its `allOf`."""
        found: list[Any] = []
        pending = [schema]
        while pending and len(found) <= _MAX_BRANCHES:
            item = pending.pop()
            if not isinstance(item, dict) or any(item is each for each in found):
                if item is False:
                    found.append({"enum": []})
                continue
            found.append(item)
            pending += _schemas(item.get("allOf"))
            if "$ref" in item:
                pending.append(self._target(item["$ref"]))
        return found

    def _target(self, reference: Any) -> Any:
        """Returns the schema that a reference points at, or None where the target cannot be
        determined."""
        if reference == "#":
            return self._root
        return find_target(self._root, reference) if isinstance(reference, str) else None

    def followed(self, schema: Any) -> Any:
        """Returns the target of a schema that is only a reference, or the schema itself."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or schema.keys() != {"$ref"}:
                break
            schema = self._target(schema["$ref"])
        return schema

    def listed(self, schema: Any) -> list[Any] | None:
        """Returns the values that a schema allows at most, if these are few and evident."""
        for each in self._conjuncts(schema):
            if (values := _listed(each)) is not None:
                return values
        for each in self._conjuncts(schema):
            low, high = each.get("minimum"), each.get("maximum")
            if (
                each.get("type") == "integer"
                and isinstance(low, int)
                and isinstance(high, int)
                and high - low < _MAX_LISTED
            ):
                return list(range(low, high + 1))
            if each.get("type") == "boolean":
                return [False, True]
        return None

    def counted(self, schema: Schema) -> Schema:
        """Returns a schema that is about to be rewritten. Raises `TooComplexError` where these have
        become too many."""
        self._count_step()
        return schema

    def _count_step(self, num_values: int = 0) -> None:
        self._num_steps += 1 + num_values // 10
        if self._num_steps > _MAX_STEPS:
            raise TooComplexError


#: Keywords of the least and of the most of something, by type.
_RANGES = {
    "number": ("minimum", "maximum"),
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
}


def _has_empty_range(conjuncts: list[Schema], keywords: tuple[str, str]) -> bool:
    low, high = keywords
    lows = [each[low] for each in conjuncts if is_number(each.get(low))]
    highs = [each[high] for each in conjuncts if is_number(each.get(high))]
    return bool(lows and highs) and max(lows) > min(highs)


def _with(schema: Schema, added: list[Any], *gone: str) -> Schema:
    """Returns a schema with others that have to hold, too, and without some keywords."""
    changed = _without(schema, *gone)
    added = [each for each in added if each is not True and each != {}]
    if added:
        given = changed.get("allOf", [])
        changed = {**changed, "allOf": [*given, *added] if isinstance(given, list) else given}
    return changed


def _without(schema: Schema, *keywords: str) -> Schema:
    if not schema.keys() & set(keywords):
        return schema
    return {name: value for name, value in schema.items() if name not in keywords}


def _around(schema: Schema) -> Schema:
    """Returns the keywords of a schema that also hold for the alternatives within it."""
    return {name: schema[name] for name in ("type", "properties", "required") if name in schema}


def _both(first: Any, second: Any) -> Any:
    return _all([first, second])


def _all(schemas: list[Any]) -> Any:
    """Returns a schema of values that follow all of some schemas."""
    if False in schemas:
        return False
    some = [each for each in schemas if each is not True and each != {}]
    return some[0] if len(some) == 1 else {"allOf": some} if some else True


def _schemas(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _strings(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _types_of(value: Any) -> set[str]:
    names = value if isinstance(value, list) else [value]
    return {"number" if name == "integer" else name for name in names if isinstance(name, str)}


def _member(schema: Schema, name: str) -> Any:
    """Returns the schema of a property within another schema."""
    named = schema.get("properties")
    if isinstance(named, dict) and name in named:
        return named[name]
    return {} if "patternProperties" in schema else schema.get("additionalProperties", {})


def _listed(schema: Any) -> list[Any] | None:
    """Returns the values of `const` or `enum`."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _comparable(value: Any) -> tuple[str, Any]:
    """Returns the type of a JSON value, and a key that is equal for equal values."""
    if isinstance(value, bool):
        return "boolean", value
    if isinstance(value, dict):
        return "object", frozenset((name, _comparable(each)) for name, each in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_comparable, value))
    if isinstance(value, str):
        return "string", value
    return ("null", None) if value is None else ("number", value)


def different(values: list[Any]) -> list[Any]:
    """Returns the values of a list, each once, as JSON Schema compares them."""
    return list({_comparable(value): value for value in reversed(values)}.values())[::-1]


def _all_but(values: list[Any]) -> Any:
    """Returns a schema of values but some: of arrays and objects, of none where some are among
    these."""
    kinds: dict[str, list[Any]] = {}
    for value in different(values):
        kinds.setdefault(_comparable(value)[0], []).append(value)
    parts: list[Any] = []
    if rest := [name for name in TYPES if name not in kinds]:
        parts.append({"type": rest})
    if "boolean" in kinds:
        parts += [{"const": each} for each in (False, True) if each not in kinds["boolean"]]
    if "string" in kinds and (pattern := _pattern_unlike(kinds["string"])) is not None:
        parts.append({"type": "string", "pattern": pattern})
    numbers = sorted(kinds.get("number", []))
    if numbers and len(numbers) <= _MAX_LISTED:
        bounds = [None, *numbers, None]
        for low, high in itertools.pairwise(bounds):
            part: Schema = {"type": "number"}
            if low is not None:
                part["exclusiveMinimum"] = low
            if high is not None:
                part["exclusiveMaximum"] = high
            parts.append(inclusive_bounds(part))
    return {"anyOf": parts} if parts else None


def _pattern_unlike(texts: Collection[str]) -> str | None:
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


def _negations_of_numbers(schema: Schema) -> Iterator[Any]:
    for name, other in (("inimum", "aximum"), ("aximum", "inimum")):
        bound = schema.get(f"m{name}")
        if is_number(bound):
            is_strict = schema.get(f"exclusiveM{name}") is True  # of draft 4
            beyond = f"m{other}" if is_strict else f"exclusiveM{other}"
            yield inclusive_bounds({"type": "number", beyond: bound})
        bound = schema.get(f"exclusiveM{name}")
        if is_number(bound):
            yield {"type": "number", f"m{other}": bound}


def _negations_of_lengths(schema: Schema) -> Iterator[Any]:
    for kind, name in (("string", "Length"), ("array", "Items")):
        least, most = schema.get(f"min{name}"), schema.get(f"max{name}")
        if isinstance(least, int):
            yield {"type": kind, f"max{name}": least - 1} if least > 0 else False
        if isinstance(most, int):
            yield {"type": kind, f"min{name}": most + 1}
