"""JSON schemas before a grammar is compiled: what is refused, which objects are closed, bounds
that are exact, and deep schemas in parts."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from aioinfer.errors import RequestError
from aioinfer.text.json_schema import MAX_SCHEMA_VALUES, check_schema
from aioinfer.text.schema_numbers import check_numbers, exact_bounds
from aioinfer.text.schema_parts import with_parts
from aioinfer.text.schema_rewriting import rewrite


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "properties": {"pattern": {"type": "string"}, "multipleOf": {}}},
        {"properties": {f"p{i}": {"type": "integer"} for i in range(1000)}},
        {"anyOf": [{"multipleOf": 0.01}, {"multipleOf": 100}, {"multipleOf": 15}]},
        {"const": {"multipleOf": 999_983, "x-guidance": {}}},
        {"$ref": "#/$defs/a~1b/items", "$defs": {"a/b": {"items": {"$ref": "#"}}}},
        {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(400)}},
    ],
)
def test_what_is_passed_on(schema: Any) -> None:
    assert check_schema(schema) is schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (3, "an object or a boolean"),
        ([], "an object or a boolean"),
        ({"x-guidance": {}}, "x-guidance"),
        ({"enum": [0] * (MAX_SCHEMA_VALUES + 1)}, f"at most {MAX_SCHEMA_VALUES} values"),
        ({"properties": {f"p{i}": {} for i in range(1001)}}, "at most 1000 members"),
        ({"items": {"pattern": "a" * 2049}}, "at most 2048 characters"),
        ({"anyOf": [{"pattern": "a" * 2000}] * 9}, "16384 characters in all"),
        ({"patternProperties": {f"^{i}": {} for i in range(51)}}, "patternProperties"),
        ({"patternProperties": 3}, "patternProperties"),
        ({"multipleOf": 999_983}, "multipleOf"),
        ({"allOf": [{"multipleOf": 0.101}, {"items": {"multipleOf": 103}}]}, "multipleOf"),
        (json.loads('{"items":' * 900 + "{}" + "}" * 900) | {"contains": {"$ref": "#/items"},
         "not": {"$ref": "elsewhere"}}, "levels"),
        ({"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2001)}}, "levels"),
    ],
)  # fmt: skip
def test_what_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_schema(schema)


LARGEST = 2**63 - 1024  # the float64 below 2^63


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"maximum": 2**53 + 1}, {"maximum": 2**53}),
        ({"minimum": 2**53 + 1}, {"minimum": 2**53 + 2, "maximum": LARGEST}),
        ({"maximum": -(2**53) - 1}, {"maximum": -(2**53) - 2, "minimum": -LARGEST}),
        ({"exclusiveMaximum": 2**53}, {"maximum": 2**53 - 1}),
        ({"exclusiveMinimum": -(2**60), "type": "integer"},
         {"minimum": -(2**60) + 128, "type": "integer"}),
        ({"exclusiveMaximum": 2**60, "maximum": 7}, {"maximum": 7}),
        ({"maximum": 2**53 + 2, "exclusiveMaximum": True}, {"maximum": 2**53}),
        ({"maximum": 2**60 + 256, "type": "integer"}, {"maximum": 2**60 + 256, "type": "integer"}),
        ({"maximum": 2**60 + 257}, {"maximum": 2**60 + 256}),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, {"minimum": -LARGEST, "maximum": LARGEST}),
        ({"minimum": 0, "maximum": 2**64 - 1}, {"minimum": 0, "maximum": LARGEST}),
        ({"maximum": 1e300}, {"maximum": LARGEST}),
    ],
)  # fmt: skip
def test_large_bounds_become_exact_within(schema: Any, expected: Any) -> None:
    changed = exact_bounds(schema)
    assert changed == expected
    check_numbers(changed)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"maximum": 2**53 - 1, "minimum": -(2**53) + 1},
        {"exclusiveMinimum": True, "minimum": 3},
        {"maximum": True},
    ],
)
def test_small_bounds_stay(schema: Any) -> None:
    assert exact_bounds(schema) is schema


@pytest.mark.parametrize(
    "schema",
    [
        {"minimum": 2**63}, {"minimum": 12345678901234567890}, {"maximum": -1e300},
        {"minimum": float("inf")}, {"minimum": 2**53 + 1, "maximum": 2**53 + 1},
    ],
)  # fmt: skip
def test_bounds_that_allow_no_exact_number(schema: Any) -> None:
    with pytest.raises(RequestError, match="2\\^63"):
        exact_bounds(schema)


@pytest.mark.parametrize(
    ("value", "is_exact"),
    [
        (2**53, True), (2**53 + 1, False), (2**53 + 2, True), (-(2**62), True), (-(2**63), False),
        (2**63, False), (1e300, False), (0.1, True), (True, True),
    ],
)  # fmt: skip
def test_constants(value: Any, is_exact: bool) -> None:
    for schema in ({"const": value}, {"items": {"enum": [3, {"a": [value]}]}}, {"maximum": value}):
        if is_exact:
            check_numbers(schema)
            continue
        with pytest.raises(RequestError, match="cannot be enforced exactly"):
            check_numbers(schema)
    check_numbers({"default": value, "examples": [value]})


def levels(value: Any) -> int:
    most, pending = 0, [(value, 1)]
    while pending:
        item, level = pending.pop()
        most = max(most, level)
        if isinstance(item, dict | list):
            children = item.values() if isinstance(item, dict) else item
            pending += [(each, level + 1) for each in children]
    return most


def nested(count: int, innermost: Any, value: Any = 3) -> Any:
    """Returns a schema of objects within arrays, and a value that follows it."""
    schema = innermost
    for _ in range(count):
        schema = {"properties": {"a": {"items": schema}}, "required": ["a"]}
        value = {"a": [value]}
    return schema, value


def test_a_deep_schema_has_parts_of_few_levels() -> None:
    schema, value = nested(90, {"type": "integer"})
    parted = with_parts(schema)
    assert parted is not None
    assert levels(schema) > 250
    assert levels(parted) < 100
    validator = jsonschema.Draft202012Validator(parted)
    validator.validate(value)
    assert not validator.is_valid(nested(90, {}, "text")[1])
    assert not validator.is_valid(nested(50, {}, {"b": 1})[1])


def test_references_into_parts() -> None:
    schema, _ = nested(40, {"properties": {"b": {"type": "string"}}})
    place = "/properties/a/items"
    whole = {"anyOf": [schema, {"$ref": f"#/anyOf/0{place * 40}/properties/b"}]}
    whole["$defs"] = {"part-0": {"type": "integer"}, "x": {"$ref": "#/$defs/part-0"}}
    parted = with_parts(whole)
    assert parted is not None
    assert parted["$defs"]["part-0"] == {"type": "integer"}
    validator = jsonschema.Draft202012Validator(parted)
    assert validator.is_valid("text")
    assert not validator.is_valid({})


@pytest.mark.parametrize(
    "schema", [{}, nested(9, {})[0], {"$ref": "#/$defs/a", "$defs": {"a": {}}}]
)
def test_shallow_schemas_stay(schema: Any) -> None:
    assert with_parts(schema) is schema


def test_references_into_what_may_be_rewritten_lead_to_defs() -> None:
    schema = {"allOf": [{"if": {"type": "string"}}, {"const": "x"}], "$defs": {"a": {"not": {}}},
              "items": {"anyOf": [{"$ref": "#/allOf/1"}, {"$ref": "#/$defs/a"}]}}  # fmt: skip
    parted = with_parts(schema)
    assert parted is not None
    first, second = parted["items"]["anyOf"]
    assert second == {"$ref": "#/$defs/a"}
    assert first == parted["allOf"][1] == {"$ref": "#/$defs/part-0"}
    assert parted["$defs"]["part-0"] == {"const": "x"}


def test_an_id_keeps_references_from_being_moved() -> None:
    inner = {"$id": "x", "$ref": "#/oneOf/0", "oneOf": [{"const": 1}]}
    assert with_parts({"items": inner}) is None
    stable = {"items": {"$id": "x", "not": {"$ref": "#/$defs/a"}, "$defs": {"a": {}}}}
    assert with_parts(stable) is None
    assert with_parts({"items": {"$ref": "http://here#/allOf/0"}, "$id": "http://here"}) is None
    rewritten = rewrite({"items": inner, "not": {}, "maximum": 2**53 + 1})
    assert rewritten == {"items": inner, "not": {}, "maximum": 2**53}


def test_what_cannot_be_parted() -> None:
    value: Any = 1
    for _ in range(60):
        value = [value]
    with pytest.raises(RequestError, match="such as a constant"):
        with_parts({"items": {"const": value}})
    with pytest.raises(RequestError, match="may not be nested this deeply"):
        with_parts(nested(90, {"$id": "x"})[0])
