"""Multipart forms (RFC 7578), in which files are uploaded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Struct

from aioinfer.api.context import MODELS, REQUEST_BODIES, receiving
from aioinfer.api.decoding import convert_texts
from aioinfer.errors import RequestError

#: What aiohttp's form parser raises where a body is not a form.
_NOT_A_FORM = AssertionError, HttpProcessingError, LookupError, RuntimeError, ValueError
#: Bytes of a part that are received at a time.
_CHUNK = 2**16
#: Bytes of the fields of a form and their names, but for the file: of each, and of all.
_MAX_FIELD_BYTES, _MAX_FIELDS_BYTES = 16_384, 65_536

S = TypeVar("S", bound=Struct)


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
    if request.headers.get("Expect"):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the response itself has not begun
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
