"""Stored chat completions, made with `store`: the list at `/v1/chat/completions` and the paths
below it. `chat` keeps them; they are in memory (see `object_store`)."""

from __future__ import annotations

from aiohttp import web

from aioinfer.api.context import read_body
from aioinfer.api.conversations import UpdateObject
from aioinfer.api.errors import json_response
from aioinfer.api.object_store import OBJECT_STORE, StoredObject, owner_of
from aioinfer.api.paging import page_of


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
    return json_response(_find(request).body)


async def update_chat(request: web.Request) -> web.Response:
    """Replaces the metadata of a stored chat completion."""
    body = await read_body(request, UpdateObject)
    stored = _find(request)
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
    messages = list(reversed(_find(request).items))
    page = page_of(messages, request.query, max_limit=100, default_limit=20, default_order="asc")
    return json_response(page)


def _find(request: web.Request) -> StoredObject:
    id = request.match_info["id"]
    return request.app[OBJECT_STORE].find(owner_of(request), "chat.completion", id)
