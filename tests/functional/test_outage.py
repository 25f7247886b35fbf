"""Workers that do not come back for long: requests end or go elsewhere, others are refused, and all
goes on once there are workers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioinfer.engine import recovery
from aioinfer.engine.engine import Engine
from aioinfer.engine.recovery import EngineState
from aioinfer.errors import EngineDeadError
from aioinfer.executor.base import Executor
from aioinfer.scheduler.request import Request, RequestStatus
from tests.executor_runs import tiny_llama
from tests.functional.conftest import Served, serve
from tests.waiting import until
from tests.worker_processes import worker_pid

pytestmark = pytest.mark.asyncio(loop_scope="session")
IDS = {"prompt": [5, 9, 13], "temperature": 0, "ignore_eos": True, "return_token_ids": True}
SETTINGS = {
    "parallel.executor": "inline", "parallel.restart_workers": 1000, "model.tokenizer": "none",
    "model.max_model_len": 120,
}  # fmt: skip
TWO_ENGINES = {"parallel.data_parallel_size": 2, "parallel.executor": "multiprocess"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(recovery, "_MAX_DELAY_S", 0.01)
    monkeypatch.setattr(recovery, "MAX_OUTAGE_S", 0.2)
    return tiny_llama(tmp_path / "llama")


def hinder_starts(engine: Engine) -> Callable[[], None]:
    """Has no new workers of an engine start until the result is called."""
    make = engine.recovery.new_executor
    assert make is not None
    gives_up = [True]

    def new_executor() -> Executor:
        if gives_up:
            raise EngineDeadError("there is no memory")
        return make()

    engine.recovery.new_executor = new_executor
    engine._workers.start_s = 0.0
    return gives_up.clear


def lose(engine: Engine) -> Callable[[], None]:
    """Loses an engine's workers; new ones cannot be started until the result is called."""
    come_back = hinder_starts(engine)
    engine.handle_loss(EngineDeadError("worker 0 was killed"))
    return come_back


async def test_requests_are_ended_and_refused_until_there_are_workers(folder: Path) -> None:
    asked: dict[str, Any] = {"max_tokens": 100, **IDS}
    async with serve(**SETTINGS, **{"model.path": str(folder)}) as served:
        engine = served.engine
        expected = await served.complete(**asked)
        stream = asyncio.ensure_future(served.stream("/v1/completions", **asked))
        await until(lambda: engine.scheduler.running)
        come_back = lose(engine)
        whole = await served.post("/v1/completions", 503, **asked)
        assert "the workers were lost, and have not come back" in whole["error"]["message"]
        assert (await stream)[-1]["error"] == whole["error"]
        assert engine.is_idle
        for method, path in (("POST", "/v1/completions"), ("GET", "/health")):
            async with served.http.request(method, path, json=asked) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "10")
                assert (await response.json())["error"]["code"] == "not_ready"
        await served.get("/health/live")
        come_back()
        await until(lambda: engine.state is EngineState.SERVING)
        await served.get("/health")
        assert await served.complete(**asked) == expected
        engine.scheduler.check_integrity()


async def test_another_engine_takes_the_requests_over(folder: Path) -> None:
    asked: dict[str, Any] = {"max_tokens": 100, **IDS}
    async with serve(**SETTINGS | TWO_ENGINES, **{"model.path": str(folder)}) as served:
        engines = served.frontend.engines
        expected = await served.complete(**asked)
        replies = [asyncio.ensure_future(served.complete(**asked)) for _ in range(2)]
        await until(lambda: all(engine.scheduler.running for engine in engines))
        come_back = lose(engines[1])
        assert await asyncio.gather(*replies) == [expected, expected]
        assert engines[1].state is EngineState.RESTARTING
        assert (await served.get("/health"))["engines"] == ["serving", "restarting"]
        come_back()
        await until(lambda: engines[1].state is EngineState.SERVING)
        assert await served.complete(**asked) == expected
        for engine in engines:
            assert engine.is_idle
            engine.scheduler.check_integrity()


SEARCHES: list[dict[str, Any]] = [
    IDS | {"use_beam_search": True, "n": width, "max_tokens": tokens, "ignore_eos": ignores, **more}
    for width, tokens, ignores, more in (
        (4, 40, True, {}), (2, 60, True, {"logprobs": 2}), (3, 40, False, {"length_penalty": 0.0}),
        (4, 60, True, {"early_stopping": True}),
    )
]  # fmt: skip


async def choices_of(served: Served, asked: dict[str, Any]) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = (await served.post("/v1/completions", **asked))["choices"]
    return choices


def up_to_rounding(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns choices to compare others with: how many rows a step has decides some roundings of
    log-probabilities."""
    for choice in choices:
        if (found := choice["logprobs"]) is not None:
            found["token_logprobs"] = pytest.approx(found["token_logprobs"], abs=1e-5)
            found["top_logprobs"] = [pytest.approx(top, abs=1e-5) for top in found["top_logprobs"]]
    return choices


async def take_over(served: Served, num_steps: int, victim: int) -> None:
    """Kills a worker `num_steps` after `SEARCHES` have begun, and waits until all serve again."""
    engines = served.frontend.engines
    come_back = [hinder_starts(engine) for engine in engines]
    begun = sum(engine.scheduler.stats.steps for engine in engines)
    await until(lambda: sum(e.scheduler.stats.steps for e in engines) >= begun + num_steps)
    os.kill(worker_pid(engines[victim]), signal.SIGKILL)
    await until(lambda: any(engine.recovery.outage for engine in engines))
    for each in come_back:
        each()
    await until(lambda: all(engine.state is EngineState.SERVING for engine in engines))


async def test_another_engine_takes_beam_searches_over(folder: Path) -> None:
    """From a worker that is killed at any time, with beams that have come to different steps."""
    settings = SETTINGS | TWO_ENGINES | {"cache.block_size": 4, "cache.num_blocks": 100}
    async with serve(**settings, **{"model.path": str(folder)}) as served:
        engines = served.frontend.engines
        expected = [up_to_rounding(await choices_of(served, asked)) for asked in SEARCHES]
        for number, num_steps in enumerate(range(2, 40, 6)):
            replies = [asyncio.ensure_future(choices_of(served, asked)) for asked in SEARCHES]
            await take_over(served, num_steps, number % 2)
            assert await asyncio.gather(*replies) == expected
            for engine in engines:
                assert engine.is_idle
                engine.check_records()
                engine.scheduler.check_integrity()
                assert engine.metrics.violations == 0
        assert sum(engine.metrics.moved for engine in engines) > 6


async def test_a_beam_that_has_its_last_token_is_not_computed_again(folder: Path) -> None:
    """Of two slots another request has one: the second beam begins when the first has ended."""
    search = IDS | {"use_beam_search": True, "n": 2, "max_tokens": 1}
    asked = IDS | {"max_tokens": 110}
    settings = SETTINGS | TWO_ENGINES | {"scheduler.max_num_seqs": 2}
    async with serve(**settings, **{"model.path": str(folder)}) as served:
        engines = served.frontend.engines
        expected = [await choices_of(served, fields) for fields in (search, asked, asked)]
        others = [asyncio.ensure_future(choices_of(served, asked)) for _ in engines]
        await until(lambda: all(engine.scheduler.running for engine in engines))
        reply = asyncio.ensure_future(choices_of(served, search))
        beams: list[Request] = []
        while [beam.status is RequestStatus.FINISHED for beam in beams] != [True, False]:
            await asyncio.sleep(0)
            found = [each for e in engines for each in e.requests.sequences.values()]
            beams = [sequence.request for sequence in found if sequence.is_beam]
            (lost, *_) = [e for e in engines if set(beams) & e.requests.sequences.keys()] or engines
        come_back = lose(lost)
        await until(lambda: lost.is_idle)
        assert beams[0].status is RequestStatus.FINISHED
        assert await asyncio.gather(reply, *others) == expected
        come_back()
