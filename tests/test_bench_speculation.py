"""scripts/bench_speculation.py: a short run."""

from __future__ import annotations

import pytest

import bench_speculation
from aioinfer.features.speculation.costs import RowTimes


@pytest.mark.extended
def test_a_short_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer repeats the prompt's code: drafts are kept, wherever a row costs nothing."""
    monkeypatch.setattr(RowTimes, "seconds", lambda self, rows: 0.001)
    options = ["--streams", "2", "--tokens", "40", "--rounds", "1", "--task"]
    bench_speculation.main([*options, "repeat code"])
    *_, row = capsys.readouterr().out.splitlines()
    task, plain, _, _, plain_steps, steps, kept, same = [
        column.strip() for column in row.strip("|").split("|")
    ]
    assert (task, same) == ("repeat code", "yes")
    assert float(plain) > 0
    assert int(steps) < int(plain_steps)
    assert int(kept.split()[0]) > 5
