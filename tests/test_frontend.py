"""The frontend over engines whose workers compute nothing: start, failures, what it refuses, drain
and close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aioinfer.checkpoint.source import resolve_model
from aioinfer.config import Config, load_config
from aioinfer.engine import recovery
from aioinfer.engine.frontend import Frontend
from aioinfer.errors import ConfigError, EngineDeadError, RequestError
from aioinfer.executor.base import ProgressCallback, WorkerReport
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.sampling_params import SamplingParams
from bench_loop import CONFIG, ONE_GROUP, make_frontend
from tests.waiting import until

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


class ScriptedExecutor:
    """Starts when the test lets it, with the outcome that the test sets; answers no plan."""

    def __init__(self, report: WorkerReport):
        self.report = report
        self.may_start = asyncio.Event()
        self.starting = asyncio.Event()
        self.error: Exception | None = None
        self.fail: Callable[[Exception], None]
        self.was_cancelled = False
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.num_shutdowns = 0

    async def start(
        self,
        on_result: Callable[[StepResult], None],
        on_failure: Callable[[Exception], None],
        on_progress: ProgressCallback,
    ) -> WorkerReport:
        self.fail = on_failure
        self.starting.set()
        try:
            await self.may_start.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.error is not None:
            raise self.error
        on_progress("load weights", 1, 1)
        return self.report

    def post(self, plan: StepPlan) -> None:
        """Keeps it for ever."""

    async def shutdown(self) -> None:
        self.num_shutdowns += 1
        await self.may_end.wait()


class Fleet:
    """A frontend over scripted executors, while it starts."""

    def __init__(self, folder: Path, config: Config, *lengths: int):
        self.folder = folder
        self.executors = [
            ScriptedExecutor(WorkerReport("none", "none", 0, 0, 16, (ONE_GROUP,), (64,), length))
            for length in lengths
        ]
        self.frontend = Frontend(config, list(self.executors), self.new_executor)
        self.progress: list[Any] = []

    def new_executor(self, number: int) -> ScriptedExecutor:
        """Returns a new executor, which is the last of the list."""
        self.executors.append(ScriptedExecutor(self.executors[number].report))
        return self.executors[-1]

    def states(self) -> list[str]:
        return [engine.state.value for engine in self.frontend.engines]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110  # no event
                await asyncio.sleep(0)

    async def start(self) -> None:
        starting = await self.begin()
        for executor in self.executors:
            executor.may_start.set()
        await starting

    async def begin(self) -> asyncio.Task[None]:
        """Returns the start, once all executors are at it."""
        starting = asyncio.create_task(
            self.frontend.start(self.folder, lambda *arguments: self.progress.append(arguments))
        )
        for executor in self.executors:
            await executor.starting.wait()
        return starting


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(CONFIG, {"parallel.data_parallel_size": 2})


@pytest.fixture(scope="module")
def folder(config: Config) -> Path:
    return resolve_model(config.model)


async def test_the_tokenizer_is_loaded_once_workers_load(
    folder: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all engines: its threads would keep workers from being started."""
    fleet = Fleet(folder, config, 800, 800)
    loaded, load = asyncio.Event(), fleet.frontend._load_for_engines
    loop = asyncio.get_running_loop()

    def note(folder: Path) -> None:
        loop.call_soon_threadsafe(loaded.set)
        load(folder)

    monkeypatch.setattr(fleet.frontend, "_load_for_engines", note)
    starting = await fleet.begin()
    fleet.executors[1].may_start.set()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(loaded.wait(), 0.3)
    fleet.executors[0].may_start.set()
    await asyncio.wait_for(loaded.wait(), 20)
    await starting
    assert fleet.frontend.tokenizer is not None
    await fleet.frontend.close()


async def test_all_engines_start_at_the_same_time(folder: Path, config: Config) -> None:
    fleet = Fleet(folder, config, 900, 700, 800)
    starting = await fleet.begin()
    assert not starting.done()
    for executor in reversed(fleet.executors):
        executor.may_start.set()
    await starting
    assert fleet.frontend.max_model_len == 700, "a request may come to any of them"
    assert len(fleet.progress) == 1, "they load the same: one bar is enough"
    await fleet.frontend.close()


async def test_one_that_fails_to_start_ends_the_others(folder: Path, config: Config) -> None:
    fleet = Fleet(folder, config, 900, 900)
    starting = await fleet.begin()
    fleet.executors[1].error = EngineDeadError("worker 0 failed")
    fleet.executors[1].may_start.set()
    with pytest.raises(EngineDeadError, match=r"^engine 1: worker 0 failed$"):
        await starting
    assert fleet.executors[0].was_cancelled
    await fleet.frontend.close()
    assert [executor.num_shutdowns for executor in fleet.executors] == [1, 1]


async def test_configuration_errors_of_the_executor_are_raised_unchanged(
    folder: Path, config: Config
) -> None:
    fleet = Fleet(folder, config, 900, 900)
    starting = await fleet.begin()
    for executor in fleet.executors:
        executor.error = ConfigError("lower it")
        executor.may_start.set()
    with pytest.raises(ConfigError, match=r"^lower it$"):
        await starting
    await fleet.frontend.close()


async def test_one_that_dies_while_another_starts_ends_the_start(
    folder: Path, config: Config
) -> None:
    fleet = Fleet(folder, config, 900, 900)
    starting = await fleet.begin()
    fleet.executors[0].may_start.set()
    await until(lambda: hasattr(fleet.frontend.engines[0], "report"))
    fleet.executors[0].fail(EngineDeadError("worker 0 was killed"))
    with pytest.raises(EngineDeadError, match=r"^engine 0: worker 0 was killed$"):
        await asyncio.wait_for(starting, 20)
    assert fleet.executors[1].was_cancelled
    await fleet.frontend.close()


async def test_a_start_that_is_given_up_ends_all(folder: Path, config: Config) -> None:
    fleet = Fleet(folder, config, 900, 900)
    starting = await fleet.begin()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert all(executor.was_cancelled for executor in fleet.executors)
    await fleet.frontend.close()


def without_restarts(config: Config) -> Config:
    return replace(config, parallel=replace(config.parallel, restart_workers=0))


async def test_the_requests_of_one_that_dies_go_to_another(folder: Path, config: Config) -> None:
    config = without_restarts(config)
    fleet = Fleet(folder, config, 900, 900)
    await fleet.start()
    assert fleet.states() == ["serving", "serving"]
    outputs = [await fleet.frontend.submit([number + 5] * 20, GREEDY) for number in range(4)]
    assert [len(engine.requests.sequences) for engine in fleet.frontend.engines] == [2, 2]
    fleet.executors[1].fail(EngineDeadError("worker 0 hung"))
    assert not any(output.is_finished for output in outputs)
    assert [len(engine.requests.sequences) for engine in fleet.frontend.engines] == [4, 0]
    assert [len(engine.metrics.open_requests) for engine in fleet.frontend.engines] == [4, 0]
    assert [engine.metrics.moved for engine in fleet.frontend.engines] == [0, 2]
    assert fleet.frontend.stats()["waiting"] == 4
    assert fleet.frontend.engines[1].is_idle
    outputs[3].abort()
    assert [len(engine.requests.sequences) for engine in fleet.frontend.engines] == [3, 0]
    for engine in fleet.frontend.engines:
        engine.check_records()
        assert engine.metrics.violations == 0
    assert (fleet.states(), fleet.frontend.is_healthy()) == (["serving", "dead"], True)
    assert [engine.metrics.is_serving for engine in fleet.frontend.engines] == [True, False]
    await fleet.frontend.submit([1], GREEDY)
    assert [len(engine.requests.sequences) for engine in fleet.frontend.engines] == [4, 0]
    await until(lambda: fleet.executors[1].num_shutdowns)
    fleet.executors[0].fail(EngineDeadError("worker 0 was killed"))
    await asyncio.wait_for(fleet.frontend.wait_dead(), 1)
    assert not fleet.frontend.is_healthy()
    found = [engine.dead_reason for engine in fleet.frontend.engines]
    assert found == ["engine 0: worker 0 was killed", "engine 1: worker 0 hung"]
    for output in outputs[:3]:
        with pytest.raises(EngineDeadError, match=r"^engine 0: worker 0 was killed$"):
            await anext(output)
    with pytest.raises(EngineDeadError, match="engine 0"):
        await fleet.frontend.submit([1], GREEDY)
    await fleet.frontend.close()


async def test_while_workers_come_back_others_get_the_requests(
    folder: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_FIRST_DELAY_S", 0.0)
    fleet = Fleet(folder, config, 900, 900)
    await fleet.start()
    fleet.executors[1].fail(EngineDeadError("worker 0 hung"))
    assert (fleet.states(), fleet.frontend.is_ready()) == (["serving", "restarting"], True)
    for number in range(3):
        await fleet.frontend.submit([number + 5] * 20, GREEDY)
    assert [len(engine.requests.sequences) for engine in fleet.frontend.engines] == [3, 0]
    fleet.executors[0].fail(EngineDeadError("worker 0 hung, too"))
    assert not fleet.frontend.is_ready()
    late = await fleet.frontend.submit([1], GREEDY)
    await fleet.until(lambda: len(fleet.executors) == 4)
    for executor in fleet.executors[2:]:
        executor.may_start.set()
    await fleet.until(fleet.frontend.is_ready)
    await fleet.until(lambda: fleet.states() == ["serving", "serving"])
    assert not late.is_finished
    assert [engine.metrics.restarts for engine in fleet.frontend.engines] == [1, 1]
    await fleet.frontend.close()
    with pytest.raises(EngineDeadError, match="shutting down"):
        await anext(late)


async def test_an_engine_whose_workers_do_not_come_back_is_dead(
    folder: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_FIRST_DELAY_S", 0.0)
    fleet = Fleet(folder, config, 900)
    await fleet.start()
    output = await fleet.frontend.submit([1], GREEDY)
    fleet.executors[0].fail(EngineDeadError("worker 0 was killed"))
    for number in range(1, 4):
        await fleet.until(lambda number=number: len(fleet.executors) == number + 1)
        if number == 2:  # too short for what was admitted
            fleet.executors[number].report = replace(fleet.executors[0].report, max_model_len=899)
        else:
            fleet.executors[number].error = EngineDeadError(f"attempt {number}")
        fleet.executors[number].may_start.set()
    await asyncio.wait_for(fleet.frontend.wait_dead(), 20)
    assert fleet.frontend.dead_reason == "engine 0: attempt 3 (after 3 restarts)"
    with pytest.raises(EngineDeadError, match="attempt 3"):
        await anext(output)
    await fleet.until(lambda: all(executor.num_shutdowns for executor in fleet.executors))
    await fleet.frontend.close()


async def test_workers_that_neither_end_nor_start_are_given_up(
    folder: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MAX_END_S", "MAX_START_S", "SLOWEST_START"):
        monkeypatch.setattr(recovery, name, 0.05)
    monkeypatch.setattr(recovery, "_FIRST_DELAY_S", 0.0)
    fleet = Fleet(folder, config, 900)
    await fleet.start()
    fleet.executors[0].may_end.clear()
    fleet.executors[0].fail(EngineDeadError("worker 0 was killed"))
    await fleet.until(lambda: fleet.executors[0].num_shutdowns == 1)
    await fleet.until(lambda: fleet.executors[0].num_shutdowns == 2)  # the next attempt
    fleet.executors[0].may_end.set()
    await asyncio.wait_for(fleet.frontend.wait_dead(), 20)
    assert fleet.frontend.dead_reason == "engine 0: TimeoutError() (after 3 restarts)"
    assert len(fleet.executors) > 1
    assert all(executor.was_cancelled for executor in fleet.executors[1:])
    await fleet.frontend.close()


async def test_a_close_ends_a_restart(folder: Path, config: Config) -> None:
    fleet = Fleet(folder, config, 900)
    await fleet.start()
    output = await fleet.frontend.submit([1], GREEDY)
    fleet.executors[0].fail(EngineDeadError("worker 0 was killed"))
    await asyncio.sleep(0)
    await asyncio.wait_for(fleet.frontend.close(), 20)
    with pytest.raises(EngineDeadError, match="shutting down"):
        await anext(output)
    assert len(fleet.executors) == 1


async def test_one_engine_has_no_number(folder: Path, config: Config) -> None:
    fleet = Fleet(
        folder, replace(config, parallel=replace(config.parallel, data_parallel_size=1)), 900
    )
    starting = await fleet.begin()
    fleet.executors[0].fail(EngineDeadError("worker 0 was killed"))
    with pytest.raises(EngineDeadError, match=r"^worker 0 was killed$"):
        await starting
    await fleet.frontend.close()


async def test_drain_and_close() -> None:
    frontend = await make_frontend(4, 0.002, {"parallel.data_parallel_size": 2})
    outputs = [await frontend.submit([number + 5] * 20, GREEDY) for number in range(4)]
    assert frontend.stats()["waiting"] == 4
    assert not await frontend.drain(0)
    assert await frontend.drain(20)
    assert all(output.is_finished for output in outputs)
    assert [sum(engine.metrics.finished.values()) for engine in frontend.engines] == [2, 2]
    assert await frontend.drain(0)
    late = [await frontend.submit([number + 5] * 20, GREEDY) for number in range(2)]
    await frontend.close()
    for output in late:
        with pytest.raises(EngineDeadError, match="shutting down"):
            await anext(output)


async def test_the_prompts_hashes_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = await make_frontend(4, 0.0, {"parallel.data_parallel_size": 3})
    calls = []
    monkeypatch.setattr(
        "aioinfer.engine.encoding.extend_hashes", lambda hashes, *rest: calls.append(hashes)
    )
    await frontend.submit([5] * 100, replace(GREEDY, n=3))
    assert len(calls) == 1
    assert [len(engine.requests.sequences) for engine in frontend.engines] == [3, 0, 0]
    await frontend.close()


async def test_what_is_refused() -> None:
    refused: list[tuple[list[int], dict[str, Any], str]] = [
        ([], {}, "prompt"), ([-1], {}, "prompt"), ([49_152], {}, "prompt"),
        ([5] * 2048, {}, "prompt"), ([5] * 2040, {"max_tokens": 9}, "max_tokens"),
        ([5], {"max_tokens": None, "min_tokens": 4000}, "min_tokens"),
        ([5], {"stop_token_ids": [50_000]}, "stop_token_ids"),
    ]  # fmt: skip
    frontend = await make_frontend(4, 0.0)
    for prompt, fields, param in refused:
        with pytest.raises(RequestError) as caught:
            await frontend.submit(prompt, replace(GREEDY, **fields))
        assert caught.value.param == param, (len(prompt), fields)
        assert frontend.engines[0].is_idle
    await frontend.close()
