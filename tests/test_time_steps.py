"""scripts/time_steps.py: what drafts bring by the times of captured steps."""

from __future__ import annotations

import pytest

from time_steps import rates


def test_rates_follow_the_next_larger_captured_step() -> None:
    plain, ahead = {1: 1.0, 128: 2.0}, {2: 1.0, 128: 2.0, 192: 3.0, 256: 4.0}
    assert rates(plain, ahead, 1, [0.5, 0.25]) == [1.0, 1.5, pytest.approx(1.75 / 2.0)]
    assert rates(plain, ahead, 90, [0.5]) == [45.0, 45.0]
    assert rates(plain, ahead, 128, [0.5, 0.5]) == [64.0, 48.0], "no step has 384 rows"
