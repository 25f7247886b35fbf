"""Sweeps: each point on requests of its own, one table, an early end where nothing succeeds."""

from __future__ import annotations

import asyncio
import itertools
import json
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchlib.load import Load
from benchlib.sweep import Sweep, best_point
from tests.scripted_server import Handler, good_reply, run_bench, serving

pytestmark = pytest.mark.slow

INFINITE = float("inf")


def test_sweeps_are_parsed() -> None:
    assert Sweep.parse("concurrency=1,2,8") == Sweep("concurrency", (1, 2, 8))
    assert Sweep.parse("rate=0.5,inf") == Sweep("rate", (0.5, INFINITE))
    assert str(Sweep.parse("rate=0.5,4,inf")) == "rate=0.5,4,inf"
    wrong_counts = ("concurrency=1.5", "concurrency=inf")
    for wrong in ("", "rate", "rate=", "rate=0", "rate=nan", "speed=1", *wrong_counts):
        with pytest.raises(ArgumentTypeError, match="no sweep"):
            Sweep.parse(wrong)


def test_the_best_point_is_the_greatest_with_enough_goodput() -> None:
    def point(value: float, share: float) -> dict[str, Any]:
        return {"value": value, "goodput": {"share": share}}

    points = [point(1, 1.0), point(4, 0.9), point(8, 0.89), point(2, 1.0)]
    assert best_point(points) == point(4, 0.9)
    assert best_point([point(1, 0.5)]) is None
    assert best_point([{"value": 1, "goodput": None}]) is None


async def sweep(url: str, folder: Path, arguments: str) -> tuple[int, str, str, dict[str, Any]]:
    """Returns exit status, output, error output and the result file of a sweep."""
    file = folder / "result.json"
    status, output, errors = await run_bench(
        f"--url {url} --input-len 5 --output {file} {arguments}"
    )
    return status, output, errors, json.loads(await asyncio.to_thread(file.read_text, "utf-8"))


async def test_a_sweep_over_concurrency(tmp_path: Path) -> None:
    prompts: list[list[int]] = []

    async def reply(request: web.Request) -> web.StreamResponse:
        prompts.append((await request.json())["prompt"])
        return await good_reply(request)

    async with serving(reply) as url:
        arguments = "--sweep concurrency=1,3,2 --num-requests 6 --warmup 2 --processes 2"
        status, output, errors, result = await sweep(url, tmp_path, f"{arguments} --slo e2e=60s")
    assert status == 0, errors
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts) == 3 * (6 + 2)
    assert [point["value"] for point in result["points"]] == [1, 3, 2]
    # the warm-up does not count
    assert [point["requests"]["succeeded"] for point in result["points"]] == [6, 6, 6]
    assert [len(point["client_cpus"]) for point in result["points"]] == [1, 2, 2]
    assert all(point["peak_in_flight"] <= point["value"] for point in result["points"])
    assert (result["sweep"], result["best_goodput_at"]) == ("concurrency", 3)
    assert result["settings"]["sweep"] == "concurrency=1,3,2"
    rows = [line.split("│")[1:-1] for line in output.splitlines() if line.startswith("│")]
    counts = [[cell.strip() for cell in row[:2]] for row in rows]
    assert counts == [["1", "6/6"], ["3", "6/6"], ["2", "6/6"]]
    assert [float(row[2]) for row in rows] == pytest.approx(
        [p["throughput"]["output_tokens_per_s"] for p in result["points"]], abs=0.1
    )
    assert "The greatest concurrency at which 90% met the limits: 3 (100.0%" in output


async def test_a_sweep_over_rates_for_a_time(tmp_path: Path) -> None:
    async with serving(good_reply) as url:
        arguments = "--sweep rate=100,inf --seconds 0.2 --concurrency 2"
        status, _, errors, result = await sweep(url, tmp_path, arguments)
    assert status == 0, errors
    slow, fast = result["points"]
    assert (slow["value"], fast["value"]) == (100, "inf")
    assert 0 < slow["requests"]["sent"] <= len(list(Load(2, rate=100.0, seconds=0.2).arrivals()))
    assert fast["peak_in_flight"] == 2
    assert fast["requests"]["sent"] > 2


def full_after(requests: int) -> Handler:
    """Returns replies of a server that is full after so many requests."""
    count = itertools.count(1)

    async def reply(request: web.Request) -> web.StreamResponse:
        is_good = next(count) <= requests
        return await good_reply(request) if is_good else web.Response(status=503, text="full")

    return reply


async def test_a_sweep_stops_where_nothing_succeeds(tmp_path: Path) -> None:
    """At the warm-up of a point, too."""
    async with serving(full_after(5)) as url:
        arguments = "--sweep concurrency=1,2,3,4 --num-requests 4 --slo e2e=60s"
        status, output, errors, result = await sweep(url, tmp_path, arguments)
    assert status == 1
    assert [point["requests"]["succeeded"] for point in result["points"]] == [4, 1, 0]
    assert "the sweep stopped at concurrency 3: none of 4 requests succeeded" in errors
    assert "concurrency 3: 4 failed: HTTP 503, such as: full" in output
    assert result["best_goodput_at"] == 1
    async with serving(full_after(3)) as url:
        arguments = "--sweep concurrency=1,2 --num-requests 2 --warmup 1"
        status, _, errors, result = await sweep(url, tmp_path, arguments)
    assert status == 1
    assert [point["value"] for point in result["points"]] == [1]
    assert "the sweep stopped at concurrency 2: warm-up failed: HTTP 503: full" in errors
