"""Multipart forms (RFC 7578), in which files are uploaded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from aioinfer.api.context import FRONTEND, REQUEST_BODIES, receiving
from aioinfer.errors import RequestError

#: What aiohttp's form parser raises where a body is not a form.
_NOT_A_FORM = AssertionError, HttpProcessingError, LookupError, RuntimeError, ValueError
#: Bytes of a part that are received at a time.
_CHUNK = 2**16


@asynccontextmanager
async def receiving_form(request: web.Request) -> AsyncIterator[AsyncIterator[BodyPartReader]]:
    """Context that yields the parts of a request's form, fields and files; each is read before the
    next one.

    Raises `RequestError` for another body, a form of a web page that may not send one, and a client
    that is too slow.
    """
    if request.content_type != "multipart/form-data":
        raise RequestError(
            "the Content-Type must be multipart/form-data",
            status=415,
            code="unsupported_media_type",
        )
    _check_origin(request)
    if "boundary" not in request.headers.get("Content-Type", ""):
        raise RequestError("the Content-Type has no boundary", param="file")
    if request.headers.get("Expect"):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the response itself has not begun
    try:
        async with receiving(request.app[REQUEST_BODIES].counts, request.content):
            yield _parts(request)
    except RequestError:
        raise
    except _NOT_A_FORM as error:
        raise RequestError("the body is not a well-formed multipart form") from error


async def _parts(request: web.Request) -> AsyncIterator[BodyPartReader]:
    form = await request.multipart()
    while (part := await form.next()) is not None:
        if not isinstance(part, BodyPartReader):
            raise RequestError("a form within the form is not understood")
        yield part


async def chunks_of(part: BodyPartReader) -> AsyncIterator[bytes]:
    """Yields the bytes of a part as they come."""
    while chunk := await part.read_chunk(_CHUNK):
        yield bytes(chunk)


async def read_field(part: BodyPartReader, longest: int) -> bytes:
    """Returns the value of a field. Raises `RequestError` if it has more than `longest` bytes."""
    value = bytearray()
    async for chunk in chunks_of(part):
        value += chunk
        if len(value) > longest:
            raise RequestError("a field of the form is too long", param=part.name)
    return bytes(value)


def _check_origin(request: web.Request) -> None:
    """Raises `RequestError` (403) for a form that a web page of another origin sends: a browser
    lets any page post one to a local server, and names the page's origin."""
    origin = request.headers.get("Origin")
    allowed = request.app[FRONTEND].config.server.cors_origins
    if origin is None or "*" in allowed or origin in allowed:
        return
    if origin.partition("://")[2] != request.headers.get("Host"):
        raise RequestError(
            "pages of this origin may not upload files: server.cors_origins lists those that may",
            status=403,
            code="origin_not_allowed",
        )
