"""The endpoints of stored objects (see `store`): files, conversations, to which responses add their
items, and chat completions made with `store`. `Objects` has what they share with batches."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from aiohttp import BodyPartReader, web
from msgspec import Meta, Struct

from aioinfer.api.batch.store import (
    OBJECT_STORE,
    FileObject,
    Kind,
    Metadata,
    ObjectStore,
    Page,
    Store,
    Stored,
    json_size,
    owner_of,
    page_of,
    require_files,
)
from aioinfer.api.decoding import Body
from aioinfer.api.errors import shorten
from aioinfer.api.form import chunks_of, read_field, receiving_form
from aioinfer.api.openai.responses_body import Item, input_items
from aioinfer.errors import FieldError, RequestError

#: Items of one body, as with OpenAI.
_Items = Annotated[list[Item], Meta(max_length=20)]
#: Bytes of an uploaded file; OpenAI's bound for batches.
MAX_FILE_BYTES = 200 * 2**20
#: Bytes of an upload that are written at a time.
_PIECE = 2**20
#: The longest value of a form's field but the file.
_MAX_FIELD_BYTES = 1024


class CreateConversation(Body, kw_only=True):
    """`POST /v1/conversations`."""

    items: _Items | None = None
    metadata: Metadata | None = None


class UpdateObject(Body, kw_only=True):
    """`POST` of a conversation or a stored chat completion: its new metadata."""

    metadata: Metadata | None


class CreateItems(Body, kw_only=True):
    """`POST /v1/conversations/{id}/items`."""

    items: _Items


class Conversation(Struct, kw_only=True):
    """A conversation without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class Deleted(Struct, kw_only=True):
    """Confirmation that an object is deleted."""

    id: str
    object: str
    deleted: Literal[True] = True


@dataclass(frozen=True, slots=True)
class Objects:
    """The endpoints that all kinds of stored objects have. The first variable of their paths is the
    object's id.

    Attributes:
        kind: of the objects.
        store: returns a server's store of them; raises `RequestError` if it has none.
        deleted: the `object` of the reply to a deletion.
        filters: the fields that parameters of a list's query select by.
        max_limit, default_limit, default_order: of a list; see `page_of`.
    """

    kind: Kind
    store: Callable[[web.Request], Store]
    deleted: str = ""
    filters: tuple[str, ...] = ()
    max_limit: int = 100
    default_limit: int = 100
    default_order: Literal["asc", "desc"] = "desc"

    def find(self, request: web.Request) -> Stored:
        """Returns the record of a request's object. Raises `RequestError` (404)."""
        id = next(iter(request.match_info.values()))
        return self.store(request).find(owner_of(request), self.kind, id)

    async def list(self, request: web.Request) -> Page:
        """Lists the objects of the API key; `limit`, `after`, `order`, and fields to select by."""
        query = request.query
        wanted = {name: query[name] for name in self.filters if name in query}
        tags = {
            name.removeprefix("metadata[")[:-1]: value
            for name, value in query.items()
            if name.startswith("metadata[") and name.endswith("]")
        }
        found = [
            record.body
            for record in self.store(request).all_of(owner_of(request), self.kind)
            if all(getattr(record.body, name) == value for name, value in wanted.items())
            and (not tags or tags.items() <= (getattr(record.body, "metadata", None) or {}).items())
        ]
        return page_of(
            found,
            query,
            max_limit=self.max_limit,
            default_limit=self.default_limit,
            default_order=self.default_order,
        )

    async def get(self, request: web.Request) -> Any:
        """Returns an object."""
        return self.find(request).body

    async def delete(self, request: web.Request) -> Deleted:
        """Deletes an object, unless it is in use."""
        id = next(iter(request.match_info.values()))
        await self.store(request).delete(owner_of(request), self.kind, id)
        return Deleted(id=id, object=self.deleted)


class ObjectsInMemory(Objects):
    """Objects whose metadata clients change, and which have items."""

    async def update(self, request: web.Request, body: UpdateObject) -> Any:
        """Replaces the metadata of an object."""
        stored = self.find(request)
        request.app[OBJECT_STORE].change_metadata(stored, body.metadata or {})
        return stored.body

    async def list_items(self, request: web.Request) -> Page:
        """Lists the items of a conversation, or the messages that a chat completion answers;
        `limit`, `after`, `order`."""
        newest_first = list(reversed(self.find(request).items))
        return page_of(newest_first, request.query, default_order=self.default_order)


def _in_memory(request: web.Request) -> ObjectStore:
    return request.app[OBJECT_STORE]


CONVERSATIONS = ObjectsInMemory("conversation", _in_memory, "conversation.deleted")
CHATS = ObjectsInMemory(
    "chat.completion",
    _in_memory,
    "chat.completion.deleted",
    filters=("model",),
    default_limit=20,
    default_order="asc",
)
FILES = Objects("file", require_files, "file", filters=("purpose",), max_limit=10_000)
BATCHES = Objects("batch", require_files)

# -------------------------------------------------------------------- conversations


async def create_conversation(request: web.Request, body: CreateConversation) -> Conversation:
    """Begins a conversation, with up to 20 items."""
    created = Conversation(
        id=f"conv_{secrets.token_hex(24)}",
        created_at=int(time.time()),
        metadata=body.metadata or {},
    )
    items, store = input_items(body.items, place="items"), request.app[OBJECT_STORE]
    size = json_size(created) + json_size(items)
    store.check_room(size, "a conversation")
    store.add(owner_of(request), created, items, num_bytes=size)
    return created


async def create_items(request: web.Request, body: CreateItems) -> Page:
    """Adds up to 20 items to the end of a conversation, and returns them."""
    conversation, store = CONVERSATIONS.find(request), request.app[OBJECT_STORE]
    new = input_items(body.items, {item.id for item in conversation.items}, "items")
    store.check_room(conversation.num_bytes + json_size(new), "a conversation", "items")
    store.extend(conversation, new)
    return page_of(new, {})


async def get_item(request: web.Request) -> Item:
    """Returns an item of a conversation."""
    return _item(request, CONVERSATIONS.find(request))


async def delete_item(request: web.Request) -> Conversation:
    """Drops an item of a conversation, which is returned."""
    conversation = CONVERSATIONS.find(request)
    dropped = _item(request, conversation)
    left = [item for item in conversation.items if item is not dropped]
    request.app[OBJECT_STORE].add(owner_of(request), conversation.body, left)
    found: Conversation = conversation.body
    return found


def _item(request: web.Request, conversation: Stored) -> Item:
    id = request.match_info["item_id"]
    for item in conversation.items:
        if item.id == id:
            return item
    raise RequestError(
        f"the conversation has no item {id[:80]!r}, or no longer", status=404, code="not_found"
    )


# -------------------------------------------------------------------- files


async def get_content(request: web.Request) -> web.StreamResponse:
    """Returns a file as it is."""
    file_id = FILES.find(request).body.id
    headers = {"Content-Type": "application/octet-stream", "X-Content-Type-Options": "nosniff"}
    return web.FileResponse(require_files(request).data(file_id), headers=headers)


async def upload_file(request: web.Request) -> FileObject:
    """Stores the file of a multipart form with `file` and `purpose`, which must be "batch"."""
    store = require_files(request)
    async with store.incoming() as place:
        async with receiving_form(request) as form:
            name, purpose = await _receive(form, place)
        if name is None:
            raise RequestError("the form has no file", param="file")
        if purpose != b"batch":
            raise FieldError("purpose", "must be 'batch'")
        return await store.keep(place, owner_of(request), name, "batch")


async def _receive(
    form: AsyncIterator[BodyPartReader], place: Path
) -> tuple[str | None, bytes | None]:
    """Writes the form's file to `place`; returns its name and the purpose, None where missing.

    Raises `RequestError`.
    """
    name = purpose = None
    async for part in form:
        if part.name == "file":
            if name is not None:
                raise RequestError("the form has two files", param="file")
            name = shorten(part.filename or "file")
            await _write(part, place)
        elif part.name == "purpose":
            purpose = await read_field(part, _MAX_FIELD_BYTES)
        else:
            field = shorten(part.name or "")
            raise RequestError(f"the form's field {field!r} is not supported", param=part.name)
    return name, purpose


async def _write(part: BodyPartReader, place: Path) -> None:
    """Writes a part of a form to a file, in pieces. Raises `RequestError`."""
    stream: BinaryIO = await asyncio.to_thread(place.open, "xb", 0)
    try:
        size, buffer = 0, bytearray()
        async for chunk in chunks_of(part):
            size += len(chunk)
            if size > MAX_FILE_BYTES:
                raise web.HTTPRequestEntityTooLarge(MAX_FILE_BYTES, size)
            buffer += chunk
            if len(buffer) >= _PIECE:
                await asyncio.to_thread(stream.write, bytes(buffer))
                buffer.clear()
        await asyncio.to_thread(stream.write, bytes(buffer))
        await asyncio.to_thread(os.fsync, stream.fileno())
    finally:
        await asyncio.to_thread(stream.close)
