"""The executor in a thread: plans in order, results on the event loop, failures reported once."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from aioinfer.errors import ConfigError, EngineDeadError
from aioinfer.executor.factory import make_executor
from aioinfer.executor.inline import InlineExecutor
from aioinfer.executor.multiprocess import MultiprocessExecutor
from tests.executor_runs import Run, broken_plan, greedy, tiny_config, tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


async def test_plans_give_results_in_order(folder: Path) -> None:
    config = tiny_config(folder, executor="inline")
    executor = make_executor(config, folder)
    assert isinstance(executor, InlineExecutor)
    run = Run(executor)
    report = await run.start()
    assert (report.num_blocks, report.block_size, report.max_model_len) == ((32,), 4, 128)
    assert [name for name, _ in report.phases] == ["load weights", "allocate, warm up"]
    assert [phase for phase, *_ in run.progress][-2:] == ["load weights", "allocate, warm up"]
    tokens = await greedy(run, 6)
    assert tokens == await greedy(run, 6)
    assert run.threads == {threading.get_ident()}
    assert run.failures == []
    await executor.shutdown()
    await executor.shutdown()


async def test_a_failing_step_is_reported_once(folder: Path) -> None:
    run = Run(InlineExecutor(tiny_config(folder, executor="inline"), folder))
    await run.start()
    run.executor.post(broken_plan(0))
    run.executor.post(broken_plan(1))
    message = await run.wait_for_failure()
    await run.executor.shutdown()
    assert len(run.failures) == 1
    assert isinstance(run.failures[0], EngineDeadError)
    assert message.startswith("the worker failed:\nTraceback")
    assert "IndexError" in message
    run.executor.post(broken_plan(2))
    assert run.results == []


async def test_errors_of_the_start_arrive(folder: Path) -> None:
    executor = InlineExecutor(
        tiny_config(folder, executor="inline", **{"model.max_model_len": 500}), folder
    )
    with pytest.raises(ConfigError, match=r"model\.max_model_len = 500 needs 125 KV blocks"):
        await Run(executor).start()
    await executor.shutdown()


async def test_a_shutdown_in_the_middle_reports_nothing_more(folder: Path) -> None:
    run = Run(InlineExecutor(tiny_config(folder, executor="inline"), folder))
    await run.start()
    for step in range(20):
        run.executor.post(broken_plan(step))
    await run.executor.shutdown()
    await asyncio.sleep(0)
    assert run.failures == run.results == []
    assert not [t for t in threading.enumerate() if t.name.startswith("worker")]


def test_processes_are_the_default(folder: Path) -> None:
    executor = make_executor(tiny_config(folder), folder)
    assert isinstance(executor, MultiprocessExecutor)
    asyncio.run(executor.shutdown())
