"""scripts/soak.py: when a figure counts as growing, and a short run over a real server."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

import soak
from benchlib.server_process import ROOT
from benchlib.soak_watch import BOUNDS, fit, judge

pytestmark = pytest.mark.slow


def test_the_slope_of_a_line_and_its_error() -> None:
    slope, error = fit([0, 1, 2, 3], [5, 7, 9, 11])
    assert (slope, error) == (2, 0)
    assert fit([1, 1], [2, 3]) == (0, float("inf"))
    assert fit([0, 1], [2, 3]) == (1, float("inf"))
    rng = random.Random(0)
    slope, error = fit(range(100), [3 * x + rng.gauss(0, 10) for x in range(100)])
    assert abs(slope - 3) < 3 * error < 0.3


def test_growth_beyond_noise_is_found() -> None:
    rng = random.Random(0)
    requests = list(range(0, 10_000, 250))
    flat = [300 + rng.gauss(0, 3) for _ in requests]
    creeping = [value + number / 1000 * 5 for value, number in zip(flat, requests, strict=True)]
    assert not judge("server memory", requests, flat).grows
    assert judge("server memory", requests, creeping).grows
    assert judge("worker 1 memory", requests, creeping).grows
    # of a run shorter than 1 000 requests no slope is judged: 10 MiB per 1 000 are usual at first
    assert judge("server memory", [0, 500, 1000], [300, 305, 310]).grows
    assert not judge("server memory", [0, 450, 900], [300, 304.5, 309]).grows
    assert not judge("server memory", [0, 450, 900], [300, 304.5, 309]).judged
    # what ends before the end of the run is no creep, but what rises by a count is
    assert not judge("descriptors", [1, 2, 3], [40, 90, 44]).grows
    assert judge("descriptors", [1, 2, 3], [40, 42, 45]).grows
    assert judge("KV cache in use", [1, 2], [0, 0.01]).grows


@pytest.mark.parametrize("name", ["server memory", "worker 3 memory", "GPU memory", "threads"])
def test_every_figure_has_a_bound(name: str) -> None:
    bound = next(bound for start, bound in BOUNDS.items() if name.startswith(start))
    assert (bound.per_thousand is None) != (bound.rise is None)


@pytest.mark.extended
def test_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Every kind of request is answered as it should; a run this short says nothing of memory."""
    options = ["--rounds", "2", "--round", "50", "--warm-up", "0", "--concurrency", "4"]
    status = soak.main([*options, "--seed", "5", "--minutes", "15"])
    shown = capsys.readouterr().out
    assert status == 0, shown
    assert "fault" not in shown
    for figure in ("server memory", "worker 0 memory", "descriptors", "asyncio tasks"):
        assert figure in shown
    assert "100 requests (" in shown


@pytest.mark.extended
def test_the_time_is_kept_and_half_of_it_may_be_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    status = soak.main(["--minutes", "0.25", "--round", "100000", "--seed", "5"])
    seconds = time.monotonic() - began
    shown = capsys.readouterr().out
    assert status == 0, shown
    assert 15 < seconds < 15 + 45, "a start and the end of the last requests take their time, too"
    lines = [line.split()[0] for line in shown.splitlines() if " requests, " in line]
    assert 2 <= lines.count("warm-up") <= 5 < 12
    assert lines.count("round") >= 2
    assert "worker 0 memory" in shown


@pytest.mark.extended
def test_a_signal_ends_the_server_as_well() -> None:
    command = [sys.executable, "scripts/soak.py", "--round", "4", "--seed", "5"]
    script = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert script.stdout is not None
        assert any("warm-up 1:" in line for line in script.stdout), "it ended by itself"
        started = psutil.Process(script.pid).children(recursive=True)
        assert started
        script.send_signal(signal.SIGTERM)
        assert script.wait(60) == 128 + signal.SIGTERM
        assert not psutil.wait_procs(started, timeout=20)[1], "left running"
    finally:
        script.kill()
        script.stdout.close()
