"""Negations and alternatives: a rewritten schema allows nothing that the given one forbids."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from aioinfer.text.schema_logic import Logic, different
from aioinfer.text.schema_rewriting import rewrite

VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, 5, 1.5, -4, "", "a", "b", "ab", "ba", "abc", [], [1], [1, 1],
    [1, 2], ["a"], ["a", "b"], ["a", 1], [1, 2, 3], {}, {"a": 1}, {"a": 2}, {"a": "a"}, {"b": 1},
    {"b": "a"}, {"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": "a", "b": "b"}, {"c": 1}, {"c": None},
    {"a": 1, "c": 2}, {"a": 1, "b": 2, "c": 3}, {"a": {"a": 1}}, {"a": [1, 1]},
]  # fmt: skip
#: Keywords that are gone behind the rewriting.
GONE = ("not", "if", "then", "else", "oneOf", "dependentRequired", "dependentSchemas",
        "dependencies", "propertyNames", "minProperties", "maxProperties")  # fmt: skip


def is_valid(schema: Any, value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def random_logic(rng: random.Random, depth: int = 2) -> Any:
    """Returns a schema of keywords that exclude each other, negate and depend."""
    scalar: Any = rng.choice(
        [
            {"type": rng.choice(["integer", "number", "string", "object", "array", "null"])},
            {"type": ["string", "integer"]},
            {"const": rng.choice(VALUES)},
            {"enum": rng.sample(VALUES, 3)},
            {"type": "integer", "minimum": rng.randint(-3, 3)},
            {"type": "number", "exclusiveMaximum": rng.randint(-3, 3)},
            {"maxLength": 1},
            {"type": "string", "minLength": 2},
            {"required": ["a"]},
            {"minItems": 2},
            {"$ref": f"#/$defs/{rng.choice('xy')}"} if depth >= 0 else {},
            rng.random() < 0.7,
        ]
    )
    if depth <= 0:
        return scalar

    def inner() -> Any:
        return random_logic(rng, depth - 1)

    names = rng.sample("abc", 2)
    objects = {
        "type": "object",
        "properties": {name: inner() for name in names},
        "required": rng.choice([[], names, names[:1]]),
    }
    if rng.random() < 0.3:
        objects["additionalProperties"] = rng.choice([False, inner()])
    return rng.choice(
        [
            scalar,
            objects,
            objects | {"dependentRequired": {"a": ["b"], "c": ["a", "b"]}},
            objects | {"dependentSchemas": {names[0]: inner()}},
            objects | {"minProperties": rng.randint(0, 2), "maxProperties": rng.randint(0, 3)},
            objects | {"propertyNames": rng.choice([{"enum": ["a", "b"]}, {"pattern": "^a"}])},
            objects | {"oneOf": [inner(), inner()]},
            {"oneOf": [inner() for _ in range(rng.randint(1, 3))]},
            {"anyOf": [inner(), inner()], "not": inner()},
            {"not": inner()},
            {"if": inner(), "then": inner()},
            {"if": inner(), "then": inner(), "else": inner()},
            objects | {"allOf": [{"if": inner(), "then": inner()} for _ in range(2)]},
            {"allOf": [inner(), {"not": inner()}]},
            {"type": "array", "items": rng.choice([{"enum": [1, 2, "a"]}, inner()]),
             "uniqueItems": True},
        ]
    )  # fmt: skip


def test_random_schemas_allow_no_more_than_before() -> None:
    rng = random.Random(0)
    num_changed = num_kept = num_allowed = 0
    for _ in range(150):
        schema = random_logic(rng)
        if isinstance(schema, bool):
            continue
        schema["$defs"] = {"x": random_logic(rng, -1), "y": {"items": random_logic(rng, 1)}}
        rewritten = rewrite(schema)
        num_changed += rewritten is not schema
        for value in VALUES:
            was_valid, still_valid = is_valid(schema, value), is_valid(rewritten, value)
            assert was_valid or not still_valid, (schema, rewritten, value)
            if rewritten is not schema:
                num_allowed += was_valid
                num_kept += still_valid
    assert num_changed > 80
    assert num_kept > 0.6 * num_allowed


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"not": {"type": "string"}}, [1, None, {}], ["a"]),
        ({"not": {"enum": ["a", "ab"]}}, [1, "", "b", "abc", "aa"], ["a", "ab"]),
        ({"type": "integer", "not": {"const": 3}}, [2, 4, -3], [3, "a"]),
        ({"type": "object", "not": {"required": ["a", "b"]}}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
        ({"not": {"anyOf": [{"type": "string"}, {"minimum": 3}]}}, [2], ["a", 3, None]),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"},
         [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
        ({"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 2}]},
         [1, 4], [2, 3, "a"]),
        ({"oneOf": [{"const": 1}, {"const": 2}, {"$ref": "#/$defs/x"}],
          "$defs": {"x": {"type": "string"}}}, [1, 2, "a"], [3]),
        ({"type": "object", "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
          "then": {"required": ["b"]}, "else": {"required": ["c"]}},
         [{"a": 1, "b": 2}, {"c": 1}, {"a": 2, "c": 1}], [{"a": 1}, {"a": 1, "c": 2}, {}]),
        ({"type": "object", "properties": {"a": {"enum": [1, 2, 3]}}, "required": ["a"],
          "allOf": [{"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
                    {"if": {"properties": {"a": {"const": 2}}}, "then": {"required": ["c"]}}]},
         [{"a": 1, "b": 2}, {"a": 2, "c": 1}, {"a": 3}], [{"a": 1}, {"a": 2, "b": 1}, {}]),
        ({"type": "array", "items": {"enum": [*range(20)]}, "uniqueItems": True},
         [[], [7], [7, 19]], [[7, 7], [20]]),
        ({"dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 1}, 3], [{"a": 1}]),
        ({"required": ["a"], "dependencies": {"a": ["b"]}}, [{"a": 1, "b": 1}], [{"a": 1}]),
        ({"dependentSchemas": {"a": {"properties": {"b": False}}}}, [{"b": 1}, {"a": 1}],
         [{"a": 1, "b": 1}]),
        ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
         [{"a": 1, "c": 1}], [{}, {"b": 1}]),
        ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 1},
         [{}, {"c": 1}], [{"a": 1, "c": 1}, {"d": 1, "e": 1}]),
        ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
         [[], ["b"], ["b", "a"]], [["a", "a"], ["c"], 3]),
        ({"items": {"type": "integer", "minimum": 1, "maximum": 7}, "uniqueItems": True},
         [[1, 2], [7], 3], [[1, 1]]),
        ({"prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False,
          "uniqueItems": True}, [["a", 1]], [[1, "a"]]),
    ],
)  # fmt: skip
def test_what_is_allowed(schema: Any, right: list[Any], wrong: list[Any]) -> None:
    rewritten = rewrite(schema)
    assert not any(f'"{name}":' in json.dumps(rewritten) for name in (*GONE, "uniqueItems"))
    assert [each for each in right if not is_valid(rewritten, each)] == []
    assert [each for each in wrong if is_valid(rewritten, each)] == []


def test_negations_that_cannot_be_described() -> None:
    logic = Logic({})
    assert logic.negate({"pattern": "a"}) is None
    assert logic.negate({"uniqueItems": True}) is None
    assert logic.negate({"type": "string", "pattern": "a"}) == {
        "type": ["null", "boolean", "number", "array", "object"]
    }
    assert logic.negate({"description": "anything"}) is False


def test_evidently_disjoint() -> None:
    logic = Logic({"$defs": {"n": {"type": "integer"}}})
    for first, second, are_disjoint in (
        ({"type": "string"}, {"$ref": "#/$defs/n"}, True),
        ({"type": "number"}, {"$ref": "#/$defs/n"}, False),
        ({"const": 1}, {"const": 1.0}, False),
        ({"const": 1}, {"const": True}, True),
        ({"maximum": 3, "type": "integer"}, {"minimum": 4, "type": "number"}, True),
        ({"maximum": 3}, {"minimum": 4}, False),  # texts
        ({"anyOf": [{"const": "a"}, {"const": "b"}]}, {"enum": ["c"]}, True),
        (
            {"type": "object", "required": ["k"], "properties": {"k": {"const": 1}}},
            {"type": "object", "properties": {"k": {"const": 2}}},
            True,
        ),
        ({"type": "object", "properties": {"k": {"const": 1}}},
         {"type": "object", "properties": {"k": {"const": 2}}}, False),
    ):  # fmt: skip
        assert logic.are_disjoint(first, second) == are_disjoint, (first, second)
        assert logic.are_disjoint(second, first) == are_disjoint, (first, second)


def test_different_values_are_those_of_json() -> None:
    assert different([1, 1.0, True, [1], [1.0], {"a": 0}, {"a": False}, "1", None]) == [
        1, True, [1], {"a": 0}, {"a": False}, "1", None
    ]  # fmt: skip


def test_a_schema_that_needs_too_many_steps_keeps_its_keywords() -> None:
    schema: Any = {"type": "string", "maxLength": 3}
    for number in range(14):
        schema = {"oneOf": [schema, {"anyOf": [schema, {"const": number}]}]}
    assert "oneOf" in rewrite(schema)
