"""Conversations and chats that are stored in memory (see `object_store`): OpenAI's
`/v1/conversations`, to which responses add their items, and the chat completions made with `store`,
at `/v1/chat/completions` and the paths below it.
"""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from aioinfer.api.batch.object_store import (
    OBJECT_STORE,
    Metadata,
    StoredObject,
    json_size,
    owner_of,
    page_of,
)
from aioinfer.api.context import read_body
from aioinfer.api.decoding import Body
from aioinfer.api.errors import json_response
from aioinfer.api.openai.responses_body import Item, input_items
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


async def list_chats(request: web.Request) -> web.Response:
    """Lists the stored chat completions of the API key, the oldest first; `model`,
    `metadata[NAME]`, `limit`, `after`, `order`."""
    query = request.query
    wanted = {
        name[len("metadata[") : -1]: value
        for name, value in query.items()
        if name.startswith("metadata[") and name.endswith("]")
    }
    found = [
        stored.body
        for stored in request.app[OBJECT_STORE].all_of(owner_of(request), "chat.completion")
        if query.get("model") in (None, stored.body["model"])
        and wanted.items() <= stored.body["metadata"].items()
    ]
    page = page_of(found, query, max_limit=100, default_limit=20, default_order="asc")
    return json_response(page)


async def get_chat(request: web.Request) -> web.Response:
    """Returns a stored chat completion."""
    return json_response(_find_chat(request).body)


async def update_chat(request: web.Request) -> web.Response:
    """Replaces the metadata of a stored chat completion."""
    body = await read_body(request, UpdateObject)
    stored = _find_chat(request)
    request.app[OBJECT_STORE].change_metadata(stored, body.metadata or {})
    return json_response(stored.body)


async def delete_chat(request: web.Request) -> web.Response:
    """Drops a stored chat completion."""
    id = request.match_info["id"]
    request.app[OBJECT_STORE].remove(owner_of(request), "chat.completion", id)
    return json_response({"id": id, "object": "chat.completion.deleted", "deleted": True})


async def list_chat_messages(request: web.Request) -> web.Response:
    """Lists the messages that a stored chat completion answers, the oldest first; `limit`, `after`,
    `order`."""
    messages = list(reversed(_find_chat(request).items))
    page = page_of(messages, request.query, max_limit=100, default_limit=20, default_order="asc")
    return json_response(page)


def _find_chat(request: web.Request) -> StoredObject:
    id = request.match_info["id"]
    return request.app[OBJECT_STORE].find(owner_of(request), "chat.completion", id)
