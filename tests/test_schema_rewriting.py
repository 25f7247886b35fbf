"""What is rewritten in JSON schemas: it allows nothing that the schema forbids, and what it should
still allow."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from aioinfer.errors import RequestError
from aioinfer.text.schema_rewriting import rewrite

INTEGERS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
OBJECT: dict[str, Any] = {"type": "object"}
AB: dict[str, Any] = OBJECT | {"properties": {"a": {}, "b": {}}}
#: A schema, what it becomes, values that stay allowed, and values that both forbid.
CASES: list[tuple[Any, Any, list[Any], list[Any]]] = [
    (INTEGERS | {"uniqueItems": False}, INTEGERS, [[1, 1]], [["a"]]),
    (INTEGERS | {"uniqueItems": True, "maxItems": 1}, INTEGERS | {"maxItems": 1}, [[1]], [[1, 1]]),
    (
        INTEGERS | {"contains": {"const": 5}},
        INTEGERS
        | {"prefixItems": [{"allOf": [{"type": "integer"}, {"const": 5}]}], "minItems": 1},
        [[5], [5, 1]],
        [[], [1], ["5"], [5, "a"]],
    ),
    (
        {"contains": {"type": "string"}, "minContains": 2, "minItems": 3},
        {"prefixItems": [{"type": "string"}] * 2, "minItems": 3},
        [["a", "b", 1], 7],
        [["a", "b"], ["a", 1, 2], []],
    ),
    (INTEGERS | {"contains": {"const": 5}, "minContains": 0}, INTEGERS, [[], [1]], [["a"]]),
    (
        OBJECT | {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGERS},
        OBJECT | {"properties": {"a": INTEGERS, "b": INTEGERS}, "additionalProperties": False},
        [{}, {"a": [1]}, {"a": [], "b": [2]}],
        [{"c": [1]}, {"a": 1}],
    ),
    (
        OBJECT | {"propertyNames": {"pattern": "^x"}},
        OBJECT | {"patternProperties": {"^x": True}, "additionalProperties": False},
        [{}, {"x": 1, "xy": 2}],
        [{"y": 1}],
    ),
    (
        AB | {"propertyNames": {"enum": ["a", "c"]}},
        OBJECT | {"properties": {"a": {}, "b": False, "c": True}, "additionalProperties": False},
        [{}, {"a": 1, "c": 2}],
        [{"b": 1}, {"d": 1}],
    ),
    (
        AB | {"propertyNames": {"maxLength": 1}},
        AB | {"patternProperties": {"^(?s:.{0,1})$": True}, "additionalProperties": False},
        [{}, {"a": 1, "c": 2}],
        [{"aa": 1}],
    ),
    (
        OBJECT | {"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"pattern": "^x"}}},
        OBJECT
        | {"patternProperties": {"^x": True}, "additionalProperties": False,
           "$defs": {"n": {"pattern": "^x"}}},
        [{}, {"x": 1, "xy": 2}],
        [{"y": 1}],
    ),
    ({"type": "string", "format": "color"}, {"type": "string"}, ["a"], [1]),
    ({"format": "idn-email"}, {"format": "email"}, [1], []),
    ({"then": {"const": 1}, "type": "string"}, {"type": "string"}, ["a"], [1]),
    ({"$ref": "#/$defs/a<b>", "$defs": {"a<b>": {"const": 1}}},
     {"$ref": "#/$defs/a%3Cb%3E", "$defs": {"a<b>": {"const": 1}}}, [1], [2]),
    (OBJECT | {"propertyNames": {"type": "string"}}, OBJECT, [{"a": 1}], [3]),
    (OBJECT | {"propertyNames": False}, OBJECT | {"additionalProperties": False}, [{}],
     [{"a": 1}]),
    (AB | {"unevaluatedProperties": False}, AB | {"additionalProperties": False}, [{"a": 1}],
     [{"c": 1}]),
    (
        {"prefixItems": [{"type": "string"}], "unevaluatedItems": False},
        {"prefixItems": [{"type": "string"}], "items": False},
        [["a"], []],
        [["a", 1]],
    ),
    (AB | {"required": ["a"], "minProperties": 1}, AB | {"required": ["a"]}, [{"a": 1}], [{}]),
    (
        AB | {"additionalProperties": False, "maxProperties": 2},
        AB | {"additionalProperties": False},
        [{"a": 1, "b": 2}],
        [{"a": 1, "b": 2, "c": 3}],
    ),
    ({"minLength": 2.0}, {"minLength": 2}, ["ab", 1], ["a"]),
    ({"not": False, "type": "string"}, {"type": "string"}, ["a"], [1]),
    (
        {"type": "number", "exclusiveMinimum": 182.0, "exclusiveMaximum": 481, "maximum": 300},
        {"type": "number", "minimum": 182.0000000001, "maximum": 300},
        [182.1, 300],
        [182, 300.1, json.loads("182.0000000000000001")],
    ),
    (
        {"type": "number", "exclusiveMinimum": -118.5, "exclusiveMaximum": 118.5},
        {"type": "number", "minimum": -118.4999999999, "maximum": 118.4999999999},
        [-118.4, 0, 118.4],
        [-118.5, 118.5],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "expected", "allowed", "forbidden"), CASES)
def test_a_keyword_is_rewritten(
    schema: Any, expected: Any, allowed: list[Any], forbidden: list[Any]
) -> None:
    before = json.dumps(schema)
    assert rewrite(schema) == expected
    assert json.dumps(schema) == before
    for value, is_valid in [(v, True) for v in allowed] + [(v, False) for v in forbidden]:
        for each in (schema, expected):
            assert jsonschema.Draft202012Validator(each).is_valid(value) == is_valid, (each, value)
    if "$defs" in schema:  # relative to the whole
        return
    inner = {"anyOf": [{"properties": {"contains": schema}}, {"items": schema}], "$defs": {"x": 1}}
    assert rewrite(inner) == {
        "anyOf": [{"properties": {"contains": expected}}, {"items": expected}],
        "$defs": {"x": 1},
    }


@pytest.mark.parametrize(
    "schema",
    [
        True,
        3,
        {},
        INTEGERS | {"uniqueItems": True},
        {"const": {"contains": 1, "minLength": 2.0}},
        {"properties": {"contains": {"type": "string"}, "not": {}}},
        {"not": {"pattern": "a"}},
        {"if": {"pattern": "a"}, "then": {"minLength": 3}},
        {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]},
        {"dependentRequired": {f"{number}": ["a"] for number in range(20)}},
        {"propertyNames": {"format": "date"}},
        {"propertyNames": {"pattern": "a"}, "patternProperties": {"b": {}}},
        {"minProperties": 9, "properties": {f"{number}": {} for number in range(20)}},
        {"minProperties": 1, "properties": {"a": {}}, "additionalProperties": False},
        {"contains": {}, "maxContains": 2},
        {"contains": {}, "minContains": 1000},
        {"contains": {}, "prefixItems": [{}]},
        {"$schema": "http://json-schema.org/draft-07/schema#", "contains": {}},
        {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
        {"propertyNames": {"type": "integer", "enum": ["a"]}},
        {"type": "integer", "exclusiveMinimum": 3},
        {"exclusiveMinimum": True, "minimum": 3},
        {"exclusiveMinimum": 0},
    ],
)
def test_what_stays(schema: Any) -> None:
    assert rewrite(schema) is schema


def test_of_a_schema_that_would_become_too_large_only_numbers_are_rewritten() -> None:
    schema: dict[str, Any] = {"type": "array", "contains": {"const": 1}, "maximum": 2**53 + 1}
    for _ in range(15):  # each is written twice, in `items` and in what comes first
        schema = {"type": "array", "items": schema, "contains": {"type": "array"}}
    rewritten = rewrite(schema)
    assert rewritten == json.loads(json.dumps(schema).replace(str(2**53 + 1), str(2**53)))


def test_all_levels_of_a_deep_schema_are_rewritten() -> None:
    schema: dict[str, Any] = {"uniqueItems": False, "const": 1}
    for _ in range(300):
        schema = {"items": schema, "uniqueItems": False}
    rewritten = rewrite(schema)
    assert "uniqueItems" not in json.dumps(rewritten)
    jsonschema.Draft202012Validator(rewritten).validate([[[]]])


def test_what_a_reference_leads_to_is_rewritten_wherever_it_is() -> None:
    schema = {"$ref": "#/components/a", "components": {"a": {"items": {"uniqueItems": False}}}}
    rewritten = rewrite(schema)
    assert rewritten["$ref"].startswith("#/$defs/")
    assert list(rewritten["$defs"].values()) == [{"items": {}}]


@pytest.mark.parametrize("place", ["const", "enum", "maximum", "minimum"])
def test_numbers_that_are_not_exact_are_found_at_any_place(place: str) -> None:
    value: Any = [[{"x": 2**53 + 1}]] if place in ("const", "enum") else -(2**63)
    # within another `$id`, a reference leads to places that are no keywords
    schema = {"properties": {"a": {"$id": "x", "$ref": "#/b", "b": {place: value}}}}
    with pytest.raises(RequestError, match="cannot be enforced exactly"):
        rewrite(schema)
