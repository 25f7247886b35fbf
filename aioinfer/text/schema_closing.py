"""Closes the objects of a JSON schema that leaves open which properties they may have besides the
listed ones. What fits the closed schema fits the open one as well, and models that may write
further properties often write them without end.
"""

from __future__ import annotations

from typing import Any

from aioinfer.text.json_schema import Schema, map_inner, subschemas

#: Keywords that have an object follow several schemas, each of which may name some properties.
_JOINING = frozenset(
    ["allOf", "not", "oneOf", "if", "then", "else", "dependentSchemas", "dependencies",
     "$dynamicRef", "$recursiveRef"]
)  # fmt: skip
#: Keywords that refer to schemas in the place of this one, if it says nothing of objects itself.
_REFERRING = frozenset(["anyOf", "$ref"])
_OF_OBJECTS = frozenset(
    ["properties", "required", "patternProperties", "additionalProperties", "propertyNames",
     "minProperties", "unevaluatedProperties"]
)  # fmt: skip


def close_objects(schema: Any) -> Any:
    """Returns a decoded schema in which an object with `properties` has no others, where the schema
    does not say that it may (`"additionalProperties": true`); the argument is not changed.

    Where schemas are joined, by `allOf` and the like, a property that one does not name may be
    another's: then only the outermost object is closed, if it is joined with none.
    """
    if any(map(_joins, subschemas(schema))):
        return _closed(schema)
    return _close_all(schema)


def _joins(schema: Schema) -> bool:
    """Whether an object has to follow several schemas. `allOf` of one is as good as a reference:
    older versions of pydantic write one so."""
    keywords = set(schema)
    if isinstance(joined := schema.get("allOf"), list) and len(joined) == 1:
        keywords -= {"allOf"}
    referring = len(keywords & _REFERRING) + ("allOf" in schema)
    return bool(keywords & _JOINING or referring > 1 or (referring and keywords & _OF_OBJECTS))


def _close_all(schema: Any) -> Any:
    return _closed(map_inner(schema, _close_all)) if isinstance(schema, dict) else schema


def _closed(schema: Any) -> Any:
    """Returns a schema whose own object is closed, if it names all that it requires."""
    if not isinstance(schema, dict) or schema.keys() & (_JOINING | _REFERRING):
        return schema
    named, required = schema.get("properties"), schema.get("required", [])
    says = schema.keys() & (_OF_OBJECTS - {"properties", "required"})
    if says or not isinstance(named, dict) or not isinstance(required, list):
        return schema
    if any(not isinstance(name, str) or name not in named for name in required):
        return schema
    return {**schema, "additionalProperties": False}
