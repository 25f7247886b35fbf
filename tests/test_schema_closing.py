"""Which objects of a schema are closed, and that a closed schema has values."""

import json
from typing import Any

import pytest

from aioinfer.text.schema_closing import close_objects

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
