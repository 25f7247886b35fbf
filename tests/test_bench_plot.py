"""Plots: pictures of a sensible size with something on them, and matplotlib is imported only
for `--plot`."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest

from benchlib import options as options_module
from benchlib.client import Record
from benchlib.load import Run
from benchlib.options import parse_arguments
from benchlib.plot import plot_run, plot_sweep, tokens_over_time
from benchlib.report import summarize
from benchlib.slo import Slo
from tests.scripted_server import good_reply, run_bench, serving

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent.parent / "scripts"


def records(count: int) -> list[Record]:
    random = np.random.default_rng(3)
    made = []
    for number in range(count):
        gaps = array("d", random.exponential(0.02, 30).tolist())
        times = {"e2e": 0.2 + sum(gaps), "ttft": 0.2, "gaps": gaps}
        made.append(Record(0.1 * number, 32, **times, chunks=31, prompt_tokens=8, output_tokens=31))
    return made


def check_picture(file: Path) -> None:
    """Asserts that a file is a PNG that decodes, is three panels wide, and is not of one colour."""
    image = pytest.importorskip("matplotlib.image")
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert 10_000 < file.stat().st_size < 1_000_000
    pixels = image.imread(file)
    height, width, channels = pixels.shape
    assert (1200 < width < 2400, 300 < height < 700, channels) == (True, True, 4)
    for panel in range(3):
        assert pixels[:, panel * width // 3 : (panel + 1) * width // 3].std() > 0.05


def test_a_sweep(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    slo = Slo.parse("ttft=300ms")
    points = [
        {"value": value, **summarize(Run(records(5 * number), duration_s=3.0), slo)}
        for number, value in ((1, 1.0), (2, float("inf")))
    ]
    failed = Run([Record(0.0, 1, e2e=1.0, error="timeout")], duration_s=1.0)
    points.append({"value": 3.0, **summarize(failed, slo)})
    plot_sweep(points, "rate", "title", tmp_path / "sweep.png")
    check_picture(tmp_path / "sweep.png")


def test_a_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_run(
        [*records(20), Record(0.0, 1, e2e=9.0, error="timeout")], "title", tmp_path / "run.png"
    )
    check_picture(tmp_path / "run.png")


def test_nothing_to_draw_is_no_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_run([Record(0.0, 1, e2e=9.0, error="timeout")], "title", tmp_path / "run.png")
    assert (tmp_path / "run.png").exists()


def test_tokens_over_time() -> None:
    # 3 at 0.25, 3 at 0.75
    early = Record(5.0, 4, e2e=1.0, ttft=0.25, gaps=array("d", [0.5]), chunks=2, output_tokens=6)
    whole = Record(5.5, 4, e2e=1.5, output_tokens=10)  # not streamed: all at 2.0
    seconds, rates = tokens_over_time([early, whole])
    span = seconds[1] - seconds[0]
    assert len(seconds) * span == pytest.approx(2.0)
    assert rates.sum() * span == pytest.approx(16)
    spans = {
        round(float(at), 2): rate * span for at, rate in zip(seconds, rates, strict=True) if rate
    }
    assert list(spans.values()) == pytest.approx([3, 3, 10])
    assert [
        abs(at - expected) <= span + 0.01
        for at, expected in zip(spans, (0.25, 0.75, 2.0), strict=True)
    ] == [True] * 3


def test_without_matplotlib_the_error_names_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options_module, "is_available", lambda: False)
    parse_arguments([])
    with pytest.raises(SystemExit):
        parse_arguments(["--plot", "x.png"])
    assert "pip install 'matplotlib" in capsys.readouterr().err


def test_matplotlib_is_not_imported_without_plot() -> None:
    code = "import sys, bench; bench.parse_arguments([]); sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=SCRIPTS, check=True)


@pytest.mark.parametrize("arguments", ["", "--sweep concurrency=1,2"], ids=["run", "sweep"])
async def test_the_command(tmp_path: Path, arguments: str) -> None:
    pytest.importorskip("matplotlib")
    file, result = tmp_path / "plot.png", tmp_path / "result.json"
    async with serving(good_reply) as url:
        status, _, errors = await run_bench(
            f"--url {url} --num-requests 4 --plot {file} --output {result} {arguments}"
        )
    assert status == 0, errors
    check_picture(file)
    assert "plot" not in json.loads(result.read_text("utf-8"))["settings"]
