"""Numbers of JSON schemas, made such that llguidance enforces them exactly or refused.

llguidance reads the numbers of a schema as float64, and the bounds of integers as 64-bit integers:
a constant of 2^53 + 1 would come out as 2^53, and a bound of -2^63 ends the process.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, TypeGuard

from aioinfer.errors import RequestError
from aioinfer.text.json_schema import Schema

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties",
           "minContains", "maxContains")  # fmt: skip
#: Significant digits of a bound that takes the place of an exclusive one.
_DIGITS = 13
#: Integers below the first have a float64 each, and numbers next to the second have no more than
#: some 20 digits.
_EXACT, _TINY = 2**53, 1e-4
_BOUNDS = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
#: The largest bound that llguidance takes: the float64 below 2^63.
_LARGEST = 2**63 - 1024


def whole_counts(schema: Schema) -> Schema:
    """Returns a schema whose counts that are written as decimals, such as `"minItems": 2.0`, are
    integers."""
    found = {
        name: int(schema[name])
        for name in _COUNTS
        if isinstance(schema.get(name), float)
        and math.isfinite(schema[name])
        and schema[name].is_integer()
    }
    return {**schema, **found} if found else schema


def inclusive_bounds(schema: Schema) -> Schema:
    """Returns a schema without exclusive bounds of numbers that may have decimals: the next number
    of 13 digits takes their place. A number nearer to the bound, such as 182.0000000000000001,
    would be the bound itself for most parsers; and llguidance reads no more than some 16 digits of
    a bound."""
    if schema.get("type") == "integer":
        return schema
    found: Schema = {}
    for name, inclusive, towards, tighter in (
        ("exclusiveMinimum", "minimum", 1, max),
        ("exclusiveMaximum", "maximum", -1, min),
    ):
        bound, other = schema.get(name), schema.get(inclusive)
        if not is_number(bound):
            continue  # of draft 4, or none
        # next to zero are numbers of hundreds of digits
        if not _TINY <= abs(bound) < _EXACT or not (other is None or is_number(other)):
            continue
        digit = 10.0 ** (math.floor(math.log10(abs(bound))) - _DIGITS + 1)
        following = float(f"{bound + towards * digit:.{_DIGITS}g}")
        found[inclusive] = following if other is None else tighter(following, other)
    if not found:
        return schema
    gone = [f"exclusive{name.title()}" for name in found]
    return {name: value for name, value in schema.items() if name not in gone} | found


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def exact_bounds(schema: Schema) -> Schema:
    """Returns a schema whose bounds of 2^53 and above are float64 numbers within the given bounds,
    and within 2^63. Raises `RequestError` where no such number is between or beyond them."""
    low = _large_bound(schema, "inimum", 1)
    high = _large_bound(schema, "aximum", -1)
    if low is None and high is None:
        return schema
    changed = dict(schema)
    if low is not None:
        changed.pop("exclusiveMinimum", None)
        changed["minimum"] = low
        if low >= _EXACT:  # it fails on a minimum near 2^63 without a maximum
            changed.setdefault("maximum", _LARGEST)
    if high is not None:
        changed.pop("exclusiveMaximum", None)
        changed["maximum"] = high
        if high <= -_EXACT:
            changed.setdefault("minimum", -_LARGEST)
    _check_range(changed)
    return changed


def _check_range(schema: Schema) -> None:
    low, high = schema.get("minimum"), schema.get("maximum")
    if is_number(low) and is_number(high) and low > high:
        raise RequestError(
            f"the JSON schema's bounds of a number allow none from {low} to {high} that can be "
            "enforced exactly: beyond 2^53, bounds are float64 below 2^63"
        )


def _large_bound(schema: Schema, name: str, inwards: int) -> int | None:
    """Returns the inclusive bound that takes the place of a schema's `minimum` and
    `exclusiveMinimum`, or of the others; None where neither is 2^53 or above.

    Args:
        name: without its first letter.
        inwards: 1 for a minimum, -1 for a maximum.
    """
    inclusive, exclusive = schema.get(f"m{name}"), schema.get(f"exclusiveM{name}")
    given: list[tuple[float, bool]] = [(each, False) for each in [inclusive] if is_number(each)]
    given += [(each, True) for each in [exclusive] if is_number(each)]
    if all(abs(bound) < _EXACT for bound, _ in given):
        return None
    # with both of them, the tighter one counts, and the exclusive one where they are equal
    bound, is_strict = max(given, key=lambda each: (inwards * each[0], each[1]))
    is_strict = is_strict or exclusive is True  # of draft 4
    if inwards * bound > _LARGEST:
        raise RequestError(
            f"the JSON schema's bound {str(bound)[:40]} allows only numbers beyond 2^63, which "
            "cannot be enforced"
        )
    found = inwards * max(float(inwards * bound), -float(_LARGEST))
    # it prints the bounds of integers as they are, and of others by the digits of their float64
    is_integer = schema.get("type") == "integer"
    while not (
        _is_within(int(found), bound, inwards, is_strict)
        and (is_integer or _is_within(Decimal(repr(found)), bound, inwards, is_strict))
    ):
        found = math.nextafter(found, inwards * math.inf)
    return int(found)


def _is_within(number: int | Decimal, bound: float, inwards: int, is_strict: bool) -> bool:
    """Whether a number is on the allowed side of a bound."""
    distance = (number > bound) - (number < bound)
    return distance == inwards or (distance == 0 and not is_strict)


def check_numbers(schema: Any) -> None:
    """Raises `RequestError` for a constant or a bound in a schema, at any depth, that llguidance
    would not take as it is. Looks at all objects: a reference may lead to any of them."""
    pending = [schema]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item.values())
            for name in item.keys() & {"const", "enum"}:
                _check_constants(item[name])
            for name in item.keys() & _BOUNDS:
                if is_number(item[name]):
                    _check_constants(item[name])
        elif isinstance(item, list):
            pending.extend(item)


def _check_constants(value: Any) -> None:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
        elif is_number(item) and not (abs(item) < 2**63 and int(float(item)) == int(item)):
            raise RequestError(
                f"the JSON schema's number {str(item)[:40]} cannot be enforced exactly: numbers "
                "beyond 2^53 must have a float64 each, and be below 2^63; a string may do"
            )
