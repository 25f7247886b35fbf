"""The page's files and its live stream, over a socket; the worker behind it computes nothing."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from blockbuster import blockbuster_ctx
from yarl import URL

import aioinfer
from aioinfer.api.admin.page import _FILES, PAGE_PATHS
from aioinfer.api.server import HttpServer, create_app
from aioinfer.engine.frontend import Frontend
from aioinfer.features.speculation.planning import ACCEPTED, DRAFT_TOKENS
from bench_loop import make_frontend
from tests.test_server import make_server
from tests.waiting import until

pytestmark = pytest.mark.slow

FOLDER = Path(aioinfer.__file__).parent / "page"
VENDOR = FOLDER / "vendor"
FILES = sorted(file for file in FOLDER.rglob("*") if file.is_file())
SVG_NAMESPACE = "http://www.w3.org/2000/svg"  # a name, which nobody follows


@asynccontextmanager
async def serve(**settings: Any) -> AsyncIterator[tuple[Frontend, HttpServer, str]]:
    """A server with four slots, whose steps take 5 ms; a call that blocks its event loop raises."""
    frontend = await make_frontend(
        4, 0.005, {name.replace("__", "."): value for name, value in settings.items()}
    )
    server = HttpServer(frontend.config, frontend)
    with blockbuster_ctx():
        try:
            yield frontend, server, await server.start()
        finally:
            await server.close()
            await frontend.close()


async def watch_all(
    http: aiohttp.ClientSession, **options: Any
) -> AsyncIterator[list[dict[str, Any]]]:
    """Yields the states of all engines as the live stream sends them."""
    async with http.get("/page/live", **options) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        async for line in response.content:
            if line.strip():
                yield json.loads(line.removeprefix(b"data: "))["engines"]


async def watch(http: aiohttp.ClientSession, **options: Any) -> AsyncIterator[dict[str, Any]]:
    """Yields the states of the only engine."""
    async for (state,) in watch_all(http, **options):
        yield state


async def complete(http: aiohttp.ClientSession, max_tokens: int, prompt_len: int = 100) -> None:
    body = {"prompt": list(range(5, 5 + prompt_len)), "max_tokens": max_tokens, "ignore_eos": True}
    async with http.post("/v1/completions", json=body) as response:
        assert response.status == 200


# ---------------------------------------------------------------- files


async def test_every_file_is_served_under_a_strict_policy() -> None:
    server = make_server()
    contents = await asyncio.to_thread(
        lambda: {file.relative_to(FOLDER).as_posix(): file.read_bytes() for file in FILES}
    )
    parts = {"head.html", "page.html", "docs.html"}
    kinds = {path.removeprefix("/page/"): kind for path, (_, kind) in _FILES.items()}
    assert kinds.keys() == contents.keys() - parts
    expected = {f"/page/{name}": (contents[name], kind) for name, kind in kinds.items()}
    for path, name, title in (("/", "page", "aioinfer"), ("/docs", "docs", "aioinfer: endpoints")):
        head = contents["head.html"].decode().replace("$name", name).replace("$title", title)
        sheets = ("base", "answer", "engine", "page") if name == "page" else ("base", "docs")
        links = [f'  <link rel="stylesheet" href="page/{sheet}.css">' for sheet in sheets]
        head = head.replace("$styles", "\n".join(links))
        page = head.encode() + contents[f"{name}.html"]
        expected[path] = page, "text/html; charset=utf-8"
    assert {*expected, ""} == PAGE_PATHS
    with blockbuster_ctx():  # reading a file must not block the event loop
        await check_files(await server.start(), expected)
    await server.close()


async def check_files(url: str, expected: dict[str, tuple[bytes, str]]) -> None:
    async with aiohttp.ClientSession(url) as http:
        for path, (content, content_type) in expected.items():
            async with http.get(path) as response:
                assert response.status == 200
                assert await response.read() == content
                assert response.headers["Content-Type"] == content_type
                assert response.headers["Content-Security-Policy"].startswith("default-src 'self';")
                policy = response.headers["Content-Security-Policy"].split("; ")
                assert "unsafe" not in "".join(policy)
                assert {"require-trusted-types-for 'script'", "trusted-types 'none'"} < set(policy)
                assert response.headers["Cache-Control"] == "no-cache"
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                tag = response.headers["ETag"]
            async with http.get(path, headers={"If-None-Match": tag}) as response:
                assert response.status == 304


@pytest.mark.parametrize(
    "path",
    [
        "/page", "/page/", "/page/page.html", "/page/head.html", "/page/../config.py",
        "/page/..%2fconfig.py", "/page/nothing.js", "/page/vendor/", "/page/vendor/../page.html",
    ],
)  # fmt: skip
async def test_nothing_else_is_served(path: str) -> None:
    server = make_server()
    url = await server.start()
    async with aiohttp.ClientSession() as http, http.get(URL(url + path, encoded=True)) as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "not_found"
    await server.close()


@pytest.mark.parametrize(
    "file", [file for file in FILES if VENDOR not in file.parents], ids=lambda file: file.name
)
def test_no_file_names_another_host(file: Path) -> None:
    text = file.read_text("utf-8").replace(SVG_NAMESPACE, "")
    assert re.findall(r"\w+://|[\"'(=]\s*//|@import|data:[^\"\s]", text) == []


def test_code_of_others_is_what_was_published_and_brings_its_licences() -> None:
    licences = (VENDOR / "LICENSES.txt").read_text("utf-8")
    named = dict(re.findall(r"^(\S+)\n  npm package .*\n  sha256 (\w+)$", licences, re.MULTILINE))
    scripts = [file for file in FILES if file.parent == VENDOR and file.suffix != ".txt"]
    fonts = {file.name for file in FILES if file.parent == VENDOR / "fonts"}
    style = (VENDOR / "katex.min.css").read_text("utf-8")
    assert fonts == set(re.findall(r"url\(fonts/(\S+?\.woff2)\)", style))
    assert named == {file.name: sha256(file.read_bytes()).hexdigest() for file in scripts}
    for package in (
        "markdown-it",
        "entities",
        "linkify-it",
        "mdurl",
        "punycode.js",
        "uc.micro",
        "katex",
        "highlight.js",
    ):
        (text,) = re.findall(
            rf"^{re.escape(package)} \(.*\)\n=+\n\n([^=]+)", licences, re.MULTILINE
        )
        assert "Copyright" in text
        assert "WARRANTIES" in text or "WARRANTY" in text


def test_its_own_scripts_and_styles_stay_small() -> None:
    own = [file for file in FILES if file.parent == FOLDER and file.suffix in (".js", ".css")]
    lines = {file.name: len(file.read_text("utf-8").splitlines()) for file in own}
    assert max(lines.values()) < 300
    assert sum(lines.values()) <= 4500


def test_every_file_is_part_of_the_installed_package() -> None:
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["aioinfer"]
    packed = {file for pattern in patterns for file in FOLDER.parent.glob(pattern)}
    assert set(FILES) <= packed


@pytest.mark.parametrize(
    "file", [file for file in FILES if file.suffix in (".js", ".mjs")], ids=lambda file: file.name
)
def test_no_script_makes_markup_or_code_of_text(file: Path) -> None:
    makers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|setHTML"
    text = file.read_text("utf-8")
    if file.name == "highlight.min.mjs":
        # It knows the names of what languages have, such as `eval`; and it has a function for
        # pages that want HTML, which ours never calls: the browser would refuse it
        # (`require-trusted-types-for`).
        assert re.findall(r"\.(innerHTML|outerHTML)\b", text) == ["innerHTML"] * 2
        makers = r"insertAdjacentHTML|document\.write\(|\beval\(|new Function|setHTML"
    assert re.findall(makers, text) == []


async def test_the_files_need_no_key_and_the_rest_does() -> None:
    async with serve(server__api_keys=["key"]) as (_, _, url), aiohttp.ClientSession(url) as http:
        for path in PAGE_PATHS - {""}:
            async with http.get(path) as response:
                assert response.status == 200, path
        for path in ("/page/live", "/page/info", "/page/", "/page/nothing"):
            async with http.get(path) as response:
                assert response.status == 401, path
        bearer = {"Authorization": "Bearer key"}
        async with http.get("/page/info", headers=bearer) as response:
            assert response.status == 200
        async for state in watch(http, headers=bearer):
            assert state["running"] == 0
            break


@pytest.mark.parametrize("takes_it_off", [False, True])
async def test_a_proxy_shows_the_pages_below_a_path(takes_it_off: bool) -> None:
    base = "" if takes_it_off else "/llm"
    async with serve(server__root_path="llm") as (_, _, url), aiohttp.ClientSession(url) as http:
        async with http.get("/llm?x=1", allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (308, "./llm/")
        for path in ("/", "/docs", "/page/page.js"):
            async with http.get(base + path) as response:
                assert response.status == 200
        async with http.get(f"{base}/openapi.json") as response:
            document = await response.json()
        assert document["servers"] == [{"url": "/llm"}]
        assert "/v1/completions" in document["paths"]


async def test_errors_of_an_application_below_a_path() -> None:
    """They have the shape of their API, and name the right path."""
    frontend = await make_frontend(4, 0.005, {})
    outer = web.Application()
    outer.add_subapp("/a/b", await create_app(frontend.config, frontend))
    async with TestServer(outer) as server, aiohttp.ClientSession(server.make_url("/")) as http:
        async with http.post("/a/b/v1/messages", json={}) as response:
            assert (await response.json())["type"] == "error"
        async with http.get("/a/b/messages") as response:
            assert response.status == 404
            message = (await response.json())["error"]["message"]
            assert message.endswith("/a/b/messages; did you mean /a/b/v1/messages?")
    await frontend.close()


# ---------------------------------------------------------------- info


@pytest.mark.parametrize("chats", [True, False])
async def test_info(chats: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as (frontend, _, url), aiohttp.ClientSession(url) as http:
        monkeypatch.setattr(type(frontend.tokenizer), "has_chat_template", chats)
        async with http.get("/page/info") as response:
            info = await response.json()
        assert info["chat"] is chats
        assert info["max_model_len"] == frontend.max_model_len
        assert info["tokenizer"] is True
        params = frontend.defaults.sampling_params()
        expected = {name: getattr(params, name) for name in info["defaults"]}
        assert info["defaults"] == pytest.approx(expected)
        assert info["defaults"]["temperature"] == 0.2, "as it is written, not its float32"
        assert {"temperature", "top_p", "top_k", "min_p"} < info["defaults"].keys()


async def test_info_has_the_default_sampling_of_the_configuration() -> None:
    settings = {"temperature": 0.5, "top_k": 7, "max_tokens": 99}
    configured = {f"model__sampling__{name}": value for name, value in settings.items()}
    async with serve(**configured) as (_, _, url), aiohttp.ClientSession(url) as http:
        async with http.get("/page/info") as response:
            defaults = (await response.json())["defaults"]
        assert {name: defaults[name] for name in settings} == settings
        await check_default_length(http, 99)


async def check_default_length(http: aiohttp.ClientSession, expected: int) -> None:
    """Completions without `max_tokens` have the default length; the EOS token is ignored."""
    body: dict[str, Any] = {"prompt": [5, 6, 7], "ignore_eos": True}
    for max_tokens, length in ((None, expected), (3, 3)):
        async with http.post("/v1/completions", json=body | {"max_tokens": max_tokens}) as response:
            assert (await response.json())["usage"]["completion_tokens"] == length
    chat = {"messages": [{"role": "user", "content": "Hello."}], "ignore_eos": True}
    async with http.post("/v1/chat/completions", json=chat) as response:
        assert (await response.json())["usage"]["completion_tokens"] == expected


async def test_a_default_length_is_capped_by_the_room_in_the_context() -> None:
    async with (
        serve(model__sampling__max_tokens=5000, model__max_model_len=200) as (_, _, url),
        aiohttp.ClientSession(url) as http,
    ):
        body: dict[str, Any] = {"prompt": list(range(5, 105)), "ignore_eos": True}
        async with http.post("/v1/completions", json=body) as response:
            assert (await response.json())["usage"]["completion_tokens"] == 100
        async with http.post("/v1/completions", json=body | {"max_tokens": 5000}) as response:
            assert response.status == 400, "what a request itself sets must fit"


# ---------------------------------------------------------------- the live stream


async def test_the_live_stream_agrees_with_the_work_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioinfer.api.admin.page._INTERVAL_S", 0.05)
    async with serve() as (frontend, _, url), aiohttp.ClientSession(url) as http:
        steps: list[list[int]] = []
        running: list[int] = []
        work: asyncio.Future[Any] | None = None
        for name, count in ((DRAFT_TOKENS, 4), (ACCEPTED, 3)):
            frontend.engines[0].metrics.count(name, count)
        async for state in watch(http):
            steps += state["log"]
            running.append(state["running"])
            found = (state["slots"], state["blocks"], state["block_size"])
            assert found == (4, frontend.engines[0].scheduler.kv_cache.num_blocks, 16)
            if work is None:
                assert (state["steps"], state["blocks_used"], state["blocks_cached"]) == (0, 0, 0)
                work = asyncio.gather(*(complete(http, 140, 100 + index) for index in range(3)))
            elif state["running"]:
                assert (state["running"], state["waiting"]) == (3, 0)
                # they may share the blocks in which they are alike
                assert state["blocks_used"] >= 3 * 7 - 2 * 6
            elif work.done():
                break
        assert work is not None
        await work
    assert 3 in running
    ids, prefills, decodes, sampled, *times = zip(*steps, strict=True)
    assert list(ids) == list(range(len(ids)))
    assert len(ids) == state["steps"] >= 140
    assert sum(sampled) == 3 * 140 + state["wasted_rows"]
    assert state["generation_tokens"] == 3 * 140
    assert (
        sum(prefills) + state["prefix_hit"]
        == state["prefix_queried"]
        == state["prompt_tokens"]
        == 100 + 101 + 102
    )
    assert sum(prefills) + sum(decodes) == 303 - state["prefix_hit"] + 3 * 139
    assert state["blocks_used"] == 0
    assert (state["draft_tokens"], state["accepted_tokens"]) == (4, 3)
    assert state["blocks_cached"] == frontend.engines[0].scheduler.kv_cache.num_cached > 20
    assert state["finished"] == {"stop": 0, "length": 3, "abort": 0, "error": 0}
    assert all(0 <= us < 1e6 for phase in times for us in phase)
    # update, plan, post, emit; this worker takes no time at all
    assert all(sum(phase) > 0 for phase in times[2:])


async def test_every_engine_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioinfer.api.admin.page._INTERVAL_S", 0.02)
    async with (
        serve(parallel__data_parallel_size=2) as (frontend, _, url),
        aiohttp.ClientSession(url) as http,
    ):
        steps: list[list[int]] = [[], []]
        work: asyncio.Future[Any] | None = None
        async for states in watch_all(http):
            for ids, state in zip(steps, states, strict=True):
                ids += [step[0] for step in state["log"]]
            if work is None:
                work = asyncio.gather(
                    *(complete(http, 20 + 10 * index, 40 + 300 * index) for index in range(2))
                )
            elif work.done() and not any(
                engine.scheduler.num_in_flight for engine in frontend.engines
            ):
                break
        assert work is not None
        await work
        assert [sum(engine.metrics.finished.values()) for engine in frontend.engines] == [1, 1]
    for ids, state in zip(steps, states, strict=True):
        assert ids == list(range(state["steps"]))
        assert state["finished"]["length"] == 1
    assert sorted(state["generation_tokens"] for state in states) == [20, 30]


async def test_the_server_notices_that_the_client_went_away() -> None:
    async with serve() as (frontend, _, url):
        steps = frontend.engines[0].metrics.steps
        async with aiohttp.ClientSession(url) as http, aiohttp.ClientSession(url) as other:
            first, second = watch(http), watch(other)
            await anext(first)
            await anext(second)
            assert steps.num_watchers == 2
            await http.close()
            await until(lambda: steps.num_watchers == 1)
            await complete(other, 3)
            while not (await anext(second))["log"]:
                pass
        await until(lambda: steps.num_watchers == 0)
        assert steps.since(-1) == []


async def test_nothing_is_logged_without_a_live_stream() -> None:
    async with serve() as (frontend, _, url), aiohttp.ClientSession(url) as http:
        await complete(http, 5)
        assert not frontend.engines[0].metrics.steps._posted
        assert frontend.engines[0].metrics.steps.since(-1) == []


async def test_a_live_stream_has_no_deadline() -> None:
    async with (
        serve(server__request_timeout_s=0.3) as (_, _, url),
        aiohttp.ClientSession(url) as http,
    ):
        times = 0
        async for _ in watch(http):
            times += 1
            if times == 3:
                break
        assert times == 3


@pytest.mark.parametrize("drains", [True, False])
async def test_a_server_that_stops_does_not_wait_for_live_streams(drains: bool) -> None:
    async with serve() as (_, server, url), aiohttp.ClientSession(url) as http:
        events = watch(http)
        await anext(events)
        async with asyncio.timeout(0.4):  # less than the time to the next event
            await (server.drain() if drains else server.close())
            assert [event async for event in events] == [], (
                "the stream ends as it should: nothing is missing of it"
            )


async def test_a_reader_that_stalls_costs_bounded_memory_and_no_time_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aioinfer.api.admin.page._INTERVAL_S", 0.0001)
    async with serve() as (frontend, server, url):
        with socket.socket() as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.setblocking(False)
            await asyncio.get_running_loop().sock_connect(stalled, ("127.0.0.1", URL(url).port))
            await asyncio.get_running_loop().sock_sendall(
                stalled, b"GET /page/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
            )
            assert server._connections is not None
            await until(lambda: frontend.engines[0].metrics.steps.num_watchers)
            (connection,) = server._connections.connections
            transport = connection.transport
            assert transport is not None
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            await until(lambda: transport.get_write_buffer_size())  # the system's buffers are full
            async with aiohttp.ClientSession(url) as http:
                await complete(http, 200)
            assert transport.get_write_buffer_size() < 16_384  # one event
            async with asyncio.timeout(5):
                await server.drain()
