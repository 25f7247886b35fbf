"""How long the match of a text's end is: what a search finds at the last place of its last pair."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioinfer.features.speculation import matches
from aioinfer.features.speculation.matches import LONG, NONE, SHORT, Matches


def search(tokens: list[int]) -> int:
    for end in range(len(tokens) - 1, 1, -1):
        if tokens[end - 2 : end] == tokens[-2:]:
            return LONG if end >= 4 and tokens[end - 4 : end] == tokens[-4:] else SHORT
    return NONE


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 40), st.integers(0, 3))
def test_matches_equal_a_search(tokens: list[int], known: int, more: int) -> None:
    """As tokens come, none or several at a time."""
    found = Matches()
    for count in (*range(known, len(tokens), 1 + more), len(tokens), len(tokens)):
        assert found.find(array("i", tokens[:count])) == search(tokens[:count])


def test_the_end_of_a_long_prompt_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matches, "_MAX_PROMPT", 10)
    for begin, length in ((2, NONE), (24, LONG)):
        text = [*range(30), *range(begin, begin + 4)]
        assert search(text) == LONG
        assert Matches().find(array("i", text)) == length
