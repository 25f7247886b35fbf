"""Adapters over HTTP: a request names one as its model, in every API; they come and go while the
server runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.adapter_files import write_adapter
from tests.functional.conftest import NUM_LAYERS, Served, serve
from tests.functional.test_request_log import lines

pytestmark = pytest.mark.asyncio(loop_scope="session")

ADMIN = {"Authorization": "Bearer admin-key"}
PROMPT = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of SmolLM2's first layers, whose weights peft does not read."""
    folder = tmp_path_factory.mktemp("adapter")
    modules = {f"model.layers.{layer}.mlp.down_proj": (576, 1536) for layer in range(NUM_LAYERS)}
    write_adapter(folder, modules, rank=4, deviation=2.0)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def adapted(adapter: Path) -> AsyncIterator[Served]:
    settings: dict[str, Any] = {
        "parallel.executor": "inline", "server.admin_key": "admin-key", "lora.max_adapters": 2,
        "lora.adapters": {"first": str(adapter)},
    }  # fmt: skip
    async with serve(**settings) as served:
        yield served


async def admin(served: Served, path: str, status: int = 200, **body: str) -> dict[str, Any]:
    async with served.http.post(path, json=body, headers=ADMIN) as response:
        reply: dict[str, Any] = await response.json()
        assert response.status == status, reply
        return reply


async def test_each_api_has_the_adapter_that_a_request_names(adapted: Served) -> None:
    plain = await adapted.complete(**PROMPT)
    reply = await adapted.post("/v1/completions", model="first", **PROMPT)
    assert reply["model"] == "first"
    text = reply["choices"][0]["text"]
    assert text != plain["text"]
    events = await adapted.stream("/v1/completions", model="first", **PROMPT)
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert {event["model"] for event in events} == {"first"}
    base = (await adapted.post("/v1/chat/completions", **CHAT))["choices"][0]["message"]["content"]
    chat = await adapted.post("/v1/chat/completions", model="first", **CHAT)
    answer = chat["choices"][0]["message"]["content"]
    assert answer != base
    anthropic = await adapted.post("/v1/messages", model="first", **CHAT)
    assert (anthropic["content"][0]["text"], anthropic["model"]) == (answer, "first")
    limits = {"temperature": 0, "num_predict": 4}
    asked = {"messages": CHAT["messages"], "options": limits, "stream": False}
    ollama = await adapted.post("/api/chat", model="first", **asked)
    assert (ollama["message"]["content"], ollama["model"]) == (answer, "first")
    limits = {"temperature": 0, "max_output_tokens": 4}
    responses = await adapted.post("/v1/responses", model="first", input="Hello!", **limits)
    assert (responses["output"][0]["content"][0]["text"], responses["model"]) == (answer, "first")
    of_base, of_first = [
        (await adapted.post("/v1/embeddings", model=name, input="Hello!"))["data"][0]["embedding"]
        for name in ("smollm2", "first")
    ]
    assert of_base != pytest.approx(of_first, abs=1e-3)


async def test_log_lines_name_the_adapter(
    adapted: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aioinfer")
    for name in ("first", "org/alias"):
        await adapted.post("/v1/completions", model=name, **PROMPT)
    await adapted.post("/v1/completions", **PROMPT)
    found = [line["model"] for line in await lines(caplog, 3)]
    assert found == ["first", "org/alias", "smollm2"]


async def test_adapters_are_listed_below_the_model(adapted: Served, adapter: Path) -> None:
    async with adapted.http.get("/v1/models") as response:
        models = {model["id"]: model for model in (await response.json())["data"]}
    assert [*models] == ["smollm2", "org/alias", "first"]
    assert models["first"]["parent"] == "smollm2"
    assert models["first"]["root"] == str(adapter)
    assert models["smollm2"]["parent"] is None


async def test_adapters_come_and_go(adapted: Served, adapter: Path) -> None:
    path = {"lora_path": str(adapter)}
    assert (await adapted.post("/v1/completions", 404, model="second", **PROMPT))["error"]["code"]
    await adapted.post("/v1/load_lora_adapter", 401, lora_name="second", **path)
    await admin(adapted, "/v1/load_lora_adapter", lora_name="second", **path)
    taken = await admin(adapted, "/v1/load_lora_adapter", 400, lora_name="second", **path)
    assert "load_inplace" in taken["error"]["message"]
    await admin(adapted, "/v1/load_lora_adapter", lora_name="second", load_inplace=True, **path)
    names = ["second", "first", "smollm2"] * 2
    texts = await asyncio.gather(*(adapted.complete(model=name, **PROMPT) for name in names))
    assert texts[0]["text"] == texts[1]["text"] == texts[4]["text"] != texts[2]["text"]
    await admin(adapted, "/v1/unload_lora_adapter", lora_name="second")
    await admin(adapted, "/v1/unload_lora_adapter", 404, lora_name="second")
    assert (await adapted.post("/v1/completions", 404, model="second", **PROMPT))["error"]["code"]


async def test_a_wrong_adapter_is_refused(adapted: Served, tmp_path: Path) -> None:
    for name, path, message in (
        ("smollm2", str(tmp_path), "is the name of the model"),
        ("third", str(tmp_path), "adapter_config.json cannot be read"),
        ("third", str(tmp_path / "nowhere"), "there is no such file or folder"),
    ):
        body = {"lora_name": name, "lora_path": path}
        reply = await admin(adapted, "/v1/load_lora_adapter", 400, **body)
        assert message in reply["error"]["message"]
        assert reply["error"]["param"] == "lora_path"
