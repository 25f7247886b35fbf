"""Tasks that run together and end together."""

from __future__ import annotations

import asyncio

import pytest

from aioinfer.tasks import end_tasks, together


async def test_the_first_failure_ends_the_others() -> None:
    ended: list[str] = []

    async def wait(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def fail() -> None:
        await asyncio.sleep(0)  # the others have begun
        raise ValueError("broken on purpose")

    with pytest.raises(ValueError, match="broken on purpose"):
        await together([wait("a"), fail(), wait("b")])
    assert sorted(ended) == ["a", "b"]


@pytest.mark.parametrize("number", [0, 1, 3])
async def test_results_are_in_order(number: int) -> None:
    async def after(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return turns

    turns = list(range(number, 0, -1))
    assert await together([after(each) for each in turns]) == turns


async def test_tasks_end_however_they_do() -> None:
    ended: list[str] = []

    async def wait(*, fails: bool) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("a")
            if fails:
                raise ValueError("broken on purpose")

    tasks = [asyncio.create_task(wait(fails=fails)) for fails in (False, True)]
    tasks.append(asyncio.create_task(asyncio.sleep(0)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await end_tasks(tasks)
    assert ended == ["a", "a"]
    assert all(task.done() for task in tasks)
    await end_tasks([])
