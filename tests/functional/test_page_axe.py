"""The page as axe-core (Deque) judges it, in each of its states, on a wide and on a narrow screen,
in both themes: no rule may be broken."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from tests.functional.chat_page import IDLE, say
from tests.functional.chromium import EXECUTABLE, Page
from tests.functional.scripted_chat import Script, call, delta, end, token, until_idle
from tests.functional.test_page_conversations import ask, press
from tests.functional.test_page_pictures import SHOWN, give, open_with

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium is installed"),
]

LONG = (
    "# Title\n\nText with `code`, \\(x^2\\) and a [link](https://example.org).\n\n"
    "$$\\sum_i a_i$$\n\n"
    "- [x] done\n- open\n\n> quoted\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n"
    "```python\ndef f(x):\n    return 'text'  # note\n```\n"
)
BROKEN = (
    "axe.run().then(({ violations }) => violations.map(({ id, nodes }) => "
    "`${id}: ${nodes.map(({ html, failureSummary }) => html + failureSummary)}`))"
)
State = Callable[[Page, Script], Awaitable[None]]


async def empty(page: Page, script: Script) -> None:
    """Nothing was said yet, and no fold is open."""


async def answered(page: Page, script: Script) -> None:
    await say(page, "All of it?")
    script.send(delta(reasoning_content="Hm."), delta(content=LONG), *end("length"))
    await until_idle(page)
    await page.until("$('.katex') && $('.hl-keyword')")
    await page.run(
        "$('.course').open = $('.thought').open = true;$('.reply .menu-list').showPopover()"
    )


async def answering(page: Page, script: Script) -> None:
    await say(page, "Go on.")
    script.send(delta(content="Yes"))
    await page.until("$('.answer')?.textContent === 'Yes'")


async def calling(page: Page, script: Script) -> None:
    await page.run("$('[data-example=tools]').click()")
    await say(page, "Is it warm?")
    script.send(call(0, "get_weather", '{"city": "Paris"}'), *end("tool_calls"))
    await until_idle(page)


async def hesitating(page: Page, script: Script) -> None:
    await page.run("$('[name=logprobs]').click()")
    await say(page, "Sky?")
    tokens = [token(f"word{n} ", -n / 2, ("other", -3.0)) for n in range(8)]
    script.send(*tokens, *end("stop"))
    await until_idle(page)
    await page.run("$$('.tool').find((made) => made.textContent === 'Probabilities').click()")


async def refused(page: Page, script: Script) -> None:
    script.refusal = {"message": "is wrong", "param": "tools[0].function.name"}
    await page.run("$('[data-example=tools]').click()")
    await say(page, "Hello.")
    await page.until("$('.failure')")
    assert "400" in await page.errors.get()


async def comparing(page: Page, script: Script) -> None:
    await page.run("$('[name=compare]').click()")
    await say(page, "Which?")
    await page.until("$$('.pair .reply').length === 2")
    for _ in range(2):
        script.send(delta(content=LONG), *end("stop"))
    await until_idle(page)


async def with_pictures(page: Page, script: Script) -> None:
    await open_with(page, ["text", "image"])
    await give(page, "paste", [40, 30, "image/png"])
    await page.until(f"{SHOWN}.length === 1")
    await page.run("$('#prompt').focus()")
    await page.press("Enter", 13, "\r")
    script.send(delta(content="Red."), *end("stop"))
    await until_idle(page)
    await give(page, "paste", [40, 30, "image/png"], [20, 90, "image/png"])
    await page.until(f"{SHOWN}.length === 2")


async def editing(page: Page, script: Script) -> None:
    """A message is being edited, and what was deleted can be brought back."""
    for text in ("One?", "Two?"):
        await ask(page, script, text, "Yes.")
    await press(page, "Delete", "$('#log')")
    await press(page, "Edit", "$('#log')")
    await page.until("$('.edit')")


async def overloaded(page: Page, script: Script) -> None:
    busy = b'{"error": {"message": "the queue is full"}}'
    await page.answer("/v1/chat/completions", 503, "application/json", busy)
    await say(page, "Hello.")
    await page.until(f"$('.failure') && {IDLE}")
    assert "503" in await page.errors.get()


async def starting(page: Page, script: Script) -> None:
    wait = b'{"error": {"message": "the server is starting (load, 25 %)", "code": "not_ready"}}'
    await page.answer("/v1/models", 503, "application/json", wait)
    await page.send("Page.reload")
    await page.until("$('#status')?.dataset.state === 'start'")


async def without_server(page: Page, script: Script) -> None:
    await page.answer("/page/live", 502, "text/html", b"<html>gone</html>")
    await page.send("Page.reload")
    await page.until("$('#status')?.dataset.state === 'lost'")


async def unreachable(page: Page, script: Script) -> None:
    await page.answer("/v1/models", 502, "text/html", b"<html>gone</html>")
    await page.send("Page.reload")
    await page.until("$('#retry')?.checkVisibility()")


async def restarting(page: Page, script: Script) -> None:
    """The state is a real engine's, but for its outage; its stream ends: it is greyed, too."""
    origin = await page.run("document.baseURI")
    async with aiohttp.ClientSession() as http, http.get(f"{origin}page/live") as response:
        event = json.loads((await response.content.readline()).removeprefix(b"data: "))
    event["engines"][0] |= {"restart": [2, 3], "log": []}
    body = f"data: {json.dumps(event)}\n\n".encode()
    await page.answer("/page/live", 200, "text/event-stream", body)
    await page.send("Page.reload")
    await page.until("$('.stale .outage')?.checkVisibility()")


async def listed(page: Page, script: Script) -> None:
    """Versions of an answer with a list and a table in parts; the menu of a conversation."""
    rows = "".join(f"| {row} | x |\n" for row in range(60))
    items = "".join(f"{item + 1}. item\n" for item in range(60))
    await ask(page, script, "One?", f"{items}\n| a | b |\n|---|---|\n{rows}")
    script.send(delta(content="[1, 2]"), *end("stop"))
    await press(page, "Regenerate", "$('#log')")
    await page.until("$('.version')?.textContent === '2/2'")
    await page.run("$('.arrow:not(:disabled)').click()")
    await page.until("$$('.further').length === 4")
    await page.run("$('#conversations .menu button').click()")


async def settings(page: Page, script: Script) -> None:
    """Only one fold is open at a time: all are, for once."""
    await page.run(
        "$$('.folds details').forEach((fold) => {fold.removeAttribute('name'); fold.open = true; })"
    )


async def without_key(page: Page, script: Script) -> None:
    await page.answer("/page/info", 401, "application/json", b'{"error": {"message": "a key"}}')
    await page.send("Page.reload")
    await page.until("$('#status')?.dataset.state === 'key'")


async def endpoints(page: Page, script: Script) -> None:
    """The other page, with a fold that is open."""
    await page.run("location.href = './docs'")
    await page.until("$$('summary').length > 20")
    await page.run("$('details').open = true")
    await page.until("$('form textarea')")


@pytest.fixture(scope="module")
def axe() -> str:
    """Returns the script, of which no more of its package is used."""
    found = importlib.metadata.distribution("axe-playwright-python")
    return Path(str(found.locate_file("axe_playwright_python/axe.min.js"))).read_text("utf-8")


STATES = (
    empty, answered, answering, calling, hesitating, comparing, with_pictures, editing, refused,
    overloaded, starting, without_server, unreachable, restarting, listed, settings, without_key,
    endpoints,
)  # fmt: skip


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(
            state,
            marks=() if state in (answered, settings) else pytest.mark.extended,
            id=state.__name__,
        )
        for state in STATES
    ],
)
async def test_axe_finds_nothing(page: Page, script: Script, axe: str, state: State) -> None:
    await state(page, script)
    await page.run(axe)
    for width in (1400, 390):
        await page.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=800, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip
        for theme in ("light", "dark"):
            await page.run(f"document.documentElement.dataset.theme = '{theme}'")
            narrow = width < 500 and state is empty
            for pane in ("history", "engine", "chat") if narrow else ("chat",):
                await page.run(f"document.body.dataset.pane = '{pane}'")
                assert await page.run(BROKEN) == [], (width, theme, pane)
    await page.send("Emulation.clearDeviceMetricsOverride")
    while state in (starting, without_server, unreachable, without_key) and not page.errors.empty():
        page.errors.get_nowait()  # of the browser itself: a status that is no success
