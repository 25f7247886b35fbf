"""Rewrites keywords of JSON Schema that llguidance does not enforce into such that it does.

A rewritten schema allows nothing that the given one forbids. Most rewritings are exact; that of
`contains` is narrower: the items that it demands come first. What cannot be rewritten stays, and
is refused by its name when the grammar is compiled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from aioinfer.text.json_schema import MAX_SCHEMA_VALUES

Schema = dict[str, Any]
Steps = tuple[Callable[[Schema], Schema], ...]

#: Keywords whose value is a schema, a list of schemas, or an object of schemas by name.
_ONE = ("items", "additionalProperties", "contains", "not", "unevaluatedProperties",
        "unevaluatedItems", "propertyNames", "if", "then", "else")  # fmt: skip
_MANY = ("anyOf", "allOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
#: Keywords whose subschemas see the same instance: what they evaluate counts for `unevaluated*`.
_IN_PLACE = frozenset(
    ["anyOf", "allOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "$recursiveRef",
     "dependentSchemas"]
)  # fmt: skip
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties",
           "minContains", "maxContains")  # fmt: skip
#: Items that `contains` may demand.
_MAX_CONTAINED = 16
#: Names that `propertyNames` may list.
_MAX_NAMES = 1_000
#: Significant digits of a bound that takes the place of an exclusive one.
_DIGITS = 13
#: Integers below the one have a float64 each, and those beside the other have no more than some 20
#: digits.
_EXACT, _TINY = 2**53, 1e-4
#: Deeper schemas are left as they are.
_MAX_DEPTH = 100
#: What the JSON of a schema holds if anything in it can be rewritten.
_HINTS = re.compile(
    r'"(?:uniqueItems|unevaluated\w+|propertyNames|contains|not|minProperties|maxProperties|'
    r'exclusive\w+)"|\d\.0'
)


def rewrite_text(source: str, schema: Any) -> str:
    """Returns the JSON of a schema with what can be rewritten; `source` itself, whose numbers stay
    as they are written, where nothing has to be. `schema` is what `source` decodes to."""
    if not _HINTS.search(source):
        return source
    rewritten = rewrite(schema)
    if rewritten is schema:
        return source
    try:
        return json.dumps(rewritten, allow_nan=False)
    except (ValueError, RecursionError):  # a number that is no float64; or it is nested too deeply
        return source


def rewrite(schema: Any) -> Any:
    """Returns a decoded schema with what can be rewritten; the same object where nothing has to
    be, or where it would become too large. The argument is not changed; the result may hold an
    object several times."""
    rewritten = _rewrite(schema, _STEPS, 0)
    if rewritten is not schema and _size(rewritten) > MAX_SCHEMA_VALUES:
        return schema
    return rewritten


def _size(value: Any) -> int:
    """Returns how many values lists and objects hold, at all depths; what is there several times
    counts as often, and is looked at once."""
    sizes: dict[int, int] = {}
    pending = [value]
    while pending:
        item = pending[-1]
        inner = item.values() if isinstance(item, dict) else item
        nested = [each for each in inner if isinstance(each, dict | list)]
        if unknown := [each for each in nested if id(each) not in sizes]:
            pending += unknown
            continue
        pending.pop()
        sizes[id(item)] = len(item) + sum(sizes[id(each)] for each in nested)
    return sizes[id(value)]


def _rewrite(schema: Any, steps: Steps, depth: int) -> Any:
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return schema
    draft = schema.get("$schema")
    if isinstance(draft, str) and "2020-12" not in draft:
        steps = _STEPS_OF_ALL_DRAFTS
    changed = _with_inner(schema, steps, depth + 1)
    for step in steps:
        changed = step(changed)
    return changed


def _with_inner(schema: Schema, steps: Steps, depth: int) -> Schema:
    """Returns a schema with the schemas within it rewritten."""
    found: Schema = {}
    for keyword, value in schema.items():
        after: Any = value
        if keyword in _ONE:
            after = _rewrite(value, steps, depth)
        elif keyword in _MANY and isinstance(value, list):
            after = _same_or([_rewrite(each, steps, depth) for each in value], value)
        elif keyword in _NAMED and isinstance(value, dict):
            named = {name: _rewrite(each, steps, depth) for name, each in value.items()}
            after = named if any(named[name] is not value[name] for name in value) else value
        if after is not value:
            found[keyword] = after
    return {**schema, **found} if found else schema


def _same_or(after: list[Any], before: list[Any]) -> list[Any]:
    same = all(new is old for new, old in zip(after, before, strict=True))
    return before if same else after


def _without(schema: Schema, *keywords: str, **others: Any) -> Schema:
    if not keywords:
        return schema
    return {name: value for name, value in schema.items() if name not in keywords} | others


def _counts(schema: Schema) -> Schema:
    """Integers that are written as decimals, such as `"minItems": 2.0`."""
    found = {
        name: int(schema[name])
        for name in _COUNTS
        if isinstance(schema.get(name), float)
        and math.isfinite(schema[name])
        and schema[name].is_integer()
    }
    return {**schema, **found} if found else schema


def _exclusive_bounds(schema: Schema) -> Schema:
    """Exclusive bounds of numbers that may have decimals: the next number of 13 digits. A number
    nearer to the bound, such as 182.0000000000000001, would be the bound itself for most parsers;
    and llguidance reads no more than some 16 digits of a bound."""
    if schema.get("type") == "integer":
        return schema
    found: Schema = {}
    for name, inclusive, towards, tighter in (
        ("exclusiveMinimum", "minimum", 1, max),
        ("exclusiveMaximum", "maximum", -1, min),
    ):
        bound, other = schema.get(name), schema.get(inclusive)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            continue  # of draft 4, or none
        # next to zero are numbers of hundreds of digits
        if not _TINY <= abs(bound) < _EXACT or (
            other is not None and not isinstance(other, int | float)
        ):
            continue
        digit = 10.0 ** (math.floor(math.log10(abs(bound))) - _DIGITS + 1)
        following = float(f"{bound + towards * digit:.{_DIGITS}g}")
        found[inclusive] = following if other is None else tighter(following, other)
    return _without(schema, *(f"exclusive{name.title()}" for name in found), **found)


def _unique_items(schema: Schema) -> Schema:
    """`uniqueItems` that forbids nothing."""
    if "uniqueItems" not in schema:
        return schema
    most = schema.get("maxItems")
    if schema["uniqueItems"] is False or (isinstance(most, int) and most <= 1):
        return _without(schema, "uniqueItems")
    return schema


def _unevaluated(schema: Schema) -> Schema:
    """`unevaluatedProperties` and `unevaluatedItems` beside nothing that evaluates in place: the
    same as `additionalProperties` and `items`."""
    if _IN_PLACE & schema.keys():
        return schema
    if "unevaluatedProperties" in schema:
        value = schema["unevaluatedProperties"]
        schema = _without(schema, "unevaluatedProperties")
        schema.setdefault("additionalProperties", value)
    if "unevaluatedItems" in schema and "contains" not in schema:
        value = schema["unevaluatedItems"]
        schema = _without(schema, "unevaluatedItems")
        schema.setdefault("items", value)
    return schema


def _property_names(schema: Schema) -> Schema:
    """`propertyNames` by a list or by a pattern, where an object's members have no other names."""
    names = schema.get("propertyNames")
    if names is True or names == {} or names == {"type": "string"}:
        return _without(schema, "propertyNames")
    if {"properties", "patternProperties"} & schema.keys():
        return schema
    rest = schema.get("additionalProperties", True)
    if names is False:
        return _without(schema, "propertyNames", additionalProperties=False)
    if not isinstance(names, dict):
        return schema
    rules = _without(names, "type", "title", "description")
    if names.get("type", "string") != "string":
        return schema
    listed = rules.get("enum", [rules["const"]] if "const" in rules else None)
    if len(rules) == 1 and isinstance(listed, list) and len(listed) <= _MAX_NAMES:
        properties = {name: rest for name in listed if isinstance(name, str)}
        return _without(schema, "propertyNames", properties=properties, additionalProperties=False)
    if rules.keys() == {"pattern"} and isinstance(rules["pattern"], str):
        patterns = {rules["pattern"]: rest}
        return _without(
            schema, "propertyNames", patternProperties=patterns, additionalProperties=False
        )
    return schema


def _contains(schema: Schema) -> Schema:
    """`contains`: the items that it demands come first."""
    if "contains" not in schema:
        return schema
    number = schema.get("minContains", 1)
    if "maxContains" in schema or "prefixItems" in schema or not isinstance(number, int):
        return schema
    if not 0 <= number <= _MAX_CONTAINED or isinstance(schema.get("items"), list):
        return schema
    wanted, items = schema["contains"], schema.get("items", True)
    least = schema.get("minItems", 0)
    schema = _without(schema, "contains", "minContains")
    if not number:
        return schema
    each = wanted if items is True or items == {} else {"allOf": [items, wanted]}
    return {
        **schema,
        "prefixItems": [each] * number,
        "minItems": max(least, number) if isinstance(least, int) else least,
    }


def _numbers_of_properties(schema: Schema) -> Schema:
    """`minProperties` and `maxProperties` that follow from what else the schema says."""
    required = schema.get("required")
    least, most = schema.get("minProperties"), schema.get("maxProperties")
    if isinstance(least, int) and (
        least <= 0 or (isinstance(required, list) and least <= _num_different(required))
    ):
        schema = _without(schema, "minProperties")
    named = schema.get("properties")
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    num_named = len(named) if isinstance(named, dict) else 0
    if isinstance(most, int) and closed and most >= num_named:
        schema = _without(schema, "maxProperties")
    return schema


def _num_different(names: list[Any]) -> int:
    return len({name for name in names if isinstance(name, str)})


def _negation(schema: Schema) -> Schema:
    """`not` that forbids nothing."""
    if schema.get("not") is False:
        return _without(schema, "not")
    return schema


_STEPS_OF_ALL_DRAFTS: Steps = (
    _counts,
    _exclusive_bounds,
    _unique_items,
    _property_names,
    _numbers_of_properties,
    _negation,
)
#: Those of draft 2020-12, in which `prefixItems` exists.
_STEPS: Steps = (_unevaluated, _contains, *_STEPS_OF_ALL_DRAFTS)
