"""Worker processes as pipeline stages, with real, tiny models: what they answer, and how the end of
one is reported."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aioinfer.executor.inline import InlineExecutor
from aioinfer.executor.multiprocess import MultiprocessExecutor
from tests.executor_runs import Run, greedy, tiny_config
from tests.tiny_models import tiny_model
from tests.worker_processes import worker_processes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("qwen2", tmp_path_factory.mktemp("qwen2"), tie_word_embeddings=True)


def staged(folder: Path, stages: int = 2, **settings: Any) -> Run:
    sizes = {"parallel.pipeline_parallel_size": stages, "scheduler.max_num_batched_tokens": 64}
    return Run(MultiprocessExecutor(tiny_config(folder, **sizes | settings), folder))


async def test_two_stages_give_what_one_worker_gives(folder: Path) -> None:
    inline = Run(InlineExecutor(tiny_config(folder, executor="inline"), folder))
    whole = await inline.start()
    expected = await greedy(inline, 7)
    await inline.executor.shutdown()
    assert len(set(expected)) > 1

    run = staged(folder)
    report = await run.start()
    assert (report.num_blocks, report.groups) == (whole.num_blocks, whole.groups)
    assert [list(layers) for layers, _ in report.stages] == [[0], [1]]
    assert report.weights_bytes == max(size for _, size in report.stages) < whole.weights_bytes
    assert await greedy(run, 7) == expected
    times = run.executor.stage_times()
    assert len(times) == 2
    assert all(time.busy_s > 0 and time.idle_s >= 0 for time in times)
    assert sum(time.idle_s for time in times) > 0  # one waits for the other
    await run.executor.shutdown()
    assert run.failures == []


@pytest.mark.extended
async def test_a_killed_rank_is_named_with_its_stage(folder: Path) -> None:
    run = staged(folder)
    before = worker_processes()
    await run.start()
    await greedy(run, 2)
    workers = [worker for worker in worker_processes() if worker not in before]
    assert len(workers) == 2
    workers[1].kill()
    async with asyncio.timeout(10):
        message = await run.wait_for_failure()
    assert message.startswith("worker 1 (stage 1) was killed by SIGKILL: rank 1 (stage 1) was")
    await run.executor.shutdown()
