"""A mixed load for long runs: requests of well-behaved, impatient and broken clients.

Each request is of a kind that is drawn at random, and each kind has an expected outcome: the tokens
that were requested, an error with a status, or nothing where the client leaves. Any other outcome
is a fault, and is recorded.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import takewhile
from typing import Any

import aiohttp
from yarl import URL

#: Statuses by which a server that is busy declines a request; no fault, but counted.
_SHED = (429, 503)
_WORDS = (
    "river", "stone", "window", "quiet", "market", "number", "yellow", "engine", "letter", "winter",
    "garden", "simple", "bridge", "method", "copper", "island", "travel", "signal", "butter",
    "planet", "silver", "thunder", "pocket", "meadow", "valley",
)  # fmt: skip
#: (path, body, status) of requests that are at fault. None as status: any 4xx.
_BAD: list[tuple[str, bytes, int | None]] = [
    ("/v1/completions", b"{", 400),
    ("/v1/completions", b"[1, 2]", 400),
    ("/v1/completions", b'{"prompt": 1.5}', 400),
    ("/v1/completions", b'{"prompt": "x", "max_tokens": -1}', 400),
    ("/v1/completions", b'{"prompt": "x", "max_tokens": 10000000}', 400),
    ("/v1/completions", b'{"prompt": "x", "temperature": "hot"}', 400),
    ("/v1/completions", b'{"prompt": "x", "model": "no-such-model"}', 404),
    ("/v1/completions", b'{"prompt": [99999999]}', 400),
    ("/v1/completions", b"\xff\xfe\x00", 400),
    ("/v1/chat/completions", b'{"messages": []}', None),
    ("/v1/chat/completions", b'{"messages": [{"role": 5}]}', 400),
    ("/v1/nothing", b"{}", 404),
]


class FaultError(Exception):
    """The server did not give a request its expected outcome."""


class MixedLoad:
    """Sends requests of all kinds to a server.

    Attributes:
        sent: how many requests of each kind have ended.
        shed: how many of them were declined with 429 or 503.
        faults: descriptions of the faults.
    """

    def __init__(self, url: str, seed: int):
        self.sent: Counter[str] = Counter()
        self.shed = 0
        self.faults: list[str] = []
        self._url = URL(url)
        self._random = random.Random(seed)
        self._http: aiohttp.ClientSession
        # (weight, kind)
        self._kinds: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (30, self._short), (4, self._long), (12, self._stream), (10, self._chat),
            (8, self._abort), (8, self._vanish), (10, self._bad), (5, self._several),
            (5, self._logprobs), (5, self._stop), (2, self._tokenize), (1, self._look),
        ]  # fmt: skip

    @property
    def total(self) -> int:
        """How many requests have ended."""
        return sum(self.sent.values())

    async def run(self, requests: int, concurrency: int, end: float = float("inf")) -> None:
        """Sends `requests` requests, `concurrency` at a time, over connections that are closed at
        the end; no more begin at `end` of `time.monotonic`."""
        timeout = aiohttp.ClientTimeout(600)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            self._url, connector=connector, timeout=timeout
        ) as self._http:
            left = takewhile(lambda _: time.monotonic() < end, range(requests))
            await asyncio.gather(*(self._send(left) for _ in range(concurrency)))

    async def _send(self, left: Any) -> None:
        weights, kinds = zip(*self._kinds, strict=True)
        for _ in left:
            (kind,) = self._random.choices(kinds, weights)
            name = kind.__name__.strip("_")
            try:
                await kind()
            except (FaultError, aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                self.faults.append(f"{name}: {error!r}")
            self.sent[name] += 1

    # ---------------------------------------------------------------- kinds

    def _prompt(self, low: int, high: int) -> str:
        words = self._random.choices(_WORDS, k=self._random.randint(low, high))
        # words that no request has sent before, so that anything cached by text would show
        new = ["".join(self._random.choices("abcdefghijklmnop", k=7)) for _ in range(3)]
        return " ".join([*new, *words])

    def _body(self, prompt: str, low: int = 1, high: int = 12, **fields: Any) -> dict[str, Any]:
        options: list[dict[str, Any]] = [
            {"temperature": 0}, {"temperature": 1}, {"top_k": 5}, {"repetition_penalty": 1.1}
        ]  # fmt: skip
        sampling = self._random.choice(options)
        count = self._random.randint(low, high)
        return {"prompt": prompt, "max_tokens": count, "ignore_eos": True, **sampling, **fields}

    async def _short(self) -> None:
        await self._complete(self._body(self._prompt(1, 20), high=6))

    async def _long(self) -> None:
        await self._complete(self._body(self._prompt(80, 200), high=3))

    async def _several(self) -> None:
        await self._complete(self._body(self._prompt(3, 30), n=self._random.randint(2, 4)))

    async def _logprobs(self) -> None:
        reply = await self._complete(self._body(self._prompt(3, 10), logprobs=3))
        if reply and not reply["choices"][0]["logprobs"]["tokens"]:
            raise FaultError("no log-probabilities")

    async def _stop(self) -> None:
        body = self._body(self._prompt(3, 10), low=8, stop=["e", "\n\n", "the end of it all"])
        reply = await self._post("/v1/completions", body)
        if reply and reply["choices"][0]["finish_reason"] not in ("stop", "length"):
            raise FaultError(f"ended by {reply['choices'][0]['finish_reason']}")

    async def _tokenize(self) -> None:
        reply = await self._post("/tokenize", {"prompt": self._prompt(5, 50)})
        if reply and not (await self._post("/detokenize", {"tokens": reply["tokens"]}) or True):
            raise FaultError("no text")

    async def _look(self) -> None:
        for path in ("/health", "/metrics", "/v1/models", "/version"):
            async with self._http.get(path) as response:
                await response.read()
                if response.status != 200:
                    raise FaultError(f"{path} answered {response.status}")

    async def _stream(self) -> None:
        body = self._body(self._prompt(2, 40), stream=True, stream_options={"include_usage": True})
        await self._read_stream("/v1/completions", body)

    async def _chat(self) -> None:
        body = self._body("")
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": self._prompt(2, 20)}]
        if self._random.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            await self._read_stream("/v1/chat/completions", body)
        else:
            await self._complete(body, "/v1/chat/completions")

    async def _abort(self) -> None:
        """Leaves in the middle of a stream, or before its first event."""
        body = self._body(self._prompt(2, 60), low=40, high=80, stream=True)
        async with self._http.post("/v1/completions", json=body) as response:
            if self._declined(response.status):
                return
            for _ in range(self._random.randint(0, 4)):
                await response.content.readline()
            response.close()

    async def _vanish(self) -> None:
        """Sends a part of a request over a connection of its own and closes it; or all of it, and
        reads nothing."""
        body = json.dumps(self._body(self._prompt(2, 60), high=30)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._url.host}\r\nContent-Type: "
        head += f"application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        data = head.encode() + body
        _, writer = await asyncio.open_connection(self._url.host, self._url.port)
        try:
            writer.write(data[: self._random.randint(0, len(data))])
            await writer.drain()
            await asyncio.sleep(self._random.random() * 0.05)
        finally:
            writer.transport.abort()  # a reset

    async def _bad(self) -> None:
        path, body, wanted = self._random.choice(_BAD)
        kind = {"Content-Type": "application/json"}
        async with self._http.post(path, data=body, headers=kind) as response:
            reply = await response.json()
            right = response.status == wanted or (wanted is None and 400 <= response.status < 500)
            if not (right and reply["error"]["message"]) and not self._declined(response.status):
                raise FaultError(f"{path} {body!r} answered {response.status}")

    # ---------------------------------------------------------------- replies

    def _declined(self, status: int) -> bool:
        self.shed += status in _SHED
        return status in _SHED

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the reply; None if the server declined the request."""
        async with self._http.post(path, json=body) as response:
            reply: dict[str, Any] = await response.json()
            if self._declined(response.status):
                return None
            if response.status != 200:
                raise FaultError(f"{path} answered {response.status}: {str(reply)[:300]}")
            return reply

    async def _complete(
        self, body: dict[str, Any], path: str = "/v1/completions"
    ) -> dict[str, Any] | None:
        """Sends a request whose output has a known length, and checks it."""
        reply = await self._post(path, body)
        if reply is not None:
            self._check_usage(body, reply["usage"], len(reply["choices"]))
        return reply

    async def _read_stream(self, path: str, body: dict[str, Any]) -> None:
        async with self._http.post(path, json=body) as response:
            text = await response.text()
            if self._declined(response.status):
                return
        *events, end, rest = text.split("\n\n")
        if response.status != 200 or (end, rest) != ("data: [DONE]", ""):
            raise FaultError(f"a stream ended with {response.status} {text[-300:]!r}")
        last = json.loads(events[-1].removeprefix("data: "))
        if "error" in last:
            raise FaultError(f"a stream ended with {last['error']}")
        self._check_usage(body, last["usage"], 1)

    @staticmethod
    def _check_usage(body: dict[str, Any], usage: dict[str, Any], choices: int) -> None:
        wanted = body.get("n", 1)
        if (choices, usage["completion_tokens"]) != (wanted, wanted * body["max_tokens"]):
            raise FaultError(
                f"{choices} choices, {usage}; requested {wanted} of {body['max_tokens']}"
            )
