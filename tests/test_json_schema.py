from __future__ import annotations

import json
from typing import Any

import pytest

from aioinfer.errors import RequestError
from aioinfer.text.json_schema import MAX_SCHEMA_VALUES, check_schema


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
