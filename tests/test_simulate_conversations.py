"""The simulation of conversations with a model with states, and what its cache has to find."""

from __future__ import annotations

import sys

import pytest

import simulate_conversations

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
