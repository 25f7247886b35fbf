"""The client: sends one request and times its reply. Called by `load`, many at a time on one event
loop.

Of the 20 µs that a chunk costs here (uvloop, one a read, AMD EPYC), its JSON takes 0.6 with orjson;
a search for the text and for an end or an error in the bytes takes 1.0. So each is decoded, and a
broken one is noticed. Both packages are used where installed.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import Any

import aiohttp

from benchlib.workload import Call, RequestShape

try:
    from orjson import loads
except ImportError:
    from json import loads  # type: ignore[assignment]

#: An SSE event larger than this ends its request with an error.
MAX_EVENT_BYTES = 16 * 2**20
#: So much of an error's text is kept as an example.
MAX_EXAMPLE = 300
#: Where servers put the output, in a choice or its `delta`.
OUTPUT_FIELDS = ("text", "content", "reasoning_content", "reasoning", "tool_calls", "token_ids")


class ReplyError(Exception):
    """A reply that is not a completion. `kind` groups the failures in the report."""

    def __init__(self, kind: str, example: str):
        super().__init__(example)
        self.kind = kind


@dataclass(slots=True)
class Record:
    """The outcome of one request. Times in seconds.

    Attributes:
        sent: `perf_counter()` just before the request was sent.
        e2e: from then until the reply's end.
        ttft: from then until the first chunk that holds output; None if none came, or not streamed.
        gaps: the times between chunks that hold output.
        chunks: how many of those came.
        max_tokens: the maximum of output tokens that was requested.
        prompt_tokens, output_tokens: from the server's `usage`; None without it.
        cached_tokens: the prompt tokens that the server reports as found in its cache; None if it
            does not.
        turn: the number of the request in its conversation, from 1; 0 outside of one.
        text: the reply's text, if it was requested.
        error: the kind of failure; None for a request that succeeded.
        example: the failure's text.
    """

    sent: float
    max_tokens: int
    e2e: float = 0.0
    ttft: float | None = None
    gaps: array[float] = field(default_factory=lambda: array("d"))
    chunks: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    turn: int = 0
    text: str = ""
    error: str | None = None
    example: str = ""

    @property
    def tokens(self) -> int:
        """Output tokens; chunks where the server reports no usage."""
        return self.chunks if self.output_tokens is None else self.output_tokens

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None where it has no meaning."""
        return (
            None
            if self.ttft is None or self.tokens < 2
            else (self.e2e - self.ttft) / (self.tokens - 1)
        )


class Client:
    """Connections to one server, as an async context manager.

    Args:
        base_url: such as `http://127.0.0.1:8000`; a final `/v1` is dropped.
        timeout_s: the longest that a request may take in all.
        headers: sent with every request.
    """

    def __init__(
        self, base_url: str, *, timeout_s: float = 600.0, headers: dict[str, str] | None = None
    ):
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", **(headers or {})}

    async def __aenter__(self) -> Client:
        # no limit of connections: the load's shape limits how many there are; no session timeout:
        # `send` has its own
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(),
            headers=self._headers,
            auto_decompress=True,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def first_model(self) -> str:
        """Returns the first model that the server lists. Raises `ReplyError`."""
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.get(f"{self.base_url}/v1/models") as response,
            ):
                await _raise_for_status(response)
                return str(loads(await response.read())["data"][0]["id"])
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            kind, example = _describe(error, self.base_url)
            raise ReplyError(kind, example) from error
        except (ValueError, LookupError, TypeError) as error:
            raise ReplyError(
                "no model", f"{self.base_url}/v1/models lists no model: name one with --model"
            ) from error

    async def send(self, shape: RequestShape, call: Call, *, keep_text: bool = False) -> Record:
        """Sends a request and returns its record, with `keep_text` also the reply's text.

        A failure is part of the record, never raised.
        """
        record = Record(perf_counter(), call.max_tokens)
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.post(self.base_url + shape.path, data=call.body) as response,
            ):
                await _raise_for_status(response)
                read = _read_stream if shape.stream else _read_whole
                await read(response, record, keep_text)
        except ReplyError as error:
            record.error, record.example = error.kind, str(error)
        except TimeoutError:
            record.error, record.example = (
                "timeout",
                f"no complete reply within {self._timeout_s:g} s",
            )
        except (aiohttp.ClientError, OSError) as error:
            record.error, record.example = _describe(error, self.base_url)
        record.e2e = perf_counter() - record.sent
        return record


def _describe(error: Exception, url: str) -> tuple[str, str]:
    """Returns the kind of a failed connection to `url`, and a sentence about it."""
    if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ServerTimeoutError):
        return "timeout", f"{url} does not answer in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "no connection", f"the certificate of {url} is not trusted"
    if isinstance(error, aiohttp.ClientSSLError):
        return "no connection", f"TLS with {url} fails"
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        number = cause.errno or 0  # the system's are above 0, unknown names' below
        reason = os.strerror(number) if number > 0 else cause.strerror or "no such name"
        return "no connection", f"nothing answers at {url}: {reason.lower()}"
    if isinstance(error, aiohttp.InvalidURL):
        return "no connection", f"{url} is not the URL of a server"
    return "connection lost", f"{url} closed the connection before its reply was complete"


async def _raise_for_status(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        text = (await response.content.read(MAX_EXAMPLE)).decode(errors="replace")
        raise ReplyError(f"HTTP {response.status}", text)


async def _read_stream(response: aiohttp.ClientResponse, record: Record, keep_text: bool) -> None:
    """Reads an SSE reply to its end, filling in the record. Raises `ReplyError`."""
    events = EventSplitter()
    texts: list[str] = []
    last = record.sent
    complete = False
    while block := await response.content.readany():
        now = perf_counter()  # before any parsing: events that came in one block came at one time
        for data in events.feed(block):
            if data == b"[DONE]":
                complete = True
                continue
            event = _parse(data)
            choices = event.get("choices") or []
            if event.get("usage"):
                _take_usage(event, record)
            has_output = False
            for choice in choices:
                complete = complete or bool(choice.get("finish_reason"))
                has_output = has_output or _has_output(choice)
            if not has_output:
                continue
            if keep_text:
                texts.append(_text(choices[0]))
            if record.ttft is None:
                record.ttft = now - record.sent
            else:
                record.gaps.append(now - last)
            last = now
            record.chunks += 1
    record.text = "".join(texts)
    if not complete:
        raise ReplyError(
            "incomplete stream",
            f"the stream ended after {record.chunks} chunks "
            f"with neither a finish_reason nor [DONE]",
        )
    if not record.chunks and not record.output_tokens:
        raise ReplyError("empty reply", "the stream ended without any output")


async def _read_whole(response: aiohttp.ClientResponse, record: Record, keep_text: bool) -> None:
    """Reads a reply that is not streamed. Raises `ReplyError`."""
    reply = _parse(await response.read())
    _take_usage(reply, record)
    if not reply.get("choices"):
        raise ReplyError("empty reply", f"no choices in {str(reply)[:MAX_EXAMPLE]}")
    if keep_text:
        record.text = _text(reply["choices"][0])


def _parse(data: bytes) -> dict[str, Any]:
    """Returns the JSON object of an event or a reply.

    Raises `ReplyError`, also for an error event.
    """
    try:
        parsed = loads(data)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ReplyError("bad reply", data[:MAX_EXAMPLE].decode(errors="replace"))
    if parsed.get("error"):
        error = parsed["error"]
        message = error.get("message") if isinstance(error, dict) else None
        raise ReplyError("error event", str(message or error)[:MAX_EXAMPLE])
    return parsed


def _take_usage(reply: dict[str, Any], record: Record) -> None:
    usage = reply.get("usage") or {}
    record.prompt_tokens, record.output_tokens = (
        usage.get("prompt_tokens"),
        usage.get("completion_tokens"),
    )
    record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _has_output(choice: dict[str, Any]) -> bool:
    made = choice.get("delta") or choice
    for name in OUTPUT_FIELDS:  # noqa: SIM110 - called for each chunk, and any() over a generator costs twice as much
        if made.get(name):
            return True
    return False


def _text(choice: dict[str, Any]) -> str:
    """Returns the text of a choice, streamed or whole, without the reasoning before it."""
    made = choice.get("delta") or choice.get("message") or choice
    return made.get("text") or made.get("content") or ""


class EventSplitter:
    """Cuts a byte stream into the data of its server-sent events (WHATWG HTML, section 9.2, as far
    as servers use it)."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, block: bytes) -> Iterator[bytes]:
        """Yields the data of each event that `block` completes.

        Raises `ReplyError` for one beyond all bounds.
        """
        *lines, self._rest = (self._rest + block).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ReplyError("bad reply", f"an event of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()
