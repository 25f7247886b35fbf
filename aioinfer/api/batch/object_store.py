"""In-memory store of clients' objects: responses of `/v1/responses`, conversations, and chat
completions with `store`. They share one limit, in number and in bytes.

`page_of` makes OpenAI's pages of lists: `limit`, `after` and `order` of a query.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from aioinfer.api.errors import shorten
from aioinfer.api.http.limits import ACCOUNT
from aioinfer.config import ChatConfig
from aioinfer.errors import RequestError

#: The kinds of stored objects, by the `object` of their JSON.
Kind = Literal["response", "conversation", "chat.completion"]

#: OpenAI's bounds of an object's metadata.
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


def checked_metadata(value: Any) -> dict[str, str]:
    """Returns the metadata that an object is stored with, {} for None. Raises `RequestError`."""
    try:
        return {} if value is None else msgspec.convert(value, Metadata)
    except msgspec.ValidationError as error:
        raise RequestError(
            "metadata must be an object of at most 16 texts of at most 512 characters, with names "
            "of at most 64",
            param="metadata",
        ) from error


#: Objects that are stored: with the usual ones `chat.max_stored_bytes` is reached before.
MAX_STORED = 1000


@dataclass(slots=True)
class StoredObject:
    """An object that is stored.

    Attributes:
        body: as replies show it.
        items: of a response, the items before its output; of a conversation, all of its items; of
            a chat completion, its messages.
        num_bytes: the length of both as JSON, and of the events.
        events: of the stream of a response in the background, by sequence number.
    """

    body: dict[str, Any]
    items: Sequence[dict[str, Any]]
    num_bytes: int
    events: Sequence[bytes] = ()


class ObjectStore:
    """The objects of all API keys, each of which finds its own alone. Beyond `MAX_STORED` objects
    and `chat.max_stored_bytes` the oldest go, conversations by their last change.

    Attributes:
        num_bytes: of all that are stored.
    """

    def __init__(self, config: ChatConfig):
        self.num_bytes = 0
        self._config = config
        self._stored: OrderedDict[tuple[str | None, str], StoredObject] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, place: tuple[str | None, str]) -> bool:
        """Whether an API key has an object of this id."""
        return place in self._stored

    def check_room(self, num_bytes: int, what: str, param: str | None = None) -> None:
        """Raises `RequestError` if an object of this size could not be stored at all. `what` names
        the object in the message."""
        if num_bytes > self._config.max_stored_bytes:
            raise RequestError(
                f"{what} is stored, and the server's chat.max_stored_bytes leaves no room for it",
                param=param,
            )

    def add(
        self,
        owner: str | None,
        body: dict[str, Any],
        items: Sequence[dict[str, Any]],
        events: Sequence[bytes] = (),
    ) -> None:
        """Stores an object of an API key. An object that is nested too deeply for JSON, or larger
        than the limit of all objects, is not kept."""
        try:
            size = json_size(body) + json_size(items) + sum(map(len, events))
        except RecursionError:
            return
        if (replaced := self._stored.pop((owner, body["id"]), None)) is not None:
            self.num_bytes -= replaced.num_bytes
        if size > self._config.max_stored_bytes:
            return
        self._stored[owner, body["id"]] = StoredObject(body, items, size, events)
        self.num_bytes += size
        self._evict()

    def change_items(
        self, owner: str | None, conversation: StoredObject, items: Sequence[dict[str, Any]]
    ) -> None:
        """Replaces the items of a conversation, which becomes the newest object. A conversation
        that is then larger than the limit of all objects is not kept."""
        self.remove(owner, "conversation", conversation.body["id"])
        self.add(owner, conversation.body, items)

    def change_metadata(self, stored: StoredObject, metadata: dict[str, str]) -> None:
        """Replaces the metadata of an object."""
        grown = json_size(metadata) - json_size(stored.body["metadata"])
        stored.body = stored.body | {"metadata": metadata}
        stored.num_bytes += grown
        self.num_bytes += grown
        self._evict()

    def find(
        self, owner: str | None, kind: Kind, id: str, param: str | None = None
    ) -> StoredObject:
        """Returns an object. Raises `RequestError` (404, or 400 for a previous response), which
        names the field of the body that has the id."""
        stored = self._stored.get((owner, id))
        if stored is None or stored.body["object"] != kind:
            previous = param == "previous_response_id"
            raise RequestError(
                f"there is no {kind.replace('.', ' ')} {id[:80]!r}, or no longer",
                param=param,
                status=400 if previous else 404,
                code="previous_response_not_found" if previous else "not_found",
            )
        return stored

    def all_of(self, owner: str | None, kind: Kind) -> Iterator[StoredObject]:
        """Yields the objects of a kind that an API key has, the newest first."""
        for (of, _), stored in reversed(self._stored.items()):
            if of == owner and stored.body["object"] == kind:
                yield stored

    def remove(self, owner: str | None, kind: Kind, id: str) -> None:
        """Drops an object. Raises `RequestError` (404)."""
        self.num_bytes -= self.find(owner, kind, id).num_bytes
        del self._stored[owner, id]

    def _evict(self) -> None:
        while len(self._stored) > MAX_STORED or self.num_bytes > self._config.max_stored_bytes:
            _, oldest = self._stored.popitem(last=False)
            self.num_bytes -= oldest.num_bytes


def json_size(value: Any) -> int:
    """Returns the length of a value as JSON, in bytes."""
    return len(msgspec.json.encode(value))


OBJECT_STORE = web.AppKey("object_store", ObjectStore)


def owner_of(request: web.Request) -> str | None:
    """Returns the name of the API key whose objects a request may see."""
    return request[ACCOUNT].key.name


class Listed(Protocol):
    """An item of a list."""

    id: str


class Page(Struct, kw_only=True):
    """A part of a list."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page_of(
    items: Sequence[Listed] | Sequence[dict[str, Any]],
    query: Mapping[str, str],
    *,
    max_limit: int,
    default_limit: int = 100,
    default_order: Literal["asc", "desc"] = "desc",
) -> Page:
    """Returns the page of `items`, the newest first, that a query asks for: at most `max_limit`.
    Items are structs with an `id`, or JSON with one.

    Raises `RequestError` naming the parameter.
    """
    order = query.get("order", default_order)
    if order not in ("asc", "desc"):
        raise RequestError("order must be 'asc' or 'desc'", param="order")
    text = query.get("limit", str(min(max_limit, default_limit)))
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= max_limit):
        raise RequestError(
            f"limit must be an integer from 1 to {max_limit}, not {shorten(text)!r}", param="limit"
        )
    ordered = list(items if order == "desc" else reversed(items))
    ids = [item["id"] if isinstance(item, dict) else item.id for item in ordered]
    if (after := query.get("after")) is not None:
        if after not in ids:
            raise RequestError("after is not the id of one in this list", param="after")
        first = ids.index(after) + 1
        ids, ordered = ids[first:], ordered[first:]
    ids, page = ids[: int(text)], ordered[: int(text)]
    return Page(
        data=page,
        first_id=ids[0] if ids else None,
        last_id=ids[-1] if ids else None,
        has_more=len(ordered) > len(page),
    )
