"""Stop strings: the same end wherever the text is cut, and nothing of a stop string ever shown."""

from __future__ import annotations

import time

from hypothesis import example, given, settings
from hypothesis import strategies as st

from aioinfer.text.stops import StopStrings

#: Few different characters, so that stop strings overlap, contain and repeat each other.
LETTERS = st.text("ab🦜", max_size=12)
STOPS = st.lists(st.text("ab🦜", min_size=1, max_size=5), min_size=1, max_size=6)


def naive_end(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the text ends with the first character that completes a stop string, the
    longest if several."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            stop = max(matching, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def naive_shown(text: str, stops: list[str]) -> str:
    """What may be shown of a text without a stop: all but the longest end that begins a stop
    string."""
    ends = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return text[: len(text) - max(ends, default=0)]


@settings(deadline=None)
@given(stops=STOPS, pieces=st.lists(LETTERS, max_size=8), include=st.booleans())
@example(stops=["ab", "b"], pieces=["a", "b"], include=False)
@example(stops=["abab", "ba"], pieces=["ab", "a"], include=False)
@example(stops=["aab"], pieces=["aa", "a", "ab"], include=True)
@example(stops=["b"], pieces=["aa", "aba"], include=False)
@example(stops=["abb"], pieces=["aab"], include=False)
def test_any_pieces_give_the_end_of_the_whole(stops: list[str], pieces: list[str], include: bool):
    finder = StopStrings(stops, include)
    shown, seen = "", ""
    for piece in pieces:
        text, stop = finder.feed(piece)
        seen += piece
        shown += text
        expected, expected_stop = naive_end(seen, stops, include)
        assert stop == expected_stop
        assert shown == (expected if stop else naive_shown(seen, stops))
    text = finder.flush()
    assert shown + text == naive_end(seen, stops, include)[0]
    assert finder.flush() == ""


def test_a_stop_across_pieces():
    finder = StopStrings(["\n\nUser:", "###"])
    assert finder.feed("Yes.\n") == ("Yes.", None)
    assert finder.feed("\nUs") == ("", None)
    assert finder.feed("age\n#") == ("\n\nUsage\n", None)
    assert finder.feed("## more") == ("", "###")
    assert finder.feed("never seen") == ("", "###")
    assert finder.flush() == ""


def test_the_time_does_not_depend_on_the_number_of_stops():
    # every one is begun by every part of the text
    alike = ["a" * 60 + chr(0x100 + n) for n in range(64)]
    finder = StopStrings(alike)
    begin = time.perf_counter()
    shown = "".join(finder.feed("a" * 4)[0] for _ in range(25_000))
    assert len(shown) == 100_000 - 60
    # it takes 50 ms; comparing with each stop at each place takes minutes
    assert time.perf_counter() - begin < 3


def test_searches_of_several_texts_share_nothing_but_their_strings() -> None:
    first = StopStrings(["abc", "bd"], include=True)
    assert first.feed("xab") == ("x", None)
    second = first.for_other_text()
    assert second.feed("c") == ("c", None)
    assert second.feed("abd") == ("abd", "bd")
    assert first.feed("c") == ("abc", "abc")
    assert first.for_other_text().feed("y") == ("y", None)
