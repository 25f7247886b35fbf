"""The comparison of executors on a CPU with a tiny model: engines and Ray are real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import bench_executors
from benchlib.shapes import Contender, Round, _cost_of_ray, _pipeline_share, text_of
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.slow


def contender(name: str, **rounds: list[Round]) -> Contender:
    given: Any = {int(streams[1:]): each for streams, each in rounds.items()}
    return Contender(name, None, given)  # type: ignore[arg-type]


def test_marks_are_of_the_rounds() -> None:
    """Each round is compared with its own partner: what slows both is in neither figure."""
    plain = contender("tp 2", s1=[Round(100, 4.0), Round(50, 8.0)], s256=[Round(1000, 9.0)] * 2)
    slower = contender("tp 2, ray", s1=[Round(90, 4.1), Round(45, 8.3)], s256=[Round(960, 9.5)] * 2)
    row = _cost_of_ray(plain, slower, 1)
    assert row["more_ms_a_step"] == pytest.approx(0.2)
    assert row["ratio"] == pytest.approx(0.9)
    assert not _cost_of_ray(plain, slower, 256)["reached"]
    assert "96.0 %, +0.500 ms a step: mark missed" in text_of(_cost_of_ray(plain, slower, 256))
    alone = contender("one", s128=[Round(550, 4.0), Round(560, 4.0)])
    row = _pipeline_share(plain, alone, 256)
    assert row["ratio"] == pytest.approx((1000 / 1100 + 1000 / 1120) / 2)
    assert row["reached"]


@pytest.mark.extended
def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_model("qwen3", tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    arguments = ["--shapes", "pp", "--model", str(folder), "--streams", "1,2", "--rounds", "1"]
    given = ["parallel.device=cpu", "parallel.cpu_threads=1"]
    sets = [part for each in given for part in ("--set", each)]
    status = bench_executors.main([*arguments, *sets, "--json", str(rows)])
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    engines = [row for row in found if "engine" in row]
    assert [(row["engine"], row["streams"]) for row in engines] == [
        ("pp 2, multiprocess", 1), ("pp 2, ray", 1),
        ("pp 2, multiprocess", 2), ("pp 2, ray", 2), ("one device", 1),
    ]  # fmt: skip
    assert all(row["tokens_per_s"] > 0 and row["step_ms"] > 0 for row in engines)
    for row in engines[:4]:
        assert len(row["stages_busy"]) == 2
        assert all(0 < busy <= 1 for busy in row["stages_busy"])
    marks = [row["reached"] for row in found if "mark" in row]
    assert len(marks) == 3
    assert status == (0 if all(marks) else 1)
    assert capsys.readouterr().out.count("mark ") == 3
