"""A gateway and two replicas of a small random model on one event loop, without Ray: what
`test_serve` runs in processes. Nothing may block the loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

from aioinfer.config import load_config
from aioinfer.gateway import members, reporter
from aioinfer.gateway.proxy import Gateway
from aioinfer.gateway.replica import Address, ReplicaServer
from tests.functional.chromium import EXECUTABLE, open_page
from tests.gpu.random_models import random_model
from tests.waiting import until

TOKEN = "secret"


def text(start: int, length: int) -> list[int]:
    """Returns a prompt of so many tokens; others begin with other tokens."""
    return [(start * 7 + 3 * i) % 512 for i in range(length)]


@dataclass
class Fleet:
    gateway: Gateway
    replicas: list[ReplicaServer]
    members: list[ReplicaServer]
    http: aiohttp.ClientSession

    async def wait_for(self, count: int) -> None:
        await until(lambda: len(self.gateway.router) == count)

    async def complete(self, prompt: list[int], **more: object) -> dict[str, object]:
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | more
        async with self.http.post("/v1/completions", json=body) as response:
            reply: dict[str, object] = await response.json()
            assert response.status == 200, reply
            return reply | {"replica": response.headers["X-Aioinfer-Replica"]}


@asynccontextmanager
async def fleet(folder: Path, **settings: object) -> AsyncIterator[Fleet]:
    usual = {
        "model.path": str(folder), "parallel.executor": "inline", "parallel.cpu_threads": 1,
        "cache.num_blocks": 400, "cache.block_size": 16, "scheduler.max_num_seqs": 4,
        "server.port": 0, "server.shutdown_timeout_s": 20,
    }  # fmt: skip
    config = load_config(None, usual | {k.replace("__", "."): v for k, v in settings.items()})
    async with AsyncExitStack() as stack:
        replicas = [await ReplicaServer.start(config, "127.0.0.1", n, TOKEN) for n in "ab"]
        members = list(replicas)

        async def discover() -> list[object]:
            return [replica.address for replica in members]

        gateway = Gateway(config, discover, TOKEN)  # type: ignore[arg-type]
        url = await gateway.start()
        http = await stack.enter_async_context(aiohttp.ClientSession(url))
        found = Fleet(gateway, replicas, members, http)
        try:
            await found.wait_for(2)
            yield found
        finally:
            await gateway.stop()
            for replica in list(members):
                await replica.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(
        tmp_path_factory.mktemp("model"), vocab_size=512, max_position_embeddings=4096
    )


async def load_of(found: Fleet) -> dict[str, object]:
    async with found.http.get("/load") as response:
        assert response.status == 200
        reply: dict[str, object] = await response.json()
        return reply


async def check_load(found: Fleet) -> None:
    """Checks that the load is that of all replicas that answer."""
    async with AsyncExitStack() as streams:
        names = []
        for n in range(4):
            body = {"prompt": text(n, 8), "max_tokens": 4000, "stream": True, "ignore_eos": True}
            response = await streams.enter_async_context(
                found.http.post("/v1/completions", json=body)
            )
            streams.callback(response.close)
            await response.content.readuntil(b"\n\n")
            names.append(response.headers["X-Aioinfer-Replica"])
        assert {*names} == {"a", "b"}
        load = await load_of(found)
        assert (load["server_load"], load["running"], load["waiting"]) == (4, 4, 0)
        for replica, are_all in zip(found.replicas, (False, True), strict=True):
            await replica._frontend.control.pause("keep")
            assert (await load_of(found))["paused"] == are_all
        for replica in found.replicas:
            replica._frontend.control.resume()
    await until(lambda: not any(replica.load().running for replica in found.replicas))
    assert (await load_of(found))["server_load"] == 0


async def test_prefixes_streams_and_a_replica_that_leaves(folder: Path) -> None:
    async with fleet(folder) as found:
        silent = SimpleNamespace(address=Address("c", "http://127.0.0.1:1", ""))
        found.members.append(silent)  # type: ignore[arg-type]
        try:
            await until(lambda: "c" in found.gateway._members[0].urls)
            await check_load(found)
        finally:
            found.members.remove(silent)  # type: ignore[arg-type]
        prefix = text(1, 320)
        first = await found.complete(prefix + text(2, 8))
        await asyncio.sleep(0.3)
        second = await found.complete(prefix + text(3, 8))
        assert second["replica"] == first["replica"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 320

        body = {"prompt": text(4, 8), "max_tokens": 200, "stream": True, "ignore_eos": True}
        async with found.http.post("/v1/completions", json=body) as response:
            assert response.content_type == "text/event-stream"
            chunks = [await response.content.readuntil(b"\n\n")]
            replica = response.headers["X-Aioinfer-Replica"]
            (leaver,) = (r for r in found.replicas if r.address.name == replica)
            found.members.remove(leaver)
            stopping = asyncio.create_task(leaver.stop())
            await found.wait_for(1)
            others = [await found.complete(text(5 + n, 8)) for n in range(3)]
            assert {other["replica"] for other in others} != {replica}
            chunks.append(await response.read())
        await stopping
        events = b"".join(chunks).decode().strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"


async def test_a_stream_that_a_replica_has_no_time_for_ends_on_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as there is another: until then it waits."""
    monkeypatch.setattr("aioinfer.gateway.replica._LEAVING_S", 0.05)
    async with fleet(folder, server__shutdown_timeout_s=0.05) as found:
        body = {"prompt": text(6, 40), "max_tokens": 300, "stream": True, "ignore_eos": True}
        body |= {"temperature": 0, "stream_options": {"include_usage": True}}
        async with found.http.post("/v1/completions", json=body) as response:
            began = await response.content.readuntil(b"\n\n")
            name = response.headers["X-Aioinfer-Replica"]
            (leaver,) = (r for r in found.replicas if r.address.name == name)
            found.members.remove(leaver)
            (other,) = found.members
            found.members.clear()
            await leaver.stop()
            await found.wait_for(0)
            found.members.append(other)
            await found.wait_for(1)
            data = (began + await response.read()).decode()
        *events, usage, done = data.strip().split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(usage[6:])["usage"]["completion_tokens"] == 300
        chunks = [json.loads(event[6:]) for event in events]
        assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
        whole = await found.complete(text(6, 40), max_tokens=300)
        assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]
        registry = found.gateway.metrics.registry
        assert registry.get_sample_value("aioinfer:gateway_resumed_requests_total") == 1


async def test_a_replica_that_hangs_after_it_has_left_holds_no_stream(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "_SILENCE_S", 0.3)
    monkeypatch.setattr(reporter, "HEARTBEAT_S", 0.1)
    async with fleet(folder) as found:
        body = {"prompt": text(7, 40), "max_tokens": 300, "ignore_eos": True, "temperature": 0}
        async with found.http.post("/v1/completions", json=body | {"stream": True}) as response:
            began = await response.content.readuntil(b"\n\n")
            name = response.headers["X-Aioinfer-Replica"]
            (leaver,) = (r for r in found.replicas if r.address.name == name)
            found.members.remove(leaver)
            await found.wait_for(1)
            leaver._frontend.control.pause_now()
            await asyncio.sleep(0.4)  # the replica still reports
            assert found.gateway.metrics.lost._value.get() == 0
            leaver._reporter._task.cancel()
            async with asyncio.timeout(20):
                data = (began + await response.read()).decode()
        *events, done = data.strip().split("\n\n")
        assert done == "data: [DONE]"
        whole = await found.complete(**body)
        streamed = (json.loads(event[6:])["choices"][0]["text"] for event in events)
        assert "".join(streamed) == whole["choices"][0]["text"]
        await until(lambda: name not in found.gateway._members[0]._followed)
        await leaver.stop()


async def test_a_request_outlives_replicas_that_hang_at_the_same_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not sent to the second one, which is silent already when the first one counts as gone:
    with two of them lost it would end with an error, as if it might be the cause."""
    monkeypatch.setattr(members, "_SILENCE_S", 1.0)
    monkeypatch.setattr(members, "_DOUBT_S", 0.5)
    monkeypatch.setattr(reporter, "HEARTBEAT_S", 0.1)
    async with fleet(folder) as found:
        for replica in found.replicas:
            replica._frontend.control.pause_now()
        asked = asyncio.create_task(found.complete(text(8, 40)))
        await until(lambda: any(found.gateway._open.values()))
        (name,) = found.gateway._open
        replicas = sorted(found.replicas, key=lambda replica: replica.address.name != name)
        for replica in replicas:
            replica._reporter._task.cancel()
            await asyncio.sleep(0.15)  # the other one reports once more
        await until(lambda: found.gateway.metrics.lost._value.get())
        assert found.gateway.router.names == {replicas[1].address.name}
        await found.wait_for(0)
        await found.wait_for(2)  # they report to a new connection
        for replica in found.replicas:
            replica._frontend.control.resume()
        await asked
        assert found.gateway.metrics.lost._value.get() == 1


@pytest.mark.extended
async def test_what_a_gateway_answers_itself(folder: Path) -> None:
    async with fleet(folder, server__api_keys=["key"]) as found:
        http = found.http
        async with http.get("/health/ready") as response:
            assert await response.json() == {"status": "ok", "replicas": 2}
            assert response.headers["Server"] == "aioinfer"  # and no versions
        async with http.get("/metrics") as response:
            assert "aioinfer:gateway_replicas 2.0" in await response.text()
        async with http.get("/metrics/targets") as response:
            assert response.content_type == "application/json"
            found_targets = await response.json()
        names = [target["labels"]["replica"] for target in found_targets]
        assert names == ["a", "b"]
        async with aiohttp.ClientSession() as prometheus:
            for target in found_targets:
                async with prometheus.get(f"http://{target['targets'][0]}/metrics") as response:
                    assert "vllm:num_requests_running" in await response.text()
        async with http.post("/v1/completions", json={"prompt": text(1, 40)}) as response:
            assert response.status == 401
            assert (await response.json())["error"]["code"] == "invalid_api_key"
        for path in ("/v1/files", "/v1/conversations/conv_1", "/v1/chat/completions"):
            async with http.get(path) as response:
                assert response.status == 501
                assert response.headers["Server"] == "aioinfer"
        async with http.get("/load") as response:
            assert response.status == 401, "the replicas ask for a key"
        async with http.get("/load", headers={"Authorization": "Bearer key"}) as response:
            assert (await response.json())["server_load"] == 0
        kept = {"previous_response_id": "x_1", "conversation": "x_1", "background": True}
        for field, value in kept.items():
            async with http.post("/v1/responses", json={"input": "a", field: value}) as response:
                assert response.status == 501
                assert (await response.json())["error"]["param"] == field
        for data in (
            b'{"conversation": null, "background": false}',
            b'{"conversation": "\xff',
            b"[" * 5000,
        ):
            async with http.post("/v1/responses", data=data) as response:
                assert response.status == 401
        async with http.get("/v1/models", headers={"Host": "elsewhere.example"}) as response:
            assert response.status == 421
        async with aiohttp.ClientSession() as bare:
            url, headers = found.replicas[0].address.url, {"X-Aioinfer-Stream": "forged 1 key 2"}
            async with bare.post(f"{url}/v1/completions", headers=headers) as response:
                assert response.status == 403
            headers = {"X-Aioinfer-Stream": f"{TOKEN} 1 key 2"}
            async with bare.post(f"{url}/v1/completions", data="{}", headers=headers) as response:
                assert response.status == 400, "no marks are there"
            for replica in found.replicas:
                async with bare.get(replica.address.reports_url) as response:
                    assert response.status == 401
            port = http._base_url.port if http._base_url else 0
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET @127.0.0.1:1/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
        await writer.wait_closed()
        found.members.clear()
        stops = [replica.stop() for replica in found.replicas]
        await asyncio.gather(*stops)
        await found.wait_for(0)
        async with http.get("/v1/models") as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"


@pytest.mark.extended
@pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium is installed")
async def test_the_page_says_which_replica_it_shows(folder: Path, tmp_path: Path) -> None:
    async with fleet(folder) as found, open_page(tmp_path) as page:
        await page.open(str(found.http._base_url))
        await page.until("$('#replica')?.textContent.includes('one of 2')")
        line = str(await page.run("$('#replica').textContent"))
        assert line.split()[:2] in (["Replica", "a,"], ["Replica", "b,"])
        assert page.errors.empty(), page.errors
