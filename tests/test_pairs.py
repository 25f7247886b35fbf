"""Parameters in pairs."""

from __future__ import annotations

from itertools import combinations, product

from tests.pairs import pairwise


def test_every_pair_of_values_is_in_a_case() -> None:
    choices = {"a": [0, 1, 2], "b": ["x", "y", "z"], "c__d": [(1, 2), (3, 4)], "e": range(5)}
    names, cases = pairwise(**choices).args
    assert names == ["a", "b", "c", "d", "e"]
    assert len(cases) == 15, "all would be 90"
    wholes = [(a, b, (c, d), e) for a, b, c, d, e in cases]
    for (i, values), (j, others) in combinations(enumerate(choices.values()), 2):
        assert {(case[i], case[j]) for case in wholes} == set(product(values, others))
