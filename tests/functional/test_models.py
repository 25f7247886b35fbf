"""Three models in one server, by turns: each answers in every API as in a server of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
import pytest_asyncio

from aioinfer.api.server import HttpServer
from aioinfer.config import load_models
from aioinfer.engine.model_group import ModelGroup
from tests.adapter_files import write_adapter
from tests.encoder_models import tiny_encoder
from tests.executor_runs import tiny_llama
from tests.functional.conftest import Served, few_layers, serve
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

COMMON = """
cache.block_size = 16
cache.num_blocks = 200
scheduler.max_num_seqs = 4
scheduler.max_num_batched_tokens = 256
parallel.cpu_threads = 1
server.port = 0
server.admin_key = "admin-key"
"""
LLAMA = """
[[models]]
model.path = "{folder}"
model.tokenizer = "none"
model.max_model_len = 120
server.served_model_names = ["{name}"]
"""
IDS = {"prompt": [5, 9, 13], "temperature": 0, "ignore_eos": True, "return_token_ids": True}
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
SHORT = {"temperature": 0, "max_tokens": 12}
ADMIN = {"Authorization": "Bearer admin-key"}


@asynccontextmanager
async def served_by_turns(
    folder: Path, text: str, stay: float
) -> AsyncIterator[tuple[Served, ModelGroup]]:
    file = folder / "models.toml"
    await asyncio.to_thread(file.write_text, COMMON + text)
    models = await ModelGroup.launch(await asyncio.to_thread(load_models, file))
    for turns in models.turns:
        turns.min_stay_s = stay
    server = HttpServer(models.first.config)
    url = await server.start()
    await server.serve(models)
    async with aiohttp.ClientSession(url) as http:
        yield Served(models.first, server, url, http), models
    await server.close()
    await models.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a Llama, an adapter of it, another Llama, and an encoder."""
    found = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("llama", "other")):
        (found / name).mkdir()
        tiny_llama(found / name, seed=seed)
    write_adapter(found / "adapter", {"model.layers.0.mlp.down_proj": (32, 64)}, rank=4)
    tiny_encoder("bert", found / "encoder")
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def three(folder: Path) -> AsyncIterator[Served]:
    text = f"""
[[models]]
model.path = "{few_layers()}"
model.max_model_len = 512
server.served_model_names = ["smollm2", "org/alias"]
{LLAMA.format(folder=folder / "llama", name="llama")}
lora.max_adapters = 1
lora.adapters.tuned = "{folder / "adapter"}"
[[models]]
model.path = "{folder / "encoder"}"
server.served_model_names = ["encoder"]
"""
    async with served_by_turns(folder, text, 0.2) as (served, _):
        yield served


async def test_all_are_listed_and_one_is_awake(three: Served) -> None:
    ask = partial(three.get, headers=ADMIN)
    listed = {card["id"]: card for card in (await ask("/v1/models"))["data"]}
    assert [*listed] == ["smollm2", "org/alias", "llama", "tuned", "encoder"]
    states = [card["status"]["value"] for card in listed.values()]
    assert states == ["loaded", "loaded", "unloaded", "unloaded", "unloaded"]
    assert listed["tuned"]["parent"] == "llama"
    assert (await ask("/v1/models/encoder"))["max_model_len"] != 120
    names = [model["name"] for model in (await ask("/api/tags"))["models"]]
    assert names == ["smollm2", "org/alias", "llama", "encoder"]
    assert [model["name"] for model in (await ask("/api/ps"))["models"]] == ["smollm2"]
    assert (await ask("/props?model=tuned"))["model_alias"] == "llama"
    assert (await ask("/is_sleeping?model=llama"))["is_sleeping"]
    assert (await ask("/health/ready"))["status"] == "ok"
    assert not (await ask("/page/info?model=llama"))["tokenizer"]
    async with three.http.get("/metrics") as response:
        text = await response.text()
    assert 'aioinfer:model_awake{model_name="smollm2"} 1.0' in text
    assert 'aioinfer:model_awake{model_name="llama"} 0.0' in text
    assert 'vllm:num_requests_waiting{engine="0",model_name="encoder"} 0.0' in text


async def answers(of_chat: Served, of_llama: Served, of_encoder: Served) -> list[Any]:
    """Returns what the models answer, at the same time, through the clients of each API."""
    url = of_chat.url
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as messages,
    ):

        async def chat_stream() -> str:
            stream = await client.chat.completions.create(
                model="smollm2", messages=CHAT, stream=True, **SHORT
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

        async def response() -> str:
            asked = {"temperature": 0, "max_output_tokens": 12}
            return (
                await client.responses.create(model="org/alias", input=CHAT, **asked)
            ).output_text

        async def message() -> str:
            reply = await messages.messages.create(
                model="smollm2", messages=CHAT, max_tokens=12, extra_body={"temperature": 0}
            )
            return reply.content[0].text

        async def ids(model: str) -> list[int]:
            (choice,) = (await of_llama.post("/v1/completions", model=model, max_tokens=80, **IDS))[
                "choices"
            ]
            return choice["token_ids"]

        async def structured() -> str:
            body = {
                "model": "smollm2",
                "messages": CHAT,
                "structured_outputs": {"choice": ["a", "b"]},
            }
            reply = await of_chat.post("/v1/chat/completions", **body, **SHORT)
            return reply["choices"][0]["message"]["content"]

        ollama = {"model": "smollm2", "messages": CHAT, "stream": False}
        options = {"temperature": 0, "num_predict": 12}
        llama_cpp = {"prompt": "One, two,", "n_predict": 6, "temperature": 0}
        embedded = {"model": "encoder", "input": "the river"}
        found = await asyncio.gather(
            chat_stream(), ids("llama"), response(), ids("tuned"), message(), structured(),
            of_encoder.post("/v1/embeddings", **embedded),
            of_chat.post("/api/chat", **ollama, options=options),
            of_chat.post("/completion", model="smollm2", **llama_cpp),
        )  # fmt: skip
    *texts, embedding, chat, completion = found
    return [*texts, embedding["data"], chat["message"]["content"], completion["content"]]


async def test_each_answers_as_in_a_server_of_its_own(
    three: Served, served: Served, folder: Path
) -> None:
    usual = {"parallel.executor": "inline", "model.max_model_len": None}
    tuned = {"lora.max_adapters": 1, "lora.adapters": {"tuned": str(folder / "adapter")}}
    llama = {"model.path": str(folder / "llama"), "model.tokenizer": "none"}
    of_llama = usual | llama | tuned | {"server.served_model_names": ["llama"]}
    encoder = {"model.path": str(folder / "encoder"), "server.served_model_names": ["encoder"]}
    async with serve(**of_llama) as alone, serve(**usual | encoder) as embedder:
        expected = await answers(served, alone, embedder)
    assert expected[1] != expected[3]
    assert await asyncio.gather(*(answers(three, three, three) for _ in range(3))) == [expected] * 3


async def test_what_is_refused(three: Served) -> None:
    reply = await three.post("/v1/completions", 404, model="unknown", prompt=[1])
    assert "serves 'smollm2', 'org/alias', 'llama', 'tuned', 'encoder'" in reply["error"]["message"]
    await three.post("/v1/chat/completions", 400, model="encoder", messages=CHAT)
    await three.post("/v1/chat/completions", 400, model="llama", messages=CHAT)
    await three.get("/props?model=unknown", 404)
    for path in ("/sleep", "/wake_up?model=llama", "/pause?model=tuned"):
        async with three.http.post(path, headers=ADMIN) as response:
            assert response.status == 409, await response.text()
    for path, body, status in (
        ("load", {"lora_name": "encoder", "lora_path": "x", "model": "llama"}, 400),
        ("unload", {"lora_name": "encoder"}, 404),
        ("unload", {"lora_name": "tuned"}, 200),
    ):
        url = f"/v1/{path}_lora_adapter"
        async with three.http.post(url, json=body, headers=ADMIN) as response:
            assert response.status == status, await response.text()


async def test_a_stream_is_not_cut_and_a_client_that_goes_away_wakes_no_model(
    folder: Path,
) -> None:
    text = "".join(LLAMA.format(folder=folder / name, name=name) for name in ("llama", "other"))
    async with served_by_turns(folder, text, 0.5) as (two, (first, second)):

        async def stream() -> list[int]:
            events = await two.stream("/v1/completions", model="llama", max_tokens=110, **IDS)
            choices = [event["choices"][0] for event in events]
            return [token for choice in choices for token in choice.get("token_ids") or []]

        streaming = asyncio.ensure_future(stream())
        await until(lambda: first.engines[0].scheduler.running)
        gone = asyncio.ensure_future(two.complete(model="other", **IDS))
        await until(lambda: second.engines[0].scheduler.num_waiting)
        gone.cancel()
        await until(lambda: second.engines[0].is_idle)
        assert len(await streaming) == 110
        assert not second.control.num_wakes
        waiting = asyncio.ensure_future(two.complete(model="other", **IDS))
        await until(lambda: second.engines[0].scheduler.num_waiting)
        await two.server.drain()  # answers what waits for its turn, too
        assert len((await waiting)["token_ids"]) == 16
        assert second.control.num_wakes


async def test_a_pause_that_comes_too_late_holds_no_model_that_sleeps(folder: Path) -> None:
    text = "".join(LLAMA.format(folder=folder / name, name=name) for name in ("llama", "other"))
    async with served_by_turns(folder, text, 0.0) as (two, models):
        (first, _), (turns,) = models, models.turns
        asked = {"model": "llama", "max_tokens": 110, **IDS}
        running = asyncio.ensure_future(two.complete(**asked))
        await until(lambda: first.engines[0].scheduler.running)
        waiting = asyncio.ensure_future(two.complete(model="other", **IDS))
        await until(lambda: turns.is_swapping)
        await two.post("/pause?model=llama", 409, headers=ADMIN)
        await asyncio.gather(running, waiting)
        assert await two.complete(**asked) == await running


async def test_models_on_gpus_of_their_own_are_all_awake(folder: Path) -> None:
    text = "".join(
        f"{LLAMA.format(folder=folder / name, name=name)}parallel.device = 'cpu:{number}'\n"
        for number, name in enumerate(("llama", "other"))
    )
    async with served_by_turns(folder, text, 0.0) as (two, models):

        async def get(path: str) -> tuple[int, Any]:
            async with two.http.get(path, headers=ADMIN) as response:
                return response.status, await response.json()

        cards = (await get("/v1/models"))[1]["data"]
        assert [card["status"]["value"] for card in cards] == ["loaded"] * 2
        running = (await get("/api/ps"))[1]["models"]
        assert [model["name"] for model in running] == ["llama", "other"]
        for name, ready in (("llama", 200), ("other", 503)):  # while one of them is not paused
            async with two.http.post(f"/pause?model={name}", headers=ADMIN) as response:
                assert response.status == 200
            assert (await get("/health/ready"))[0] == ready
        await models.end_pauses()
        assert len((await two.complete(model="other", **IDS))["token_ids"]) == 16
        assert not any(each.control.num_wakes for each in models)
