"""Stored chat completions, made with `store`: the list at `/v1/chat/completions` and the paths
below it. `chat` keeps them; they are in memory (see `object_store`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from aioinfer.api.context import read_body
from aioinfer.api.conversations import UpdateObject
from aioinfer.api.delivery import ChoiceEvents
from aioinfer.api.errors import json_response
from aioinfer.api.object_store import OBJECT_STORE, StoredObject, checked_metadata, owner_of
from aioinfer.api.paging import page_of
from aioinfer.engine.output import Delta

if TYPE_CHECKING:
    from aioinfer.api.messages import Message
    from aioinfer.api.protocol import ChatRequest


def keep_chat(request: web.Request, body: ChatRequest, reply: dict[str, Any]) -> None:
    """Stores the reply to a chat with its messages, in the place of an older one of its id."""
    stored = reply | {"metadata": checked_metadata(body.metadata)}
    messages = [
        {"id": f"{reply['id']}-{index}", **_message(message)}
        for index, message in enumerate(body.messages)
    ]
    request.app[OBJECT_STORE].add(owner_of(request), stored, messages)


def _message(message: Message) -> dict[str, Any]:
    """Returns a message as OpenAI lists it: its content as text, and its parts beside that."""
    given = {k: v for k, v in msgspec.to_builtins(message).items() if v is not None}
    parts = given["content"] if isinstance(message.content, list) else None
    text = None if message.content is None else message.for_template()["content"]
    return given | {"content": text, "content_parts": parts}


class RecordedChoice(ChoiceEvents):
    """The events of a choice whose text is to be stored when the stream has ended.

    Attributes:
        delta: all that has come.
        num_tokens: that have come.
    """

    def __init__(self, index: int, events: ChoiceEvents):
        self.delta = Delta(index)
        self.num_tokens = 0
        self.returns_token_ids = events.returns_token_ids
        self._events = events

    async def open(self) -> None:
        """See `ChoiceEvents.open`."""
        await self._events.open()

    def events(self, delta: Delta) -> bytes:
        """See `ChoiceEvents.events`."""
        self.num_tokens += len(delta.token_ids)
        self.delta.merge(delta)
        return self._events.events(delta)

    def token_frame(self, text: str, reason: str | None, stop_reason: int | str | None) -> bytes:
        """See `ChoiceEvents.token_frame`."""
        self.num_tokens += 1
        end: dict[str, Any] = {"finish_reason": reason, "stop_reason": stop_reason}
        self.delta.merge(Delta(self.delta.index, text, **end))
        return self._events.token_frame(text, reason, stop_reason)


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
