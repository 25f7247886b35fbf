"""Rewrites keywords of JSON Schema that llguidance does not enforce into such that it does, and
closes the objects of schemas.

A rewritten schema allows nothing that the given one forbids. Some allow less: with `contains`, the
items that it demands come first. A keyword that cannot be rewritten stays, and is refused by its
name when the grammar is compiled.

An object is closed that leaves open which properties it may have besides the listed ones. What fits
the closed schema fits the open one as well, and models that may write further properties often
write them without end.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

from aioinfer.text.json_schema import MAX_SCHEMA_VALUES, Schema, map_inner, subschemas
from aioinfer.text.schema_logic import TYPES, Logic, TooComplexError, different
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
#: Keywords of which less is more; where they are left, the schema is refused.
_REVERSED = frozenset(["not", "if", "then", "else", "oneOf"])
#: Items that `contains` may demand.
_MAX_CONTAINED = 16
#: Names that `propertyNames` may list.
_MAX_NAMES = 1_000
#: Arrays that `uniqueItems` may become, and combinations of properties that `minProperties` may.
_MAX_ARRAYS, _MAX_COMBINATIONS = 500, 64
#: Formats that llguidance enforces.
_ENFORCED_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
_CHARACTER = r"[A-Za-z0-9._~!$&'()*+,;=@-]"
_PATH = rf"/?{_CHARACTER}+(/{_CHARACTER}*)*(\?{_CHARACTER}*)?(#{_CHARACTER}*)?"
_POINTER = r"(/([^~/]|~[01])*)*"
_SET = r"\[\^?([A-Za-z0-9_@:;,=]|a-z|A-Z|0-9|\\[dws])+\]"
_ATOM = rf"([A-Za-z0-9_@:;,=<>/ -]|\.|\\[dwsDWS.*+?()\[\]{{}}|^$\\]|{_SET})"
_PIECE = rf"{_ATOM}([*+?]|\{{[1-9]\}})?"
_BRANCHES = rf"({_PIECE})+(\|({_PIECE})+)*"
#: Replacements of the other formats of the standard: a pattern, or a format that allows less.
_FORMAT_PATTERNS = {
    "uri-reference": f"^({_PATH})$",
    "iri-reference": f"^({_PATH})$",
    "uri-template": rf"^({_CHARACTER}|[/:?#]|\{{[A-Za-z0-9_]+\}})+$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{_POINTER})$",
    "regex": rf"^\^?({_PIECE}|\(({_BRANCHES})\)[*+?]?)+\$?$",
}
_FORMAT_NAMES = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri"}
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


def rewrite(schema: Any) -> Any:
    """Returns a decoded schema with its keywords rewritten where possible; the same object where
    nothing is to be rewritten. The argument is not changed; the result may hold an object several
    times.

    Raises `RequestError` for numbers that cannot be enforced exactly, and for a schema that is
    nested too deeply.
    """
    if not isinstance(schema, dict):
        return schema
    of_numbers = _Draft((), _STEPS_OF_NUMBERS)
    parted = with_parts(schema)
    if parted is None:
        rewritten = _rewrite(schema, of_numbers, of_numbers)
        check_numbers(rewritten)
        return rewritten
    logic = Logic(parted)
    before: Steps = (
        logic.counted,
        logic.dependencies,
        logic.negation,
        logic.conditions,
        logic.condition,
        logic.alternatives,
    )
    after: Steps = (
        *_STEPS,
        partial(_property_names, logic=logic),
        partial(_unique_items, logic=logic),
    )
    try:
        rewritten = _rewrite(
            parted, _Draft((_unevaluated, *before), (_contains, *after)), _Draft(before, after)
        )
    except TooComplexError:
        rewritten = None
    if rewritten is None or _size(rewritten) > MAX_SCHEMA_VALUES:
        rewritten = _rewrite(parted, of_numbers, of_numbers)
    rewritten = with_parts(rewritten) or rewritten
    check_numbers(rewritten)
    return rewritten


def _size(value: Any) -> int:
    """Returns the number of values in lists and objects, at all depths; an object that occurs
    several times counts each time, and is looked at once."""
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


class _Draft(NamedTuple):
    """The rewriting steps for schemas of some drafts: first the steps before the subschemas are
    rewritten, which must see the subschemas as they were given (a negation of less is more), then
    the steps after that."""

    before: Steps
    after: Steps


def _rewrite(schema: Any, newest: _Draft, older: _Draft) -> Any:
    """Returns a schema rewritten by the steps of draft 2020-12, or of an older one."""
    if not isinstance(schema, dict):
        return schema
    draft = schema.get("$schema")
    if isinstance(draft, str) and "2020-12" not in draft:
        newest = older
    changed = schema
    for step in newest.before:
        changed = step(changed)
    changed = map_inner(changed, lambda inner: _rewrite(inner, newest, older), but=_REVERSED)
    for step in newest.after:
        changed = step(changed)
    return changed


def _without(schema: Schema, *keywords: str, **others: Any) -> Schema:
    if not others and not schema.keys() & set(keywords):
        return schema
    return {name: value for name, value in schema.items() if name not in keywords} | others


def _unique_items(schema: Schema, logic: Logic) -> Schema:
    """`uniqueItems` that forbids nothing, or of items of few values: all arrays of these are
    listed. Where they are too many, items come in the order of their values, and only so many."""
    if "uniqueItems" not in schema:
        return schema
    least, most = schema.get("minItems", 0), schema.get("maxItems", MAX_SCHEMA_VALUES)
    if schema["uniqueItems"] is False or (isinstance(most, int) and most <= 1):
        return _without(schema, "uniqueItems")
    if schema["uniqueItems"] is not True or not isinstance(least, int) or not isinstance(most, int):
        return schema
    first, rest = schema.get("prefixItems"), schema.get("items", True)
    if isinstance(rest, list):
        first, rest = rest, schema.get("additionalItems", True)
    if isinstance(first, list):
        is_closed = rest is False or most <= len(first)
        if is_closed and _are_all_disjoint(first, logic):
            return _without(schema, "uniqueItems")
        return schema
    values = logic.listed(rest)
    if values is None or "contains" in schema:
        return schema
    arrays = _arrays_of(different(values), least, most)
    if not arrays:
        return schema
    gone = ("uniqueItems", "items", "minItems", "maxItems")
    if schema.get("type") == "array":
        return _without(schema, *gone, allOf=[*schema.get("allOf", []), {"enum": arrays}])
    others = {"type": [name for name in TYPES if name != "array"]}
    either = {"anyOf": [others, {"enum": arrays}]}
    return _without(schema, *gone, allOf=[*schema.get("allOf", []), either])


def _are_all_disjoint(schemas: list[Any], logic: Logic) -> bool:
    return all(logic.are_disjoint(*pair) for pair in itertools.combinations(schemas, 2))


def _arrays_of(values: list[Any], least: int, most: int) -> list[list[Any]]:
    """Returns arrays of different values: all, or only the arrays in the order of the values; no
    array at all where these would have one value at most."""
    most = min(most, len(values))
    for choose, count in (
        (itertools.permutations, math.perm),
        (itertools.combinations, math.comb),
    ):
        found: list[list[Any]] = []
        for length in range(most + 1):
            if len(found) + count(len(values), length) > _MAX_ARRAYS:
                break
            if length >= least:
                found += map(list, choose(values, length))
        else:
            return found
    return found if found and len(found[-1]) > 1 else []


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


def _property_names(schema: Schema, logic: Logic) -> Schema:
    """`propertyNames` by a list, a pattern or lengths. Declared properties whose name is not
    allowed may not come; the other allowed names are declared, too, or are matched by the
    pattern."""
    names = logic.followed(schema.get("propertyNames"))
    if names is True or names == {} or names == {"type": "string"}:
        return _without(schema, "propertyNames")
    if names is False:
        names = {"enum": []}
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return schema
    if "patternProperties" in schema or not isinstance(schema.get("properties", {}), dict):
        return schema
    rules = _without(names, "type", "title", "description", "$comment", "examples")
    named, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    listed = rules.get("enum", [rules["const"]] if "const" in rules else None)
    if len(rules) == 1 and isinstance(listed, list) and len(listed) <= _MAX_NAMES:
        others = {name: rest for name in listed if isinstance(name, str) and name not in named}
        properties = {name: each if name in listed else False for name, each in named.items()}
        properties |= others if rest is not False else {}
        found = {"properties": properties} if properties else {}
        return _without(schema, "propertyNames", **found, additionalProperties=False)
    pattern = _pattern_of(rules)
    if pattern is None or (named and rest not in (True, False, {})):
        return schema
    properties = {}
    for name, each in named.items():
        try:
            is_right = re.search(pattern, name) is not None
        except re.error:
            return schema
        properties[name] = each if is_right else False
    others = {} if rest is False else {"patternProperties": {pattern: rest}}
    if named:
        others["properties"] = properties
    return _without(schema, "propertyNames", **others, additionalProperties=False)


def _pattern_of(rules: Schema) -> str | None:
    """Returns the pattern of the texts that a `pattern` or lengths allow."""
    if rules.keys() == {"pattern"} and isinstance(rules["pattern"], str):
        return rules["pattern"]
    least, most = rules.get("minLength", 0), rules.get("maxLength", "")
    if rules.keys() <= {"minLength", "maxLength"} and isinstance(least, int):
        return f"^(?s:.{{{least},{most}}})$"
    return None


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
    """`minProperties` and `maxProperties` that follow from what else the schema says, or that are
    few combinations of the properties that are listed. Then others do not count for the minimum,
    and do not come where there is a maximum."""
    required = schema.get("required", [])
    named = schema.get("properties", {})
    if not isinstance(required, list) or not isinstance(named, dict):
        return schema
    optional = [name for name, each in named.items() if name not in required and each is not False]
    num_required = _num_different(required)
    least, most = schema.get("minProperties"), schema.get("maxProperties")
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    added: list[Schema] = []
    if isinstance(least, int) and least <= num_required:
        schema = _without(schema, "minProperties")
    elif isinstance(least, int) and optional and not (closed and least == 1):
        num_chosen = least - num_required
        if 0 < math.comb(len(optional), num_chosen) <= _MAX_COMBINATIONS:
            chosen = itertools.combinations(optional, num_chosen)
            schema = _without(schema, "minProperties")
            added.append({"anyOf": [{"required": list(names)} for names in chosen]})
    if isinstance(most, int) and closed and most >= len(named):
        schema = _without(schema, "maxProperties")
    elif isinstance(most, int) and optional and "patternProperties" not in schema:
        num_absent = max(0, len(optional) + num_required - most)
        if most >= num_required and math.comb(len(optional), num_absent) <= _MAX_COMBINATIONS:
            absent = itertools.combinations(optional, num_absent)
            schema = _without(schema, "maxProperties", additionalProperties=False)
            if num_absent:
                added.append(
                    {"anyOf": [{"properties": dict.fromkeys(names, False)} for names in absent]}
                )
    if not added:
        return schema
    return {**schema, "allOf": [*schema.get("allOf", []), *added]}


def _num_different(names: list[Any]) -> int:
    return len({name for name in names if isinstance(name, str)})


def _without_effect(schema: Schema) -> Schema:
    """Keywords that say nothing without others."""
    if "contains" not in schema:
        schema = _without(schema, "minContains", "maxContains")
    return _without(schema, "$recursiveAnchor", "$dynamicAnchor", "$vocabulary")


def _reference(schema: Schema) -> Schema:
    """A reference with characters that have to be escaped, such as of `Partial<Record<a,b>>`."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return schema
    escaped = "#" + quote(reference[1:], safe="/%~!$&'()*+,;=:@?-._")
    return schema if escaped == reference else {**schema, "$ref": escaped}


def _plain_format(schema: Schema) -> Schema:
    """Returns a schema with only the `format`s that llguidance enforces. Others of the standard
    become patterns, some of which allow less. Unknown ones are annotations, as the standard has
    it."""
    name = schema.get("format")
    if not isinstance(name, str) or name in _ENFORCED_FORMATS:
        return schema
    changed = {keyword: value for keyword, value in schema.items() if keyword != "format"}
    if (known := _FORMAT_NAMES.get(name)) is not None:
        changed["format"] = known
    if (pattern := _FORMAT_PATTERNS.get(name)) is not None:
        if "pattern" not in changed:
            changed["pattern"] = pattern
        else:
            changed["allOf"] = [*changed.get("allOf", []), {"pattern": pattern}]
    return changed


#: Rewriting steps that are applied to a schema after its subschemas are rewritten.
_STEPS: Steps = (
    whole_counts,
    exact_bounds,
    inclusive_bounds,
    _plain_format,
    _reference,
    _without_effect,
    _numbers_of_properties,
)
#: Rewriting steps for a schema that the others would make too large.
_STEPS_OF_NUMBERS: Steps = (whole_counts, exact_bounds)


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
