"""Values counted without decoding: as many as `json` finds, however the bytes are sliced."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioinfer.text import json_values
from aioinfer.text.json_values import count_values

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


@given(VALUES, st.sampled_from([1, 2, 3, 7, 1000]), st.sampled_from([None, 1]), st.booleans())
def test_all_values_are_counted(value: Any, size: int, indent: int | None, ascii: bool) -> None:
    raw = json.dumps(value, indent=indent, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "_SLICE", size)
        assert count_values(raw) == count(value)


@given(st.binary(max_size=40) | TEXTS.map(str.encode), st.sampled_from([1, 2, 1000]))
def test_any_bytes_are_scanned(raw: bytes, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "_SLICE", size)
        assert 0 <= count_values(raw) <= len(raw)
