"""`/v1/conversations`: OpenAI's conversations, to which responses add their items. They are in
memory (see `object_store`)."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from aioinfer.api.context import read_body
from aioinfer.api.errors import json_response
from aioinfer.api.object_store import OBJECT_STORE, Metadata, StoredObject, json_size, owner_of
from aioinfer.api.paging import page_of
from aioinfer.api.protocol import Body
from aioinfer.api.responses_body import Item, input_items
from aioinfer.errors import RequestError

#: Items of one body, as with OpenAI.
_Items = Annotated[list[Item], Meta(max_length=20)]


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


async def create_conversation(request: web.Request) -> web.Response:
    """Begins a conversation, with up to 20 items."""
    body = await read_body(request, CreateConversation)
    conversation = Conversation(
        id=f"conv_{secrets.token_hex(24)}",
        created_at=int(time.time()),
        metadata=body.metadata or {},
    )
    created = msgspec.structs.asdict(conversation)
    items, store = input_items(body.items, place="items"), request.app[OBJECT_STORE]
    store.check_room(json_size(created) + json_size(items), "a conversation")
    store.add(owner_of(request), created, items)
    return json_response(created)


async def get_conversation(request: web.Request) -> web.Response:
    """Returns a conversation without its items."""
    return json_response(_find(request).body)


async def update_conversation(request: web.Request) -> web.Response:
    """Replaces the metadata of a conversation."""
    body = await read_body(request, UpdateObject)
    conversation = _find(request)
    request.app[OBJECT_STORE].change_metadata(conversation, body.metadata or {})
    return json_response(conversation.body)


async def delete_conversation(request: web.Request) -> web.Response:
    """Drops a conversation with its items."""
    id = request.match_info["id"]
    request.app[OBJECT_STORE].remove(owner_of(request), "conversation", id)
    return json_response({"id": id, "object": "conversation.deleted", "deleted": True})


async def create_items(request: web.Request) -> web.Response:
    """Adds up to 20 items to the end of a conversation, and returns them."""
    body = await read_body(request, CreateItems)
    conversation, store = _find(request), request.app[OBJECT_STORE]
    new = input_items(body.items, {item["id"] for item in conversation.items}, "items")
    store.check_room(conversation.num_bytes + json_size(new), "a conversation", "items")
    store.change_items(owner_of(request), conversation, [*conversation.items, *new])
    return json_response(page_of(new, {"order": "desc"}, max_limit=100))


async def list_items(request: web.Request) -> web.Response:
    """Lists the items of a conversation, the newest first; `limit`, `after`, `order`."""
    newest_first = list(reversed(_find(request).items))
    return json_response(page_of(newest_first, request.query, max_limit=100, default_limit=20))


async def get_item(request: web.Request) -> web.Response:
    """Returns an item of a conversation."""
    return json_response(_item(request, _find(request)))


async def delete_item(request: web.Request) -> web.Response:
    """Drops an item of a conversation, which is returned."""
    conversation = _find(request)
    dropped = _item(request, conversation)
    left = [item for item in conversation.items if item is not dropped]
    request.app[OBJECT_STORE].change_items(owner_of(request), conversation, left)
    return json_response(conversation.body)


def _find(request: web.Request) -> StoredObject:
    id = request.match_info["id"]
    return request.app[OBJECT_STORE].find(owner_of(request), "conversation", id)


def _item(request: web.Request, conversation: StoredObject) -> dict[str, Any]:
    id = request.match_info["item_id"]
    for item in conversation.items:
        if item["id"] == id:
            return item
    raise RequestError(
        f"the conversation has no item {id[:80]!r}, or no longer", status=404, code="not_found"
    )
