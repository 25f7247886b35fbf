"""The simulator of clusters, at a size that takes a moment."""

from __future__ import annotations

import argparse

import pytest

import simulate_cluster
from simulate_cluster import POLICIES, Simulation, StepTimes


def options(**changes: object) -> argparse.Namespace:
    usual: dict[str, object] = {
        "rate": 60.0, "seconds": 8.0, "share": 0.9, "prefixes": 6, "prefix_tokens": 1024,
        "prompt_tokens": (64, 128), "output_tokens": (8, 32), "burst": 1.0, "lose_at": None,
        "seed": 1,
    }  # fmt: skip
    return argparse.Namespace(**(usual | changes))


def test_step_times_are_those_of_the_table() -> None:
    times = StepTimes.load(simulate_cluster.STEP_TIMES)
    assert times.seconds(1, 0, 0) == 3.98e-3
    assert times.seconds(256, 0, 0) == 7.6e-3
    assert 4.58e-3 < times.seconds(80, 0, 0) < 5.1e-3
    # the note's step of 256 streams at 256 tokens of context: 10.3 ms
    assert abs(times.seconds(256, 256 * 256, 0) - 10.3e-3) < 0.3e-3


def test_every_request_ends_under_every_policy() -> None:
    hits = {}
    for policy in POLICIES:
        found = Simulation(options(), 4, policy).run()
        open_ones = len(found.ttft) - found.ended
        assert found.failed == 0
        assert 0 <= open_ones < 20
        assert found.ended > 20
        assert min(found.ttft) > 0.003
        hits[policy] = found.hit / found.queried
    assert hits["cost"] > hits["round-robin"]
    assert hits["cost"] > hits["fewest"]


def test_merged_steps_change_nothing_that_is_measured() -> None:
    merged = Simulation(options(), 2, "round-robin").run()
    most, simulate_cluster.MAX_MERGED_STEPS = simulate_cluster.MAX_MERGED_STEPS, 1
    try:
        single = Simulation(options(), 2, "round-robin").run()
    finally:
        simulate_cluster.MAX_MERGED_STEPS = most
    assert merged.steps < single.steps / 2
    assert merged.ended == single.ended
    assert sum(merged.ttft) == pytest.approx(sum(single.ttft), rel=0.01)


def test_a_lost_replica_loses_its_requests_alone() -> None:
    found = Simulation(options(lose_at=4.0, rate=240.0), 3, "cost").run()
    assert 0 < found.failed < 30
    assert found.ended > 50
