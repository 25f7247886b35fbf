"""Rewrites keywords of JSON Schema that llguidance does not enforce into such that it does.

A rewritten schema allows nothing that the given one forbids. Most rewritings are exact; that of
`contains` is narrower: the items that it demands come first. What cannot be rewritten stays, and
is refused by its name when the grammar is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aioinfer.text.json_schema import MAX_SCHEMA_VALUES, Schema, map_inner
from aioinfer.text.schema_numbers import (
    check_numbers,
    exact_bounds,
    inclusive_bounds,
    whole_counts,
)
from aioinfer.text.schema_parts import with_parts

Steps = tuple[Callable[[Schema], Schema], ...]

#: Keywords whose subschemas see the same instance: what they evaluate counts for `unevaluated*`.
_IN_PLACE = frozenset(
    ["anyOf", "allOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "$recursiveRef",
     "dependentSchemas"]
)  # fmt: skip
#: Items that `contains` may demand.
_MAX_CONTAINED = 16
#: Names that `propertyNames` may list.
_MAX_NAMES = 1_000


def rewrite(schema: Any) -> Any:
    """Returns a decoded schema with what can be rewritten; the same object where nothing has to
    be. The argument is not changed; the result may hold an object several times.

    Raises `RequestError` for numbers that cannot be enforced exactly, and for what is nested too
    deeply.
    """
    if not isinstance(schema, dict):
        return schema
    parted = with_parts(schema)
    rewritten = _rewrite(parted, _STEPS)
    if _size(rewritten) > MAX_SCHEMA_VALUES:
        rewritten = _rewrite(parted, _STEPS_OF_NUMBERS)
    rewritten = with_parts(rewritten)
    check_numbers(rewritten)
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


def _rewrite(schema: Any, steps: Steps) -> Any:
    if not isinstance(schema, dict):
        return schema
    draft = schema.get("$schema")
    if isinstance(draft, str) and "2020-12" not in draft:
        steps = _STEPS_OF_ALL_DRAFTS
    changed = map_inner(schema, lambda inner: _rewrite(inner, steps))
    for step in steps:
        changed = step(changed)
    return changed


def _without(schema: Schema, *keywords: str, **others: Any) -> Schema:
    if not keywords:
        return schema
    return {name: value for name, value in schema.items() if name not in keywords} | others


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
    whole_counts,
    exact_bounds,
    inclusive_bounds,
    _unique_items,
    _property_names,
    _numbers_of_properties,
    _negation,
)
#: Those of draft 2020-12, in which `prefixItems` exists.
_STEPS: Steps = (_unevaluated, _contains, *_STEPS_OF_ALL_DRAFTS)
#: What is done to a schema that the others would make too large.
_STEPS_OF_NUMBERS: Steps = (whole_counts, exact_bounds)
