"""Two result files beside each other: the ratios, which way is better, and what is rejected."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

import bench
from benchlib.client import Record
from benchlib.load import Run
from benchlib.options import parse_arguments, settings_of
from benchlib.report import summarize
from benchlib.slo import Slo


def result(speed: float, *arguments: str) -> dict[str, Any]:
    """Returns the result of two requests, `speed` times as fast as in one second, under the
    settings of a command line."""
    options = parse_arguments(list(arguments))
    usual = {"gaps": array("d", [0.1 / speed]), "chunks": 2, "prompt_tokens": 7, "output_tokens": 4}
    records = [Record(0.0, 4, e2e=1 / speed, ttft=ttft / speed, **usual) for ttft in (0.2, 0.4)]
    figures = summarize(Run(records, duration_s=1 / speed), options.slo)
    if options.sweep:
        points = [{"value": value, **figures} for value in options.sweep.values]
        figures = {"sweep": options.sweep.kind, "points": points}
    return {"model": "m", "settings": settings_of(options), **figures}


def compare(tmp_path: Path, first: Any, second: Any, *arguments: str) -> int:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, content in zip(files, (first, second), strict=True):
        file.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return bench.main(["--compare", *map(str, files), *arguments])


def rows(output: str) -> dict[str, list[str]]:
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in output.splitlines()
        if line.startswith("│")
    ]
    return {name: rest for name, *rest in cells if rest[0]}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def test_ratios_and_arrows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = result(2.0, "--seed", "2", "--url", "http://other", "--processes", "4")
    assert compare(tmp_path, result(1.0, "--seed", "1"), other) == 0
    found = rows(capsys.readouterr().out)
    assert found["output tokens/s"] == ["8.000", "16.000", "2.000", "▲ better"]
    assert found["TTFT mean ms"] == ["300.000", "150.000", "0.500", "▲ better"]
    assert found["ITL p99 ms"] == ["100.000", "50.000", "0.500", "▲ better"]
    assert found["chunks per token"] == ["0.500", "0.500", "1.000", "="]
    assert "prompt tokens cached, %" not in found  # neither reports it
    assert compare(tmp_path, result(1.0), result(0.5)) == 0
    found = rows(capsys.readouterr().out)
    assert found["requests/s"] == ["2.000", "1.000", "0.500", "▼ worse"]
    assert found["e2e p50 ms"] == ["1,000.000", "2,000.000", "2.000", "▼ worse"]
    assert compare(tmp_path, result(1.0), result(1.004)) == 0
    assert rows(capsys.readouterr().out)["requests/s"][3] == "="


def test_other_workloads_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = result(1.0, "--output-len", "100-200"), result(2.0, "--concurrency", "3")
    assert compare(tmp_path, *both) == 1
    output, errors = capsys.readouterr()
    assert output == ""
    assert "--output-len (100-200 and 128)" in errors
    assert "--concurrency (not set and 3)" in errors
    assert "--seed" not in errors
    assert "--force" in errors
    assert compare(tmp_path, *both, "--force") == 0
    output, _ = capsys.readouterr()
    assert rows(output)["requests/s"][2] == "2.000"
    assert (
        "The workloads differ in --concurrency (not set and 3), --output-len (100-200 and 128)."
        in output.replace("\n", " ")
    )


def test_a_file_from_before_an_option_existed_had_its_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = result(1.0)
    del old["settings"]["workload"], old["tokens"]["chunks_per_token"], old["goodput"]
    assert compare(tmp_path, old, result(1.0)) == 0
    assert rows(capsys.readouterr().out)["chunks per token"] == ["–", "0.500", "–", ""]
    assert compare(tmp_path, old, result(1.0, "--workload", "shared-prefix")) == 1
    assert "--workload (random and shared-prefix)" in capsys.readouterr().err


def test_goodput_is_compared_under_the_same_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = str(Slo.parse("ttft=300ms"))
    assert compare(tmp_path, result(1.0, "--slo", limits), result(2.0, "--slo", limits)) == 0
    row = rows(capsys.readouterr().out)["goodput, % (ttft 300 ms)"]
    assert row == ["50.000", "100.000", "2.000", "▲ better"]
    assert compare(tmp_path, result(1.0, "--slo", limits), result(2.0, "--slo", "ttft=100ms")) == 0
    assert rows(capsys.readouterr().out)["goodput, % (ttft 300 ms)"] == ["50.000", "–", "–", ""]


def test_points_of_sweeps_are_matched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (result(speed, "--sweep", "concurrency=1,2,4") for speed in (1.0, 2.0))
    second["points"].pop()
    assert compare(tmp_path, first, second) == 0
    output = capsys.readouterr().out
    assert output.count("output tokens/s") == 2
    assert "concurrency 2" in output
    assert "Only in one of them: concurrency 4" in output


BY_ANOTHER = "was not written by"


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "is not JSON"), ("[]", BY_ANOTHER), ('{"settings": {}}', BY_ANOTHER)],
)
def test_other_files_are_rejected(
    tmp_path: Path, content: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(tmp_path, result(1.0), content) == 1
    assert f"b.json {words}" in capsys.readouterr().err
