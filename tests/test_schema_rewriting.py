"""What is rewritten in JSON schemas: it allows nothing that the schema forbids, and what it should
still allow."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from aioinfer.errors import RequestError
from aioinfer.text.schema_logic import Logic, different
from aioinfer.text.schema_rewriting import close_objects, rewrite

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


A = {"properties": {"a": {}}}
CLOSED = A | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        # as pydantic writes a model with others in it
        ({"properties": {"a": {"$ref": "#/$defs/A"}, "b": {"anyOf": [A, {"type": "null"}]},
                         "c": {"type": "array", "items": A}}, "required": ["a"], "$defs": {"A": A}},
         {"properties": {"a": {"$ref": "#/$defs/A"}, "b": {"anyOf": [CLOSED, {"type": "null"}]},
                         "c": {"type": "array", "items": CLOSED}}, "required": ["a"],
          "$defs": {"A": CLOSED}, "additionalProperties": False}),
        ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}},
         {"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": CLOSED}}),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        # a joined object may have what another schema names
        ({"properties": {"b": {"allOf": [A, {"properties": {"c": {}}}]}}},
         {"properties": {"b": {"allOf": [A, {"properties": {"c": {}}}]}},
          "additionalProperties": False}),
    ],
)  # fmt: skip
def test_objects_without_a_word_of_others_are_closed(schema: Any, closed: Any) -> None:
    before = json.dumps(schema)
    assert close_objects(schema) == closed
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        True, {"type": "object"}, A | {"additionalProperties": True}, A | {"required": ["b"]},
        A | {"patternProperties": {"^x": {}}}, A | {"minProperties": 2},
        A | {"anyOf": [{"properties": {"b": {}}}, {"required": ["c"]}]},
        {"allOf": [A, {"properties": {"b": {}}}]},
        {"allOf": [A], "required": ["b"]},
        {"anyOf": [A, {}], "$ref": "#/$defs/B", "$defs": {"B": {"properties": {"b": {}}}}},
        A | {"$ref": "#/$defs/B", "$defs": {"B": {"properties": {"b": {}}}}},
    ],
)  # fmt: skip
def test_what_may_have_other_properties_stays_open(schema: Any) -> None:
    assert close_objects(schema) == schema
