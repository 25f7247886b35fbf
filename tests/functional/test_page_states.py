"""What the page says while the server starts, when it is gone or refuses, and with a wrong key."""

from __future__ import annotations

import json

import pytest

from aioinfer.api.server import HttpServer
from aioinfer.engine.model_group import ModelGroup
from bench_loop import make_frontend
from tests.functional.chat_page import IDLE, say
from tests.functional.chromium import EXECUTABLE, Page
from tests.functional.scripted_chat import Script, delta, end, until_idle

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium is installed"),
]

STATE = "$('#status')?.dataset.state"
HINT = "$('#hint')?.textContent"
NOTICE = "$('#notice-text')?.textContent"
FAILURE = "$('.failure')?.textContent"


async def test_the_page_waits_for_a_server_that_starts(browser: Page) -> None:
    frontend = await make_frontend(4, 0.005, {})
    server = HttpServer(frontend.config)
    try:
        url = await server.start()
        await browser.open(url)
        await browser.until(f"{STATE} === 'start' && {HINT} === 'The server is starting.'")
        assert await browser.run("$('#prompt').disabled")
        server.on_progress("load the weights", 3, 12)
        await browser.until(f"{HINT} === 'The server is starting (load the weights, 25 %).'")
        await server.serve(ModelGroup([frontend]))
        await browser.until(f"{STATE} === 'live' && !$('#prompt').disabled")
        assert "starting" not in await browser.run(HINT)
        while not browser.errors.empty():
            assert "503" in browser.errors.get_nowait()
    finally:
        await browser.open("about:blank")
        await server.close()
        await frontend.close()


async def test_the_picker_says_which_models_sleep(browser: Page) -> None:
    """Of two that take turns beside one that is always awake."""
    apart, first, second = [
        await make_frontend(
            4, 0.005, {"server.served_model_names": [name], "parallel.device": f"cpu:{gpu}"}
        )
        for name, gpu in (("apart", 1), ("first", 0), ("second", 0))
    ]
    await second.control.sleep()
    models, server = ModelGroup([apart, first, second]), HttpServer(apart.config)
    models.turns[1].min_stay_s = 0.0
    names = "$$('#model option').map((one) => one.textContent).join()"
    panels = "$$('#engine h2').map((one) => one.textContent).join()"
    try:
        url = await server.start()
        await server.serve(models)
        await browser.open(url)
        await browser.until(f"{names} === 'apart,first,second (asleep)'")
        await browser.until(f"{panels} === 'apart,first,second'")
        await browser.run(
            "$('#model').value = 'second';$('#model').dispatchEvent(new Event('change'))"
        )
        await say(browser, "Hello")
        await browser.until(f"{names} === 'apart,first (asleep),second'")
        assert models.awake == [apart, second]
    finally:
        await browser.open("about:blank")
        await server.close()
        await models.close()


async def test_a_wrong_key_is_said_to_be_wrong(page: Page, mounted: tuple[Script, str]) -> None:
    refusal = json.dumps({"error": {"message": "a valid API key is needed"}}).encode()
    await page.answer("/page/info", 401, "application/json", refusal)
    await page.send("Page.navigate", url=f"{mounted[1]}/")
    await page.until(f"{NOTICE} === 'This server asks for an API key.'")
    await page.run("$('#key').value = 'wrong';$('#key-form button').click()")
    await page.until(f"{NOTICE} === 'This key was not accepted.'")
    assert await page.run("document.activeElement.id") == "key"
    assert ["401" in await page.errors.get() for _ in range(2)] == [True, True]


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (502, b"<html><h1>Bad Gateway</h1></html>", "502: The server behind this address does not"),
        (403, b"<html>blocked</html>", "403: Something between this page and the server refused"),
        (503, b'{"error": {"message": "the queue is full"}}', "503: the queue is full"),
    ],
)
async def test_a_refusal_is_one_plain_sentence(
    page: Page, status: int, body: bytes, said: str
) -> None:
    kind = "application/json" if body.startswith(b"{") else "text/html"
    await page.answer("/v1/chat/completions", status, kind, body)
    await say(page, "Hello.")
    await page.until(f"{FAILURE} && {IDLE}")
    shown = await page.run(FAILURE)
    assert shown.startswith(said)
    assert "<" not in shown
    assert await page.run("$('#prompt').value") == "Hello."
    assert str(status) in await page.errors.get()


async def test_an_answer_whose_stream_breaks_off_goes_on(page: Page, script: Script) -> None:
    half = b'data: {"choices":[{"delta":{"content":"One, two"},"finish_reason":null}]}\n\n'
    await page.answer("/v1/chat/completions", 200, "text/event-stream", half)
    await say(page, "Count.")
    await page.until(f"{FAILURE} && {IDLE}")
    assert "ended before the answer" in await page.run(FAILURE)
    await page.send("Fetch.disable")
    page.answers.clear()
    await page.run("$$('.tool').find((made) => made.textContent === 'Continue').click()")
    script.send(delta(content=", three."), *end("stop"))
    await until_idle(page)
    await page.until("$('.answer').textContent === 'One, two, three.'")
    assert not await page.run(FAILURE), "it is whole now"


async def test_a_server_that_goes_away_greys_the_panel(page: Page) -> None:
    await page.answer("/page/live", 502, "text/html", b"<html>gone</html>")
    await page.run("$('#theme').focus()")
    await page.send("Page.reload")
    await page.until(f"{STATE} === 'lost'")
    assert await page.run("getComputedStyle($('#gone')).display") != "none"
    assert await page.run("$('#engine').classList.contains('stale')")
    assert "502" in await page.errors.get()
    await page.send("Fetch.disable")
    page.answers.clear()
    await page.until(f"{STATE} === 'live' && $('#gone').hidden")
    while not page.errors.empty():
        page.errors.get_nowait()
