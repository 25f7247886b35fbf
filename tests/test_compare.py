"""The comparison's own arithmetic, and what it reports when the server does not start.

Its measurements are not tests.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

import compare
from benchlib.server_process import ServerProcess
from benchlib.workload import RequestShape


def figures(rate: float, peer: float) -> dict[str, Any]:
    latency = {"ttft": {"p50": 10 * rate}, "itl": {"p50": rate, "p99": 2 * rate}}
    return {
        "transformers": peer,
        "1": {"throughput": {"output_tokens_per_s": rate}, "latency_ms": latency},
    }


def test_medians_and_the_ratio_of_each_round(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [figures(30.0, 20.0), figures(20.0, 5.0), figures(50.0, 20.0)]
    assert compare.median(rounds, "1", "latency_ms", "itl", "p99") == 60.0
    options = argparse.Namespace(
        config=Path("x.toml"), input_len=1, output_len=1, rounds=3, streams=[1], transformers=True
    )
    compare.show(options, rounds, 0.0012, {"first": 15.04, "second": 7.96})
    output = capsys.readouterr().out
    row = next(line for line in output.splitlines() if "1 stream " in line)
    numbers = [float(word) for word in row.split() if word[0].isdigit()]
    assert numbers == [1.0, 30.0, 300.0, 30.0, 60.0]
    # of 1.5, 4 and 2.5; the ratio of the medians would be 1.5
    assert "one stream against transformers: 2.50 times" in output
    assert "idle: 0.12% of a core" in output
    assert "ready after 15.0 s the first time, 8.0 s the second" in output


def test_rounds_share_no_prompt() -> None:
    options = argparse.Namespace(input_len=8, output_len=4)
    bodies = [
        call.body
        for seed in range(3)
        for call in compare.make_calls(options, RequestShape("m"), 20, seed)
    ]
    assert len(set(bodies)) == 60


def test_the_error_of_a_server_that_does_not_start_is_reported(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"status 2 .*\n.*missing\.toml"),
        ServerProcess(tmp_path / "missing.toml"),
    ):
        pass
