"""Exceptions that nothing handles leave one line, with their type and place and no text."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable

import pytest
import uvloop

from aioinfer.process_log import LoopErrors

pytestmark = pytest.mark.slow

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


async def fail(text: str) -> None:
    raise ValueError(text)


def raise_key(key: str) -> None:
    raise KeyError(key)


async def until(caplog: pytest.LogCaptureFixture, number: int) -> None:
    """Waits for so many lines."""
    async with asyncio.timeout(10):
        while len(caplog.messages) < number:  # no event
            gc.collect()
            await asyncio.sleep(0.005)


def run(main: Callable[[], object], new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())  # type: ignore[arg-type]


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_task_that_fails_leaves_its_type_and_place(
    new_loop: Callable[[], asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        errors = LoopErrors(asyncio.get_running_loop())
        for _ in range(20):
            asyncio.get_running_loop().create_task(fail("the secret prompt"))
            await asyncio.sleep(0)
        await until(caplog, 1)
        gc.collect()
        await asyncio.sleep(0.05)
        assert len(caplog.messages) == 1
        errors.close()

    run(main, new_loop)
    first, second = caplog.messages
    place = "ValueError at test_loop_errors.py:"
    kind = "the last Task exception was never retrieved, "
    assert first.startswith(f"errors that nothing handled: 1, {kind}{place}")
    assert first.endswith(" in fail, task fail")
    assert second.startswith("errors that nothing handled: 19, ")
    assert "secret" not in caplog.text
    assert [record.exc_info for record in caplog.records] == [None, None]


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_callback_that_fails_shows_no_argument(
    new_loop: Callable[[], asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        errors = LoopErrors(asyncio.get_running_loop())
        asyncio.get_running_loop().call_soon(raise_key, "sk-secret")
        await until(caplog, 1)
        errors.close()

    run(main, new_loop)
    (line,) = caplog.messages
    assert "the last Exception in callback, KeyError at test_loop_errors.py:" in line
    assert line.endswith(" in raise_key")
    assert "secret" not in caplog.text


@pytest.mark.parametrize("new_loop", LOOPS)
def test_errors_that_are_found_in_another_thread_or_late(
    new_loop: Callable[[], asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    context = {"message": "Future exception was never retrieved of sk-secret"}
    context_of_error = {**context, "exception": ValueError("sk-secret")}

    async def main() -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        errors = LoopErrors(loop)
        await asyncio.to_thread(loop.call_exception_handler, context_of_error)
        await until(caplog, 1)
        errors.close()
        return loop

    with asyncio.Runner(loop_factory=new_loop) as runner:
        loop = runner.run(main())
    loop.call_exception_handler(context)
    kind = "Future exception was never retrieved"
    assert caplog.messages == [
        f"errors that nothing handled: 1, the last {kind}, ValueError",
        f"an error that nothing handled: {kind}",
    ]
