"""Parameters of tests in pairs: every value of one beside every value of another, in few cases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(**choices: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test so that each pair of values of two parameters is in one of its cases.

    A name such as `kind__grouped` stands for two parameters, whose values are tuples.
    """
    places = [range(len(values)) for values in choices.values()]
    rows = list(product(*places))
    missing = set().union(*map(_pairs, rows))
    cases = []
    while missing:
        best = max(rows, key=lambda row: len(missing.intersection(_pairs(row))))
        missing.difference_update(_pairs(best))
        cases.append([values[place] for place, values in zip(best, choices.values(), strict=True)])
    names = [name.split("__") for name in choices]
    flat = [
        [value for parts, given in zip(names, case, strict=True) for value in _values(parts, given)]
        for case in cases
    ]
    return pytest.mark.parametrize([name for parts in names for name in parts], flat)


def _pairs(row: Sequence[int]) -> set[tuple[tuple[int, int], ...]]:
    """Returns the pairs of (parameter, place of its value) in a case."""
    return set(combinations(enumerate(row), 2))


def _values(names: Sequence[str], given: Any) -> Iterable[Any]:
    return given if len(names) > 1 else [given]
