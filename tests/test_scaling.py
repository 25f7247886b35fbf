"""How many replicas there should be."""

from __future__ import annotations

import pytest

from aioinfer.cluster.scaling import wanted_replicas


@pytest.mark.parametrize(
    ("utilizations", "current", "wanted"),
    [
        ([], 3, 3),  # nothing is reported yet
        ([0.6], 1, 1),
        ([0.64, 0.58], 2, 2),  # within a tenth
        ([1.8], 1, 3),
        ([0.9, 0.9], 2, 3),
        ([0.9, 0.9], 3, 3),  # the third is on its way
        ([0.1, 0.2, 0.3], 3, 1),
        ([0.0, 0.0], 2, 1),
    ],
)
def test_the_mean_comes_near_the_target(
    utilizations: list[float], current: int, wanted: int
) -> None:
    assert wanted_replicas(utilizations, 0.6, current) == wanted
