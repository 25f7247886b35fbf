"""Models that take turns: each has the text that it has alone, requests in turns cause no more
swaps than the stay allows, and none waits without end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from aioinfer.engine import recovery
from aioinfer.engine.engine import Engine
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.model_group import ModelGroup
from aioinfer.engine.output import RequestOutput
from aioinfer.engine.recovery import EngineState
from aioinfer.errors import ConfigError, EngineDeadError, NotReadyError, WorkerCallError
from aioinfer.executor.base import Executor
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.worker import Worker
from tests.executor_runs import tiny_config, tiny_llama
from tests.waiting import until
from tests.worker_processes import worker_pid

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=90, ignore_eos=True)
PROMPTS = {(5, 9, 13, 2, 7): GREEDY, (11, 4, 8): SEEDED}
Tokens = list[list[int]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [tiny_llama(tmp_path_factory.mktemp("llama"), seed=seed) for seed in range(3)]


@asynccontextmanager
async def launched(
    folders: list[Path],
    stay_s: float = 0.0,
    first_gpus: tuple[int, ...] = (0, 0, 0),
    **settings: Any,
) -> AsyncIterator[ModelGroup]:
    usual = {"model.tokenizer": "none", "executor": "inline"}
    models = await ModelGroup.launch(
        [
            tiny_config(
                folder,
                **usual
                | {
                    "server.served_model_names": [f"m{number}"],
                    "parallel.device": f"cpu:{first_gpus[number]}",
                }
                | settings,
            )
            for number, folder in enumerate(folders)
        ]
    )
    for turns in models.turns:
        turns.min_stay_s = stay_s
    yield models
    for each in models:
        each.engines[0].scheduler.check_integrity()
    await models.close()


async def tokens_of(frontend: Frontend, **options: Any) -> Tokens:
    outputs = [await frontend.submit(list(p), params) for p, params in PROMPTS.items()]
    return [list((await output.collect())[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def alone(folders: list[Path]) -> list[Tokens]:
    """What each model answers in a server of its own."""

    async def ask(folder: Path) -> Tokens:
        async with launched([folder]) as models:
            return await tokens_of(models.first)

    return [asyncio.run(ask(folder)) for folder in folders]


async def long_request(frontend: Frontend) -> RequestOutput:
    """Returns the output of a request of many steps that has begun."""
    params = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)
    output = await frontend.submit([7, 3], params)
    await until(lambda: frontend.engines[0].scheduler.running)
    return output


async def test_each_model_has_its_turn_and_the_text_that_it_has_alone(
    folders: list[Path], alone: list[Tokens]
) -> None:
    async with launched(folders) as models:
        assert [each.control.sleep_level for each in models] == [0, 1, 1]
        assert models.awake == [models.first] == [models.find("m0")]
        assert models.find("m3") is None
        for _ in range(2):  # the second time out of what they have kept, if anything
            found = await asyncio.gather(*map(tokens_of, models), *map(tokens_of, models))
            assert found == alone + alone
        assert sum(not each.control.sleep_level for each in models) == 1


async def test_models_on_gpus_of_their_own_are_awake_side_by_side(
    folders: list[Path], alone: list[Tokens]
) -> None:
    """Two take turns, and the third one has nothing to do with that."""
    async with launched(folders, first_gpus=(0, 1, 0)) as models:
        first, second, third = models
        assert models.awake == [first, second]
        assert [each.control.sleep_level for each in models] == [0, 0, 1]
        running = await long_request(second)
        assert await asyncio.gather(*map(tokens_of, models)) == alone
        assert len((await running.collect())[0].token_ids) == 110
        assert [each.control.num_wakes > 0 for each in models] == [False, False, True]
        assert models.awake == [third, second]
        first.engines[0].handle_loss(EngineDeadError("lost"))
        assert await tokens_of(first) == alone[0]


async def test_a_request_that_runs_is_finished_first_and_one_that_waits_comes_later(
    folders: list[Path], alone: list[Tokens]
) -> None:
    async with launched(folders[:2], **{"scheduler.max_num_seqs": 1}) as models:
        first, second = models
        running = await long_request(first)
        waiting = asyncio.ensure_future(tokens_of(first))
        assert await tokens_of(second) == alone[1]
        (delta,) = await running.collect()
        assert (len(delta.token_ids), delta.finish_reason) == (110, "length")
        assert await waiting == alone[0]
        assert min(first.control.num_wakes, second.control.num_wakes) > 0


async def test_requests_in_turns_cause_no_more_swaps_than_the_stay_allows(
    folders: list[Path],
) -> None:
    stay_s, began = 0.2, time.monotonic()
    async with launched(folders, stay_s) as models:

        async def ask(frontend: Frontend) -> int:
            for number in count(1):
                await tokens_of(frontend)
                if all(each.control.num_wakes for each in models):
                    return number
            raise AssertionError

        # all are always wanted, and none starves
        asked = await asyncio.gather(*map(ask, models))
        assert min(asked) > 0
        wakes = sum(each.control.num_wakes for each in models)
        # those at the start, which had no stay before them, are two
        assert wakes <= 2 + (time.monotonic() - began) / stay_s


async def test_an_aborted_request_wakes_no_model_up(folders: list[Path]) -> None:
    async with launched(folders[:2], 0.3) as models:
        first, second = models
        output = await second.submit([5, 9], GREEDY)
        assert second.engines[0].scheduler.num_waiting == 1
        output.abort()
        assert second.engines[0].is_idle
        await until(lambda: not models.turns[0]._wanted)
        assert await tokens_of(first)
        assert (models.awake, second.control.num_wakes) == ([first], 0)


async def test_a_model_that_is_paused_keeps_its_place(
    folders: list[Path], alone: list[Tokens]
) -> None:
    async with launched(folders[:2]) as models:
        first, second = models
        await first.control.pause()
        waiting = asyncio.ensure_future(tokens_of(second))
        await until(lambda: models.turns[0]._wanted)
        await asyncio.sleep(0.05)
        assert (models.awake, first.control.sleep_level) == ([first], 0)
        await models.end_pauses()
        assert await waiting == alone[1]


@pytest.fixture
def restarts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_FIRST_DELAY_S", 0.0)


@pytest.mark.usefixtures("restarts_at_once")
async def test_workers_that_are_lost_asleep_come_back_in_their_turn(
    folders: list[Path], alone: list[Tokens]
) -> None:
    async with launched(folders[:2]) as models:
        first, second = models
        engine = second.engines[0]
        engine.handle_loss(EngineDeadError("lost"))
        assert await tokens_of(first) == alone[0]
        assert (engine.state, models.is_healthy()) == (EngineState.RESTARTING, True)
        assert await tokens_of(second) == alone[1]
        first.engines[0].handle_loss(EngineDeadError("lost"))
        found = await asyncio.gather(tokens_of(second), tokens_of(first))
        assert found == [alone[1], alone[0]]


@pytest.mark.usefixtures("restarts_at_once")
@pytest.mark.parametrize("falls_asleep", [True, False])
async def test_workers_that_are_lost_in_a_swap_are_reported_once(
    folders: list[Path], alone: list[Tokens], caplog: pytest.LogCaptureFixture, falls_asleep: bool
) -> None:
    """They are stopped, so that they are killed for certain before they sleep or wake up."""
    async with launched(folders[:2], executor="multiprocess") as models:
        first, second = models
        worker = worker_pid((first if falls_asleep else second).engines[0])
        os.kill(worker, signal.SIGSTOP)
        waiting = asyncio.ensure_future(tokens_of(second))
        turns = models.turns[0]
        await until(lambda: turns.is_swapping and turns.awake is (first, second)[not falls_asleep])
        os.kill(worker, signal.SIGKILL)
        assert await waiting == alone[1]
        said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        lost, *kept, serves = said
        assert "was killed by SIGKILL" in lost
        assert (
            kept == [f"{first.config.name} makes way once its workers serve again"][:falls_asleep]
        )
        assert "the workers serve again" in serves
        assert await tokens_of(first) == alone[0]


@pytest.mark.usefixtures("restarts_at_once")
async def test_an_engine_that_is_lost_while_its_model_wakes_up_takes_no_other_along(
    folders: list[Path], alone: list[Tokens], caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"parallel.data_parallel_size": 2}
    async with launched(folders[:2], executor="multiprocess", **settings) as models:
        second = models.find("m1")
        assert second is not None
        worker = worker_pid(second.engines[0])
        os.kill(worker, signal.SIGSTOP)
        waiting = asyncio.ensure_future(tokens_of(second))
        await until(lambda: models.turns[0].is_swapping and models.awake == [second])
        os.kill(worker, signal.SIGKILL)
        assert await waiting == alone[1]
        await until(lambda: all(each.state is EngineState.SERVING for each in second.engines))
        lost, _ = (r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)
        assert "was killed by SIGKILL" in lost
        assert [engine.metrics.restarts for engine in second.engines] == [1, 0]
        assert await asyncio.gather(*map(tokens_of, models)) == alone[:2]


@pytest.fixture
def short_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(recovery, "_MAX_DELAY_S", 0.01)
    monkeypatch.setattr(recovery, "MAX_OUTAGE_S", 0.1)
    monkeypatch.setattr(recovery, "OUTAGE_STARTS", 0.0)


def lose_for_long(engine: Engine) -> Callable[[], None]:
    """Loses an engine's workers; new ones cannot be started until the result is called."""
    make = engine.recovery.new_executor

    def fail() -> Executor:
        raise EngineDeadError("there is no memory")

    def come_back() -> None:
        engine.recovery.new_executor = make

    engine.recovery.new_executor = fail
    engine.handle_loss(EngineDeadError("lost"))
    return come_back


@pytest.mark.usefixtures("short_outage")
async def test_a_model_whose_workers_do_not_come_back_makes_way(
    folders: list[Path], alone: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with launched(folders[:2], **{"parallel.restart_workers": 1000}) as models:
        first, second = models
        (engine,) = first.engines
        come_back = lose_for_long(engine)
        with pytest.raises(NotReadyError, match="have not come back"):
            await tokens_of(first)
        assert await tokens_of(second) == alone[1]
        assert engine.state is EngineState.RESTARTING
        come_back()
        monkeypatch.setattr(recovery, "MAX_OUTAGE_S", 60.0)
        assert await tokens_of(first) == alone[0]
        assert await tokens_of(second) == alone[1]


@pytest.mark.usefixtures("short_outage")
async def test_an_engine_whose_workers_do_not_come_back_holds_no_other_model_up(
    folders: list[Path], alone: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"parallel.restart_workers": 1000, "parallel.data_parallel_size": 2}
    async with launched(folders[:2], executor="multiprocess", **settings) as models:
        first, second = models
        engine = first.engines[1]
        come_back = lose_for_long(engine)
        assert await tokens_of(first) == alone[0]
        assert await tokens_of(second) == alone[1]
        assert engine.state is EngineState.RESTARTING
        assert await tokens_of(first) == alone[0]
        come_back()
        await until(lambda: engine.state is EngineState.SERVING)
        assert await asyncio.gather(*map(tokens_of, models)) == alone[:2]


@pytest.mark.usefixtures("short_outage")
async def test_a_model_that_is_paused_keeps_its_place_without_workers(
    folders: list[Path], alone: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with launched(folders[:2], **{"parallel.restart_workers": 1000}) as models:
        first, second = models
        await first.control.pause()
        come_back = lose_for_long(first.engines[0])
        await until(lambda: first.control.outage)
        waiting = asyncio.ensure_future(tokens_of(second))
        await until(lambda: models.turns[0]._wanted)
        await asyncio.sleep(0.05)
        assert (models.awake, first.control.sleep_level) == ([first], 0)
        first.control.resume()
        assert await waiting == alone[1]
        come_back()
        monkeypatch.setattr(recovery, "MAX_OUTAGE_S", 60.0)
        assert await tokens_of(first) == alone[0]


@pytest.mark.usefixtures("restarts_at_once")
@pytest.mark.parametrize("method", ["sleep", "wake_up"])
async def test_a_model_that_cannot_sleep_or_wake_up_is_tried_again(
    folders: list[Path], alone: list[Tokens], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async with launched(folders[:2]) as models:
        first, second = models
        failures, usual = iter([True]), getattr(Worker, method)

        def fail_once(worker: Worker, *args: Any, **options: Any) -> None:
            if next(failures, False):
                raise WorkerCallError("there is no memory")
            usual(worker, *args, **options)

        monkeypatch.setattr(Worker, method, fail_once)
        assert await asyncio.gather(tokens_of(second), tokens_of(first)) == [alone[1], alone[0]]
        assert models.is_healthy()


async def test_a_model_that_cannot_start_ends_those_before_it(folders: list[Path]) -> None:
    with pytest.raises(ConfigError, match="model"):
        async with launched([folders[0] / "missing", folders[1]]):
            pass


async def test_a_model_that_is_dead_ends_the_server(folders: list[Path]) -> None:
    async with launched(folders[:2], **{"parallel.restart_workers": 0}) as models:
        _, second = models
        waiting = asyncio.ensure_future(models.wait_dead())
        second.engines[0].handle_loss(EngineDeadError("lost"))
        await waiting
        assert (models.is_healthy(), models.dead_reason) == (False, "lost")
