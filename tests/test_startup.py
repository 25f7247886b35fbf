"""The start-up table."""

from __future__ import annotations

import re

import pytest

from aioinfer.executor.base import WorkerReport
from aioinfer.startup import StartupDisplay


def test_the_table_shows_each_engine(capsys: pytest.CaptureFixture[str]) -> None:
    reports = [
        WorkerReport(
            "cpu",
            "float32",
            2**20,
            2**30,
            16,
            100 + number,
            900 - number,
            "reason",
            [("load weights", 1.0 + number)],
        )
        for number in range(2)
    ]
    StartupDisplay().show(reports, ["model"])
    shown = capsys.readouterr().err
    assert re.search(r"engine 0 +│ 1.00 GiB a worker: 100 blocks of 16 tokens", shown)
    assert re.search(r"engine 1 +│ 1.00 GiB a worker: 101 blocks of 16 tokens", shown)
    assert re.search(r"longest request +│ 899 tokens \(reason\)", shown)
    assert re.search(r"load weights +│ 2.00 s", shown), "the slowest counts"
    StartupDisplay().show(reports[:1], ["model"])
    shown = capsys.readouterr().err
    assert "engine" not in shown
    assert re.search(r"KV cache +│ 1.00 GiB a worker: 100 blocks", shown)
