"""Pictures on the page: pasted or dropped where the model reads them, scaled down, sent and kept.
In headless Chromium, with a scripted answer."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest

from tests.functional.chat_page import IDLE, say
from tests.functional.chat_page import posted as posted_to
from tests.functional.chromium import EXECUTABLE, Page
from tests.functional.scripted_chat import Script, delta, end, posted, until_idle
from tests.functional.test_page_conversations import press, reload

pytestmark = [
    pytest.mark.extended,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium is installed"),
]

SHOWN = "$$('#composer .pictures img').map((img) => img.naturalWidth)"
IN_TURN = "$$('.turn .pictures img').length"
#: Makes files of pictures: `[width, height, type]` each.
GIVE = """async (kind, ...sizes) => {
    const data = new DataTransfer();
    for (const [width, height, type] of sizes) {
        const canvas = new OffscreenCanvas(width, height);
        const context = canvas.getContext("2d");
        context.fillStyle = "red";
        context.fillRect(0, 0, width / 2, height);
        data.items.add(new File([await canvas.convertToBlob({ type })], "a.png", { type }));
    }
    const prompt = $("#prompt");
    const options = { bubbles: true, cancelable: true };
    const event = kind === "paste"
        ? new ClipboardEvent("paste", { ...options, clipboardData: data })
        : new DragEvent("drop", { ...options, dataTransfer: data });
    prompt.dispatchEvent(event);
    return event.defaultPrevented;
}"""


async def open_with(page: Page, modalities: list[str]) -> None:
    """Opens the page of a model that reads what `modalities` says."""
    models = {"object": "list", "data": [{"id": "eye", "input_modalities": modalities}]}
    await page.answer("/v1/models", 200, "application/json", json.dumps(models).encode())
    await page.answer("/tokenize", 200, "application/json", b'{"count": 7}')
    await page.send("Page.reload")
    await page.until("$('#model')?.value === 'eye'")
    await page.until("$('#status')?.dataset.state === 'live'")


def size_of(url: str) -> tuple[str, int]:
    """Returns the kind and the number of bytes of a data URL."""
    head, data = url.split(",", 1)
    return head, len(base64.b64decode(data))


async def give(page: Page, kind: str, *sizes: list[Any]) -> bool:
    return bool(await page.run(f"({GIVE})({json.dumps(kind)}, ...{json.dumps(sizes)})"))


async def test_pictures_are_pasted_dropped_sent_and_kept(page: Page, script: Script) -> None:
    await open_with(page, ["text", "image"])
    assert not await page.run("$('#picture').hidden")
    assert await give(page, "paste", [40, 30, "image/png"])
    assert await give(page, "drop", [4000, 1000, "image/png"], [20, 20, "image/webp"])
    await page.until(f"{SHOWN}.join() === '40,1568,20'")
    await page.run("$$('#composer .pictures button')[2].click()")
    await say(page, "What is it?")
    script.send(delta(content="Red."), *end("stop"))
    await until_idle(page)
    (content,) = [message["content"] for message in posted(page)[-1]["messages"]]
    assert [part["type"] for part in content] == ["image_url", "image_url", "text"]
    assert content[2]["text"] == "What is it?"
    first, second = (size_of(part["image_url"]["url"]) for part in content[:2])
    assert first[0] == "data:image/png;base64", "a small picture is sent as it is"
    assert second[0] == "data:image/jpeg;base64"
    assert second[1] < 1_000_000
    assert await page.run(SHOWN) == []

    await reload(page)
    await page.until(f"{IN_TURN} === 2")
    assert await page.run("$('.said.user').textContent") == "What is it?"
    await page.run("$('[aria-label=\"Edit the message\"]').click()")
    await page.until("document.activeElement.matches('.edit textarea')")
    assert await page.run("document.activeElement.value") == "What is it?"
    await page.send("Input.insertText", text="And what colour?")
    await press(page, "Send", "$('.edit')")
    script.send(delta(content="Red!"), *end("stop"))
    await until_idle(page)
    edited = posted(page)[-1]["messages"][0]["content"]
    assert edited[:2] == content[:2]
    assert edited[2]["text"].endswith("And what colour?")


async def test_a_picture_is_counted_once_and_kept_once(page: Page, script: Script) -> None:
    await open_with(page, ["text", "image"])
    await give(page, "paste", [40, 30, "image/png"])
    await page.until(f"{SHOWN}.length === 1 && $('#tokens').textContent")
    for word in ("What ", "is ", "it?"):
        await page.send("Input.insertText", text=word)
        await asyncio.sleep(0.5)
    counted = [json.dumps(body) for body in posted_to(page, "/llm/tokenize")]
    assert len(counted) > 4
    assert sum("data:image" in body for body in counted) == 1
    await page.press("Enter", 13, "\r")
    for number in range(2):
        script.send(delta(content=f"Red {number}. "))
        await asyncio.sleep(1.1)  # the conversation is kept once a second
    script.send(*end("stop"))
    await until_idle(page)
    kept = """(async () => {
        const done = (request) =>
            new Promise((wake) => (request.onsuccess = () => wake(request.result)));
        const [{ name }] = await indexedDB.databases();
        const database = await done(indexedDB.open(name));
        const tables = database.transaction(["conversations", "pictures"]);
        const all = ["conversations", "pictures"].map((each) => tables.objectStore(each).getAll());
        const [kept, pictures] = await Promise.all(all.map(done));
        database.close();
        return [JSON.stringify(kept).includes("data:"), pictures.length, kept.length];
    })()"""
    assert await page.run(kept) == [False, 1, 1]
    await reload(page)
    await page.until(f"{IN_TURN} === 1")
    await press(page, "Delete", "$('#conversations li')")
    await page.until(f"{IN_TURN} === 0")
    await reload(page)
    assert await page.run(kept) == [False, 0, 0], "nothing has the picture any more"


async def test_a_picture_alone_is_a_message_and_a_refusal_gives_it_back(
    page: Page, script: Script
) -> None:
    await open_with(page, ["text", "image"])
    script.refusal = {"message": "is too large", "param": "messages[0].content[0].image_url"}
    await give(page, "paste", [8, 8, "image/png"])
    await page.until(f"{SHOWN}.length === 1")
    await page.run("$('#prompt').focus()")
    await page.press("Enter", 13, "\r")
    await page.until("$('.failure')")
    await page.until(f"{IDLE} && {SHOWN}.length === 1")
    assert [part["type"] for part in posted(page)[-1]["messages"][0]["content"]] == ["image_url"]
    assert "400" in await page.errors.get()


async def test_what_is_no_picture_is_said(page: Page) -> None:
    await open_with(page, ["text", "image"])
    await page.run(
        "(() => { const data = new DataTransfer();"
        "data.items.add(new File(['no'], 'note.txt', { type: 'text/plain' }));"
        "$('#prompt').dispatchEvent(new DragEvent('drop', "
        "{ bubbles: true, cancelable: true, dataTransfer: data })); })()"
    )
    await page.until("$('#said').textContent.includes('note.txt')")
    assert await page.run(SHOWN) == []


async def test_a_model_that_reads_text_alone_is_offered_none(page: Page) -> None:
    await open_with(page, ["text"])
    assert await page.run("$('#picture').hidden")
    assert await give(page, "drop", [8, 8, "image/png"]), "the browser does not leave the page"
    await page.until("$('#said').textContent.includes('no pictures')")
    assert await page.run(SHOWN) == []
