"""Requests at fault get a 4xx that names the parameter, nothing of them is scheduled, and the
server goes on."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from yarl import URL

from aioinfer.api.context import largest_body
from tests.functional.conftest import Served
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
JSON = {"Content-Type": "application/json"}

#: (path, changes to a good body, parameter that the error names): one of each kind, and all that
#: depend on the model. `test_protocol` and `test_sampling_params` have every field's.
WRONG_FIELDS: list[tuple[str, dict[str, Any], str | None]] = [
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["fine", ""]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1, 2], []]}, "prompt"),
    (COMPLETIONS, {"prompt": "word " * 3000}, "prompt"),
    (COMPLETIONS, {"prompt": [1] * 512}, "prompt"),
    (COMPLETIONS, {"prompt": [1, 49152]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, 2**31 - 1]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, -1]}, "prompt[1]"),
    (COMPLETIONS, {"temperature": -0.5}, "temperature"),
    (COMPLETIONS, {"n": 10_000}, "n"),
    (COMPLETIONS, {"max_tokens": 4000}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 2**31 - 1}, "max_tokens"),
    (COMPLETIONS, {"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    (COMPLETIONS, {"stop_token_ids": [99_999]}, "stop_token_ids"),
    (COMPLETIONS, {"logit_bias": {"99999": 1}}, "logit_bias"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
    (COMPLETIONS, {"logit_bias": {"two words": 1}}, "logit_bias"),
    (COMPLETIONS, {"priority": -1}, "priority"),
    (CHAT, {"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 3000}]}, "messages"),
    (CHAT, {"max_completion_tokens": 4000}, "max_completion_tokens"),
    (CHAT, {"max_tokens": 4000}, "max_tokens"),
    (CHAT, {"response_format": {"type": "json"}}, "response_format.type"),
    (COMPLETIONS, {"json_schema": {"not": {}}}, "json_schema"),
    (COMPLETIONS, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    (COMPLETIONS, {"structured_outputs": {"json": {}, "whitespace_pattern": "("}},
     "structured_outputs.whitespace_pattern"),
    (CHAT, {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?" * 1025}},
     "structured_outputs.whitespace_pattern"),
    (COMPLETIONS, {"structured_outputs": {"json": {"not": {}}, "whitespace_pattern": " ?"}},
     "structured_outputs.json"),
    (COMPLETIONS, {"allowed_token_ids": [99_999]}, "allowed_token_ids"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True},
     "continue_final_message"),
    (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ("/tokenize", {}, "prompt"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ("/detokenize", {"tokens": [1, 49152]}, "tokens"),
]  # fmt: skip

#: Of a beam search, which cannot be streamed.
WRONG_SEARCHES = [
    ({"stream": True}, "stream"), ({"n": 65}, "n"), ({"best_of": 65}, "best_of"), ({"n": 64}, "n"),
    ({"n": 2, "best_of": 64}, "best_of"),
    ({"temperature": 0.5}, "temperature"),
    ({"top_k": 5}, "top_k"), ({"stop": "."}, "stop"),
    ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
    ({"length_penalty": 50}, "length_penalty"),
    ({"early_stopping": "soon"}, "early_stopping"),
    ({"echo": True, "max_tokens": 0}, "max_tokens"),
]  # fmt: skip

#: `test_protocol` has more of them.
RAW_BODIES = [
    b"",
    b"[]",
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt": "x", "seed": ' + b"9" * 100_000 + b"}",
]


def body_for(path: str) -> dict[str, Any]:
    return {COMPLETIONS: {"prompt": "hello"}, CHAT: {"messages": HELLO}}.get(path, {})


def check_error(
    reply: dict[str, Any], param: str | None, kind: str = "invalid_request_error"
) -> None:
    """Checks an error body against OpenAI's shape."""
    assert set(reply) == {"error"}
    assert set(reply["error"]) == {"message", "type", "param", "code"}
    assert reply["error"]["type"] == kind
    assert reply["error"]["param"] == param
    assert reply["error"]["message"]


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def nothing_is_scheduled(served: Served) -> AsyncIterator[None]:
    """Checks that no step was planned for what a test sent, and that the server is well."""
    steps = served.frontend.stats()["steps"]
    yield
    assert served.engine.scheduler.is_idle
    assert served.frontend.stats()["steps"] == steps
    await served.get("/health")


@pytest.mark.parametrize(("path", "fields", "param"), WRONG_FIELDS)
async def test_wrong_fields(served: Served, path: str, fields: dict[str, Any], param: str) -> None:
    """Where an endpoint streams, in the reply's status as well."""
    body = body_for(path)
    for stream in [{"stream": False}, {"stream": True}] if body else [{}]:
        check_error(await served.post(path, 400, **body | stream | fields), param)


@pytest.mark.parametrize(("fields", "param"), WRONG_SEARCHES)
async def test_wrong_searches(served: Served, fields: dict[str, Any], param: str) -> None:
    body = body_for(COMPLETIONS) | {"use_beam_search": True} | fields
    check_error(await served.post(COMPLETIONS, 400, **body), param)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("raw", RAW_BODIES)
async def test_bodies_that_are_not_json_objects(served: Served, path: str, raw: bytes) -> None:
    async with served.http.post(path, data=raw, headers=JSON) as response:
        assert response.status == 400
        assert "error" in await response.json()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
async def test_unknown_model(served: Served, path: str) -> None:
    bodies = {"/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]}}
    reply = await served.post(path, 404, **(body_for(path) or bodies[path]), model="gpt-9")
    check_error(reply, "model")
    assert reply["error"]["code"] == "model_not_found"


async def test_unknown_model_card(served: Served) -> None:
    check_error(await served.get("/v1/models/gpt-9", 404), "model")


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "multipart/form-data"},
        {"Content-Type": "text/plain", "Origin": "https://evil.example"},
        {"Content-Type": "", "Sec-Fetch-Site": "same-site"},
    ],
)
async def test_wrong_content_type(served: Served, headers: dict[str, str]) -> None:
    async with served.http.post(COMPLETIONS, data=b'{"prompt": "x"}', headers=headers) as response:
        assert response.status == 415
        check_error(await response.json(), None)


async def test_compressed_body(served: Served) -> None:
    async with served.http.post(
        COMPLETIONS, data=b"\x1f\x8b", headers=JSON | {"Content-Encoding": "gzip"}
    ) as response:
        assert response.status == 415


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", COMPLETIONS, "POST"),
        ("PUT", CHAT, "POST"),
        ("DELETE", "/v1/models", "GET,HEAD"),
        ("POST", "/health", "GET,HEAD"),
    ],
)
async def test_wrong_method(served: Served, method: str, path: str, allow: str) -> None:
    async with served.http.request(method, path) as response:
        assert response.status == 405
        assert response.headers["Allow"] == allow
        check_error(await response.json(), None)


@pytest.mark.parametrize(
    "path", ["/page/", "/v1", "/v1/nothing", "/v1/completions/", "/%00", "/v1/models/"]
)
async def test_unknown_path(served: Served, path: str) -> None:
    check_error(await served.get(path, 404), None)


@pytest.mark.parametrize("text", ["0123456789" * 90_000, "word " * 180_000])
async def test_a_text_that_cannot_fit_is_rejected_before_it_is_encoded(
    served: Served, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = {
        "prompt": (COMPLETIONS, {"prompt": text}),
        "messages": (CHAT, {"messages": [{"role": "user", "content": text}]}),
    }
    with monkeypatch.context() as patch:
        patch.setattr(served.frontend.tokenizer, "encode", None)
        for param, (path, body) in bodies.items():
            reply = await served.post(path, 400, **body)
            check_error(reply, param)
            assert reply["error"]["code"] == "context_length_exceeded"
    assert (await served.post("/tokenize", prompt=text))["count"] > 100_000


async def test_a_large_body_is_refused_by_its_length(served: Served) -> None:
    """The answer comes although the 50 MB are only announced: nobody waits for them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(served.url).port)
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {50 * 2**20}\r\n\r\n"
    )
    writer.write(head.encode() + b'{"prompt": "')
    status = await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    assert status.split()[1] == b"413"


async def test_a_large_body_of_unknown_length_is_cut_off(served: Served) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(50):
            yield b"x" * 2**20

    async with served.http.post(COMPLETIONS, data=chunks(), headers=JSON) as response:
        assert response.status == 413
        check_error(await response.json(), None)


async def test_a_body_of_the_largest_size_is_read(served: Served) -> None:
    body = json.dumps({"prompt": "x"}).encode()
    padded = body + b" " * (largest_body(served.frontend.max_model_len) - len(body))
    async with served.http.post("/tokenize", data=io.BytesIO(padded), headers=JSON) as response:
        assert response.status == 200
    larger = io.BytesIO(padded + b" ")
    async with served.http.post("/tokenize", data=larger, headers=JSON) as response:
        assert response.status == 413


async def test_bytes_that_are_not_http(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(served.url).port)
    writer.write(b"\x16\x03\x01 garbage\r\n\r\n")
    assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == b"400"
    writer.close()


async def test_a_body_that_never_ends(served: Served) -> None:
    """A client that goes away in the middle of its body leaves no handler behind."""
    _, writer = await asyncio.open_connection("127.0.0.1", URL(served.url).port)
    writer.write(
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
        f"application/json\r\nContent-Length: 99\r\n\r\n{{".encode()
    )
    await writer.drain()
    async with asyncio.timeout(10):
        await until(lambda: served.server._handling.number)
        writer.close()
        await writer.wait_closed()
        await until(lambda: not served.server._handling.number)
