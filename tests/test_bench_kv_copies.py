"""scripts/bench_kv_copies.py: a short run on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench_kv_copies


def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    sizes = "--device cpu --blocks 5 --block-size 4 --layers 2 --weights 0 --rounds 2"
    bench_kv_copies.main([*sizes.split(), "--json", str(file)])
    assert len(json.loads(file.read_text())["load"]["plain"]["GB/s"]) == 2
    assert "save  plain" in capsys.readouterr().out
