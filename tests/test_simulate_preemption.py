"""The simulation of preemption by swapping, and what swapping has to do for it."""

from __future__ import annotations

import sys

import pytest

import simulate_preemption


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
