"""Error bodies, and what the log says of a failure that nobody expected."""

from __future__ import annotations

import logging
from pathlib import Path

import orjson
import pytest

from aioinfer.api.errors import describe, error_body, error_response, raw_response
from aioinfer.errors import NotReadyError, OverloadedError, RequestError


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


@pytest.mark.parametrize("error", [OverloadedError("full"), NotReadyError("starting")])
def test_what_may_be_tried_again_says_when(error: RequestError) -> None:
    response = error_response(error)
    assert response.status == 503
    assert response.headers["Retry-After"] == "1"


def test_a_raw_response_is_a_whole_one() -> None:
    raw = raw_response(408, {"error": "ü"}, b"Retry-After: 1\r\n")
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 408 Request Timeout"
    assert b"Content-Length: %d" % len(body) in lines
    assert {b"Connection: close", b"Retry-After: 1"} < set(lines)
    assert orjson.loads(body) == {"error": "ü"}
