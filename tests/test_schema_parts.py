from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from aioinfer.errors import RequestError
from aioinfer.text.schema_parts import with_parts
from aioinfer.text.schema_rewriting import rewrite


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
def test_what_stays(schema: Any) -> None:
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
