"""Conversations on the page: kept over a reload, edited, branched, compared, exported and imported;
and what the page shows of an answer beside its text. In headless Chromium, event by event."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.functional.chat_page import IDLE, LAST_TEXT, say, set_field
from tests.functional.chromium import EXECUTABLE, Page
from tests.functional.scripted_chat import Script, delta, end, posted, token, until_idle

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium is installed"),
]

TITLES = "$$('.conversation').map((b) => b.textContent)"
SAID = "$$('.said.user, .answer').map((n) => n.textContent)"
VERSION = "$('.version')?.textContent"


async def ask(page: Page, script: Script, text: str, answer: str) -> None:
    """Has a message answered."""
    count = await page.run("$$('.turn').length")
    await say(page, text)
    script.send(delta(content=answer), *end("stop"))
    await until_idle(page, count + 1)


async def press(page: Page, name: str, scope: str = "document", last: bool = True) -> None:
    """Presses the last, or first, button of this text, in a menu or not."""
    named = f"filter((b) => b.textContent === {json.dumps(name)})"
    found = f"[...{scope}.querySelectorAll('button')].{named}.at({-1 if last else 0})"
    await page.until(found)
    await page.run(f"{found}.click()")


#: Waits until the transactions of the page's database that have begun have ended.
KEPT = """new Promise(async (wake) => {
    const [{ name }] = await indexedDB.databases();
    indexedDB.open(name).onsuccess = ({ target: { result } }) => {
        const last = result.transaction([...result.objectStoreNames], "readwrite");
        last.oncomplete = () => (result.close(), wake(true));
    };
})"""


async def reload(page: Page) -> None:
    await asyncio.sleep(0.5)  # what is to be kept has begun to be
    await page.run(KEPT)  # a transaction that has not ended is lost
    await page.send("Page.reload")
    await page.until("$('#status')?.dataset.state === 'live'")


# ---------------------------------------------------------------- kept


async def test_a_reload_loses_nothing(page: Page, script: Script) -> None:
    await ask(page, script, "What is ＊this＊?", "It is **this**.")
    await page.send("Input.insertText", text="A draft")
    await reload(page)
    await page.until(f"{LAST_TEXT} === 'It is this.'")
    assert await page.run(SAID) == ["What is ＊this＊?", "It is this."]
    assert await page.run("$('#prompt').value") == "A draft"
    assert await page.run(TITLES) == ["What is ＊this＊?"]
    assert (await page.run("document.title")).startswith("What is ＊this＊? ")
    figures = await page.run("$('.figures').textContent")
    assert figures.startswith("7 tokens (prompt 9) · first after ")
    await page.run("$('#prompt').value = ''")
    await ask(page, script, "And?", "That.")
    assert [message["content"] for message in posted(page)[-1]["messages"]] == [
        "What is ＊this＊?", "It is **this**.", "And?",
    ]  # fmt: skip


async def test_a_reload_keeps_the_settings_and_a_message_without_answer(
    page: Page, script: Script
) -> None:
    await set_field(page, "temperature", "0.3")
    await set_field(page, "system", "Be brief.")
    await page.run("$('[data-example=tools]').click()")
    await say(page, "Are you there?")
    await page.until(f"{TITLES}.join() === 'Are you there?'")
    await reload(page)
    assert await page.run("$('#num-set').textContent") == "2 set"
    await press(page, "Answer")
    script.send(delta(content="Yes."), *end("stop"))
    await page.until(f"{LAST_TEXT} === 'Yes.' && {IDLE}")
    body = posted(page)[-1]
    assert body["temperature"] == 0.3
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["tools"][0]["function"]["name"] == "get_weather"
    shown = "getComputedStyle($('.unanswered')).display"
    assert await page.run(shown) == "none"


async def test_a_page_that_is_left_removes_no_message(page: Page, script: Script) -> None:
    """Its request fails then, which it must not take for a refusal: the removal would often be lost
    with the page, but not always."""
    await page.run(
        """{
        const { delete: before } = IDBObjectStore.prototype;
        IDBObjectStore.prototype.delete = function (key) {
            localStorage.setItem("removed", key);
            return before.call(this, key);
        };
        localStorage.removeItem("removed");
        }"""
    )
    await say(page, "Are you there?")
    await page.until(f"{TITLES}.join() === 'Are you there?'")
    await reload(page)
    await page.until("[...$$('button')].some((b) => b.textContent === 'Answer')")
    assert await page.run("localStorage.getItem('removed')") is None


async def test_a_refusal_leaves_the_answer_that_was_to_be_given_once_more(
    page: Page, script: Script
) -> None:
    await ask(page, script, "Why?", "So.")
    script.refusal = {"message": "the queue is full"}
    await press(page, "Regenerate")
    await page.until(f"$('.log > .failure') && {IDLE}")
    assert await page.run(SAID) == ["Why?", "So."]
    assert "400" in await page.errors.get()
    await say(page, "And now?")
    await page.until(f"$('#prompt').value === 'And now?' && {IDLE}")
    assert await page.run(SAID) == ["Why?", "So."], "what was refused is in the composer alone"
    assert await page.run("$$('.failure').length") == 1
    assert "400" in await page.errors.get()
    await press(page, "New chat")
    await page.press("Enter", 13, "\r")
    await page.until(f"$('.log > .failure') && {IDLE}")
    assert await page.run(TITLES) == ["Why?"], "nothing is kept of a chat without a message"
    assert "400" in await page.errors.get()
    script.refusal = None
    await page.run("$('#prompt').value = ''")
    await ask(page, script, "A title", "Yes.")
    assert await page.run(TITLES) == ["A title", "Why?"]


async def test_an_answer_that_a_reload_breaks_off_is_kept_and_continued(
    page: Page, script: Script
) -> None:
    await say(page, "Count.")
    script.send(delta(content="One, two"))
    await page.until(f"{LAST_TEXT} === 'One, two'")
    await asyncio.sleep(1.1)  # what came is kept once a second
    script.send(delta(content=", three"))
    await page.until(f"{LAST_TEXT} === 'One, two, three'")
    await reload(page)
    await page.until(f"{LAST_TEXT} === 'One, two, three'")
    script.begin()
    await press(page, "Continue")
    script.send(delta(content=", four."), *end("stop"))
    await until_idle(page)
    assert await page.run(LAST_TEXT) == "One, two, three, four."
    body = posted(page)[-1]
    assert body["continue_final_message"] is True
    assert body["add_generation_prompt"] is False
    assert body["messages"][-1] == {"role": "assistant", "content": "One, two, three"}
    await reload(page)
    await page.until(f"{LAST_TEXT} === 'One, two, three, four.'")


async def test_what_is_opened_while_an_answer_comes_stays_open(page: Page, script: Script) -> None:
    await ask(page, script, "First?", "One.")
    await press(page, "New chat")
    await say(page, "Second?")
    script.send(delta(content="Two"))
    await page.until(f"{LAST_TEXT} === 'Two'")
    await page.run("$$('.conversation').find((made) => made.textContent === 'First?').click()")
    await page.until(f"{LAST_TEXT} === 'One.' && {TITLES}.length === 2")
    script.begin()
    current = "$('.conversation[aria-current]').textContent"
    assert await page.run(f"[{current}, document.title.split(' · ')[0]]") == ["First?"] * 2
    await press(page, "Private")
    await say(page, "Third?")
    script.send(delta(content="Three"))
    await page.until(f"{LAST_TEXT} === 'Three'")
    await page.run("$('.conversation').click()")
    await page.until(f"{LAST_TEXT} === 'Two'")
    assert await page.run("$('#private').hidden")
    await reload(page)
    await page.until(f"{LAST_TEXT} === 'Two' && {current} === 'Second?'")
    assert sorted(await page.run(TITLES)) == ["First?", "Second?"]


async def test_a_conversation_is_removed_while_its_answer_comes(page: Page, script: Script) -> None:
    await say(page, "Why?")
    script.send(delta(content="Be"))
    await page.until(f"{LAST_TEXT} === 'Be'")
    await asyncio.sleep(1.1)  # it is kept once a second
    script.send(delta(content="cause"))
    await page.until(f"{TITLES}.length === 1")
    await press(page, "Delete", "$('#conversations')")
    await page.until(f"$$('.turn').length === 0 && {IDLE}")
    await asyncio.sleep(0.2)
    assert await page.run(TITLES) == []
    await reload(page)
    assert await page.run(TITLES) == []


async def test_an_answer_that_is_being_kept_closes_no_menu(page: Page, script: Script) -> None:
    await say(page, "Why?")
    script.send(delta(content="0"))
    await asyncio.sleep(1.1)
    script.send(delta(content="1"))
    await page.until(f"{TITLES}.length === 1")
    await page.run("$('#conversations .menu-list').showPopover()")
    for number in range(2, 4):
        await asyncio.sleep(1.1)
        script.send(delta(content=str(number)))
    await page.until(f"{LAST_TEXT} === '0123'")
    assert await page.run(
        "(({ bottom, height }) => height > 100 && bottom < innerHeight)"
        "($('#conversations :popover-open').getBoundingClientRect())"
    ), "the list does not cut the menu off"
    await page.press("Escape", 27)
    await page.until("$(':popover-open') === null")
    assert not await page.run(IDLE), "Escape has closed the menu, and nothing else"
    await page.run("$$('.conversation').forEach((made) => made.click())")
    script.send(delta(content="4"), *end("stop"))
    await until_idle(page)
    assert await page.run(LAST_TEXT) == "01234", "to open what is open ends no answer"


async def test_the_list_is_searched_renamed_pinned_and_undone(page: Page, script: Script) -> None:
    for number, word in enumerate(("apples", "pears", "plums")):
        if number:
            await press(page, "New chat")
        await ask(page, script, f"About {word}", f"{word} are fruit; zebra{number}")
    assert await page.run(TITLES) == ["About plums", "About pears", "About apples"]
    await page.run("$('#search').focus()")
    await page.send("Input.insertText", text="ZEBRA1")
    await page.until(f"{TITLES}.join() === 'About pears'")
    await page.run(
        "const search = $('#search');search.value = ''; search.dispatchEvent(new Event('input'))"
    )
    last = "$('#conversations li:last-child')"
    await press(page, "Pin", last)
    await page.until(f"{TITLES}[0] === '★ About apples'")
    await press(page, "Rename", "$('#conversations li')")
    await page.send("Input.insertText", text="Fruit <b>")
    current = "$('.conversation[aria-current]').textContent"
    opened = await page.run(current)
    await page.press("Enter", 13, "\r")
    await page.until(f"{TITLES}[0] === '★ Fruit <b>'")
    assert await page.run(current) == opened, "Enter renames, and opens nothing"
    await press(page, "Delete", "$('#conversations li')")
    await page.until(f"{TITLES}.length === 2")
    await press(page, "Undo", "$('#said')")
    await page.until(f"{TITLES}.length === 3")
    await reload(page)
    await page.until(f"{TITLES}.join() === '★ Fruit <b>,About plums,About pears'")
    await page.run("$('.conversation').click()")
    await page.until(f"{LAST_TEXT} === 'apples are fruit; zebra0'")


async def test_a_private_chat_is_not_kept(page: Page, script: Script) -> None:
    await press(page, "Private")
    assert not await page.run("$('#private').hidden")
    await ask(page, script, "A secret", "Yes.")
    assert await page.run(TITLES) == []
    await reload(page)
    assert await page.run(f"{TITLES}.length || $$('.turn').length") == 0


async def test_a_later_version_of_the_page_may_change_the_tables(
    page: Page, script: Script
) -> None:
    await ask(page, script, "Kept?", "Yes.")
    newer = """new Promise(async (wake) => {
        const [{ name, version }] = await indexedDB.databases();
        const opening = indexedDB.open(name, version + 1);
        opening.onblocked = () => wake("blocked");
        opening.onsuccess = () => (opening.result.close(), wake("open"));
    })"""
    assert await page.run(newer) == "open"
    await page.until("$('#said').textContent.includes('reload')")
    await ask(page, script, "And now?", "No.")  # the chat works on
    assert await page.run(SAID) == ["Kept?", "Yes.", "And now?", "No."]


async def test_export_and_import(page: Page, script: Script) -> None:
    await ask(page, script, "Name one.", "# One\n\n`two`")
    script_of_export = """(async () => {
        let text = null;
        const make = URL.createObjectURL;
        URL.createObjectURL = (blob) => ((text = blob.text()), make.call(URL, blob));
        $$('.menu-list button')
            .find((b) => b.textContent === 'Export as %s').click();
        return await text;
    })()"""
    markdown = await page.run(script_of_export % "Markdown")
    assert markdown == "# Name one.\n\n## User\n\nName one.\n\n## Assistant\n\n# One\n\n`two`\n"
    exported = await page.run(script_of_export % "JSON")
    (kept,) = json.loads(exported)["conversations"]
    assert [node["message"] and node["message"]["content"] for node in kept["nodes"]] == [
        None, "Name one.", "# One\n\n`two`",
    ]  # fmt: skip
    for text, said in (
        (exported, "1 imported."),
        ("{", "This file is no JSON."),
        ('{"conversations": [{"nodes": [{"id": "a", "parent": "a"}]}]}', "something else"),
        (json.dumps(circle(kept)), "something else"),
    ):
        await page.run(
            f"""(() => {{
                const transfer = new DataTransfer(), input = $('#import-file');
                transfer.items.add(new File([{json.dumps(text)}], "x.json"));
                input.files = transfer.files;
                input.dispatchEvent(new Event("change"));
            }})()"""
        )
        await page.until(f"$('#said').textContent.includes({json.dumps(said)})")
    assert await page.run(TITLES) == ["Name one."] * 2


def circle(kept: dict[str, Any]) -> dict[str, Any]:
    """Returns a conversation whose messages stand behind each other in a circle."""
    nodes = json.loads(json.dumps(kept["nodes"]))
    nodes[1]["parent"] = nodes[2]["id"]
    return kept | {"nodes": nodes}


# ---------------------------------------------------------------- versions


async def test_regenerate_edit_and_go_through_the_versions(page: Page, script: Script) -> None:
    await ask(page, script, "Pick a number.", "One.")
    await press(page, "Regenerate")
    script.send(delta(content="Two."), *end("stop"))
    await page.until(f"{VERSION} === '2/2' && {IDLE}")
    assert await page.run(SAID) == ["Pick a number.", "Two."]
    await ask(page, script, "Why?", "Because.")
    await press(page, "‹")
    await page.until(f"{VERSION} === '1/2'")
    assert await page.run(SAID) == ["Pick a number.", "One."], "what followed Two. is its own"
    assert await page.run("document.activeElement.textContent") in ("›", "‹")
    await press(page, "›")
    await page.until(f"{SAID}.length === 4")
    await press(page, "Edit", last=False)
    assert await page.run("document.activeElement.value") == "Pick a number."
    await page.run("document.activeElement.select()")
    await page.send("Input.insertText", text="Pick a letter.")
    await page.press("Enter", 13, "\r", 2)  # with control
    script.send(delta(content="A."), *end("stop"))
    await page.until(f"{LAST_TEXT} === 'A.' && {VERSION} === '2/2' && {IDLE}")
    assert [message["content"] for message in posted(page)[-1]["messages"]] == ["Pick a letter."]
    assert await page.run(SAID) == ["Pick a letter.", "A."]
    await press(page, "‹", last=False)
    await page.until(f"{SAID}.join() === 'Pick a number.,Two.,Why?,Because.'")
    await reload(page)
    await page.until(f"{SAID}.join() === 'Pick a number.,Two.,Why?,Because.'")


async def test_a_turn_is_deleted_and_brought_back(page: Page, script: Script) -> None:
    await ask(page, script, "First", "1")
    await ask(page, script, "Second", "2")
    await press(page, "Delete", "$$('.turn')[1]", last=False)
    await page.until(f"{SAID}.join() === 'First,1'")
    assert await page.run("document.activeElement.textContent") == "Undo"
    await press(page, "Undo")
    await page.until(f"{SAID}.join() === 'First,1,Second,2'")
    await press(page, "Delete", "$$('.turn')[1]", last=False)
    await ask(page, script, "Third", "3")
    assert [message["content"] for message in posted(page)[-1]["messages"]] == [
        "First",
        "1",
        "Third",
    ]


async def test_two_answers_side_by_side(page: Page, script: Script) -> None:
    await set_field(page, "temperature", "0.1")
    await page.run("$('#preset-name').value = 'cold'")
    await press(page, "Save")
    await set_field(page, "temperature", "1.5")
    await page.run("$('[name=compare]').checked = true;$('[name=compare_preset]').value = 'cold'")
    await say(page, "Which?")
    await page.until("$$('.pair .reply').length === 2")
    script.send(delta(content="x"), *end("stop"))
    script.send(delta(content="x"), *end("stop"))
    await until_idle(page)
    assert sorted(body["temperature"] for body in posted(page)) == [0.1, 1.5]
    assert await page.run("$$('.pair .column').length") == 2
    await press(page, "Go on with this", last=False)
    await page.until(f"!$('.pair') && {VERSION}")
    await page.run("$('[name=compare]').checked = false")
    await ask(page, script, "And?", "So.")
    assert len(posted(page)[-1]["messages"]) == 3


# ---------------------------------------------------------------- insight


async def test_an_alternative_is_gone_on_from(page: Page, script: Script) -> None:
    await page.run("$('[name=logprobs]').click()")
    await say(page, "Sky?")
    script.send(
        token("Blue", -0.1, ("Grey", -2.5)), token(" today", -3.0, (" né", -3.1)), *end("stop")
    )
    await until_idle(page)
    assert posted(page)[0]["top_logprobs"] == 5
    await press(page, "Probabilities")
    levels = "$$('.token').map((t) => t.dataset.level).join()"
    assert await page.run(levels) == "0,4"
    await page.press("Tab", 9)
    await page.run("$('.token-text').focus()")
    await page.press("ArrowRight", 39)
    details = "$('.alternatives').textContent"
    assert "Token 2: “␣today” 5.0 %" in await page.run(details)
    await page.run("$$('.token')[1].click()")
    await page.run(
        "$$('.token')[0].dispatchEvent(new PointerEvent('pointerover', { bubbles: true }))"
    )
    assert "Token 2" in await page.run(details), "a click holds a token"
    await press(page, "␣né")
    script.send(delta(content="."), *end("stop"))
    await page.until(f"{LAST_TEXT} === 'Blue né.'")
    body = posted(page)[-1]
    assert body["messages"][-1] == {"role": "assistant", "content": "Blue né"}
    assert body["continue_final_message"] is True
    await page.until(f"{VERSION} === '2/2' && {IDLE}")


async def test_the_request_as_code(page: Page, script: Script) -> None:
    await set_field(page, "top_k", "3")
    await ask(page, script, "It's 'quoted'", "Yes.")
    body = {"path": "/v1/chat/completions", "body": posted(page)[0]}
    code = "(async () => (await import('./page/requests.js')).codeOf('%s', %s))()"
    curl = await page.run(code % ("curl", json.dumps(body)))
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", f"curl() {{ printf '%s' \"${{@: -1}}\"; }}; {curl}",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    printed, _ = await process.communicate()
    assert json.loads(printed) == body["body"]
    python = await page.run(code % ("python", json.dumps(body)))
    compile(python, "snippet", "exec")
    assert '"top_k": 3' in python
    assert "/llm/v1" in python


async def test_formulas_code_and_tasks(page: Page, script: Script) -> None:
    text = (
        "Inline \\(a_1 < b\\) and $x^2$, it costs $5 and $6.\n\n$$\n\\frac{1}{2}\n$$\n\n"
        "\\[ c \\]\n\n"
        "Broken \\(\\frac{\\).\n\n- [x] done\n- [ ] open\n\n"
        "```python\ndef f(): return 'é'\n```\n\n`$n$`"
    )
    await ask(page, script, "All?", text)
    await page.until("$$('.katex').length === 4")
    assert await page.run("$$('.katex-display').length") == 2
    assert await page.run("$('.unread').textContent") == "\\frac{"
    assert "it costs $5 and $6." in await page.run(LAST_TEXT)
    boxes = "$$('.task input').map((box) => box.checked)"
    assert await page.run(boxes) == [True, False]
    await page.until("$('.hl-keyword')")
    assert await page.run("$('.hl-keyword').textContent") == "def"
    assert await page.run("$('.code code').textContent") == ("def f(): return 'é'\n")
    assert await page.run("$$('.answer > p code').at(-1).textContent") == ("$n$")


async def test_the_tokens_of_a_draft_are_counted(page: Page) -> None:
    await page.answer("/tokenize", 200, "application/json", b'{"count": 1234, "max_model_len": 1}')
    await page.send("Input.insertText", text="A long draft")
    await page.until("$('#tokens').textContent === '1,234 of 100 tokens'")
    assert await page.run("$('#tokens').classList.contains('over')")
