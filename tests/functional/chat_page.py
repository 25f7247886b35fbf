"""What tests do on the chat page, as a user does it."""

from __future__ import annotations

import json
from typing import Any

from yarl import URL

from tests.functional.chromium import Page

LAST_TEXT = "$$('.answer').at(-1)?.textContent"
IDLE = "!$('#send').hidden"
CHAT = "/v1/chat/completions"


async def say(page: Page, text: str) -> None:
    """Types a message and sends it, by keyboard."""
    await page.run("$('#prompt').focus()")
    await page.send("Input.insertText", text=text)
    await page.press("Enter", 13, "\r")


async def ask(page: Page, text: str, num_answers: int = 1) -> None:
    """Sends a message, and returns when so many answers are whole."""
    await say(page, text)
    await page.until(f"{IDLE} && $$('.figures').length === {num_answers}")


async def set_field(page: Page, name: str, value: str) -> None:
    """Fills in one of the settings, or the tools or the schema."""
    field = f"$('#composer').elements.{name}"
    await page.run(f"{field}.closest('details').open = true; {field}.focus(); {field}.select()")
    await page.send("Input.insertText", text=value)


def posted(page: Page, path: str = CHAT) -> list[dict[str, Any]]:
    """Returns the bodies that the page has posted to a path."""
    return [
        json.loads(request["postData"])
        for request in page.requests
        if URL(request["url"]).path == path
    ]
