"""The page in headless Chromium, served by a real process with a real model."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from yarl import URL

from aioinfer.api.server import HttpServer
from aioinfer.sampling_params import SamplingParams
from bench_loop import make_frontend
from tests.functional.chat_page import IDLE, LAST_TEXT, ask, posted, say, set_field
from tests.functional.chromium import EXECUTABLE, Page

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "parallel.executor=inline", "server.port=0", "parallel.cpu_threads=1", "cache.num_blocks=200",
    "scheduler.max_num_seqs=4",
)  # fmt: skip
SHIFT = 8
HALF = b'data: {"choices":[{"delta":{"content":"Half"},"finish_reason":null}]}\n\n'

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


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Page, url: str) -> AsyncIterator[Page]:
    """The page, ready; whatever the test does, it may contact no other host and complain of nothing
    but what the test expects."""
    await browser.open(url)
    await browser.until("$('#status')?.dataset.state === 'live'")
    yield browser
    hosts = {URL(request["url"]).authority for request in browser.requests}
    assert hosts == {URL(url).authority}
    assert browser.errors.empty(), browser.errors


def letters(text: str) -> str:
    return "".join(filter(str.isalpha, text))


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
        "/", "/page/page.css", "/page/page.js", "/page/settings.js", "/v1/models", "/page/info",
        "/page/live",
    } <= paths  # fmt: skip
    assert await page.run("$('#model').value") == "SmolLM2-135M-Instruct"
    assert await page.run("getComputedStyle(document.body).display") == "flex", (
        "the style sheet has been taken"
    )
    assert await page.run("document.activeElement.id") == "prompt"
    fields = "$$('input, textarea, select')"
    assert await page.run(f"{fields}.filter((field) => !field.labels.length).length") == 0
    assert await page.run("$$('[role=img]').every((c) => c.ariaLabel)")


async def test_an_answer_streams_and_the_live_view_shows_it(page: Page, url: str) -> None:
    await set_field(page, "max_tokens", "60")
    await say(page, "Tell me a story about a lighthouse.")
    lengths = [len(await page.until(LAST_TEXT))]
    while len(lengths) < 3:
        await page.until(f"({LAST_TEXT}).length > {lengths[-1]}")
        lengths.append(len(await page.run(LAST_TEXT)))
    assert await page.run("$('#send').hidden"), "it is still being written"
    await page.until("$('[data-value=running]').textContent === '1'")
    await page.until("/[1-9.]+ decode tokens/.test($('[data-value=readout]').textContent)")
    await page.until(IDLE)
    figures = await page.run("$('.figures').textContent")
    assert not await page.run("$('.failure')?.textContent"), figures
    tokens, first, speed, reason = figures.split(" · ")
    assert tokens.startswith("60 tokens (prompt "), figures
    assert first.startswith("first after ")
    assert speed.endswith(" tokens/s")
    assert reason == "token limit reached"
    await page.until("$('[data-value=running]').textContent === '0'")
    assert await page.run("$('[data-value=steps]').textContent") != "0 since the start"
    kept = await page.run("$('[data-value=drafts]').textContent")
    assert re.fullmatch(r"–|[0-9.]+\s?%", kept), kept


async def test_the_demo_answers_well_with_its_own_settings(page: Page) -> None:
    field = "$('#composer').elements.temperature.placeholder"
    assert await page.run(field) == "0.2"
    for question, answer in (
        ("What is the capital of France?", "Paris"),
        ("What is the chemical symbol for water?", "H2O"),
        ("How many days are there in a week?", "7"),
    ):
        await ask(page, question)
        assert answer in await page.run(LAST_TEXT)
        await page.run("$('#clear').click()")


@pytest.mark.parametrize("by", ["button", "key"])
async def test_stop(page: Page, url: str, by: str) -> None:
    await say(page, "Tell me a very long story about the sea and the people who live by it.")
    await page.until(f"({LAST_TEXT} ?? '').length > 10")
    if by == "button":
        await page.run("$('#halt').click()")
    else:
        await page.press("Escape", 27)
    await page.until(IDLE)
    await until_idle(url)
    await page.until("$('[data-value=running]').textContent === '0'")
    shown = await page.run(LAST_TEXT)
    assert (await page.run("$('.figures').textContent")).endswith("stopped")
    await set_field(page, "max_tokens", "2")
    await ask(page, "Go on.", 2)
    _, second = posted(page)
    kept = second["messages"][1]
    assert kept["role"] == "assistant"
    # what had come stays part of the conversation; what is shown lacks Markdown's own characters
    assert letters(kept["content"]) == letters(shown)


async def test_a_second_turn_brings_the_first_and_clear_forgets(page: Page) -> None:
    await set_field(page, "max_tokens", "8")
    await set_field(page, "temperature", "0")
    assert await page.run("$('#hint').textContent") == "Ask something."
    await ask(page, "My name is Ada.")
    await ask(page, "What is my name?", 2)
    answer = await page.run("$('.answer').textContent")
    first, second = posted(page)
    assert first["messages"] == [{"role": "user", "content": "My name is Ada."}]
    assert second["messages"] == [
        *first["messages"],
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "What is my name?"},
    ]
    await page.run("$('#clear').click()")
    assert await page.run("$$('.turn').length") == 0
    await ask(page, "Hello.")
    assert posted(page)[-1]["messages"] == [{"role": "user", "content": "Hello."}]


async def test_clear_ends_an_answer_that_is_coming(page: Page, url: str) -> None:
    await say(page, "Tell me a very long story about mountains.")
    await page.until(f"({LAST_TEXT} ?? '').length > 10")
    await page.run("$('#clear').click()")
    await until_idle(url)
    assert await page.run(f"{IDLE} && !$('.turn') && !$('#prompt').value")


async def test_settings_reach_the_request(page: Page) -> None:
    numbers = {
        "temperature": "0.7", "top_p": "0.9", "top_k": "40", "min_p": "0.05", "max_tokens": "5",
        "seed": "7",
        "repetition_penalty": "1.1", "presence_penalty": "0.2", "frequency_penalty": "0.3",
    }  # fmt: skip
    for name, value in (numbers | {"system": "Be brief.", "stop": "END\n\\n\\n"}).items():
        await set_field(page, name, value)
    await ask(page, "Hello.")
    (body,) = posted(page)
    assert body == {
        "model": "SmolLM2-135M-Instruct",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello."},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "timings_per_token": True,
        "stop": ["END", "\n\n"],
        **{name: float(value) for name, value in numbers.items()},
    }
    await page.run("$('#reset').click()")
    await set_field(page, "max_tokens", "2")
    await ask(page, "Again.", 2)
    assert posted(page)[1].keys() == {
        "model", "messages", "stream", "stream_options", "timings_per_token", "max_tokens",
    }  # fmt: skip


async def test_enter_with_shift_breaks_the_line(page: Page) -> None:
    await page.send("Input.insertText", text="one")
    await page.press("Enter", 13, "\r", SHIFT)
    await page.send("Input.insertText", text="two")
    assert await page.run("$('#prompt').value") == "one\ntwo"
    assert posted(page) == []


async def test_an_error_is_shown_in_its_place(page: Page) -> None:
    await set_field(page, "temperature", "-1")
    await say(page, "Hello.")
    shown = await page.until("$('.failure')?.textContent")
    assert shown.startswith("400: temperature must be")
    assert await page.run("$('#prompt').value") == "Hello.", "it can be sent again"
    assert "400" in await page.errors.get()  # the browser's own line
    invalid = "$('[name=temperature]').ariaInvalid"
    assert await page.run(invalid) == "true"
    await page.run("$('#reset').click()")
    assert await page.run(invalid) is None
    await set_field(page, "max_tokens", "2")
    await page.press("Tab", 9)
    await page.run("$('#composer').requestSubmit()")
    await page.until(f"{IDLE} && $('.figures')")
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
    assert shown in await page.until("$('.failure')?.textContent")
    await page.until(IDLE)
    assert await page.run(LAST_TEXT) == ("Half" if b"Half" in body else None)


# ---------------------------------------------------------------- tools and JSON


@pytest.mark.extended
async def test_a_round_with_a_tool(page: Page) -> None:
    """The model has to call the example's tool, the user plays it, and the model goes on."""
    await page.run("$('[data-example=tools]').click()")
    await page.run("$('[name=one_call]').click()")
    await set_field(page, "max_tokens", "60")
    choice = "$('[name=tool_choice]')"
    names = await page.run(f"[...{choice}.options].map((option) => option.value)")
    assert names == ["auto", "required", "none", ":get_weather"]
    await page.run(f"{choice}.value = 'required'")
    await ask(page, "What is the weather in Paris, in celsius?")
    assert await page.run("$('.call .language').textContent") == "get_weather"
    shown = await page.run("$('.call code').textContent")
    arguments = json.loads(shown)
    assert shown == json.dumps(arguments, indent=2, ensure_ascii=False)
    assert arguments.keys() == {"city", "unit"}
    assert arguments["unit"] in ("celsius", "fahrenheit")
    await page.run(f"{choice}.value = 'none'")
    await page.until("document.activeElement.labels?.[0].textContent === 'Result of get_weather'")
    await page.send("Input.insertText", text='{"temperature": 21}')
    await page.press("Enter", 13, "\r")
    await page.until(f"{IDLE} && $$('.figures').length === 2")
    assert len(await page.run(LAST_TEXT)) > 3
    first, second = posted(page)
    assert first["tool_choice"] == "required"
    assert first["parallel_tool_calls"] is False
    asked, result = second["messages"][1:]
    (call,) = asked["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == arguments
    assert result == {
        "role": "tool", "tool_call_id": call["id"], "name": "get_weather",
        "content": '{"temperature": 21}',
    }  # fmt: skip


@pytest.mark.extended
async def test_an_answer_by_a_schema(page: Page) -> None:
    await page.run("$('[data-example=response_format]').click()")
    await set_field(page, "max_tokens", "100")
    await ask(page, "Describe Paris.")
    code = "$('.answer code').textContent"
    shown = await page.run(code)
    described = json.loads(shown)
    assert described.keys() == {"city", "country", "population"}
    assert shown == json.dumps(described, indent=2, ensure_ascii=False)
    await page.run("$('.answer button').click()")
    assert json.loads(await page.run(code)) == described  # as the model has laid it out
    switch = "$('.answer button').textContent"
    assert await page.run(switch) == "Show indented"


@pytest.mark.extended
async def test_what_cannot_be_enforced_is_said_at_its_field(page: Page) -> None:
    await set_field(page, "response_format", '{"type": "array", "items": {}, "uniqueItems": true}')
    await say(page, "Hello.")
    said = await page.until("$('.failure')?.textContent")
    assert said.startswith("400: ")
    assert "response_format" in said
    assert "uniqueItems" in said
    at_field = "$('#response_format-error').innerText"
    assert said.endswith(await page.run(at_field))
    assert "400" in await page.errors.get()


# ---------------------------------------------------------------- Markdown


async def answer_with(page: Page, text: str) -> None:
    """Sends a message to which the answer is `text`, in the server's place."""
    event = {"choices": [{"delta": {"content": text}, "finish_reason": None}]}
    body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
    await page.answer("/v1/chat/completions", 200, "text/event-stream", body)
    count = await page.run("$$('.figures').length")
    await ask(page, "Hello.", count + 1)


async def test_an_answer_is_shown_as_markdown(page: Page) -> None:
    await answer_with(
        page,
        "# Title\n\nSome *fine* **bold** `code`,\nand a [link](https://example.org/a?b=c).\n\n"
        "3. one\n4. two\n   - inner\n\n> quoted\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n"
        "```python\nif a < b:\n    pass\n```\n\n---\n\n~~gone~~ 2 &lt; 3 https://example.org",
    )
    kinds = "$$('.answer > *').map((node) => node.tagName).join()"
    assert await page.run(kinds) == "H3,P,OL,BLOCKQUOTE,DIV,DIV,HR,P"
    assert await page.run("$('.answer ol').start") == 3
    assert await page.run("$('.answer ol ul li').textContent") == "inner"
    assert await page.run("$('.answer .code code').textContent") == ("if a < b:\n    pass\n")
    assert await page.run("$('.answer .language').textContent") == "python"
    right = "getComputedStyle($('.answer td + td')).textAlign"
    assert await page.run(right) == "right"
    assert await page.run("$('.answer > p').innerText") == ("Some fine bold code,\nand a link.")
    links = "$$('.answer a').map((a) => [a.href, a.target, a.rel])"
    assert await page.run(links) == [
        ["https://example.org/a?b=c", "_blank", "noopener noreferrer"],
        ["https://example.org/", "_blank", "noopener noreferrer"],
    ]
    last = "$('.answer > p:last-child').textContent"
    assert await page.run(last) == "gone 2 < 3 https://example.org"


async def test_the_conversation_keeps_markdown_as_the_model_wrote_it(page: Page) -> None:
    text = "**Bold**\r\n\r\n1. one\n2. two <b>three</b>\n\n[x]: https://example.org\n"
    await answer_with(page, text)
    await answer_with(page, "Done.")
    assert posted(page)[1]["messages"][1] == {"role": "assistant", "content": text}


async def test_what_the_user_writes_is_shown_as_it_is(page: Page) -> None:
    answer = HALF + b"data: [DONE]\n\n"
    await page.answer("/v1/chat/completions", 200, "text/event-stream", answer)
    await say(page, "# **Hello** <i>there</i> `x` https://example.org")
    await page.until(IDLE)
    assert await page.run("$('.user').textContent") == (
        "# **Hello** <i>there</i> `x` https://example.org"
    )
    assert await page.run("$('.user').children.length") == 0


HOSTILE = [
    "<script>document.title = 'hacked'</script>",
    "<img src=x onerror=\"document.title = 'hacked'\"> <svg onload=\"document.title='hacked'\"/>",
    "<b onclick=alert(1)>bold</b> <iframe src=/></iframe> <style>* {display: none}</style>",
    "<a href=\"javascript:document.title='hacked'\">click</a>",
    "[click](javascript:document.title='hacked') [click](JaVaScRiPt:alert(1))",
    "[click](&#106;avascript:alert(1)) [click](java\tscript:alert(1)) [click](<java\nscript:x>)",
    "[click](data:text/html,<script>alert(1)</script>) [click](vbscript:x) [click](file:///etc)",
    "[click](/metrics) [click](//example.org/x) [click](blob:x) [click](#prompt)",
    "[x][y]\n\n[y]: javascript:alert(1)",
    "<javascript:alert(1)> <data:text/html,x>",
    '[click](https://example.org/"onmouseover="alert(1) "t\\" onclick=\\"alert(1)")',
    '![a" onerror="alert(1)](https://example.org/image.png "b\\" onload=\\"alert(1)")',
    "![](https://example.org/pixel.png) [![in a link](//example.org/i.png)](https://example.org)",
    "![a](data:image/svg+xml;base64,PHN2Zz4=) ![a](/page/icon.svg)",
    '```html" onclick="alert(1)\n<script>alert(1)</script>\n```',
    "`<img src=x onerror=alert(1)>` &lt;script&gt;alert(1)&lt;/script&gt;",
    '| <script>alert(1)</script> |\n|:--" onclick="alert(1)|\n| <img src=x onerror=alert(1)> |',
    "<div>\n\n# <script>alert(1)</script>\n\n</div>\n<!-- --><math><mtext></p><style><img src=x>",
]


@pytest.mark.parametrize("hostile", HOSTILE)
async def test_hostile_output_is_neutralised(page: Page, hostile: str) -> None:
    """Beside what is asserted here, the page may contact no other host and break no rule of its
    content security policy (see the fixture)."""
    await answer_with(page, hostile)
    nodes = "$$('.answer *')"
    tags = set(await page.run(f"{nodes}.map((node) => node.tagName)"))
    assert tags <= {
        "P", "A", "SPAN", "CODE", "PRE", "DIV", "BUTTON", "H3", "BR", "EM", "TABLE", "THEAD",
        "TBODY", "TR", "TH", "TD",
    }  # fmt: skip
    attributes = f"{nodes}.flatMap((node) => node.getAttributeNames())"
    assert set(await page.run(attributes)) <= {
        "class", "dir", "href", "target", "rel", "title", "type", "tabindex"
    }  # fmt: skip
    links = "$$('.answer a')"
    addresses = await page.run(f"{links}.map((link) => link.href)")
    assert [link for link in addresses if not link.startswith("https://example.org")] == []
    await page.run(f"{links}.forEach((link) => link.dispatchEvent(new MouseEvent('mouseover')))")
    assert "hacked" not in await page.run("document.title")
    assert await page.run("$('#composer').checkVisibility()")


async def test_the_browser_itself_takes_no_string_as_html(page: Page) -> None:
    attempt = "$('#hint').innerHTML = '<b>x</b>'"
    script = f"try {{ {attempt}; 'taken' }} catch (error) {{ error.name }}"
    assert await page.run(script) == "TypeError"
    assert "TrustedHTML" in await page.errors.get()


async def test_a_code_block_can_be_copied(page: Page, url: str) -> None:
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    await page.send("Browser.grantPermissions", origin=url, permissions=permissions)
    await answer_with(page, "```\nfirst\n```\n\ntext\n\n```sh\necho 'a'  \\\n  b\n```")
    await page.click("$$('.answer .tool')[1]")
    await page.until("$('#said').textContent === 'Copied.'")
    assert await page.run("navigator.clipboard.readText()") == "echo 'a'  \\\n  b\n"


async def test_without_a_clipboard_the_code_is_selected(page: Page) -> None:
    await answer_with(page, "```\nfirst\n```")
    await page.run(
        "Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true }); "
        "$('.answer .tool').click()"
    )
    await page.until("$('#said').textContent.startsWith('Selected')")
    assert await page.run("getSelection().toString().trim()") == "first"


TEXTS = [
    "A paragraph\nof two lines.\n\nAnother *one*.\n\n\n# Title #\nand text\n\nSetext\n===\nend",
    "1. a\n\n2. b\n\n   more of b\n3. c\n\nno list\n\n- x\n  - y\n\n    z\n- w\n* other\n",
    "```py\nx = 1\n\n# no title\n```\n\n~~~\nopen\n```\n\nstill code\n\n    indented",
    "    code\n\n    more\n\ntext\n\n> quote\nlazy\n>\n> - in it\n\nafter\n***\n---\n",
    "before\n| a | b |\n|---|---|\n| 1 | `2` |\n| 3\n\nafter **bold\nacross** it\\\nhard  \nbreak",
    "[late] and [early]\n\n[early]: https://example.org/e\n\n[late]: https://example.org/l 'T'\n",
    "windows\r\nlines\r\n\r\n- a\r\n- b\r\n\r\nold\rmac\r\rend",
    "\n\n  \n\nspace\t\n\n\u00a0nbsp\n\n😀 *ünïcödé* 你好\n\n\\*no em\\* &amp; &copy; &nope;",
    "- [ ] todo\n- [x] done\n\n2) two\n3) three\n\n![image](https://example.org/i.png)\n\n<b>x</b>",
]


def random_list(chance: random.Random, depth: int = 2, indent: str = "") -> str:
    """Returns a list in Markdown: loose or tight, with whatever an item may hold."""
    lines = []
    ordered, is_loose = chance.random() < 0.4, chance.random() < 0.3
    for number in range(chance.randrange(1, 9)):
        mark = f"{number + 3}. " if ordered else "- "
        inner = indent + " " * len(mark)
        kinds = (
            "a *b*", "[ ] box", "`c`", "$x$ so", "[link]", "> quote", "# title", "", "wide  text",
        )  # fmt: skip
        lines.append(f"{indent}{mark}{chance.choice(kinds)}")
        if chance.random() < 0.15:
            lines += [f"{inner}more of it"]
        if chance.random() < 0.1:
            lines += ["", f"{inner}a second paragraph"]
        if chance.random() < 0.1:
            lines += [f"{inner}```py", f"{inner}x = 1", "", f"{inner}y = 2", f"{inner}```"]
        if depth and chance.random() < 0.2:
            lines.append(random_list(chance, depth - 1, inner))
        if is_loose and chance.random() < 0.5:
            lines.append("")
    return "\n".join(lines)


def random_text(seed: int) -> str:
    chance = random.Random(seed)
    parts = []
    for _ in range(3):
        kind = chance.randrange(4)
        rows = "\n".join(f"| {row} | *{row}* | x" for row in range(chance.randrange(7)))
        parts.append(
            random_list(chance) if kind else f"| a | b |\n|--:|---|\n{rows}"
        )  # fmt: skip
    between = chance.choice(["\n\n", "\n\ntext\n\n", "\n\n---\n\n", "\n***\n", "\nlazy\n\n"])
    return between.join(parts) + chance.choice(["", "\n", "\n\n[link]: https://example.org\n"])


GROWING = [*TEXTS, *map(random_text, (1, 2, 5, 17, 22, 28, 35, 36, 51))]


@pytest.mark.parametrize("text", GROWING)
async def test_a_text_that_grows_ends_as_the_same_text_at_once(page: Page, text: str) -> None:
    script = """async (text) => {
        const { MarkdownView } = await import("/page/markdown.js");
        const show = (pieces) => {
            const node = document.createElement("div");
            const view = new MarkdownView(node);
            for (const piece of pieces) { view.append(piece); view.render(); }
            view.finish();
            return [node.innerHTML, view.text];
        };
        const pieces = (size) => text.match(new RegExp(`[^]{1,${size}}`, "g"));
        return [show([text]), ...[1, 2, 3, 7, 20].map((size) => show(pieces(size)))];
    }"""
    (whole, kept), *grown = await page.run(f"({script})({json.dumps(text)})")
    assert kept == text
    assert len(whole) > 20
    for html, kept in grown:
        assert html == whole
        assert kept == text


@pytest.mark.parametrize("part", ["it, *and* so on ", "One $x$.\nTwo. ", "你好。再见，"])
async def test_a_paragraph_without_end_is_divided(page: Page, part: str) -> None:
    text = "# Title\n\n  " + part * (12_000 // len(part)) + "\n\nafter it"
    script = """async (text) => {
        const { MarkdownView } = await import("/page/markdown.js");
        const show = (size) => {
            const node = document.createElement("div");
            const view = new MarkdownView(node);
            let longest = 0;
            for (let at = 0; at < text.length; at += size) {
                view.append(text.slice(at, at + size));
                view.render();
                const last = [...node.querySelectorAll("p")].at(-1);
                longest = Math.max(longest, last?.textContent.length ?? 0);
            }
            view.finish();
            return [node.innerHTML, node.textContent, longest];
        };
        return [show(text.length), show(97), show(1009)];
    }"""
    (whole, shown, _), *grown = await page.run(f"({script})({json.dumps(text)})")
    assert whole.count("<p") >= 4
    assert [html for html, _, _ in grown] == [whole] * 2
    assert letters(shown) == letters(text.replace("*", "").replace("$", "")) or "$" in text
    assert all(longest < 6500 for _, _, longest in grown), "only the last part is not final"


async def test_what_is_final_is_rendered_once_and_a_frame_renders_all_that_came(page: Page) -> None:
    script = """async () => {
        const { MarkdownView } = await import("/page/markdown.js");
        const node = document.createElement("div");
        let renderings = 0;
        const view = new MarkdownView(node, (render) => { renderings++; render(); });
        const frame = () =>
            new Promise((wake) => setTimeout(() => requestAnimationFrame(wake), 300));
        const text = "# Title\\n\\nfirst *paragraph*\\n\\n```\\ncode\\n";
        for (const character of text) view.append(character);
        const before = [renderings, node.childNodes.length];
        await frame();
        const nodes = [...node.childNodes];
        const code = node.querySelector("code").firstChild;
        for (const word of Array(150).fill("more ")) view.append(word);
        await frame();
        const kept = nodes.every((child, index) => child === node.childNodes[index]);
        const sameText = code === node.querySelector("code").firstChild;
        return [before, renderings, kept, sameText, code.data.length];
    }"""
    before, renderings, *found = await page.run(f"({script})()")
    assert (before, found) == ([0, 0], [True, True, 5 + 750])
    # 204 texts came; where a rendering took long, the next one has fewer characters
    assert 2 <= renderings <= 4


async def test_what_comes_at_once_is_rendered_over_several_frames(page: Page) -> None:
    script = """async () => {
        const { MarkdownView } = await import("/page/markdown.js");
        const node = document.createElement("div");
        const view = new MarkdownView(node);
        view.append("word ".repeat(600));
        view.render();
        const first = node.textContent.length;
        while (node.textContent.trim().length < 2999) await new Promise(requestAnimationFrame);
        return first;
    }"""
    assert 900 <= await page.run(f"({script})()") <= 1000


@pytest.mark.parametrize(
    ("head", "part", "items"),
    [
        ("", "- item {n} with `code` and $x_{n}$\n", ".answer ul > li"),
        ("", "{n}. item\n\n   and more\n\n", ".answer ol > li"),
        ("| a | b |\n|---|---|\n", "| {n} | *x* |\n", ".answer tbody > tr"),
        ("", "Paragraph {n}.\n\n```py\nx = {n}\n```\n\n", ".answer > *"),
    ],
)
async def test_what_is_final_of_a_long_answer_stays_the_same_nodes(
    page: Page, head: str, part: str, items: str
) -> None:
    script = """async (head, parts, items) => {
        const { MarkdownView } = await import("/page/markdown.js");
        const node = document.createElement("div");
        node.className = "answer";
        $("#log").append(node);
        const view = new MarkdownView(node);
        const all = () => [...node.parentNode.querySelectorAll(items)];
        view.append(head);
        const seen = [];
        for (const [number, part] of parts.entries()) {
            view.append(part);
            view.render();
            if (number % 50 === 49) seen.push(all().slice(0, -2));
        }
        view.finish();
        const last = all();
        const same = seen.map((nodes) => nodes.every((each, index) => each === last[index]));
        node.remove();
        return [same, last.length >= parts.length, seen.map((nodes) => nodes.length > 40)];
    }"""
    parts = [part.format(n=number) for number in range(1, 301)]
    arguments = ", ".join(map(json.dumps, (head, parts, items)))
    assert await page.run(f"({script})({arguments})") == [[True] * 6, True, [True] * 6]


async def test_the_log_follows_its_end_but_for_whoever_scrolls_up(page: Page) -> None:
    script = """async (isUp) => {
        const { followEnd, showEnd } = await import("/page/views.js");
        const log = $("#log");
        const node = document.createElement("div");
        log.append(node);
        showEnd();
        const frame = () => new Promise((wake) => requestAnimationFrame(() => setTimeout(wake)));
        for (let line = 0; line < 60; line++) {
            followEnd(() => node.append(`${line}`, document.createElement("br")));
            await frame();
            if (line === 40 && isUp) {
                log.dispatchEvent(new WheelEvent("wheel"));
                log.scrollTop -= 100;
                await frame();
            }
            // the last lines become shorter, and grow again with the next ones, in one frame
            if (line === 50 || line === 51) {
                node.style.cssText = line === 50 ? "height: 700px; overflow: clip" : "";
                await frame();
            }
        }
        await frame();
        const left = log.scrollHeight - log.scrollTop - log.clientHeight;
        node.remove();
        return left;
    }"""
    assert await page.run(f"({script})(false)") < 2
    assert await page.run(f"({script})(true)") > 100


async def test_rendering_a_long_answer_takes_a_bounded_fraction_of_the_time(page: Page) -> None:
    """One list, so that no block is final before the end: each rendering parses all of it."""
    script = """async () => {
        const { MarkdownView } = await import("/page/markdown.js");
        const node = document.createElement("div");
        $("#log").append(node);
        let spent = 0;
        const view = new MarkdownView(node, (render) => {
            const begin = performance.now();
            render();
            spent += performance.now() - begin;
        });
        const begin = performance.now();
        for (let item = 0; performance.now() - begin < 3000; item++) {
            view.append("- item `" + item + "` of *many*\\n".repeat(20));
            await new Promise((wake) => setTimeout(wake, 1));
        }
        const taken = performance.now() - begin;
        node.remove();
        return [view.text.length, spent / taken];
    }"""
    length, fraction = await page.run(f"({script})()")
    assert length > 20_000
    assert fraction < 0.4  # a fifth, and the first renderings


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
async def test_events_are_read_across_the_borders_of_chunks(page: Page, size: int) -> None:
    text = (
        ": comment\r\n\r\ndata: größer\r\ndata: 你好 😀\r\n\r\nevent: x\nid: 1\ndata:[1]\n\n"
        "data: a\rdata: b\r\rdata: unfinished"
    )
    script = """async (text, size) => {
        const { readEvents } = await import("/page/api.js");
        const bytes = new TextEncoder().encode(text);
        const stream = new ReadableStream({ start(controller) {
            for (let at = 0; at < bytes.length; at += size)
                controller.enqueue(bytes.slice(at, at + size));
            controller.close();
        } });
        return await Array.fromAsync(readEvents(stream));
    }"""
    assert await page.run(f"({script})({json.dumps(text)}, {size})") == [
        "größer\n你好 😀",
        "[1]",
        "a\nb",
    ]


async def test_a_server_that_needs_a_key(page: Page, url: str) -> None:
    refusal = json.dumps({"error": {"message": "a valid API key is needed"}}).encode()
    await page.answer("/page/info", 401, "application/json", refusal)
    await page.send("Page.navigate", url=url)
    await page.until("$('#key') === document.activeElement")
    assert "401" in await page.errors.get()
    await page.send("Fetch.disable")
    page.requests.clear()
    await page.run("$('#key').value = 'sk-test'; $('#key-form button').click()")
    await page.until("$('#status').dataset.state === 'live' && $('#notice').hidden")
    assert await page.run(
        "sessionStorage.getItem('aioinfer-api-key') === 'sk-test' && !document.cookie && "
        "!JSON.stringify(localStorage).includes('sk-test')"
    )
    await set_field(page, "max_tokens", "2")
    await ask(page, "Hello.")
    paths = ["/v1/models", "/page/info", "/page/live", "/v1/chat/completions"]
    requested = [URL(request["url"]).path for request in page.requests]
    assert [path for path in requested if path != "/tokenize"] == paths
    assert all(request["headers"]["Authorization"] == "Bearer sk-test" for request in page.requests)
    await page.run("sessionStorage.clear()")


async def test_a_model_without_a_chat_template(page: Page, url: str) -> None:
    info = {"chat": False, "max_model_len": 100, "defaults": {"temperature": 1}}
    await page.answer("/page/info", 200, "application/json", json.dumps(info).encode())
    await page.send("Page.navigate", url=url)
    await page.until("$('#hint')?.textContent.includes('no chat template')")
    assert await page.run("$('.chat-only').hidden")
    await set_field(page, "max_tokens", "6")
    for text in ("The capital of France is", "Once upon"):
        await say(page, text)
        await page.until(
            f"{IDLE} && {LAST_TEXT} && $$('.turn').at(-1).textContent.includes('{text}')"
        )
    assert [body["prompt"] for body in posted(page, "/v1/completions")] == [
        "The capital of France is",
        "Once upon",
    ]
    assert posted(page) == []


async def test_a_model_without_a_chat_template_has_its_text_shown_as_it_is(
    page: Page, url: str
) -> None:
    info = {"chat": False, "tokenizer": True, "max_model_len": 100, "defaults": {"max_tokens": 7}}
    await page.answer("/page/info", 200, "application/json", json.dumps(info).encode())
    event = {"choices": [{"text": " **a**\n\n\n# <b>", "finish_reason": None}]}
    body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
    await page.answer("/v1/completions", 200, "text/event-stream", body)
    await page.send("Page.navigate", url=url)
    await page.until("$('#hint')?.textContent.includes('no chat template')")
    field = "$('#composer').elements.max_tokens.placeholder"
    assert await page.run(field) == "7"
    await ask(page, "Once")
    assert await page.run("$('.answer').innerText") == " **a**\n\n\n# <b>"


async def test_a_server_without_a_tokenizer(page: Page, url: str) -> None:
    info = {"chat": False, "tokenizer": False, "max_model_len": 100, "defaults": {}}
    await page.answer("/page/info", 200, "application/json", json.dumps(info).encode())
    await page.send("Page.navigate", url=url)
    await page.until("$('#hint')?.textContent.includes('without a tokenizer')")
    assert await page.run("$('#prompt').disabled")
    assert await page.run("$('#send').disabled")
    await page.until("$('#status').dataset.state === 'live'")


async def test_an_engine_that_does_not_serve_says_why(page: Page, url: str) -> None:
    """The state is that of a real engine, but for its outage."""
    async with aiohttp.ClientSession(url) as http, http.get("/page/live") as response:
        event = json.loads((await response.content.readline()).removeprefix(b"data: "))
    restarting, dead = ({**event["engines"][0], "log": []} for _ in range(2))
    restarting["restart"] = [2, 3]
    dead["dead"] = "worker 0 was killed\nTraceback"
    body = f"data: {json.dumps(event | {'engines': [restarting, dead]})}\n\n".encode()
    await page.answer("/page/live", 200, "text/event-stream", body)
    await page.send("Page.navigate", url=url)
    await page.until("$$('.engine').length === 2")
    shown = "$$('.outage').map((node) => [node.hidden, node.innerText])"
    assert await page.run(shown) == [
        [False, "The workers were lost and are restarting: attempt 2 of 3. Requests wait."],
        [False, "Dead: worker 0 was killed"],
    ]


async def test_the_live_stream_is_open_only_while_the_page_can_be_seen(page: Page) -> None:
    def streams() -> int:
        return sum(URL(request["url"]).path == "/page/live" for request in page.requests)

    show = """Object.defineProperty(document, "hidden", { value: %s, configurable: true });
              document.dispatchEvent(new Event("visibilitychange"))"""
    assert streams() == 1
    await page.run(show % "true")
    await page.run(
        "$('[data-value=running]').textContent = 'stale'; new "
        "Promise((wake) => setTimeout(wake, 1200))"
    )
    assert await page.run("$('[data-value=running]').textContent") == "stale", "no event comes"
    await page.run(show % "false")
    await page.until("$('[data-value=running]').textContent === '0'")
    assert streams() == 2


async def test_each_engine_has_its_panel(browser: Page) -> None:
    frontend = await make_frontend(4, 0.005, {"parallel.data_parallel_size": 2})
    server = HttpServer(frontend.config, frontend)
    try:
        await browser.open(await server.start())
        await browser.until("$$('.engine').length === 2")
        assert await browser.run("$$('.engine h2').map((h) => h.textContent)") == [
            "Engine 0",
            "Engine 1",
        ]
        params = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
        for number in range(3):
            await frontend.submit([number + 5] * 20, params)
        await browser.until(
            "$$('.engine [data-value=running]').map((d) => d.textContent).join() === '2,1'"
        )
        readouts = "$$('.engine [data-value=readout]')"
        await browser.until(f"{readouts}.every((p) => p.textContent.startsWith('Mean of'))")
    finally:
        await browser.open("about:blank")
        await server.close()
        await frontend.close()
    assert browser.errors.empty(), browser.errors


async def test_a_phone(page: Page) -> None:
    await page.send(
        "Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2,
        mobile=True,
    )  # fmt: skip
    assert await page.run("document.documentElement.scrollWidth") == 360, (
        "nothing has to be scrolled sideways"
    )
    assert await page.run("$('#prompt').getBoundingClientRect().bottom < innerHeight")
    drawn = """(async () => {
        $("[data-shows=engine]").click();
        for (let frame = 0; frame < 3; frame++) await new Promise(requestAnimationFrame);
        const charts = $$("#engine canvas");
        return charts.filter((each) => each.width > 300).length;
    })()"""
    assert await page.run(drawn) >= 6, "charts are drawn once they are shown"
    await page.send("Emulation.clearDeviceMetricsOverride")
