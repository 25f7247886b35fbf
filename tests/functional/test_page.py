"""The page in headless Chromium, served by a real process with a real model."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from yarl import URL

from aioinfer.api.server import HttpServer
from aioinfer.sampling_params import SamplingParams
from bench_loop import make_frontend
from tests.functional.chromium import EXECUTABLE, Page, open_page

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "parallel.executor=inline",
    "server.port=0",
    "parallel.cpu_threads=1",
    "cache.num_blocks=200",
    "scheduler.max_num_seqs=4",
)
SHIFT = 8
HALF = b'data: {"choices":[{"delta":{"content":"Half"},"finish_reason":null}]}\n\n'
LAST_TEXT = "[...document.querySelectorAll('.answer')].at(-1)?.textContent"
IDLE = "!document.querySelector('#send').hidden"

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium is installed"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncIterator[str]:
    """A server process that is ready."""
    command = [sys.executable, "-m", "aioinfer", "--config", "configs/smollm2.toml"]
    for setting in SETTINGS:
        command += ["--set", setting]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    found = ""
    while "http://" not in found:
        found = (await process.stdout.readline()).decode()
        assert found, "the server ended"
    yield next(word for word in found.split() if word.startswith("http://"))
    process.terminate()
    await process.communicate()
    assert process.returncode == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    async with open_page(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Page, url: str) -> AsyncIterator[Page]:
    """The page, ready; whatever the test does, it may ask no other host, and complain of nothing
    but what the test expects."""
    await browser.open(url)
    await browser.until("document.querySelector('#status')?.dataset.state === 'live'")
    yield browser
    hosts = {URL(request["url"]).authority for request in browser.requests}
    assert hosts == {URL(url).authority}
    assert browser.errors.empty(), browser.errors


async def say(page: Page, text: str) -> None:
    """Types a message and sends it, by keyboard."""
    await page.run("document.querySelector('#prompt').focus()")
    await page.send("Input.insertText", text=text)
    await page.press("Enter", 13, "\r")


async def set_field(page: Page, name: str, value: str) -> None:
    """Fills in one of the settings."""
    field = f"document.querySelector('#composer').elements.{name}"
    await page.run(
        f"document.querySelector('.settings').open = true; {field}.focus(); {field}.select()"
    )
    await page.send("Input.insertText", text=value)


def posted(page: Page, path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
    """Returns the bodies that the page has posted."""
    return [
        json.loads(request["postData"])
        for request in page.requests
        if URL(request["url"]).path == path
    ]


async def gauge(url: str, name: str) -> float:
    async with aiohttp.ClientSession(url) as http, http.get("/metrics") as response:
        line = next(line for line in (await response.text()).splitlines() if line.startswith(name))
    return float(line.split()[-1])


async def until_idle(url: str) -> None:
    async with asyncio.timeout(10):
        while await gauge(url, "vllm:num_requests_running"):  # noqa: ASYNC110  # another process has no events for us
            await asyncio.sleep(0.01)


async def test_it_loads_by_itself(page: Page, url: str) -> None:
    paths = {URL(request["url"]).path for request in page.requests}
    assert {
        "/",
        "/page/page.css",
        "/page/page.js",
        "/v1/models",
        "/page/info",
        "/page/live",
    } <= paths
    assert await page.run("document.querySelector('#model').value") == "SmolLM2-135M-Instruct"
    assert await page.run("getComputedStyle(document.body).display") == "flex", (
        "the style sheet has been taken"
    )
    assert await page.run("document.activeElement.id") == "prompt"
    unlabelled = "[...document.querySelectorAll('input, textarea, select')].filter((f) => !f.labels.length).length"
    assert await page.run(unlabelled) == 0
    assert await page.run("[...document.querySelectorAll('[role=img]')].every((c) => c.ariaLabel)")


async def test_an_answer_streams_and_the_live_view_shows_it(page: Page, url: str) -> None:
    await set_field(page, "max_tokens", "60")
    await say(page, "Tell me a story about a lighthouse.")
    lengths = [len(await page.until(LAST_TEXT))]
    while len(lengths) < 3:
        await page.until(f"({LAST_TEXT}).length > {lengths[-1]}")
        lengths.append(len(await page.run(LAST_TEXT)))
    assert await page.run("document.querySelector('#send').hidden"), "it is still being written"
    await page.until("document.querySelector('[data-value=running]').textContent === '1'")
    await page.until(
        "/1 decode tokens/.test(document.querySelector('[data-value=readout]').textContent)"
    )
    await page.until(IDLE)
    figures = await page.run("document.querySelector('.figures').textContent")
    assert not await page.run("document.querySelector('.failure')?.textContent"), figures
    tokens, first, speed, reason = figures.split(" · ")
    assert tokens.startswith("60 tokens (prompt "), figures
    assert first.startswith("first after ")
    assert speed.endswith(" tokens/s")
    assert reason == "length"
    await page.until("document.querySelector('[data-value=running]').textContent === '0'")
    assert (
        await page.run("document.querySelector('[data-value=steps]').textContent")
        != "0 since the start"
    )


@pytest.mark.parametrize("by", ["button", "key"])
async def test_stop(page: Page, url: str, by: str) -> None:
    await say(page, "Tell me a very long story about the sea and the people who live by it.")
    await page.until(f"({LAST_TEXT} ?? '').length > 10")
    if by == "button":
        await page.run("document.querySelector('#halt').click()")
    else:
        await page.press("Escape", 27)
    await page.until(IDLE)
    await until_idle(url)
    await page.until("document.querySelector('[data-value=running]').textContent === '0'")
    text = await page.run(LAST_TEXT)
    assert (await page.run("document.querySelector('.figures').textContent")).endswith("stopped")
    await set_field(page, "max_tokens", "2")
    await say(page, "Go on.")
    await page.until(f"{IDLE} && document.querySelectorAll('.figures').length === 2")
    _, second = posted(page)
    assert second["messages"][1] == {"role": "assistant", "content": text}, (
        "what had come stays part of the conversation"
    )


async def test_a_second_turn_brings_the_first_and_clear_forgets(page: Page) -> None:
    await set_field(page, "max_tokens", "8")
    await set_field(page, "temperature", "0")
    await say(page, "My name is Ada.")
    await page.until(f"{IDLE} && document.querySelector('.figures')")
    await say(page, "What is my name?")
    await page.until(f"{IDLE} && document.querySelectorAll('.figures').length === 2")
    answer = await page.run("document.querySelector('.answer').textContent")
    first, second = posted(page)
    assert first["messages"] == [{"role": "user", "content": "My name is Ada."}]
    assert second["messages"] == [
        *first["messages"],
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "What is my name?"},
    ]
    await page.run("document.querySelector('#clear').click()")
    assert await page.run("document.querySelectorAll('.turn').length") == 0
    await say(page, "Hello.")
    await page.until(f"{IDLE} && document.querySelector('.figures')")
    assert posted(page)[-1]["messages"] == [{"role": "user", "content": "Hello."}]


async def test_clear_ends_an_answer_that_is_coming(page: Page, url: str) -> None:
    await say(page, "Tell me a very long story about mountains.")
    await page.until(f"({LAST_TEXT} ?? '').length > 10")
    await page.run("document.querySelector('#clear').click()")
    await until_idle(url)
    assert await page.run(
        f"{IDLE} && !document.querySelector('.turn') && !document.querySelector('#prompt').value"
    )


async def test_settings_reach_the_request(page: Page) -> None:
    numbers = {
        "temperature": "0.7", "top_p": "0.9", "top_k": "40", "min_p": "0.05", "max_tokens": "5",
        "seed": "7",
        "repetition_penalty": "1.1", "presence_penalty": "0.2", "frequency_penalty": "0.3",
    }  # fmt: skip
    for name, value in (numbers | {"system": "Be brief.", "stop": "END\n\\n\\n"}).items():
        await set_field(page, name, value)
    await say(page, "Hello.")
    await page.until(f"{IDLE} && document.querySelector('.figures')")
    (body,) = posted(page)
    assert body == {
        "model": "SmolLM2-135M-Instruct",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello."},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop": ["END", "\n\n"],
        **{name: float(value) for name, value in numbers.items()},
    }
    await page.run("document.querySelector('#reset').click()")
    await set_field(page, "max_tokens", "2")
    await say(page, "Again.")
    await page.until(f"{IDLE} && document.querySelectorAll('.figures').length === 2")
    assert posted(page)[1].keys() == {"model", "messages", "stream", "stream_options", "max_tokens"}


async def test_enter_with_shift_breaks_the_line(page: Page) -> None:
    await page.send("Input.insertText", text="one")
    await page.press("Enter", 13, "\r", SHIFT)
    await page.send("Input.insertText", text="two")
    assert await page.run("document.querySelector('#prompt').value") == "one\ntwo"
    assert posted(page) == []


async def test_an_error_is_shown_in_its_place(page: Page) -> None:
    await set_field(page, "temperature", "-1")
    await say(page, "Hello.")
    shown = await page.until("document.querySelector('.turn .failure')?.textContent")
    assert shown.startswith("400: temperature must be")
    assert await page.run("document.querySelector('#prompt').value") == "Hello.", (
        "it can be sent again"
    )
    assert "400" in await page.errors.get()  # the browser's own line
    await page.run("document.querySelector('#reset').click()")
    await set_field(page, "max_tokens", "2")
    await page.press("Tab", 9)
    await page.run("document.querySelector('#composer').requestSubmit()")
    await page.until(f"{IDLE} && document.querySelector('.figures')")
    assert posted(page)[1]["messages"] == [{"role": "user", "content": "Hello."}], (
        "what failed is not part of the conversation"
    )


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (HALF + b'data: {"error":{"message":"it broke"}}\n\n', "it broke"),
        (HALF, "ended before the answer did"),
        (b"data: {nonsense\n\n", "broke off"),
    ],
)
async def test_a_stream_that_fails(page: Page, body: bytes, shown: str) -> None:
    await page.answer("/v1/chat/completions", 200, "text/event-stream", body)
    await say(page, "Hello.")
    assert shown in await page.until("document.querySelector('.failure')?.textContent")
    assert await page.run(LAST_TEXT) == ("Half" if b"Half" in body else "")


async def test_hostile_output_stays_text(page: Page) -> None:
    hostile = "<script>document.title = 'hacked'</script><img src=x onerror=\"document.title = 'hacked'\"><b>bold</b>"
    event = {"choices": [{"delta": {"content": hostile}, "finish_reason": None}]}
    await page.answer(
        "/v1/chat/completions",
        200,
        "text/event-stream",
        f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode(),
    )
    await say(page, "Hello <i>there</i>")
    await page.until(f"{IDLE} && document.querySelector('.figures')")
    assert await page.run(LAST_TEXT) == hostile
    assert await page.run("document.querySelector('.user').textContent") == "Hello <i>there</i>"
    assert await page.run("document.querySelectorAll('.log :is(script, img, b, i)').length") == 0
    assert "hacked" not in await page.run("document.title")


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
async def test_events_are_read_across_the_borders_of_chunks(page: Page, size: int) -> None:
    text = ": comment\r\n\r\ndata: größer\r\ndata: 你好 😀\r\n\r\nevent: x\nid: 1\ndata:[1]\n\ndata: a\rdata: b\r\rdata: unfinished"
    script = """async (text, size) => {
        const { readEvents } = await import("/page/api.js");
        const bytes = new TextEncoder().encode(text);
        const stream = new ReadableStream({ start(controller) {
            for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
            controller.close();
        } });
        return await Array.fromAsync(readEvents(stream));
    }"""
    assert await page.run(f"({script})({json.dumps(text)}, {size})") == [
        "größer\n你好 😀",
        "[1]",
        "a\nb",
    ]


async def test_a_server_that_asks_for_a_key(page: Page, url: str) -> None:
    refusal = json.dumps({"error": {"message": "a valid API key is needed"}}).encode()
    await page.answer("/page/info", 401, "application/json", refusal)
    await page.send("Page.navigate", url=url)
    await page.until("document.querySelector('#key') === document.activeElement")
    assert "401" in await page.errors.get()
    await page.send("Fetch.disable")
    page.requests.clear()
    await page.run(
        "document.querySelector('#key').value = 'sk-test'; "
        "document.querySelector('#key-form button').click()"
    )
    await page.until(
        "document.querySelector('#status').dataset.state === 'live' && "
        "document.querySelector('#notice').hidden"
    )
    assert await page.run(
        "sessionStorage.length === 1 && localStorage.length === 0 && !document.cookie"
    )
    await set_field(page, "max_tokens", "2")
    await say(page, "Hello.")
    await page.until(f"{IDLE} && document.querySelector('.figures')")
    paths = ["/v1/models", "/page/info", "/page/live", "/v1/chat/completions"]
    assert [URL(request["url"]).path for request in page.requests] == paths
    assert all(request["headers"]["Authorization"] == "Bearer sk-test" for request in page.requests)
    await page.run("sessionStorage.clear()")


async def test_a_model_without_a_chat_template(page: Page, url: str) -> None:
    info = {"chat": False, "max_model_len": 100, "defaults": {"temperature": 1}}
    await page.answer("/page/info", 200, "application/json", json.dumps(info).encode())
    await page.send("Page.navigate", url=url)
    await page.until("document.querySelector('#hint')?.textContent.includes('no chat template')")
    assert await page.run("document.querySelector('.chat-only').hidden")
    await set_field(page, "max_tokens", "6")
    for text in ("The capital of France is", "Once upon"):
        await say(page, text)
        await page.until(
            f"{IDLE} && [...document.querySelectorAll('.turn')].at(-1)?.textContent.includes('{text}') && {LAST_TEXT}"
        )
    assert [body["prompt"] for body in posted(page, "/v1/completions")] == [
        "The capital of France is",
        "Once upon",
    ]
    assert posted(page) == []


async def test_the_live_stream_is_open_only_while_the_page_can_be_seen(page: Page) -> None:
    def streams() -> int:
        return sum(URL(request["url"]).path == "/page/live" for request in page.requests)

    show = """Object.defineProperty(document, "hidden", { value: %s, configurable: true });
              document.dispatchEvent(new Event("visibilitychange"))"""
    assert streams() == 1
    await page.run(show % "true")
    await page.run(
        "document.querySelector('[data-value=running]').textContent = 'stale'; new "
        "Promise((wake) => setTimeout(wake, 1200))"
    )
    assert (
        await page.run("document.querySelector('[data-value=running]').textContent") == "stale"
    ), "no event comes"
    await page.run(show % "false")
    await page.until("document.querySelector('[data-value=running]').textContent === '0'")
    assert streams() == 2


async def test_each_engine_has_its_panel(browser: Page) -> None:
    frontend = await make_frontend(4, 0.005, {"parallel.data_parallel_size": 2})
    server = HttpServer(frontend)
    try:
        await browser.open(await server.start())
        await browser.until("document.querySelectorAll('.engine').length === 2")
        assert await browser.run(
            "[...document.querySelectorAll('.engine h2')].map((h) => h.textContent)"
        ) == ["Engine 0", "Engine 1"]
        params = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
        for number in range(3):
            await frontend.submit([number + 5] * 20, params)
        await browser.until(
            "[...document.querySelectorAll('.engine "
            "[data-value=running]')].map((d) => d.textContent).join() === '2,1'"
        )
        steps = "[...document.querySelectorAll('.engine [data-value=readout]')].every((p) => p.textContent.startsWith('Mean of'))"
        await browser.until(steps)
    finally:
        await browser.open("about:blank")
        await server.close()
        await frontend.close()
    assert browser.errors.empty(), browser.errors


async def test_a_phone(page: Page) -> None:
    await page.send(
        "Emulation.setDeviceMetricsOverride",
        width=360,
        height=740,
        deviceScaleFactor=2,
        mobile=True,
    )
    assert await page.run("document.documentElement.scrollWidth") == 360, (
        "nothing has to be scrolled sideways"
    )
    assert await page.run(
        "document.querySelector('#prompt').getBoundingClientRect().bottom < innerHeight"
    )
    await page.send("Emulation.clearDeviceMetricsOverride")
