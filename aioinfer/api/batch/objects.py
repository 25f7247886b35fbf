"""The endpoints of stored objects (see `store`): files, and conversations, to which responses add
their items. `Objects` has what they share with batches."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from aiohttp import BodyPartReader, web
from msgspec import UNSET, Meta, Struct, UnsetType

from aioinfer.api.batch.store import (
    OBJECT_STORE,
    FileObject,
    Kind,
    Metadata,
    Page,
    PageQuery,
    Store,
    Stored,
    json_size,
    owner_of,
    page_of,
    require_files,
)
from aioinfer.api.context import chunks_of, read_query, receive_form
from aioinfer.api.decoding import Body
from aioinfer.api.errors import shorten
from aioinfer.api.messages import Item, input_items
from aioinfer.errors import RequestError

#: Items of one body, as with OpenAI.
_Items = Annotated[list[Item], Meta(max_length=20)]
#: Bytes of an uploaded file; OpenAI's bound for batches.
MAX_FILE_BYTES = 200 * 2**20


class CreateConversation(Body, kw_only=True):
    """`POST /v1/conversations`."""

    items: _Items | None = None
    metadata: Metadata | None = None


class UpdateObject(Body, kw_only=True):
    """`POST /v1/conversations/{id}`: its new metadata."""

    metadata: Metadata | None


class CreateItems(Body, kw_only=True):
    """`POST /v1/conversations/{id}/items`."""

    items: _Items


class UploadForm(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/files`, beside `file`."""

    purpose: Literal["batch"]


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


class ListQuery(PageQuery, kw_only=True):
    """The query of a list of batches."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 100


class FilesQuery(PageQuery, kw_only=True):
    """The query of a list of files."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] = 100
    purpose: str | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Objects:
    """The endpoints that all kinds of stored objects have. The first variable of their paths is the
    object's id.

    Attributes:
        kind: of the objects.
        store: returns a server's store of them; raises `RequestError` if it has none.
        deleted: the `object` of the reply to a deletion.
        query: of lists.
    """

    kind: Kind
    store: Callable[[web.Request], Store]
    deleted: str = ""
    query: type[PageQuery] = ListQuery

    def find(self, request: web.Request) -> Stored:
        """Returns the record of a request's object. Raises `RequestError` (404)."""
        id = next(iter(request.match_info.values()))
        return self.store(request).find(owner_of(request), self.kind, id)

    async def list(self, request: web.Request) -> Page:
        """Lists the objects of the API key; `limit`, `after`, `order`, and `purpose` of files."""
        query = read_query(request, self.query)
        records = self.store(request).all_of(owner_of(request), self.kind)
        found = [record.body for record in records]
        if isinstance(query, FilesQuery) and query.purpose is not UNSET:
            found = [file for file in found if file.purpose == query.purpose]
        return page_of(found, query)

    async def get(self, request: web.Request) -> Any:
        """Returns an object."""
        return self.find(request).body

    async def delete(self, request: web.Request) -> Deleted:
        """Deletes an object, unless it is in use."""
        id = next(iter(request.match_info.values()))
        await self.store(request).delete(owner_of(request), self.kind, id)
        return Deleted(id=id, object=self.deleted)


CONVERSATIONS = Objects(
    "conversation", lambda request: request.app[OBJECT_STORE], "conversation.deleted"
)
FILES = Objects("file", require_files, "file", FilesQuery)
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
    size = json_size(items)
    store.check_room(size + json_size(created), "a conversation")
    store.add(owner_of(request), created, items, item_bytes=size)
    return created


async def update_conversation(request: web.Request, body: UpdateObject) -> Conversation:
    """Replaces the metadata of a conversation."""
    stored = CONVERSATIONS.find(request)
    request.app[OBJECT_STORE].change_metadata(stored, body.metadata or {})
    conversation: Conversation = stored.body
    return conversation


async def list_items(request: web.Request, query: PageQuery) -> Page:
    """Lists the items of a conversation; `limit`, `after`, `order`."""
    return page_of(list(reversed(CONVERSATIONS.find(request).items)), query)


async def create_items(request: web.Request, body: CreateItems) -> Page:
    """Adds up to 20 items to the end of a conversation, and returns them."""
    conversation, store = CONVERSATIONS.find(request), request.app[OBJECT_STORE]
    new = input_items(body.items, {item.id for item in conversation.items}, "items")
    store.check_room(conversation.num_bytes + json_size(new), "a conversation", "items")
    store.extend(conversation, new)
    return page_of(new)


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
    raise RequestError(f"the conversation has no item {id[:80]!r}, or no longer", status=404)


# -------------------------------------------------------------------- files


async def get_content(request: web.Request) -> web.StreamResponse:
    """Returns a file as it is."""
    file_id = FILES.find(request).body.id
    headers = {"Content-Type": "application/octet-stream", "X-Content-Type-Options": "nosniff"}
    return web.FileResponse(require_files(request).data(file_id), headers=headers)


async def upload_file(request: web.Request) -> FileObject:
    """Stores the file of a multipart form with `file` and `purpose`, which must be "batch"."""
    store, name = require_files(request), "file"
    async with store.incoming() as place:

        async def take(part: BodyPartReader) -> None:
            nonlocal name
            name = shorten(part.filename or name)
            await _write(part, place)

        form = await receive_form(request, UploadForm, take)
        return await store.keep(place, owner_of(request), name, form.purpose)


async def _write(part: BodyPartReader, place: Path) -> None:
    """Writes a part of a form to a file as it comes. Raises `RequestError`, OSError."""
    stream: BinaryIO = await asyncio.to_thread(place.open, "xb")  # unbuffered writes may be short
    try:
        size = 0
        async for chunk in chunks_of(part):
            size += len(chunk)
            if size > MAX_FILE_BYTES:
                raise web.HTTPRequestEntityTooLarge(MAX_FILE_BYTES, size)
            await asyncio.to_thread(stream.write, chunk)
        await asyncio.to_thread(stream.flush)
        await asyncio.to_thread(os.fsync, stream.fileno())
    finally:
        await asyncio.to_thread(stream.close)
