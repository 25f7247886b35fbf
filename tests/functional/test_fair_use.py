"""Several API keys over a socket: limits of tokens, shares of the queue and of the slots, and
priorities. The engine is real; instead of a model, something answers with tokens of a text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from multidict import CIMultiDictProxy

from aioinfer.api.server import HttpServer
from bench_loop import make_frontend


@asynccontextmanager
async def serve(
    keys: Path, text: str, *, slots: int = 2, delay_s: float = 0.0, **settings: Any
) -> AsyncIterator[aiohttp.ClientSession]:
    """A server whose key file holds `text`."""
    await asyncio.to_thread(keys.write_text, text)
    settings = {name.replace("__", "."): value for name, value in settings.items()}
    frontend = await make_frontend(slots, delay_s, settings | {"server.api_keys": str(keys)})
    server = HttpServer(frontend.config, frontend)
    async with aiohttp.ClientSession(await server.start()) as http:
        yield http
    await server.close()
    await frontend.close()


async def complete(
    http: aiohttp.ClientSession, key: str, prompt: Any = 10, new: int = 5, **body: Any
) -> tuple[int, CIMultiDictProxy[str], Any]:
    prompt = [7] * prompt if isinstance(prompt, int) else prompt
    body = {"prompt": prompt, "max_tokens": new, "ignore_eos": True} | body
    headers = {"Authorization": f"Bearer {key}"}
    async with http.post("/v1/completions", json=body, headers=headers) as response:
        return response.status, response.headers, await response.json()


async def test_tokens_are_charged_when_queued_and_settled_at_the_end(tmp_path: Path) -> None:
    text = '[a]\nkey = "a"\ntokens_per_minute = 100\n[b]\nkey = "b"\n'
    async with serve(tmp_path / "keys", text) as http:
        status, headers, _ = await complete(http, "a", 10, 60)
        assert status == 200
        assert headers["x-ratelimit-limit-tokens"] == "100"
        status, headers, reply = await complete(http, "a", 10, 60)
        assert status == 429, "70 tokens are used, and 70 would be needed"
        assert reply["error"]["type"] == "tokens"
        assert 1 <= int(headers["Retry-After"]) <= 24
        assert (await complete(http, "a", 10, 10))[0] == 200
        assert (await complete(http, "b", 100, 600))[0] == 200
        status, headers, _ = await complete(http, "a", 10, 2000)
        assert status == 429
        assert 10 <= int(headers["x-ratelimit-remaining-tokens"]) <= 60


async def test_a_key_finds_its_own_conversations_alone(tmp_path: Path) -> None:
    async with serve(tmp_path / "keys", '[a]\nkey = "a"\n[b]\nkey = "b"\n') as http:
        a, b = ({"Authorization": f"Bearer {key}"} for key in "ab")
        body = {"items": [{"role": "user", "content": "mine"}]}
        async with http.post("/v1/conversations", json=body, headers=a) as response:
            path = f"/v1/conversations/{(await response.json())['id']}"
        for below in ("", "/items"):
            async with http.get(path + below, headers=a) as response:
                assert response.status == 200
            async with http.get(path + below, headers=b) as response:
                assert response.status == 404
        async with http.delete(path, headers=b) as response:
            assert response.status == 404


async def test_a_request_that_is_wrong_costs_no_tokens(tmp_path: Path) -> None:
    text = '[a]\nkey = "a"\ntokens_per_minute = 100000\n'
    async with serve(tmp_path / "keys", text) as http:
        status, _, reply = await complete(http, "a", 10, 50_000)
        assert (status, reply["error"]["param"]) == (400, "max_tokens")
        _, headers, _ = await complete(http, "a", 10, 5)
        assert int(headers["x-ratelimit-remaining-tokens"]) >= 100_000 - 15


async def test_one_request_is_served_beside_many_of_another_key(tmp_path: Path) -> None:
    """60 requests wait for two slots when another key's one arrives."""
    text = '[many]\nkey = "many"\n[one]\nkey = "one"\n'
    async with serve(tmp_path / "keys", text, delay_s=0.002) as http:
        many = [asyncio.ensure_future(complete(http, "many", 20, 20)) for _ in range(60)]
        await asyncio.wait(many, return_when=asyncio.FIRST_COMPLETED)
        assert (await complete(http, "one", 20, 20))[0] == 200
        ended = sum(task.done() for task in many)
        assert ended < 30, "it waited for those that came before it"
        assert {status for status, *_ in await asyncio.gather(*many)} == {200}


async def test_one_request_is_served_beside_another_with_many_prompts(tmp_path: Path) -> None:
    """60 prompts of one request wait for two slots when another one of the same key arrives."""
    async with serve(tmp_path / "keys", '[one]\nkey = "one"\n', delay_s=0.002) as http:
        many = asyncio.ensure_future(complete(http, "one", new=20, prompt=[[7] * 20] * 60))
        await asyncio.sleep(0.2)
        assert (await complete(http, "one", 20, 20))[0] == 200
        assert not many.done(), "it waited for those that came before it"
        status, _, reply = await many
        assert (status, len(reply["choices"])) == (200, 60)


async def test_a_key_leaves_room_in_the_queue(tmp_path: Path) -> None:
    text = '[many]\nkey = "many"\n[one]\nkey = "one"\n'
    settings = {"scheduler.max_waiting_requests": 20}
    async with serve(tmp_path / "keys", text, delay_s=0.05, **settings) as http:
        many = [asyncio.ensure_future(complete(http, "many", 20, 30)) for _ in range(40)]
        left, rejected = set(many), set()
        while len(left) > 20:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            rejected |= done
        assert {task.result()[0] for task in rejected} == {503}
        assert (await complete(http, "one", 20, 1))[0] == 200
        for task in many:
            task.cancel()
        await asyncio.gather(*many, return_exceptions=True)


async def test_priorities_are_bounded(tmp_path: Path) -> None:
    text = '[low]\nkey = "low"\nmin_priority = 5\n[any]\nkey = "any"\nmin_priority = -5\n'
    async with serve(tmp_path / "keys", text) as http:
        assert (await complete(http, "low"))[0] == 200
        assert (await complete(http, "low", priority=5))[0] == 200
        assert (await complete(http, "any", priority=-5))[0] == 200
        status, _, reply = await complete(http, "low", priority=4)
        assert (status, reply["error"]["param"]) == (400, "priority")
