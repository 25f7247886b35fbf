"""Workers that do not come back for long: requests end or go elsewhere, others are refused, and all
goes on once there are workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioinfer.engine import recovery
from aioinfer.engine.engine import Engine
from aioinfer.engine.recovery import EngineState
from aioinfer.errors import EngineDeadError
from aioinfer.executor.base import Executor
from tests.executor_runs import tiny_llama
from tests.functional.conftest import serve
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")
IDS = {"prompt": [5, 9, 13], "temperature": 0, "ignore_eos": True, "return_token_ids": True}
SETTINGS = {
    "parallel.executor": "inline", "parallel.restart_workers": 1000, "model.tokenizer": "none",
    "model.max_model_len": 120,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(recovery, "_MAX_DELAY_S", 0.01)
    monkeypatch.setattr(recovery, "MAX_OUTAGE_S", 0.2)
    return tiny_llama(tmp_path / "llama")


def lose(engine: Engine) -> Callable[[], None]:
    """Loses an engine's workers; new ones cannot be started until the result is called."""
    make = engine.recovery.new_executor
    assert make is not None
    gives_up = [True]

    def new_executor() -> Executor:
        if gives_up:
            raise EngineDeadError("there is no memory")
        return make()

    engine.recovery.new_executor = new_executor
    engine._workers.start_s = 0.0
    engine.handle_loss(EngineDeadError("worker 0 was killed"))
    return gives_up.clear


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
    two = {"parallel.data_parallel_size": 2, "parallel.executor": "multiprocess"}
    async with serve(**SETTINGS | two, **{"model.path": str(folder)}) as served:
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
