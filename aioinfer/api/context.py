"""Shared parts of the handlers: the application's keys, and receiving, decoding and checking a
request body: JSON, or a multipart form (RFC 7578) with a file.

The size of a body, the memory of all together, and the time that a client may take are bounded.
After large bodies memory is given back to the system. It is free once its request has ended, but
the C library keeps most of it: a heap shrinks only from its end, and after the first large block
was freed glibc takes such blocks from its heaps. `malloc_trim` gives free pages inside of heaps
back as well. It is called in a thread, some seconds after a large body, and no more often than
that. Another C library than glibc has no such function, and then nothing is done.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import BodyPartReader, HttpVersion11, StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import UNSET, Struct, UnsetType

from aioinfer.api.decoding import MAX_PROMPTS, Body, convert_texts, decode, decode_large
from aioinfer.api.errors import shorten
from aioinfer.api.http.connections import HttpCounts
from aioinfer.api.http.limits import RATE_LIMITER
from aioinfer.api.http.logs import RECORD
from aioinfer.errors import OverloadedError, RequestError

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend
    from aioinfer.engine.model_group import ModelGroup

#: The models that are served.
MODELS: web.AppKey[ModelGroup] = web.AppKey("models")
#: The model that a request is for, once that is known.
MODEL: web.RequestKey[Frontend] = web.RequestKey("model")
#: Makes JSON of anything that a reply holds. `orjson` does so for texts, which it escapes faster.
encode = msgspec.json.Encoder().encode
#: Headers of every reply that is a stream of events.
STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events otherwise
}
#: When the server became ready, in Unix seconds.
STARTED = web.AppKey("started", int)
#: The `system_fingerprint` of OpenAI's replies, by the model's first name.
FINGERPRINTS: web.AppKey[dict[str, str]] = web.AppKey("fingerprints")
#: A body's bound in bytes follows from the model's context length: 8 KiB a token, so that 2048
#: prompts of that length fit (a token has about four bytes of text), and 2 MiB for all else. It is
#: never above `MAX_BYTES`, which are decoded without holding other requests up; see `decoding`.
MAX_BYTES = 16 * 2**20
_BASE_BYTES = 2 * 2**20
_BYTES_PER_TOKEN = 4 * MAX_PROMPTS
#: Bytes of all bodies together that are being received or decoded, without the first 64 KiB of
#: each: sixteen of the largest.
MAX_HELD_BYTES = 256 * 2**20
#: Seconds at whose end a client must have delivered a body, or `_MIN_RATE` of it since the last
#: such check: nginx's default for bodies.
TIMEOUT_S = 60.0
#: The rate of a client that delivers a body too slowly, in bytes a second: a limit on the time
#: between two reads alone, like nginx's `client_body_timeout`, never ends one that sends byte by
#: byte. (Apache's `RequestReadTimeout` has such a rate as well.)
_MIN_RATE = 1024
#: A body of so many bytes leaves something behind that is worth a `malloc_trim`; the seconds from
#: it to the call. Most requests with one have ended by then.
LARGE_BODY, TRIM_DELAY_S = 2**17, 5.0
#: Bytes of each body that do not count: small requests go on while large ones use all of the bound.
_FREE_BYTES = 64 * 1024
#: Bytes that are collected before they become a part of a body.
_PART = 64 * 1024
#: Larger bodies are decoded and checked in a thread. The decoder itself does not let other threads
#: run meanwhile: it takes 1.5 ms for a MiB of text; see `decoding` for many small values.
_SMALL_BODY = 64 * 1024
#: Some editors and languages begin UTF-8 with it; JSON (RFC 8259, 8.1) lets a reader ignore it.
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

#: What aiohttp's form parser raises where a body is not a form.
_NOT_A_FORM = AssertionError, HttpProcessingError, LookupError, RuntimeError, ValueError
#: Bytes of a part that are received at a time.
_CHUNK = 2**16
#: Bytes of the fields of a form and their names, but for the file: of each, and of all.
_MAX_FIELD_BYTES, _MAX_FIELDS_BYTES = 16_384, 65_536

#: Names of models that an error lists.
_NAMED = 20

B = TypeVar("B", bound=Body)
S = TypeVar("S", bound=Struct)
T = TypeVar("T")

#: The parts of a body that was received before `read_body` is called.
RECEIVED: web.RequestKey[list[bytes]] = web.RequestKey("received")


def encode_list(items: Iterable[Any], at_once: int) -> Any:
    """Returns the JSON of a list, a `msgspec.Raw`, which is made of so many items at a time: the
    encoder does not let other threads run meanwhile."""
    pieces = [encode(piece)[1:-1] for piece in pieces_of(items, at_once)]
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


def pieces_of(items: Iterable[T], at_once: int) -> Iterator[list[T]]:
    """Yields the items in lists of so many."""
    rest = iter(items)
    while piece := list(islice(rest, at_once)):
        yield piece


def iso_time(seconds: float) -> str:
    """Returns a Unix time in the form of ISO 8601, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


@asynccontextmanager
async def receiving(counts: HttpCounts, content: StreamReader) -> AsyncIterator[None]:
    """Bounds the time in which a client delivers the body that the block reads from `content`:
    `TIMEOUT_S` seconds for all of it, or for the next part of it while `_MIN_RATE` was kept.

    Raises `RequestError` (408), which `counts` has.
    """
    loop, received = asyncio.get_running_loop(), 0
    timer: asyncio.TimerHandle

    def check() -> None:
        nonlocal received, timer
        before, received = received, content.total_bytes
        if received - before < TIMEOUT_S * _MIN_RATE:
            guard.reschedule(loop.time())
        else:
            timer = loop.call_later(TIMEOUT_S, check)

    timer = loop.call_later(TIMEOUT_S, check)
    try:
        async with asyncio.timeout(None) as guard:
            yield
    except TimeoutError:
        if not guard.expired():
            raise
        counts.timeouts["body"] += 1
        message = "the request's body came more slowly than it may"
        raise RequestError(message, status=408, code="timeout") from None
    finally:
        timer.cancel()


def largest_body(max_model_len: int) -> int:
    """Returns how many bytes a body may have for a model of this context length."""
    return min(MAX_BYTES, _BASE_BYTES + _BYTES_PER_TOKEN * max_model_len)


class RequestBodies:
    """All request bodies that are being received or decoded.

    Attributes:
        max_bytes: the largest that one may have.
        held_bytes: their bytes beyond the first 64 KiB of each.
    """

    def __init__(self, counts: HttpCounts, max_bytes: int):
        """`counts` gets the clients that are too slow."""
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.counts = counts
        # glibc's function; other libraries have none
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._timer: asyncio.TimerHandle | None = None

    def trim_later(self) -> None:
        """Calls `malloc_trim` some seconds from now, once for all bodies until then."""
        if self._trim is not None and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(TRIM_DELAY_S, self._start, self._trim)

    def _start(self, trim: Callable[[int], int]) -> None:
        self._timer = None
        # ctypes lets other threads run meanwhile
        asyncio.get_running_loop().run_in_executor(None, trim, 0)


class HeldBody:
    """Room for one request body, from receiving it until it has been decoded, which is the end of a
    `with` block."""

    def __init__(self, bodies: RequestBodies):
        self._bodies = bodies
        # One buffer would have to be copied on the event loop, as it grows and at the end: 16 MiB
        # take 20 ms there, most of it for memory that the process has to get first.
        self._parts: list[bytes] = []
        self._latest = bytearray()
        self._size = 0
        self._held = 0

    def __enter__(self) -> HeldBody:
        return self

    def __exit__(self, *error: object) -> None:
        self._bodies.held_bytes -= self._held
        if self._size >= LARGE_BODY:
            self._bodies.trim_later()

    async def receive(self, request: web.Request) -> list[bytes]:
        """Returns the body of a request in parts, a body of up to 64 KiB in one.

        Raises:
            web.HTTPRequestEntityTooLarge: it is larger than a body may be, or announced to be.
            RequestError: 408 for a client that is too slow.
            OverloadedError: all bodies together are too large.
        """
        limit = self._bodies.max_bytes
        if request.content_length is not None and request.content_length > limit:
            raise web.HTTPRequestEntityTooLarge(limit)
        await _continue(request)
        if request.content.is_eof():  # all of it came with the head
            self.add(request.content.read_nowait(), limit)
        else:
            async with receiving(self._bodies.counts, request.content):
                while chunk := await request.content.readany():
                    self.add(chunk, limit)
        return self.take()

    def take(self) -> list[bytes]:
        """Returns what was added, in parts."""
        self._parts.append(bytes(self._latest))
        return self._parts

    def add(self, chunk: bytes, limit: int) -> None:
        """Adds bytes of the body, which has `limit` of them at most. Raises as `receive`."""
        size = self._size + len(chunk)
        if size > limit:
            raise web.HTTPRequestEntityTooLarge(limit)
        more = max(0, size - _FREE_BYTES) - self._held
        others = self._bodies.held_bytes - self._held
        # one alone is always received, however small the bound is
        if more and others and self._bodies.held_bytes + more > MAX_HELD_BYTES:
            raise OverloadedError("the bodies of other requests use all memory; try again later")
        self._bodies.held_bytes += more
        self._held += more
        self._size = size
        if len(chunk) > _PART and not self._latest:  # a part by itself, which needs no copy
            self._parts.append(chunk)
            return
        self._latest += chunk
        if len(self._latest) > _PART:  # a list of what comes would be long where bytes come singly
            self._parts.append(bytes(self._latest))
            self._latest.clear()


REQUEST_BODIES = web.AppKey("request_bodies", RequestBodies)


async def defer_continue(request: web.Request) -> None:
    """Handles `Expect: 100-continue` of a route whose handler receives the body: a request that can
    be refused by its head is refused before the client sends the body."""


async def _continue(request: web.Request) -> None:
    """Lets a client send the body that waits for it."""
    if request.version == HttpVersion11 and "Expect" in request.headers:
        # `server` has checked that it is 100-continue
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the response itself has not begun


async def read_body(request: web.Request, kind: type[B]) -> B:
    """Reads, decodes and checks a request's JSON body.

    Raises:
        RequestError: 415 for another content type or a compressed body, 404 for a model that is not
            served, 400 for anything else that is wrong with it.
        web.HTTPRequestEntityTooLarge, OverloadedError: see `HeldBody.receive`.
    """
    await request.app[RATE_LIMITER].enter()
    if kind.may_be_absent and not request.body_exists:
        return kind()
    models = request.app[MODELS]
    _check_content_type(request)
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise RequestError("compressed bodies are not understood", status=415)
    with HeldBody(request.app[REQUEST_BODIES]) as held:
        parts = request.get(RECEIVED) or await held.receive(request)
        parts[0] = parts[0].removeprefix(_BYTE_ORDER_MARK)
        ignores_unknown = models.first.config.server.unknown_fields == "ignore"
        body = await decode_body(parts, kind, ignores_unknown=ignores_unknown)
    note_body(request, body)
    return body


def note_body(request: web.Request, body: Body) -> None:
    """Notes the model that a body names, and when it was decoded. Raises as `name_model`."""
    name_model(request, body.model)
    record = request[RECORD]
    record.decoded, record.model = time.perf_counter(), body.model


def read_query(request: web.Request, kind: type[S]) -> S:
    """Returns the parameters of a request's query in the types of a struct's fields; texts of a
    list come in several parameters, or in one with commas. Raises `RequestError`."""
    given, empty = dict[str, Any](), kind()
    for name in request.query.keys() & set(kind.__struct_fields__):
        values = request.query.getall(name)
        given[name] = values[0]
        if isinstance(getattr(empty, name), list):
            given[name] = [each for value in values for each in value.split(",") if each]
    return convert_texts(given, kind)


async def decode_body(parts: list[bytes], kind: type[B], *, ignores_unknown: bool) -> B:
    """Decodes and checks the parts of a body, a large one in a thread. Raises `RequestError`."""
    if sum(map(len, parts)) <= _SMALL_BODY:
        return decode(b"".join(parts), kind, ignores_unknown=ignores_unknown)

    def join_and_decode() -> B:
        raw = b"".join(parts)  # lets other threads run while it copies
        parts.clear()
        return decode_large(raw, kind, ignores_unknown=ignores_unknown)

    return await asyncio.to_thread(join_and_decode)


async def receive_form(
    request: web.Request, kind: type[S], take: Callable[[BodyPartReader], Awaitable[None]]
) -> S:
    """Returns the fields of a form beside its `file`, whose part `take` receives.

    Raises `RequestError` for another body, a field that is wrong, a missing file, a form of a web
    page that may not send one, and a client that is too slow.
    """
    if request.content_type != "multipart/form-data":
        raise RequestError("the Content-Type must be multipart/form-data", status=415)
    _check_origin(request)
    if "boundary" not in request.headers.get("Content-Type", ""):
        raise RequestError("the Content-Type has no boundary", param="file")
    await _continue(request)
    try:
        async with receiving(request.app[REQUEST_BODIES].counts, request.content):
            fields = await _receive(request, take)
    except RequestError:
        raise
    except _NOT_A_FORM as error:
        raise RequestError("the body is not a well-formed multipart form") from error
    return convert_texts(fields, kind)


async def _receive(
    request: web.Request, take: Callable[[BodyPartReader], Awaitable[None]]
) -> dict[str, Any]:
    """Returns the texts of the fields; of those whose names end in `[]`, lists of texts."""
    form, has_file, fields = await request.multipart(), False, dict[str, Any]()
    left = _MAX_FIELDS_BYTES
    while (part := await form.next()) is not None:
        if not isinstance(part, BodyPartReader):
            raise RequestError("a form within the form is not understood")
        if (name := part.name or "") != "file":
            value = await _read_field(part)
            if (left := left - len(name) - len(value)) < 0:
                raise RequestError("the fields of the form are too long", param=name)
            text: Any = value.decode("utf-8", "replace")
            if name.endswith("[]"):
                name = name.removesuffix("[]")
                given = fields.get(name)
                text = [*given, text] if isinstance(given, list) else [text]
            fields[name] = text
        elif has_file:
            raise RequestError("the form has two files", param="file")
        else:
            has_file = True
            await take(part)
    if not has_file:
        raise RequestError("the form has no file", param="file")
    return fields


async def chunks_of(part: BodyPartReader) -> AsyncIterator[bytes]:
    """Yields the bytes of a part as they come."""
    while chunk := await part.read_chunk(_CHUNK):
        yield bytes(chunk)


async def _read_field(part: BodyPartReader) -> bytes:
    """Returns the value of a field. Raises `RequestError` if it is too long."""
    value = bytearray()
    async for chunk in chunks_of(part):
        value += chunk
        if len(value) > _MAX_FIELD_BYTES:
            raise RequestError("a field of the form is too long", param=part.name)
    return bytes(value)


def _check_origin(request: web.Request) -> None:
    """Raises `RequestError` (403) for a form that a web page of another origin sends: a browser
    lets any page post one to a local server, and names the page's origin."""
    origin = request.headers.get("Origin")
    allowed = request.app[MODELS].first.config.server.cors_origins
    if origin is None or "*" in allowed or origin in allowed:
        return
    if origin.partition("://")[2] != request.headers.get("Host"):
        raise RequestError(
            "pages of this origin may not upload files: server.cors_origins lists those that may",
            status=403,
            code="origin_not_allowed",
        )


def _check_content_type(request: web.Request) -> None:
    """Raises `RequestError` (415) for a request of a web page that is not declared as JSON, and for
    any that is declared as parts.

    A browser lets any page post plain text or a form to a local server, and asks the server before
    it sends JSON. It adds `Origin` or `Sec-Fetch-Site` to what a page sends, which no page can
    prevent. Other clients may say what they like of their JSON, or nothing, as with other servers.
    """
    if request.content_type == "application/json":
        return
    is_page = "Origin" in request.headers or "Sec-Fetch-Site" in request.headers
    if is_page or request.content_type.startswith("multipart/"):
        raise RequestError("the Content-Type must be application/json", status=415)


class ModelQuery(Struct, kw_only=True):
    """The query of an endpoint that is about one of the models."""

    model: str | UnsetType = UNSET


def name_model(request: web.Request, name: str | None) -> Frontend:
    """Returns the model that a request names in its body, or in its query as `model`; the first one
    for a request that names none. `frontend_of` returns it from now on.

    Raises `RequestError` (404) for a name under which none is served.
    """
    models = request.app[MODELS]
    if name is None and len(models) > 1:
        name = request.query.get("model")
    found = models.first if name is None else models.find(name)
    if found is None:
        known = models.names()
        names = ", ".join(map(repr, known[:_NAMED])) + " and others" * (len(known) > _NAMED)
        raise RequestError(
            f"the model {shorten(name or '')!r} does not exist; this server serves {names}",
            param="model",
            status=404,
            code="model_not_found",
        )
    request[MODEL] = found
    return found


def frontend_of(request: web.Request) -> Frontend:
    """Returns the model that a request is for. Raises as `name_model`."""
    return request.get(MODEL) or name_model(request, None)
