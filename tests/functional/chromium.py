"""A headless Chromium for tests, driven over the Chrome DevTools Protocol: one page, its requests
and its console."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

EXECUTABLE = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--window-size=1280,800", "--remote-debugging-port=0",
)  # fmt: skip
#: For scripts of tests: `$` is the first element of a selector, `$$` the list of all.
_SHORT_NAMES = """
    globalThis.$ = (selector) => document.querySelector(selector);
    globalThis.$$ = (selector) => [...document.querySelectorAll(selector)];
"""


class Page:
    """A page.

    `requests` holds what it has requested since it was opened, `errors` what its console complained
    of.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self.requests: list[dict[str, Any]] = []
        self.errors: asyncio.Queue[str] = asyncio.Queue()
        self.answers: dict[str, tuple[int, str, bytes]] = {}
        self._trace: list[dict[str, Any]] = []
        self._traced: asyncio.Future[None] | None = None
        self._socket = socket
        self._session = ""
        self._numbers = count(1)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._background: set[asyncio.Task[Any]] = set()

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Returns the result of a command.

        Raises RuntimeError if the browser refuses it, ConnectionError if it has gone.
        """
        number = next(self._numbers)
        reply_to = self._replies[number] = asyncio.get_running_loop().create_future()
        session = {"sessionId": self._session} if self._session else {}
        await self._socket.send_json({"id": number, "method": method, "params": params} | session)
        reply = await reply_to
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']['message']}")
        return reply["result"]

    async def receive(self) -> None:
        """Takes the browser's messages until it ends."""
        try:
            async for message in self._socket:
                event = json.loads(message.data)
                if "id" not in event:
                    self._take(event["method"], event["params"])
                # else nobody waits for it any more
                elif not (reply_to := self._replies.pop(event["id"])).done():
                    reply_to.set_result(event)
        finally:
            for reply_to in self._replies.values():
                if not reply_to.done():
                    reply_to.set_exception(ConnectionError("the browser has gone"))

    def _take(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"])
        elif method == "Runtime.exceptionThrown":
            self.errors.put_nowait(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.put_nowait(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.errors.put_nowait(str(params["args"]))
        elif method == "Tracing.dataCollected":
            self._trace += params["value"]
        elif method == "Tracing.tracingComplete" and self._traced is not None:
            self._traced.set_result(None)
        elif method == "Fetch.requestPaused":
            task = asyncio.ensure_future(
                self._answer(params["requestId"], params["request"]["url"])
            )
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _answer(self, request: str, url: str) -> None:
        status, content_type, body = next(
            answer for part, answer in self.answers.items() if part in url
        )
        headers = [{"name": "Content-Type", "value": content_type}]
        data = base64.b64encode(body).decode()
        await self.send(
            "Fetch.fulfillRequest", requestId=request, responseCode=status, responseHeaders=headers,
            body=data,
        )  # fmt: skip

    async def attach(self) -> None:
        """Opens an empty page and watches it."""
        target = await self.send("Target.createTarget", url="about:blank")
        self._session = (
            await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        )["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.send(f"{domain}.enable")
        await self.send("Page.addScriptToEvaluateOnNewDocument", source=_SHORT_NAMES)

    async def answer(self, path: str, status: int, content_type: str, body: bytes) -> None:
        """From now on answers requests for `path` in the server's place."""
        self.answers[path] = status, content_type, body
        await self.send(
            "Fetch.enable",
            patterns=[
                {"urlPattern": f"*{part}{query}"} for part in self.answers for query in ("", "\\?*")
            ],
        )

    async def open(self, url: str) -> None:
        """Goes to a URL as for the first time: whatever was noted, answered and kept of the page
        before it is gone."""
        if self.answers:
            self.answers.clear()
            await self.send("Fetch.disable")
        origin = str(URL(url).origin()) if url.startswith("http") else ""
        if origin:
            await self.run("sessionStorage?.clear()" if self.requests else "0")
        await self.send("Page.navigate", url="about:blank")
        if origin:
            await self.send("Storage.clearDataForOrigin", origin=origin, storageTypes="all")
        self.requests.clear()
        while not self.errors.empty():
            self.errors.get_nowait()
        await self.send("Page.navigate", url=url)

    async def start_trace(self, *categories: str) -> None:
        """Begins to note the events of these categories, of all processes of the browser."""
        self._trace, self._traced = [], asyncio.get_running_loop().create_future()
        config = {"includedCategories": categories, "traceBufferSizeInKb": 800_000}
        await self.send("Tracing.start", transferMode="ReportEvents", traceConfig=config)

    async def end_trace(self) -> list[dict[str, Any]]:
        """Returns the events (Trace Event Format), ordered by time."""
        assert self._traced is not None, "no trace was started"
        await self.send("Tracing.end")
        await self._traced
        return sorted(self._trace, key=lambda event: event.get("ts", 0))

    async def press(self, key: str, code: int, text: str = "", modifiers: int = 0) -> None:
        """Presses a key; `code` is its Windows virtual key code."""
        await self.send(
            "Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code,
            text=text, modifiers=modifiers,
        )  # fmt: skip
        await self.send(
            "Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code,
            modifiers=modifiers,
        )  # fmt: skip

    async def click(self, element: str) -> None:
        """Clicks with the mouse on the middle of an element, given as a JavaScript expression."""
        x, y = await self.run(
            f"(({element}).scrollIntoView(), (({{ x, y, width, height }}) => "
            f"[x + width / 2, y + height / 2])(({element}).getBoundingClientRect()))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.send(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )

    async def run(self, script: str) -> Any:
        """Returns what a JavaScript expression comes to; promises are awaited.

        Raises RuntimeError where it throws.
        """
        reply = await self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in reply:
            raise RuntimeError(str(reply["exceptionDetails"]))
        return reply["result"].get("value")

    async def until(self, condition: str, timeout_s: float = 30.0) -> Any:
        """Returns the first value of an expression that is true, of this page or of one that it
        goes on to."""
        pause = "await new Promise((wake) => setTimeout(wake, 5))"
        test = f"const value = {condition}; if (value) return value"
        wait = f"(async () => {{ for (;;) {{ {test}; {pause}; }} }})()"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        return await self.run(wait)
                    except RuntimeError as error:
                        if "navigated" not in str(error):
                            raise
        except TimeoutError:
            raise AssertionError(
                f"not within {timeout_s} s: {condition}; console: {self.errors}"
            ) from None


@asynccontextmanager
async def open_page(folder: Path) -> AsyncIterator[Page]:
    """Starts a browser with an empty profile in `folder`, and ends it."""
    assert EXECUTABLE is not None
    process = await asyncio.create_subprocess_exec(
        EXECUTABLE, *_FLAGS, f"--user-data-dir={folder}", stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        url = ""
        while not url:
            line = (await asyncio.wait_for(process.stderr.readline(), 60)).decode()
            assert line, "the browser ended"
            url = line.partition("DevTools listening on ")[2].strip()
        async with aiohttp.ClientSession() as http, http.ws_connect(url, max_msg_size=0) as socket:
            page = Page(socket)
            receiving = asyncio.ensure_future(page.receive())
            await page.attach()
            yield page
            receiving.cancel()
    finally:
        process.kill()
        await process.communicate()
