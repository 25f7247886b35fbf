"""Error bodies, the reasons that they are counted under, and what the log says of failures that
nobody expected."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
import uvloop

from aioinfer.api.errors import describe, error_body, error_response, raw_response
from aioinfer.api.http.connections import REASONS, HttpCounts
from aioinfer.errors import EngineDeadError, NotReadyError, OverloadedError
from aioinfer.gateway.relay import ReplicaLostError
from aioinfer.process_log import LoopErrors


def test_long_texts_are_shortened_and_keep_both_ends() -> None:
    error = error_body(400, f"the field {'x' * 10**6} is odd", param="y" * 10**6).error
    assert len(error.message) <= 400
    assert error.message.startswith("the field xxx")
    assert error.message.endswith("xxx is odd")
    assert len(error.param or "") <= 400
    assert error_body(400, "x" * 400).error.message == "x" * 400


def test_an_unexpected_exception_is_logged_without_its_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(text: str) -> None:
        try:
            raise ValueError(f"bad text: {text}")
        except ValueError as error:
            raise KeyError(text) from error

    prompt = "a secret prompt"
    with pytest.raises(KeyError) as raised:
        fail(prompt)
    status, body = describe(raised.value)
    assert status == 500
    assert "secret" not in str(body)
    assert "secret" not in caplog.text
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().endswith("KeyError")
    for part in ("ValueError", "test_errors.py", "in fail", "raise KeyError(text) from error"):
        assert part in record.getMessage()


def test_a_full_disk_is_named() -> None:
    with Path("/dev/full").open("wb", buffering=0) as full, pytest.raises(OSError) as raised:
        full.write(b"x")
    status, body = describe(raised.value)
    assert (status, body.error.code) == (507, "insufficient_storage")
    assert body.error.message == "the server cannot store it: No space left on device"


@pytest.mark.parametrize(
    ("error", "status", "seconds"),
    [
        (OverloadedError("full"), 503, "1"), (NotReadyError("starting"), 503, "1"),
        (EngineDeadError("a worker died"), 503, "10"), (ReplicaLostError(), 502, "1"),
    ],
)  # fmt: skip
def test_what_may_be_tried_again_says_when(error: Exception, status: int, seconds: str) -> None:
    response = error_response(error)
    assert response.status == status
    assert response.headers["Retry-After"] == seconds


def test_a_raw_response_is_a_whole_one() -> None:
    raw = raw_response(408, {"error": "ü"}, b"Retry-After: 1\r\n")
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 408 Request Timeout"
    assert b"Content-Length: %d" % len(body) in lines
    assert {b"Connection: close", b"Retry-After: 1"} < set(lines)
    assert orjson.loads(body) == {"error": "ü"}


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (400, None, "bad_request"), (400, "context_length_exceeded", "bad_request"),
        (400, "malformed_request", "malformed"), (415, "unsupported_media_type", "bad_request"),
        (401, "invalid_api_key", "api_key"), (413, "request_too_large", "too_large"),
        (429, "rate_limit_exceeded", "rate_limit"), (500, None, "failure"), (503, None, "failure"),
        (503, "overloaded", "overloaded"), (503, "not_ready", "not_ready"),
        (503, "engine_dead", "engine_dead"), (504, "timeout", "deadline"),
        (499, "of a client", "bad_request"),
    ],
)  # fmt: skip
def test_the_reason_of_a_reply(status: int, code: str | None, reason: str) -> None:
    counts = HttpCounts()
    counts.count_error(status, code)
    assert counts.errors == dict.fromkeys(REASONS, 0) | {reason: 1}


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


@pytest.mark.slow
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
    place = "ValueError at test_errors.py:"
    kind = "the last Task exception was never retrieved, "
    assert first.startswith(f"errors that nothing handled: 1, {kind}{place}")
    assert first.endswith(" in fail, task fail")
    assert second.startswith("errors that nothing handled: 19, ")
    assert "secret" not in caplog.text
    assert [record.exc_info for record in caplog.records] == [None, None]


@pytest.mark.slow
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
    assert "the last Exception in callback, KeyError at test_errors.py:" in line
    assert line.endswith(" in raise_key")
    assert "secret" not in caplog.text


@pytest.mark.slow
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
