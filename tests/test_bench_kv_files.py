"""The benchmark of files of KV blocks reads what it has written, and leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import bench_kv_files


def test_it_prints_a_row_for_each_number_of_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--blocks 3 --mib 1 --threads 1 2 --rounds 1"
    bench_kv_files.main([str(tmp_path), *options.split()])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[4:]]
    assert [row[0] for row in rows] == ["1", "2"]
    assert all(float(figure) >= 0.0 for row in rows for figure in row)
    assert not [*tmp_path.iterdir()]
