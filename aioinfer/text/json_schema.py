"""Validation of JSON schemas before llguidance compiles them: refuses keywords that llguidance
would accept without enforcing them, and schemas that would take it too long.

llguidance itself refuses the keywords that it does not know to be annotations (`not`, `if`,
`uniqueItems` and the like), where `schema_rewriting` has left them; `grammar.describe` puts its
messages into words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from aioinfer.errors import RequestError

Schema = dict[str, Any]

#: JSON values of a schema, at all depths.
MAX_SCHEMA_VALUES = 8_192
#: Properties of one object.
MAX_PROPERTIES = 1_000
#: Characters of a regular expression, and of all in a schema: compiling one takes a time that grows
#: with the square of its length, 0.3 s for 4 000 characters at worst.
MAX_PATTERN_CHARS = 2_048
MAX_ALL_PATTERN_CHARS = 16 * 1024
#: Members of all `patternProperties`, of which each two are checked to be disjoint.
MAX_PATTERN_PROPERTIES = 50
#: The least common multiple of all `multipleOf`, decimal points and trailing zeros left out: the
#: automaton of a number has as many states.
MAX_MULTIPLE = 2_000

#: Levels of lists and objects in a schema, and in the target of each reference within it:
#: llguidance descends them on the stack of the thread (see `engine.restriction_compiler`).
MAX_LEVELS = 2_000

#: Keywords whose value is a schema, a list of schemas, or an object of schemas by name. (Some are
#: a list or a schema, and members of `dependencies` may be no schemas.)
_ONE = frozenset(
    ["items", "additionalItems", "additionalProperties", "contains", "not", "propertyNames",
     "unevaluatedProperties", "unevaluatedItems", "if", "then", "else"]
)  # fmt: skip
_MANY = frozenset(["anyOf", "allOf", "oneOf", "prefixItems", "items"])
_NAMED = frozenset(
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"]
)


def inner_schemas(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yields the schemas right within a schema, each behind its place: a keyword, and the name or
    the number where it has several."""
    for keyword, value in schema.items():
        if keyword in _MANY and isinstance(value, list):
            for number, each in enumerate(value):
                yield (keyword, number), each
        elif keyword in _NAMED and isinstance(value, dict):
            for name, each in value.items():
                if isinstance(each, dict | bool):
                    yield (keyword, name), each
        elif keyword in _ONE and isinstance(value, dict | bool):
            yield (keyword,), value


def map_inner(schema: Schema, change: Callable[[Any], Any], but: Collection[str] = ()) -> Schema:
    """Returns a schema with each of the schemas right within it changed; the same object where
    all of these stay the same objects. Schemas of the keywords `but` stay."""
    found: dict[str, Any] = {}
    for place, inner in inner_schemas(schema):
        keyword = place[0]
        if keyword in but or (after := change(inner)) is inner:
            continue
        assert isinstance(keyword, str)
        if len(place) == 1:
            found[keyword] = after
            continue
        if keyword not in found:
            found[keyword] = schema[keyword].copy()
        found[keyword][place[1]] = after
    return {**schema, **found} if found else schema


def check_schema(schema: Any) -> Any:
    """Returns a decoded schema. Raises `RequestError` for a schema that is refused."""
    if not isinstance(schema, dict | bool):
        raise RequestError("a JSON schema must be an object or a boolean")
    if isinstance(schema, bool):
        return schema
    if _count_values(schema) > MAX_SCHEMA_VALUES:
        raise RequestError(f"a JSON schema may hold at most {MAX_SCHEMA_VALUES} values")
    if "x-guidance" in schema:
        raise RequestError("the JSON schema keyword 'x-guidance' is not supported")
    if (levels := _count_levels(schema)) > MAX_LEVELS:
        raise RequestError(
            f"a JSON schema may be nested through at most {MAX_LEVELS} levels, those of its "
            f"references added, not {levels}"
        )
    num_chars = num_patterns = 0
    multiple = 1
    for each in subschemas(schema):
        _check_keywords(each)
        num_chars += sum(map(len, _patterns(each)))
        num_patterns += len(each.get("patternProperties", ()))
        multiple = math.lcm(multiple, _numerator(each.get("multipleOf")))
        if multiple > MAX_MULTIPLE:
            raise RequestError("the JSON schema's values of 'multipleOf' have too many digits")
    if num_patterns > MAX_PATTERN_PROPERTIES:
        raise RequestError(
            f"a JSON schema may have at most {MAX_PATTERN_PROPERTIES} 'patternProperties', not "
            f"{num_patterns}"
        )
    if num_chars > MAX_ALL_PATTERN_CHARS:
        raise RequestError(
            f"the patterns of a JSON schema may have at most {MAX_ALL_PATTERN_CHARS} characters "
            f"in all, not {num_chars}"
        )
    return schema


def _count_values(value: Any) -> int:
    """Returns how many values lists and objects hold, at all depths."""
    count, pending = 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict | list):
            count += len(item)
            pending.extend(item.values() if isinstance(item, dict) else item)
    return count


def _count_levels(schema: Any) -> int:
    """Returns the depth of a schema's lists and objects, plus the depth of every target of a
    `$ref`: an upper bound of how deep a descent through references is that enters each target
    once."""
    items: list[Any] = [schema]  # values that hold others, parents first
    for item in items:
        children = item.values() if isinstance(item, dict) else item
        items.extend(each for each in children if isinstance(each, dict | list))
    depths: dict[int, int] = {}
    targets: set[str] = set()
    for item in reversed(items):
        children = item.values() if isinstance(item, dict) else item
        depths[id(item)] = 1 + max((depths.get(id(each), 0) for each in children), default=0)
        if isinstance(item, dict) and isinstance(reference := item.get("$ref"), str):
            targets.add(reference)
    whole = depths[id(schema)]
    return whole + sum(depths.get(id(find_target(schema, each)), whole) for each in targets)


def find_target(schema: Any, reference: str) -> Any:
    """Returns the schema that a reference such as `#/$defs/name` points at, or None where the
    target cannot be determined."""
    path = path_to(schema, reference)
    return path[-1][1] if path else None


def path_to(schema: Any, reference: str) -> list[tuple[str, Any]]:
    """Returns the path of a reference such as `#/$defs/name`: its segments as written, each with
    the value found there; empty where the target cannot be determined."""
    path: list[tuple[str, Any]] = []
    if not reference.startswith("#/"):
        return path
    for place in unquote(reference[2:]).split("/"):
        name = place.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict):
            schema = schema.get(name)
        elif isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            return []
        path.append((place, schema))
    return path


def subschemas(schema: Any) -> Iterator[Schema]:
    """Yields a schema and the schemas within it that are objects."""
    pending = [schema]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            yield item
            pending.extend(inner for _, inner in inner_schemas(item))


def _patterns(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yields the regular expressions of a schema itself, without its subschemas."""
    if isinstance(pattern := schema.get("pattern"), str):
        yield pattern
    if isinstance(named := schema.get("patternProperties"), dict):
        yield from named


def _check_keywords(schema: Mapping[str, Any]) -> None:
    for pattern in _patterns(schema):
        if len(pattern) > MAX_PATTERN_CHARS:
            raise RequestError(
                f"a pattern of a JSON schema may have at most {MAX_PATTERN_CHARS} characters, not "
                f"{len(pattern)}"
            )
    if "patternProperties" in schema and not isinstance(schema["patternProperties"], dict):
        raise RequestError("'patternProperties' of a JSON schema must be an object")
    named = schema.get("properties")
    if isinstance(named, dict) and len(named) > MAX_PROPERTIES:
        raise RequestError(
            f"'properties' of a JSON schema may have at most {MAX_PROPERTIES} members, not "
            f"{len(named)}"
        )


def _numerator(number: Any) -> int:
    """Returns the digits of a decimal number as an integer, trailing zeros left out; 1 for a value
    that is no positive number."""
    if not isinstance(number, int | float) or not 0 < number < math.inf:
        return 1
    mantissa = repr(number).partition("e")[0].replace(".", "").strip("0")
    return int(mantissa or 1)
