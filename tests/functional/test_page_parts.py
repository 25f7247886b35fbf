"""Thoughts, tool calls and JSON on the page, event by event, in headless Chromium; and the page of
an application that is mounted below a path."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from yarl import URL

from aioinfer.api.admin.openapi import EXAMPLES
from tests.functional.chat_page import IDLE, LAST_TEXT, say, set_field
from tests.functional.chromium import EXECUTABLE, Page
from tests.functional.scripted_chat import Script, call, delta, end, posted, until_idle

pytestmark = [
    pytest.mark.extended,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium is installed"),
]

SUMMARY = "$('.thought summary').textContent"
CODE = "$$('.turn code').at(-1)?.textContent"
RESULTS = "$$('.calls textarea')"


# ---------------------------------------------------------------- below a path


@pytest.mark.sample
async def test_the_pages_work_below_a_path(browser: Page, mounted: tuple[Script, str]) -> None:
    url = mounted[1]
    await browser.open(url)  # without a slash at its end
    await browser.until("$('#status')?.dataset.state === 'live'")
    assert await browser.run("location.pathname") == "/llm/"
    assert await browser.run("getComputedStyle(document.body).display") == "flex"
    await browser.open(f"{url}/docs")
    await browser.until("$$('details').length > 20")
    titles = "$$('summary > code:first-child').map((c) => c.textContent)"
    assert "POST /llm/v1/chat/completions" in await browser.run(titles)
    await opened(browser, "POST /llm/v1/chat/completions")
    fields = "$$('td code').map((code) => code.textContent)"
    assert "tool_choice" in await browser.run(fields)
    names = await browser.run("$$('summary').map((summary) => summary.textContent)")
    assert "ChatChunk" in names, "the events of the stream are shown"
    borders = "getComputedStyle($('table')).borderCollapse"
    assert await browser.run(borders) == "collapse"
    await browser.click("$('a[href=\"./\"]')")
    await browser.until("$('#status')?.dataset.state === 'live'")
    assert all(URL(request["url"]).path.startswith("/llm") for request in browser.requests)
    assert browser.errors.empty(), browser.errors


# ---------------------------------------------------------------- the page of endpoints


async def opened(browser: Page, title: str) -> str:
    """Opens an endpoint's fold; returns an expression that is its element."""
    summaries = "$$('main > details > summary')"
    fold = f"{summaries}.find((s) => s.firstChild.textContent === {title!r}).parentNode"
    await browser.run(f"{fold}.open = true")
    await browser.until(f"{fold}.querySelector('form')")
    return fold


@pytest.mark.sample
async def test_a_call_from_the_page_of_endpoints(
    browser: Page, mounted: tuple[Script, str]
) -> None:
    script, url = mounted
    script.begin()
    await browser.open(f"{url}/docs")
    await browser.until("$$('details').length > 20")
    await browser.run("$('#key').focus()")
    await browser.send("Input.insertText", text="secret")

    fold = await opened(browser, "GET /llm/v1/models/{id}")
    await browser.run(f"{fold}.querySelector('[name=id]').focus()")
    await browser.send("Input.insertText", text="a/b")
    await browser.click(f"{fold}.querySelector('button')")
    status = f"{fold}.querySelector('[role=status]').textContent"
    await browser.until(f"{status}.endsWith(' ms')")
    assert (await browser.run(status)).startswith("404 Not Found · application/json")
    answer = f"{fold}.querySelector('pre').textContent"
    assert json.loads(await browser.run(answer))["error"]["code"] == "model_not_found"
    request = browser.requests[-1]
    assert URL(request["url"]).raw_path == "/llm/v1/models/a%2Fb"
    assert request["headers"]["Authorization"] == "Bearer secret"
    assert "404" in await browser.errors.get()

    fold = await opened(browser, "POST /llm/v1/chat/completions")
    await browser.click(f"{fold}.querySelector('[name=stream]')")
    await browser.click(f"{fold}.querySelector('button')")
    answer = f"{fold}.querySelector('pre').textContent"
    script.send(delta(content="Half"))
    await browser.until(f"{answer}.includes('Half') && !{answer}.includes('DONE')")
    script.send(delta(content=" a loaf"), *end("stop"))
    await browser.until(f"{answer}.includes('[DONE]')")
    (sent,) = posted(browser)
    assert sent == EXAMPLES["ChatRequest"] | {"stream": True}

    await browser.click(f"{fold}.querySelector('button')")
    stop = f"{fold}.querySelectorAll('button')[1]"
    await browser.until(f"!{stop}.hidden && !{fold}.querySelector('pre').hidden")
    await browser.click(stop)
    status = f"{fold}.querySelector('[role=status]').textContent"
    await browser.until(f"{status} === 'Stopped'")
    await browser.run(f"{fold}.querySelector('textarea').value = '{{'")
    await browser.click(f"{fold}.querySelector('button')")
    await browser.until(f"{status}.startsWith('The body is not JSON')")
    assert len(posted(browser)) == 2
    # a type of the description, with its own fields
    inner = f"[...{fold}.querySelectorAll('td summary')].find((s) => s.textContent === 'Message')"
    await browser.run(f"({inner}).parentNode.open = true")
    await browser.until(f"({inner}).parentNode.textContent.includes('tool_call_id')")
    await browser.run("sessionStorage.clear()")
    assert browser.errors.empty(), browser.errors


# ---------------------------------------------------------------- for screen readers


@pytest.mark.sample
@pytest.mark.parametrize("width", [390, 1280])
async def test_names_and_headings(page: Page, script: Script, width: int) -> None:
    """As the browser tells a screen reader: each control has a name, no level of headings is left
    out, whatever the model writes."""
    await page.send(
        "Emulation.setDeviceMetricsOverride",
        width=width, height=740, deviceScaleFactor=1, mobile=width < 500,
    )  # fmt: skip
    await say(page, "Long?")
    script.send(delta(content="x\n\n### Deep\n\n# Title\n\n##### Sub\n\ny"), *end("stop"))
    await until_idle(page)
    for path, titles in (("", ["Deep", "Title", "Sub"]), ("docs", [])):
        if path:
            await page.run("$('a')?.remove(), location.assign('docs')")
            await page.until("$$('details').length > 20")
            await opened(page, "POST /llm/v1/completions")
        await page.send("Accessibility.enable")
        nodes = (await page.send("Accessibility.getFullAXTree"))["nodes"]
        shown = [node for node in nodes if not node["ignored"]]
        roles = {"combobox", "textbox", "button", "spinbutton", "checkbox", "log", "region"}
        controls = [node for node in shown if node["role"]["value"] in roles]
        assert len(controls) > 3
        assert [node for node in controls if not node.get("name", {}).get("value")] == []
        headings = [node for node in shown if node["role"]["value"] == "heading"]
        levels = [
            next(p["value"]["value"] for p in node["properties"] if p["name"] == "level")
            for node in headings
        ]
        assert all(level <= last + 1 for last, level in zip([0, *levels], levels, strict=False))
        assert set(titles) <= {node["name"]["value"] for node in headings}
    await page.send("Emulation.clearDeviceMetricsOverride")


# ---------------------------------------------------------------- thoughts


async def test_a_thought_is_folded_and_is_no_content(page: Page, script: Script) -> None:
    await say(page, "Why?")
    script.send(delta(reasoning_content="First <b>this</b>,"))
    await page.until(f"$('.thought') && {SUMMARY}.endsWith(' 18 characters')")
    assert (await page.run(SUMMARY)).startswith("Thinking for 0.")
    assert not await page.run("$('.thought').open")
    script.send(delta(reasoning_content="\nthen that."))
    await page.until(f"{SUMMARY}.endsWith(' 29 characters')")
    script.send(delta(content="**Because.**"))
    await page.until(f"{LAST_TEXT} === 'Because.'")
    assert (await page.run(SUMMARY)).startswith("Thought for ")
    await page.run("$('.thought summary').focus()")
    await page.press("Enter", 13, "\r")
    text = "$('.thought-text').innerText"
    assert await page.run(text) == "First <b>this</b>,\nthen that."
    script.send(*end("stop"))
    await until_idle(page)
    await say(page, "And?")
    script.send(delta(content="So."), *end("stop"))
    await until_idle(page, 2)
    assert posted(page)[1]["messages"][1] == {
        "role": "assistant",
        "content": "**Because.**",
        "reasoning_content": "First <b>this</b>,\nthen that.",
    }
    assert await page.run("$$('.thought').length") == 1


async def test_a_thought_that_is_stopped_is_no_answer(page: Page, script: Script) -> None:
    await say(page, "Why?")
    script.send(delta(reasoning_content="Let me see"))
    await page.until("$('.thought')")
    await page.press("Escape", 27)
    await until_idle(page)
    assert (await page.run(SUMMARY)).startswith("Thought for ")
    assert (await page.run("$('.figures').textContent")).endswith("stopped")
    assert await page.run("$('#prompt').value") == "Why?"


# ---------------------------------------------------------------- tool calls


@pytest.mark.sample
async def test_a_call_streams_and_its_result_goes_on(page: Page, script: Script) -> None:
    await page.run("$('[data-example=tools]').click()")
    assert await page.run("$('#num-tools').textContent") == "1 set"
    await page.run("$('[name=tool_choice]').value = ':get_weather'")
    await say(page, "Is it warm?")
    script.send(delta(reasoning_content="A tool knows."), call(0, "get_weather", ""))
    await page.until("$('.call')")
    script.send(call(0, None, '{"city": "Pa'))
    await page.until(f"""{CODE} === '{{\\n  "city": "Pa'""")
    assert not await page.run(f"{RESULTS}.length"), "there is more to come"
    script.send(call(0, None, 'ris","days":[]}'), *end("tool_calls"))
    await until_idle(page)
    assert await page.run(CODE) == '{\n  "city": "Paris",\n  "days": []\n}'
    label = "document.activeElement.labels[0].textContent"
    assert await page.run(label) == "Result of get_weather"
    await page.send("Input.insertText", text='{"temperature":')
    await page.press("Enter", 13, "\r", 8)  # with shift
    await page.send("Input.insertText", text="21}")
    await page.press("Enter", 13, "\r")
    script.send(delta(content="Yes."), *end("stop"))
    await until_idle(page, 2)
    assert await page.run(LAST_TEXT) == "Yes."
    assert await page.run(f"{RESULTS}[0].readOnly && document.activeElement.id") == "prompt"
    first, second = posted(page)
    assert first["tools"][0]["function"]["name"] == "get_weather"
    assert first["tool_choice"] == {"type": "function", "function": {"name": "get_weather"}}
    asked = {"name": "get_weather", "arguments": '{"city": "Paris","days":[]}'}
    assert second["messages"] == [
        {"role": "user", "content": "Is it warm?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "A tool knows.",
            "tool_calls": [{"id": "call_0", "type": "function", "function": asked}],
        },
        {
            "role": "tool", "tool_call_id": "call_0", "name": "get_weather",
            "content": '{"temperature":\n21}',
        },
    ]  # fmt: skip


async def test_two_calls_whose_results_fail_at_first(page: Page, script: Script) -> None:
    await say(page, "Both?")
    script.send(delta(content="Let me see."), call(0, "first", "{}"), call(1, "second", ""))
    script.send(*end("tool_calls"))
    await until_idle(page)
    send = "$('.calls .primary')"
    assert await page.run(f"{send}.textContent") == "Send results"
    await page.send("Input.insertText", text="1")
    await page.press("Enter", 13, "\r")
    assert await page.run("document.activeElement.labels[0].textContent") == "Result of second"
    script.refusal = {"message": "is wrong", "param": "messages[2].content"}
    await page.press("Enter", 13, "\r")  # it returns nothing
    await page.until(f"$('.failure') && {IDLE}")
    failure = await page.run("$('.failure').textContent")
    assert failure == "400: messages[2].content: is wrong"
    assert "400" in await page.errors.get()
    script.refusal = None
    await page.click(send)
    script.send(delta(content="Done."), *end("stop"))
    await page.until(f"{LAST_TEXT} === 'Done.' && {IDLE}")
    _, failed, again = posted(page)
    assert failed == again
    assert [m["role"] for m in again["messages"]] == ["user", "assistant", "tool", "tool"]
    assert [m["content"] for m in again["messages"]] == ["Both?", "Let me see.", "1", ""]


async def test_a_message_goes_on_without_a_result(page: Page, script: Script) -> None:
    await say(page, "Both?")
    script.send(call(0, "first", "{}"), call(1, "second", "{}"), *end("tool_calls"))
    await until_idle(page)
    await page.send("Input.insertText", text="1")
    await say(page, "Never mind.")
    script.send(delta(content="Good."), *end("stop"))
    await until_idle(page, 2)
    roles = [message["role"] for message in posted(page)[1]["messages"]]
    assert roles == ["user", "assistant", "tool", "user"]
    await say(page, "And now?")
    script.send(delta(content="Nothing."), *end("stop"))
    await until_idle(page, 3)
    assert [m["role"] for m in posted(page)[2]["messages"]] == [*roles, "assistant", "user"]


async def test_a_call_that_breaks_off_is_left_out(page: Page, script: Script) -> None:
    await say(page, "One?")
    script.send(call(0, "first", '{"a": 1}'), call(1, "<i>second</i>", '{"b": "<b>'))
    await page.until("$$('.call').length === 2")
    await page.press("Escape", 27)
    await until_idle(page)
    names = "$$('.call .language').map((node) => node.innerHTML)"
    assert await page.run(names) == ["first", "&lt;i&gt;second&lt;/i&gt;"]
    assert await page.run(CODE) == '{"b": "<b>'
    assert await page.run("$('.call > .quiet').textContent") == (
        "The call is not complete: it is left out."
    )
    assert await page.run(f"{RESULTS}.length") == 1
    await page.press("Enter", 13, "\r")
    script.send(delta(content="Done."), *end("stop"))
    await until_idle(page, 2)
    calls = posted(page)[1]["messages"][1]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["first"]


# ---------------------------------------------------------------- JSON


@pytest.mark.sample
async def test_json_is_indented_while_it_comes(page: Page, script: Script) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}}}
    await set_field(page, "response_format", json.dumps(schema))
    await say(page, "JSON?")
    script.send(delta(content='{"a": [1'))
    await page.until(f"""{CODE} === '{{\\n  "a": [\\n    1'""")
    script.send(delta(content=', "x, y"]}'), *end("stop"))
    await until_idle(page)
    assert await page.run(CODE) == '{\n  "a": [\n    1,\n    "x, y"\n  ]\n}'
    switch = "$('.answer button')"
    await page.click(switch)
    assert await page.run(CODE) == '{"a": [1, "x, y"]}'
    assert await page.run(f"{switch}.textContent") == "Show indented"
    await page.click(switch)
    assert "\n" in await page.run(CODE)
    (body,) = posted(page)
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    assert body["response_format"] == wanted
    await page.run("$('[data-remove=response_format]').click()")
    await say(page, "Again?")
    script.send(delta(content='[{"b": 1}]'), *end("stop"))
    await until_idle(page, 2)
    assert await page.run(CODE) == '[\n  {\n    "b": 1\n  }\n]'
    assert "response_format" not in posted(page)[1]
    assert posted(page)[1]["messages"][1]["content"] == '{"a": [1, "x, y"]}'


@pytest.mark.parametrize(
    ("text", "shown"), [('{"a": "b', '{\n  "a": "b'), ("Sorry, I *can't*.", "Sorry, I *can't*.")]
)
async def test_what_is_no_whole_json(page: Page, script: Script, text: str, shown: str) -> None:
    await set_field(page, "response_format", '{"type": "object"}')
    await say(page, "JSON?")
    script.send(delta(content=text), *end("length"))
    await until_idle(page)
    assert await page.run(CODE) == shown
    assert await page.run("$('.answer .language').textContent") == ("JSON, not complete")


async def test_indenting_is_that_of_the_browser(page: Page) -> None:
    """Values of all kinds, cut anywhere."""
    chance = random.Random(7)

    def value(depth: int) -> Any:
        kind = chance.randrange(7 if depth else 5)
        if kind < 5:
            return [None, True, -1.5e30, 'a "\\{[,:]}\n 你', ""][kind]
        items = [value(depth - 1) for _ in range(chance.randrange(4))]
        return items if kind == 5 else {f"k {n}\\": item for n, item in enumerate(items)}

    values = [value(5) for _ in range(60)]
    script = """async (values) => {
        const { Indenter } = await import("./page/json.js");
        const wrong = [];
        for (const [number, value] of values.entries()) {
            const text = JSON.stringify(value, null, number % 3 ? "\\t " : 0);
            const size = 1 + number % 5;
            const indenter = new Indenter();
            let shown = "";
            for (let at = 0; at < text.length; at += size)
                shown += indenter.feed(text.slice(at, at + size));
            if (shown !== JSON.stringify(value, null, 2)) wrong.push(shown);
        }
        const deep = new Indenter().feed("[".repeat(5000)).length;
        return [wrong, deep < 400000];
    }"""
    assert await page.run(f"({script})({json.dumps(values)})") == [[], True]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("tools", "[{", "This is no JSON: "),
        ("tools", '{"type": "function"}', "Tools are a list: put [ and ] around them."),
        ("response_format", "[1]", 'A schema is an object, such as {"type": "object"}.'),
    ],
)
async def test_a_field_that_cannot_be_sent(page: Page, name: str, text: str, said: str) -> None:
    await set_field(page, name, text)
    await page.run(f"$('[name={name}]').closest('details').open = false")
    await say(page, "Hello.")
    shown = await page.run(f"$('#{name}-error').innerText")
    assert shown.startswith(said)
    assert await page.run("document.activeElement.name") == name
    assert await page.run("document.activeElement.ariaInvalid") == "true"
    assert posted(page) == []
    await page.send("Input.insertText", text=" ")
    assert await page.run(f"$('#{name}-error').hidden")
    assert await page.run("document.activeElement.ariaInvalid") is None


async def test_an_error_of_the_server_is_said_at_its_field(page: Page, script: Script) -> None:
    await page.run("$('[data-example=tools]').click()")
    script.refusal = {"message": "a name is missing", "param": "tools[0].function.name"}
    await say(page, "Hello.")
    await page.until("$('.failure')")
    failure = "400: tools[0].function.name: a name is missing"
    assert await page.run("$('.failure').textContent") == failure
    assert await page.run("$('#tools-error').innerText") == failure[5:]
    assert "400" in await page.errors.get()


async def test_a_phone_with_all_of_it(page: Page, script: Script) -> None:
    await page.send(
        "Emulation.setDeviceMetricsOverride", width=400, height=740, deviceScaleFactor=2,
        mobile=True,
    )  # fmt: skip
    await say(page, "Long?")
    long = json.dumps({"text": "x" * 300})
    script.send(delta(reasoning_content="y" * 300), delta(content="z" * 300))
    script.send(call(0, "n" * 60, long), *end("tool_calls"))
    await until_idle(page)
    for fold in ("tools", "response_format", "temperature"):
        await page.run(f"$('[name={fold}]').closest('details').open = true")
        assert await page.run("document.documentElement.scrollWidth") == 400
        assert await page.run("$$('.folds > [open]').length") == 1
        prompt = "$('#prompt').getBoundingClientRect()"
        assert await page.run(f"{prompt}.bottom < innerHeight")
    fields = "$$('input, textarea, select')"
    assert await page.run(f"{fields}.filter((field) => !field.labels.length).length") == 0
    await page.send("Emulation.clearDeviceMetricsOverride")
