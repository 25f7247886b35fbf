"""German, Chinese, Japanese and Arabic on the page: nothing runs over its edge, lines begin where
the script begins, and what an input method composes is not sent. In headless Chromium."""

from __future__ import annotations

import pytest

from tests.functional.chat_page import IDLE
from tests.functional.chromium import EXECUTABLE, Page
from tests.functional.scripted_chat import Script, delta, end, posted, until_idle
from tests.functional.test_page_conversations import ask

pytestmark = [
    pytest.mark.extended,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium is installed"),
]

GERMAN = "Rindfleischetikettierungsüberwachungsaufgabenübertragungsgesetz" * 2
ARABIC = "مرحبا بالعالم، هذا نص طويل قليلا"
TEXTS = {
    "German": GERMAN,
    "Chinese": "请用中文解释分页注意力机制" * 12,
    "Japanese": "ページ注意機構を日本語で説明してください。" * 8,
    "Arabic": ARABIC,
}


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", TEXTS)
async def test_no_text_runs_over_the_edge(
    page: Page, script: Script, name: str, width: int
) -> None:
    text = TEXTS[name]
    await page.send(
        "Emulation.setDeviceMetricsOverride",
        width=width, height=740, deviceScaleFactor=1, mobile=width < 500,
    )  # fmt: skip
    answer = (
        f"# {text}\n\n{text} **{text}**\n\n- {text}\n\n> {text}\n\n| {text} | b |\n|---|---|\n"
        f"| {text} | 1 |\n\n`{text}`\n\n```\n{text * 3}\n```\n"
    )
    await ask(page, script, text, answer)
    wide = await page.run(
        """$$("body, #log, .said, .answer > *, .turn, .history")
        .filter((node) => node.scrollWidth > node.clientWidth + 1 && node.clientWidth
            && getComputedStyle(node).display !== "inline"
            && !node.matches(".table, .math"))
        .map((node) => `${node.tagName}.${node.className} ${node.scrollWidth}`)"""
    )
    assert wide == []
    directions = await page.run(
        """[".user", ".answer > p", ".answer > ul", ".answer td", ".answer .code"]
        .map((each) => getComputedStyle($(each)).direction)"""
    )
    own = "rtl" if name == "Arabic" else "ltr"
    assert directions == [own] * 4 + ["ltr"]
    await page.send("Emulation.clearDeviceMetricsOverride")


async def test_enter_of_an_input_method_does_not_send(page: Page, script: Script) -> None:
    await page.run("$('#prompt').focus()")
    await page.send("Input.imeSetComposition", text="にほん", selectionStart=3, selectionEnd=3)
    sends = """(isComposing) => document.activeElement.dispatchEvent(new KeyboardEvent(
        "keydown", { key: "Enter", isComposing, bubbles: true, cancelable: true }))"""
    assert await page.run(f"({sends})(true)"), "Enter is left to the input method"
    assert posted(page) == []
    await page.send("Input.insertText", text="日本")
    assert not await page.run(f"({sends})(false)")
    script.send(delta(content="はい"), *end("stop"))
    await until_idle(page)
    assert await page.run(IDLE)
    assert posted(page)[0]["messages"][0]["content"] == "日本"
