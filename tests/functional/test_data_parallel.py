"""Two engines behind one loop: the same texts, requests where they belong, and the metrics of both.

That two give the texts of one is in `test_llm`, that they end together in `test_lifecycle`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from aioinfer.sampling_params import SamplingParams
from tests.functional.conftest import Served, serve
from tests.functional.prompts import PROMPTS
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = {"temperature": 0, "ignore_eos": True}
LONG = GREEDY | {"max_tokens": 400}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[Served]:
    """Two engines with four slots each."""
    async with serve(parallel__data_parallel_size=2) as served:
        yield served
        for engine in served.frontend.engines:
            engine.scheduler.check_integrity()


def finished(pair: Served) -> list[int]:
    return [sum(engine.metrics.finished.values()) for engine in pair.frontend.engines]


def running(pair: Served) -> list[int]:
    return [len(engine.scheduler.running) for engine in pair.frontend.engines]


async def complete_on(pair: Served, *bodies: dict[str, Any]) -> list[int]:
    """Posts requests at the same time; returns how many each engine has finished of them."""
    before = finished(pair)
    await asyncio.gather(*(pair.complete(**GREEDY | {"max_tokens": 2} | body) for body in bodies))
    return [now - then for now, then in zip(finished(pair), before, strict=True)]


def prompt(length: int, seed: int) -> list[int]:
    """Returns token ids that no other seed begins with."""
    return [1000 + seed, *range(2000 + seed, 2000 + seed + length - 1)]


async def test_requests_spread(pair: Served) -> None:
    bodies = [GREEDY | {"prompt": text, "max_tokens": 16} for text in PROMPTS[:8]]
    before = finished(pair)
    together = await asyncio.gather(*(pair.complete(**body) for body in bodies))
    assert [now - then for now, then in zip(finished(pair), before, strict=True)] == [4, 4]
    assert [await pair.complete(**body) for body in bodies[:4]] == together[:4]
    pids = {
        process.pid
        for engine in pair.frontend.engines
        for process in engine._workers.executor.ranks._processes  # type: ignore[attr-defined]
    }
    assert len(pids) == 2


async def test_a_seed_gives_the_same_text_on_either(pair: Served) -> None:
    body = {"prompt": prompt(20, 1), "temperature": 0.9, "seed": 5, "max_tokens": 12}
    before = finished(pair)
    first, second = await asyncio.gather(pair.complete(**body), pair.complete(**body))
    assert [now - then for now, then in zip(finished(pair), before, strict=True)] == [1, 1]
    assert first == second


async def test_a_shared_prefix_sticks(pair: Served) -> None:
    stem = prompt(100, 2)
    hits = [engine.scheduler.stats.prefix_hit for engine in pair.frontend.engines]
    home = (await complete_on(pair, {"prompt": stem})).index(1)
    for number in range(4):
        assert (await complete_on(pair, {"prompt": stem + prompt(5, 10 + number)}))[home] == 1
        await complete_on(pair, {"prompt": prompt(30, 20 + number)})  # something else in between
    gained = [
        engine.scheduler.stats.prefix_hit - before
        for engine, before in zip(pair.frontend.engines, hits, strict=True)
    ]
    assert gained[home] == 4 * 96
    assert gained[1 - home] == 0


async def test_who_goes_away_frees_its_engine(pair: Served) -> None:
    posts = [
        asyncio.ensure_future(pair.post("/v1/completions", prompt=prompt(20, 40 + number), **LONG))
        for number in range(2)
    ]
    await until(lambda: running(pair) == [1, 1])
    steps = [engine.scheduler.stats.steps for engine in pair.frontend.engines]
    for post in posts:
        post.cancel()
    await until(lambda: running(pair) == [0, 0])
    for engine, before in zip(pair.frontend.engines, steps, strict=True):
        assert engine.scheduler.stats.steps - before <= 3
        assert engine.scheduler.kv_cache.usage == 0
        assert engine.is_idle


async def test_drain_waits_for_both(pair: Served) -> None:
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=10)
    outputs = [await pair.frontend.submit(prompt(20, 50 + number), params) for number in range(4)]
    await until(lambda: running(pair) == [2, 2])
    assert not await pair.frontend.drain(0)
    assert await pair.frontend.drain(30)
    assert all(output.is_finished for output in outputs)
    assert await pair.frontend.drain(0)


async def test_metrics_and_page_show_both_engines(pair: Served) -> None:
    await complete_on(pair, {"prompt": prompt(20, 60)}, {"prompt": prompt(20, 61)})
    async with pair.http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    for number, count in enumerate(finished(pair)):
        found = [
            line
            for line in lines
            if line.startswith("vllm:request_success_total{") and f'engine="{number}"' in line
        ]
        assert sum(float(line.rpartition(" ")[2]) for line in found) == count > 0
    async with pair.http.get("/page/live") as response:
        states = json.loads((await response.content.readline()).removeprefix(b"data: "))["engines"]
    assert [sum(state["finished"].values()) for state in states] == finished(pair)
    assert [state["slots"] for state in states] == [4, 4]
