"""How often and how soon workers are restarted."""

from __future__ import annotations

import pytest

from aioinfer.engine import recovery
from aioinfer.engine.recovery import STABLE_S, RestartPolicy


def test_delays_double_up_to_a_bound() -> None:
    policy = RestartPolicy(9)
    delays = [policy.next_delay_s() for _ in range(10)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, None]


def test_none_are_allowed() -> None:
    assert RestartPolicy(0).next_delay_s() is None


def test_only_service_of_some_length_resets_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(recovery.time, "monotonic", lambda: now)
    policy = RestartPolicy(2)
    policy.begin_service()
    assert policy.next_delay_s() == 1.0
    policy.begin_service()
    now += STABLE_S - 1
    assert policy.next_delay_s() == 2.0
    now += 10 * STABLE_S  # attempts that take long are no service
    assert policy.next_delay_s() is None
    policy.begin_service()
    now += STABLE_S
    assert [policy.next_delay_s() for _ in range(3)] == [1.0, 2.0, None]
