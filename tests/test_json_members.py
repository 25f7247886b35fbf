"""Members of an object, found without decoding: what `json` finds, however the bytes are sliced."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioinfer.api import json_members
from aioinfer.api.json_members import MAX_MEMBERS, count_values, find_members
from aioinfer.errors import RequestError

TEXTS = st.text('a"\\\\,:[]{}\n é', max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def count(value: Any) -> int:
    """Returns how many values another holds; an empty list or object counts as one with a value."""
    items = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(items, list):
        return 0
    return max(1, len(items)) + sum(map(count, items))


@given(
    st.dictionaries(TEXTS, VALUES, max_size=5),
    st.sampled_from([1, 2, 3, 7, 1000]),
    st.sampled_from([None, 1]),
)
def test_members_are_those_of_the_object(
    value: dict[str, Any], size: int, indent: int | None
) -> None:
    raw = json.dumps(value, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_members, "_SLICE", size)
        members = find_members(raw)
        assert count_values(raw) == count(value)
    assert {json.loads(m.key): m.num_values for m in members} == {
        key: count(item) for key, item in value.items()
    }
    assert {json.loads(m.key): json.loads(raw[m.start : m.end]) for m in members} == value


@given(st.binary(max_size=40) | TEXTS.map(str.encode))
def test_any_bytes_are_scanned(raw: bytes) -> None:
    assert count_values(raw) >= 0
    assert len(find_members(raw)) <= len(raw)


def test_the_number_of_members_is_bounded() -> None:
    raw = json.dumps({str(i): i for i in range(MAX_MEMBERS)}).encode()
    assert len(find_members(raw)) == MAX_MEMBERS
    with pytest.raises(RequestError):
        find_members(raw[:-1] + b', "x": 1}')
