"""The simulators of clusters, conversations and preemption, at sizes that take a moment."""

from __future__ import annotations

import argparse
import sys

import pytest

import simulate_cluster
import simulate_conversations
import simulate_preemption
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


SMALL = "--conversations 12 --turns 4 --system 1000 --output 150 --input 300 --block-size 32"


def figures(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[float, float]:
    """Returns the parts of the prompt tokens that were found and that could be, of all turns."""
    monkeypatch.setattr(sys, "argv", ["simulate_conversations.py", *arguments.split()])
    simulate_conversations.main()
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| all"))
    found, possible = (float(cell.strip(" %")) for cell in line.split("|")[3:5])
    return found, possible


@pytest.mark.parametrize(
    ("more", "missed"),
    [
        ("", 1.1),  # what the first one computes is found by none
        # a snapshot for each conversation, and two states for each of four that run
        ("--state-blocks 21 --max-num-seqs 4", 1.1),
        ("--think 5 --state-blocks 21 --max-num-seqs 4", 1.1),
    ],
)
def test_the_cache_finds_what_is_possible(
    more: str,
    missed: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, possible = figures(f"{SMALL} {more}", monkeypatch, capsys)
    assert possible - missed < found <= possible


@pytest.mark.slow
def test_the_tokens_found_of_64_conversations_on_an_h200(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ("", "--max-num-seqs 64 --think 10", "--max-num-seqs 32 --memory 50"):
        assert figures(more, monkeypatch, capsys)[0] >= 90


def test_each_preempted_request_is_loaded_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where requests of short prompts come back in groups, too: what one of them takes beside its
    loaded blocks are not the blocks of another one, which had to be loaded again."""
    arguments = "--blocks 250 --block-size 16 --prompt 60 --output 250 --requests 60"
    monkeypatch.setattr(sys, "argv", ["simulate_preemption.py", *arguments.split()])
    simulate_preemption.main()
    found = {}
    for line in capsys.readouterr().out.splitlines()[4:]:
        name, _, _, ratio, *counts, _ = (cell.strip() for cell in line.strip("| ").split("|"))
        found[name] = float(ratio), *map(int, counts)
    assert found["recompute"][2:] == (0, found["recompute"][3])
    ratio, preemptions, loads, again = found["swap"]
    assert 1.0 < ratio < found["all fit"][0]
    assert 50 < preemptions * 0.9 < loads < 1.2 * preemptions
    assert again < found["recompute"][3] / 3
    assert found["all fit"][1:] == (0, 0, 0)
