"""The request log over a socket: one line a request, whatever ends it, and no text of a client that
was not asked for."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from aioinfer.process_log import FieldsMessage
from tests.functional.test_fair_use import complete, serve

KEYS = '[alice]\nkey = "sk-alice"\nrequests_per_minute = 1000\n'
ALICE = {"Authorization": "Bearer sk-alice"}


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aioinfer")


async def lines(caplog: pytest.LogCaptureFixture, number: int) -> list[dict[str, Any]]:
    """Returns the fields of the requests' lines once there are so many."""
    async with asyncio.timeout(20):
        while len(found := fields(caplog)) < number:  # noqa: ASYNC110  # the log has no events
            await asyncio.sleep(0.001)
    assert len(found) == number
    return found


def fields(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    messages = [record.msg for record in caplog.records]
    return [dict(message.fields) for message in messages if isinstance(message, FieldsMessage)]


async def test_a_completion(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serve(tmp_path / "keys", KEYS) as http:
        await complete(http, "sk-alice", 40, 7)
        await complete(http, "sk-alice", 40, 7, n=2)
        first, second = await lines(caplog, 2)
    assert {name: first[name] for name in ("key", "method", "path", "status", "finish")} == {
        "key": "alice", "method": "POST", "path": "/v1/completions", "status": 200,
        "finish": "length",
    }  # fmt: skip
    assert (first["prompt_tokens"], first["cached_tokens"], first["output_tokens"]) == (40, 0, 7)
    found = (second["prompt_tokens"], second["cached_tokens"], second["output_tokens"])
    assert found == (40, 32, 14)
    assert len(first["id"]) == 24
    parts = first["queue_ms"] + first["prefill_ms"]
    assert 0 < parts <= first["ttft_ms"] + 0.2
    assert first["ttft_ms"] + first["decode_ms"] <= first["total_ms"] + 0.2
    assert "prompt" not in first
    assert "sk-alice" not in caplog.text


async def test_a_stream_and_its_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serve(tmp_path / "keys", KEYS) as http:
        body = {"prompt": "the secret word", "max_tokens": 5, "stream": True, "ignore_eos": True}
        headers = ALICE | {"X-Request-Id": 'x" status=500'}
        async with http.post("/v1/completions", json=body, headers=headers) as response:
            await response.read()
        (line,) = await lines(caplog, 1)
    assert (line["id"], line["status"], line["output_tokens"]) == ('x" status=500', 200, 5)
    assert ' id="x\\" status=500" ' in caplog.text
    assert "secret" not in caplog.text


async def test_what_was_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serve(tmp_path / "keys", KEYS) as http:
        for method, path, headers in (
            ("POST", "/v1/completions", {}),
            ("GET", "/no%0Awhere/" + "x" * 500, ALICE),
            ("POST", "/v1/completions", ALICE),
            ("GET", "/version", ALICE),
            ("GET", "/health", {}),
            ("GET", "/health/x", ALICE),
        ):
            async with http.request(method, path, headers=headers) as response:
                await response.read()
        found = await lines(caplog, 2)
    assert [(line["key"], line["status"]) for line in found] == [("alice", 404), ("alice", 400)]
    values = [(line["client"], line["code"]) for line in found]
    assert values == [("127.0.0.1", "not_found"), ("127.0.0.1", "invalid_json")]
    assert found[0]["reason"].startswith("there is nothing at the path /no")
    assert found[1]["reason"].startswith("the body is not valid JSON")
    assert len(found[0]["path"]) == 200
    assert "model" not in found[1]
    assert len(caplog.text.splitlines()) == 3


async def test_requests_without_a_key_leave_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(tmp_path / "keys", KEYS) as http:
        for number in range(50):
            headers = {"Authorization": f"Bearer sk-guess-{number}"}
            async with http.post(f"/v1/guess-{number}", headers=headers) as response:
                assert response.status == 401
        assert caplog.messages == ["requests without a valid API key: 1, the last from 127.0.0.1"]
    assert caplog.messages[1:] == ["requests without a valid API key: 49, the last from 127.0.0.1"]
    assert "guess" not in caplog.text


async def test_a_client_that_goes_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serve(tmp_path / "keys", KEYS, delay_s=0.01) as http:
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.3):
                await complete(http, "sk-alice", 10, 1500)
        (line,) = await lines(caplog, 1)
    assert (line["status"], line["finish"]) == (499, "abort")
    assert 0 < line["output_tokens"] < 1500


async def test_lines_can_be_switched_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"logging.requests": False}
    async with serve(tmp_path / "keys", KEYS, **settings) as http:
        assert (await complete(http, "sk-alice"))[0] == 200
        async with http.get("/metrics") as response:
            text = await response.text()
    assert caplog.records == []
    assert (
        'aioinfer:api_key_requests_total{key="alice",model_name="SmolLM2-135M-Instruct"} 1.0'
        in text
    )
    assert 'aioinfer:api_key_prompt_tokens_total{key="alice"' in text
