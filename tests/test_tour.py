"""docs/tour.md shows the code as it is: each excerpt is compared with its file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "tour.md").read_text("utf-8")
#: The excerpts: the file that the first line names, and the lines behind it.
EXCERPTS = re.findall(r"^```python\n# (\S+)\n(.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL)
ELISION = "..."


def find_excerpt(excerpt: str, code: str) -> bool:
    """Whether the lines of an excerpt are lines of `code`, in its order and indentation: those
    between two elisions (`...`) without a gap."""
    runs = re.split(rf"^ *{re.escape(ELISION)}$", excerpt, flags=re.MULTILINE)
    at = 0
    for run in (run.strip("\n") for run in runs):
        if run:
            found = f"\n{code}\n".find(f"\n{run}\n", at)
            if found < 0:
                return False
            at = found + len(run) + 1
    return True


def test_the_tour_has_ten_excerpts() -> None:
    assert len(EXCERPTS) == PAGE.count("```python") == 10
    assert len(PAGE.splitlines()) <= 250


@pytest.mark.parametrize(
    ("file", "excerpt"), EXCERPTS, ids=[f"{n}-{file}" for n, (file, _) in enumerate(EXCERPTS, 1)]
)
def test_an_excerpt_is_the_code(file: str, excerpt: str) -> None:
    assert find_excerpt(excerpt, (ROOT / file).read_text("utf-8")), excerpt


def test_other_lines_are_found() -> None:
    code = "def f():\n    a = 1\n    b = 2\n    c = 3\n    return a"
    assert find_excerpt("    a = 1\n    ...\n    return a", code)
    assert find_excerpt("def f():\n    a = 1", code)
    assert not find_excerpt("    a = 1\n    c = 3", code)  # a gap that is not marked
    assert not find_excerpt("    c = 3\n    ...\n    a = 1", code)  # another order
    assert not find_excerpt("    a = 2", code)
    assert not find_excerpt("a = 1", code)  # another indentation
    assert not find_excerpt("    a = 1\n    ...\n    a = 1", code)  # one line for two
