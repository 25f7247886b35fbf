from __future__ import annotations

from typing import Any

import pytest

from aioinfer.errors import RequestError
from aioinfer.text.schema_numbers import check_numbers, exact_bounds

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
        {"minimum": 2**63},
        {"minimum": 12345678901234567890},
        {"maximum": -1e300},
        {"minimum": float("inf")},
        {"minimum": 2**53 + 1, "maximum": 2**53 + 1},
    ],
)
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
