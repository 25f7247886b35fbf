"""Several client processes are as one client: the same requests, the same records, one start."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from benchlib.client import Record
from benchlib.client_processes import ClientProcesses, Target
from benchlib.load import Load, Run, merge_runs
from benchlib.report import summarize
from benchlib.slo import Slo
from benchlib.workload import Call, Calls, IntRange, PromptMaker, RandomPrompts, RequestShape
from tests.scripted_server import good_reply, serving

pytestmark = pytest.mark.slow

SHAPE = RequestShape("m")
WORKLOAD = RandomPrompts(
    SHAPE, PromptMaker(IntRange(500, 60_000)), IntRange(3, 9), IntRange(4, 8), seed=2
)


@pytest.fixture(scope="module")
def processes() -> Iterator[ClientProcesses]:
    with ClientProcesses(3) as processes:
        yield processes


def random_record(random: np.random.Generator) -> Record:
    ttft = float(random.exponential(0.1))
    sent = float(random.uniform(10, 20))
    record = Record(sent, 50, ttft=ttft, prompt_tokens=9, cached_tokens=3)
    record.gaps.extend(random.exponential(0.01, int(random.integers(0, 40))).tolist())
    record.chunks = record.output_tokens = 1 + len(record.gaps)
    record.e2e = ttft + sum(record.gaps)
    record.error = "timeout" if random.random() < 0.1 else None
    return record


def test_merged_runs_have_the_statistics_of_one() -> None:
    random = np.random.default_rng(1)
    records = [random_record(random) for _ in range(300)]
    slo = Slo.parse("ttft=100ms,itl=40ms,e2e=400ms")
    one = summarize(merge_runs([Run(list(records), client_cpus=[0.4])]), slo)
    # so that a mean of percentiles would be another figure
    unequal = [records[:200], records[200:290], records[290:]]
    cpus = [0.1, 0.4, 0.2]
    runs = [Run(share, client_cpus=[cpu]) for share, cpu in zip(unequal, cpus, strict=True)]
    merged = summarize(merge_runs(runs), slo)
    assert merged.pop("client_cpus") == cpus
    assert one.pop("client_cpus") == [0.4]
    assert merged == one
    assert 0 < one["goodput"]["share"] < 1


def test_runs_of_several_processes_are_one() -> None:
    early, late = Record(10.0, 5, e2e=2.0), Record(11.0, 5, e2e=6.0)
    first = Run([late], 6.0, num_items=3, client_cpus=[0.25])
    run = merge_runs([first, Run([early], 2.0, num_items=2, client_cpus=[0.5])])
    assert run.records == [early, late]
    assert (run.duration_s, run.num_items, run.peak_in_flight, run.client_cpu) == (7.0, 3, 2, 0.5)
    assert merge_runs([Run()]).duration_s == 0.0


@pytest.mark.parametrize(
    "load",
    [Load(6, num_items=40, seed=5), Load(64, rate=400.0, num_items=40, seed=5)],
    ids=["closed", "open"],
)
async def test_three_processes_send_the_requests_of_one(
    processes: ClientProcesses, load: Load
) -> None:
    sent: list[list[int]] = []
    ports: set[Any] = set()

    async def reply(request: web.Request) -> web.StreamResponse:
        sent.append((await request.json())["prompt"])
        assert request.transport is not None
        ports.add(request.transport.get_extra_info("peername")[1])
        return await good_reply(request)

    progress: list[tuple[int, int]] = []
    options = {"first": 10, "on_progress": lambda *counts: progress.append(counts)}
    async with serving(reply) as url:
        target = Target(url, SHAPE)
        run = await asyncio.to_thread(processes.send, target, WORKLOAD, load, **options)
    assert [record.error for record in run.records] == [None] * 40
    items = [WORKLOAD.item(index) for index in range(10, 50)]
    assert sorted(sent) == sorted(json.loads(item.body)["prompt"] for item in items)
    assert run.num_items == 40
    assert len(run.client_cpus) == 3
    assert len(ports) >= 3
    assert progress[-1] == (40, 0)
    lengths = sorted(record.max_tokens for record in run.records)
    assert lengths == sorted(item.max_tokens for item in items)


async def test_processes_begin_together_and_keep_the_concurrency(
    processes: ClientProcesses,
) -> None:
    seven = asyncio.Barrier(7)  # passes only if all the processes' requests are under way at a time
    in_flight = peak = 0

    async def reply(request: web.Request) -> web.StreamResponse:
        nonlocal in_flight, peak
        in_flight += 1
        peak = max(peak, in_flight)
        async with asyncio.timeout(20):
            await seven.wait()
        in_flight -= 1
        return await good_reply(request)

    async with serving(reply) as url:
        calls = [WORKLOAD.item(index) for index in range(7)]
        run = await asyncio.to_thread(
            processes.send, Target(url, SHAPE), Calls(calls), Load(7, num_items=7)
        )
        assert peak == run.peak_in_flight == 7
        again = await asyncio.to_thread(processes.run_load, url, SHAPE, calls, 7)
    assert len(again.records) == 7
    sent = [record.sent for record in run.records]
    assert max(sent) - min(sent) < 1.0


async def test_headers_and_failures_come_through(processes: ClientProcesses) -> None:
    async def reply(request: web.Request) -> web.StreamResponse:
        if request.headers.get("X-Key") != "secret":
            return web.Response(status=401, text="who?")
        return await good_reply(request)

    async with serving(reply) as url:
        target = Target(url, SHAPE, {"X-Key": "secret"})
        good = await asyncio.to_thread(processes.send, target, WORKLOAD, Load(3, num_items=3))
        bad = await asyncio.to_thread(
            processes.send, replace(target, headers={}), WORKLOAD, Load(3, num_items=3)
        )
    assert [record.error for record in good.records] == [None] * 3
    assert [(record.error, record.example) for record in bad.records] == [("HTTP 401", "who?")] * 3


class Fatal:
    """A workload that ends the process that makes it."""

    def item(self, index: int) -> Call:
        os._exit(3)


async def test_a_client_process_that_ends_is_an_error() -> None:
    with (
        ClientProcesses(2) as processes,
        pytest.raises(RuntimeError, match="a client process ended"),
    ):
        await asyncio.to_thread(
            processes.send, Target("http://127.0.0.1:9", SHAPE), Fatal(), Load(2, num_items=2)
        )
