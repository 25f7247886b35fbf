"""`/v1/files`: the inputs and the results of batches, in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Struct

from aioinfer.api.batch.batches import BATCHES
from aioinfer.api.batch.file_store import MAX_FILE_BYTES, FileStore, require_store
from aioinfer.api.batch.object_store import page_of
from aioinfer.api.context import FRONTEND
from aioinfer.api.errors import json_response, shorten
from aioinfer.api.http.limits import ACCOUNT
from aioinfer.api.http.request_body import REQUEST_BODIES, receiving
from aioinfer.errors import RequestError

T = TypeVar("T")
#: Bytes of an upload that are written at a time.
_PIECE = 2**20
#: The longest value of a form's field but the file.
_MAX_FIELD_BYTES = 1024


class Deleted(Struct, kw_only=True):
    """Confirmation that a file is deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


async def upload_file(request: web.Request) -> web.Response:
    """Stores the file of a multipart form with `file` and `purpose`, which must be "batch"."""
    store = require_store(request)
    _check_origin(request)
    if request.content_type != "multipart/form-data":
        raise RequestError(
            "the Content-Type must be multipart/form-data",
            status=415,
            code="unsupported_media_type",
        )
    if "boundary" not in request.headers.get("Content-Type", ""):
        raise RequestError("the Content-Type has no boundary", param="file")
    place = store.begin_upload()
    try:
        name, purpose = await _receive(request, store, place)
        if name is None:
            raise RequestError("the form has no file", param="file")
        if purpose != "batch":
            raise RequestError("purpose must be 'batch'", param="purpose")
        owner = request[ACCOUNT].key.name
        file = await asyncio.to_thread(store.keep, place, owner, name, purpose)
        store.note(owner, file)
    finally:
        store.end_upload()
        await asyncio.to_thread(place.unlink, True)
    return json_response(file)


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


async def _receive(
    request: web.Request, store: FileStore, place: Path
) -> tuple[str | None, str | None]:
    """Writes the form's file to `place`; returns its name and the purpose, None where missing.

    Raises `RequestError`.
    """
    if request.headers.get("Expect"):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the response itself has not begun
    name = purpose = None
    form = await _parsed(request.multipart())
    async with receiving(request.app[REQUEST_BODIES].counts) as count:
        while (part := await _parsed(form.next())) is not None:
            if not isinstance(part, BodyPartReader):
                raise RequestError("a form within the form is not understood")
            if part.name == "file":
                if name is not None:
                    raise RequestError("the form has two files", param="file")
                name = shorten(part.filename or "file")
                await _write(part, place, MAX_FILE_BYTES, count)
            elif part.name == "purpose":
                purpose = (await _field(part)).decode("utf-8", "replace")
            else:
                raise RequestError(
                    f"the form's field {shorten(part.name or '')!r} is not supported",
                    param=part.name,
                )
    return name, purpose


async def _parsed(step: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a step of aiohttp's form parser. Raises `RequestError` for all that it
    raises where a body is not a form."""
    try:
        return await step
    except RequestError:
        raise
    except (AssertionError, HttpProcessingError, LookupError, RuntimeError, ValueError) as error:
        raise RequestError("the body is not a well-formed multipart form") from error


async def _write(
    part: BodyPartReader, place: Path, limit: int, count: Callable[[int], None]
) -> None:
    """Writes a part of a form to a file, in pieces, and counts the bytes. Raises
    `RequestError`."""
    stream: BinaryIO = await asyncio.to_thread(place.open, "xb", 0)
    try:
        size, buffer = 0, bytearray()
        while chunk := await _parsed(part.read_chunk(2**16)):
            count(len(chunk))
            size += len(chunk)
            if size > limit:
                raise web.HTTPRequestEntityTooLarge(limit, size)
            buffer += chunk
            if len(buffer) >= _PIECE:
                await asyncio.to_thread(stream.write, bytes(buffer))
                buffer.clear()
        await asyncio.to_thread(stream.write, bytes(buffer))
        await asyncio.to_thread(os.fsync, stream.fileno())
    finally:
        await asyncio.to_thread(stream.close)


async def _field(part: BodyPartReader) -> bytes:
    value = bytearray()
    while chunk := await _parsed(part.read_chunk(_MAX_FIELD_BYTES)):
        value += chunk
        if len(value) > _MAX_FIELD_BYTES:
            raise RequestError("a field of the form is too long", param=part.name)
    return bytes(value)


async def list_files(request: web.Request) -> web.Response:
    """Lists the files of the API key, the newest first; `purpose`, `limit`, `after`, `order`."""
    files = list(require_store(request).of(request[ACCOUNT].key.name))
    if (purpose := request.query.get("purpose")) is not None:
        files = [file for file in files if file.purpose == purpose]
    return json_response(page_of(files, request.query, max_limit=10_000))


async def get_file(request: web.Request) -> web.Response:
    """Describes a file."""
    file = require_store(request).find(request.match_info["file_id"], request[ACCOUNT].key.name)
    return json_response(file)


async def get_content(request: web.Request) -> web.StreamResponse:
    """Returns a file as it is."""
    store = require_store(request)
    file = store.find(request.match_info["file_id"], request[ACCOUNT].key.name)
    headers = {"Content-Type": "application/octet-stream", "X-Content-Type-Options": "nosniff"}
    return web.FileResponse(store.data(file.id), headers=headers)


async def delete_file(request: web.Request) -> web.Response:
    """Deletes a file, unless a batch in progress needs it."""
    store = require_store(request)
    file = store.find(request.match_info["file_id"], request[ACCOUNT].key.name)
    batches = request.app[BATCHES]
    if batches is not None and batches.uses(file.id):
        raise RequestError(
            "a batch in progress reads this file", param="file_id", status=409, code="file_in_use"
        )
    store.forget(file.id)
    await asyncio.to_thread(store.remove, file.id)
    return json_response(Deleted(id=file.id))
