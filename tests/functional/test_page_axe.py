"""The page as axe-core (Deque) judges it, in each of its states, on a wide and on a narrow screen,
in both themes: no rule may be broken."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.functional.chat_page import say
from tests.functional.chromium import EXECUTABLE, Page
from tests.functional.scripted_chat import Script, call, delta, end, token, until_idle

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
State = Callable[[Page, Script], Awaitable[None]]


async def empty(page: Page, script: Script) -> None:
    """Nothing was said yet, and no fold is open."""


async def answered(page: Page, script: Script) -> None:
    await say(page, "All of it?")
    script.send(delta(reasoning_content="Hm."), delta(content=LONG), *end("length"))
    await until_idle(page)
    await page.until("document.querySelector('.katex') && document.querySelector('.hl-keyword')")
    await page.run(
        "document.querySelector('.course').open = document.querySelector('.thought').open = true;"
        "document.querySelectorAll('.menu').forEach((menu) => (menu.open = true))"
    )


async def answering(page: Page, script: Script) -> None:
    await say(page, "Go on.")
    script.send(delta(content="Yes"))
    await page.until("document.querySelector('.answer')?.textContent === 'Yes'")


async def calling(page: Page, script: Script) -> None:
    await page.run("document.querySelector('[data-example=tools]').click()")
    await say(page, "Is it warm?")
    script.send(call(0, "get_weather", '{"city": "Paris"}'), *end("tool_calls"))
    await until_idle(page)


async def hesitating(page: Page, script: Script) -> None:
    await page.run("document.querySelector('[name=logprobs]').click()")
    await say(page, "Sky?")
    tokens = [token(f"word{n} ", -n / 2, ("other", -3.0)) for n in range(8)]
    script.send(*tokens, *end("stop"))
    await until_idle(page)
    await page.run(
        "[...document.querySelectorAll('.tool')]"
        ".find((made) => made.textContent === 'Probabilities').click()"
    )


async def refused(page: Page, script: Script) -> None:
    script.refusal = {"message": "is wrong", "param": "tools[0].function.name"}
    await page.run("document.querySelector('[data-example=tools]').click()")
    await say(page, "Hello.")
    await page.until("document.querySelector('.failure')")
    assert "400" in await page.errors.get()


async def settings(page: Page, script: Script) -> None:
    """Only one fold is open at a time: all are, for once."""
    await page.run(
        "document.querySelectorAll('.folds details').forEach((fold) => {"
        "fold.removeAttribute('name'); fold.open = true; })"
    )


async def without_key(page: Page, script: Script) -> None:
    await page.run("document.querySelector('#notice').hidden = false")
    await page.run(
        "document.querySelector('#notice-text').textContent = 'This server asks for an API key.';"
        "document.querySelector('#key-form').hidden = false"
    )


@pytest.fixture(scope="module")
def axe() -> str:
    """Returns the script, of which no more of its package is used."""
    found = importlib.metadata.distribution("axe-playwright-python")
    return Path(str(found.locate_file("axe_playwright_python/axe.min.js"))).read_text("utf-8")


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    "state",
    [empty, answered, answering, calling, hesitating, refused, settings, without_key],
    ids=lambda state: state.__name__,
)
async def test_axe_finds_nothing(
    page: Page, script: Script, axe: str, state: State, theme: str, width: int
) -> None:
    await page.send(
        "Emulation.setDeviceMetricsOverride",
        width=width, height=800, deviceScaleFactor=1, mobile=width < 500,
    )  # fmt: skip
    await page.run(
        f"document.querySelector('#theme').value = '{theme}';"
        "document.querySelector('#theme').dispatchEvent(new Event('change'))"
    )
    await state(page, script)
    await page.run(axe)
    for pane in ("chat", "history", "engine") if width < 500 and state is empty else ("chat",):
        await page.run(f"document.body.dataset.pane = '{pane}'")
        broken = await page.run(
            "axe.run().then(({ violations }) => violations.map(({ id, nodes }) => "
            "`${id}: ${nodes.map(({ html, failureSummary }) => html + failureSummary)}`))"
        )
        assert broken == [], pane
    await page.send("Emulation.clearDeviceMetricsOverride")
