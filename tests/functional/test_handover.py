"""Prefill and decode on different servers, behind a gateway: texts are those of one server, and a
server that is slow or lost costs time and nothing else."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from aioinfer.api.event_stream import HANDOVER_HEADER, STREAM_HEADER, gateway_token
from aioinfer.config import load_config
from aioinfer.gateway import proxy
from aioinfer.gateway.proxy import Gateway
from aioinfer.gateway.replica import ReplicaServer
from aioinfer.ipc import nixl_link, peer_link
from aioinfer.worker import kv_peers
from tests.functional.test_kv_store import MODELS, SETTINGS, model_of
from tests.tiny_models import tiny_model
from tests.waiting import until

extended = pytest.mark.extended
KEY = "0123456789abcdef" * 2
RNG = random.Random(7)
PROMPTS = [[RNG.randrange(3, 200) for _ in range(RNG.randint(50, 90))] for _ in range(4)]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a model; beside it are a key, and the first of two free ports."""
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "port").write_text(str(free_port(2)))
    return model_of(getattr(request, "param", "all tokens"), tmp_path)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The folder of a model with other weights."""
    family, fields = MODELS["all tokens"]
    return tiny_model(family, tmp_path / "other", vocab_size=200, seed=1, **fields)


def free_port(count: int) -> int:
    """Returns the first of `count` free ports."""
    while True:
        first = random.SystemRandom().randrange(20_000, 30_000)  # other processes test, too
        try:
            for port in range(first, first + count):
                with socket.create_server(("127.0.0.1", port)):
                    pass
        except OSError:
            continue
        return first


@dataclass
class Servers:
    """A server that computes prompts, one that generates, and a gateway to both."""

    prefill: ReplicaServer
    decode: ReplicaServer
    gateway: Gateway
    http: aiohttp.ClientSession
    token: str

    def loaded(self) -> int:
        return self.decode._frontend.engines[0].scheduler.stats.loaded_tokens

    def check(self) -> None:
        for server in (self.prefill, self.decode):
            server._frontend.engines[0].scheduler.check_integrity()

    async def generate(self, prompt: list[int], **more: Any) -> list[int]:
        return await complete(self.http, prompt, "decode", **more)


async def complete(
    http: aiohttp.ClientSession, prompt: list[int], replica: str | None, **more: Any
) -> list[int]:
    """Returns the tokens of an answer, and checks who has generated them."""
    body = {
        "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "seed": 3,
    }  # fmt: skip
    async with http.post("/v1/completions", json=body | more) as response:
        reply = await response.json()
        assert response.status == 200, reply
        assert response.headers.get("X-Aioinfer-Replica") == replica
        return list(reply["choices"][0]["token_ids"])


@asynccontextmanager
async def servers(folder: Path, **settings: Any) -> AsyncIterator[Servers]:
    key, port = folder.parent / "key", await asyncio.to_thread((folder.parent / "port").read_text)
    token = await asyncio.to_thread(gateway_token, str(key))
    usual = SETTINGS | {
        "model.path": str(folder), "cache.host_bytes": 2**24, "cache.peer_key_file": str(key),
        "server.port": 0, "cache.num_blocks": 200,
    } | settings  # fmt: skip
    serving = {"cache.peer_address": f"127.0.0.1:{port}"}
    prefill = await ReplicaServer.start(
        load_config(None, usual | serving), "127.0.0.1", "prefill", token
    )
    decode = await ReplicaServer.start(load_config(None, usual), "127.0.0.1", "decode", token)
    gateway = Gateway(
        load_config(None, usual), lambda: _addresses(decode), token,
        discover_prefill=lambda: _addresses(prefill),
    )  # fmt: skip
    async with aiohttp.ClientSession(await gateway.start()) as http:
        found = Servers(prefill, decode, gateway, http, token)
        try:
            await until(lambda: len(gateway.router) == len(gateway.prefill_router) == 1)
            yield found
        finally:
            await gateway.stop()
            for server in (prefill, decode):
                await server.stop()


async def _addresses(server: ReplicaServer) -> list[Any]:
    return [server.address]


def _works(server: ReplicaServer) -> list[Any]:
    executor = server._frontend.engines[0]._workers.executor
    worker = getattr(executor, "_worker", None)
    works = worker.runner.works.all if worker is not None else []
    return [work for work in works if hasattr(work, "connectors")]


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "MIN_HANDED_OVER", 16)


async def compare(found: Servers, folder: Path, **settings: Any) -> None:
    """Texts through the gateway are those of a server alone, and prompts are handed over."""
    texts = {
        (number, temperature): await found.generate(prompt, temperature=temperature)
        for number, prompt in enumerate(PROMPTS)
        for temperature in (0, 1)
    }
    assert found.gateway.metrics.handed_over._value.get() >= len(PROMPTS)
    size = found.decode._frontend.engines[0].report.block_size
    assert found.loaded() >= sum((len(prompt) - 1) // size * size for prompt in PROMPTS)
    found.check()
    config = SETTINGS | settings | {"model.path": str(folder), "server.port": 0}
    alone = await ReplicaServer.start(load_config(None, config), "127.0.0.1", "decode", "")
    async with aiohttp.ClientSession(alone.address.url) as http:
        for (number, temperature), text in texts.items():
            prompt = PROMPTS[number]
            assert await complete(http, prompt, None, temperature=temperature) == text
    await alone.stop()


@pytest.mark.parametrize(
    "folder",
    ["windows", *(pytest.param(name, marks=extended) for name in MODELS if name != "windows")],
    indirect=True,
)
async def test_texts_are_those_of_one_server(folder: Path) -> None:
    async with servers(folder) as found:
        await compare(found, folder)


async def test_texts_over_nixl_are_those_of_one_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers find each other over TCP alone, as on two hosts."""
    monkeypatch.setattr(peer_link, "unix_name", lambda address: "\0aioinfer-kv nowhere")
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(nixl_link, "has_rdma", lambda: True)
    async with servers(folder) as found:
        await compare(found, folder)
        (reading,) = _works(found.decode)
        links = [link for each in reading.connectors[1]._links.values() for link in each]
        assert links
        assert None not in [link.channel for link in links]


@extended
@pytest.mark.parametrize("folder", ["windows", "states"], indirect=True)
async def test_two_ranks_on_both_sides(folder: Path) -> None:
    settings = {"parallel.executor": "multiprocess", "parallel.tensor_parallel_size": 2}
    async with servers(folder, **settings) as found:
        await compare(found, folder, **settings)


async def test_a_lost_or_slow_server_costs_time_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with servers(folder) as found:
        expected = await found.generate(PROMPTS[0])
        before = found.loaded()
        assert before > 0
        # blocks that the server has promised and does not have any more
        monkeypatch.setattr(kv_peers, "_MAX_WAIT_S", 0.05)
        (work,) = _works(found.prefill)
        prompt = [*PROMPTS[1], *PROMPTS[0]]
        find = work.connectors[1]._index.find
        work.connectors[1]._index.find = lambda group, name, until: None
        first = await found.generate(prompt)
        assert found.loaded() == before
        work.connectors[1]._index.find = find
        # a server whose port for blocks is gone while it still computes prompts
        await asyncio.to_thread(work.connectors[1]._server.close)
        (reading,) = _works(found.decode)
        for links in reading.connectors[1]._links.values():
            for link in links:
                link._connection.shutdown(socket.SHUT_RDWR)
        assert await found.generate(PROMPTS[2])
        # a server that is gone
        await found.prefill.stop()
        assert await found.generate(PROMPTS[3])
        found.decode._frontend.reset_prefix_cache()
        assert await found.generate(PROMPTS[0]) == expected
        assert await found.generate(prompt) == first
        found.check()


async def test_a_server_that_ends_gives_its_address_up(folder: Path) -> None:
    """Its process goes on."""
    texts = []
    for _ in range(2):
        async with servers(folder) as found:
            texts.append(await found.generate(PROMPTS[0]))
            assert found.loaded() > 0
    assert texts[0] == texts[1]


async def test_the_command(folder: Path) -> None:
    async with servers(folder) as found:
        command = [
            "-m", "aioinfer", "gateway", str(folder), "--port", "0",
            "--set", "model.tokenizer=none",
            "--set", f"cache.peer_key_file={folder.parent / 'key'}",
            "--prefill", found.prefill.address.url, "--server", found.decode.address.url,
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        try:
            ready = (await process.stdout.readline()).decode()
            assert ready.startswith("The gateway is ready at http://127.0.0.1:")
            expected = await found.generate(PROMPTS[0])
            async with aiohttp.ClientSession(ready.split()[-1]) as http:
                url = found.decode.address.url
                assert await complete(http, PROMPTS[0], url) == expected
                async with http.get("/metrics/targets") as response:
                    targets = await response.json()
                expected_urls = [url, found.prefill.address.url]
                assert [each["labels"]["replica"] for each in targets] == expected_urls
                body = {"prompt": PROMPTS[1], "max_tokens": 60, "ignore_eos": True, "stream": True}
                async with http.post("/v1/completions", json=body) as response:
                    await response.content.readline()
                    await found.decode._frontend.control.pause()
                    process.terminate()
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(asyncio.shield(process.wait()), 1)
                    process.terminate()  # which does not wait
                    assert await asyncio.wait_for(process.wait(), 20) == 0
                found.decode._frontend.control.resume()
        finally:
            if process.returncode is None:
                process.kill()


async def test_blocks_of_old_weights_are_not_read_for_new_ones(
    folder: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt waits for the update, and its blocks are another server's, of the old weights."""
    async with servers(folder) as found:
        await found.generate(PROMPTS[1])  # the connections are there
        before, control = found.loaded(), found.decode._frontend.control
        connector = _works(found.decode)[0].connectors[1]
        begin = connector.read

        def read(*args: Any) -> None:  # it may be over before anything else is done
            begin(*args)
            time.sleep(0.2)

        monkeypatch.setattr(connector, "read", read)
        await control.pause()
        generating = asyncio.create_task(found.generate(PROMPTS[0]))
        await until(lambda: found.decode._frontend.engines[0].scheduler.num_waiting == 1)
        await control.update_from_disk(other)
        control.resume()
        text = await generating
        assert found.loaded() == before
        found.decode._frontend.reset_prefix_cache()
        assert await found.generate(PROMPTS[0]) == text


async def test_streams_and_what_no_client_may_send(folder: Path) -> None:
    async with servers(folder) as found:
        body = {
            "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        headers = {HANDOVER_HEADER: "offer"}  # a gateway's own: it is not passed on
        async with found.http.post("/v1/completions", json=body, headers=headers) as response:
            text = await response.text()
        assert text.endswith("data: [DONE]\n\n")
        cached = (len(PROMPTS[0]) - 1) // 4 * 4
        assert f'"cached_tokens":{cached}' in text
        async with aiohttp.ClientSession(found.decode.address.url) as direct:
            for token, handover, status in (
                ("wrong", "offer", 403),
                (found.token, "{}", 400),
                (found.token, '{"address": 1}', 400),
            ):  # fmt: skip
                headers = {HANDOVER_HEADER: handover, STREAM_HEADER: token}
                async with direct.post("/v1/completions", json=body, headers=headers) as response:
                    assert response.status == status
