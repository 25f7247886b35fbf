"""Responses that are kept in memory: to be continued (`previous_response_id`) or read again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from aioinfer.config import ChatConfig
from aioinfer.errors import RequestError


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and its conversation.

    Attributes:
        body: of the reply.
        messages: the whole conversation as chat templates read it, the answer included.
        num_bytes: the length of both as JSON, and of the events.
        events: of the stream of a response in the background, by sequence number.
    """

    body: dict[str, Any]
    messages: Sequence[dict[str, Any]]
    num_bytes: int
    events: Sequence[bytes] = ()


class ResponseStore:
    """The responses of all API keys, each of which finds its own alone. Beyond
    `chat.max_stored_responses` and `chat.max_stored_bytes` the oldest go.

    Attributes:
        num_bytes: of all that are stored.
    """

    def __init__(self, config: ChatConfig):
        self.num_bytes = 0
        self._config = config
        self._stored: OrderedDict[tuple[str | None, str], StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, place: tuple[str | None, str]) -> bool:
        """Whether an API key has a response of this id."""
        return place in self._stored

    def add(
        self,
        owner: str | None,
        body: dict[str, Any],
        messages: Sequence[dict[str, Any]],
        events: Sequence[bytes] = (),
    ) -> None:
        """Stores a response of an API key. One that is nested too deeply for JSON is not kept."""
        try:
            size = len(orjson.dumps(body)) + len(orjson.dumps(messages)) + sum(map(len, events))
        except orjson.JSONEncodeError:
            return
        self._stored[owner, body["id"]] = StoredResponse(body, messages, size, events)
        self.num_bytes += size
        while (
            len(self._stored) > self._config.max_stored_responses
            or self.num_bytes > self._config.max_stored_bytes
        ):
            _, oldest = self._stored.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def find(self, owner: str | None, id: str, param: str | None = None) -> StoredResponse:
        """Returns a response. Raises `RequestError` (404, or 400 for a field of a body)."""
        stored = self._stored.get((owner, id))
        if stored is None:
            raise RequestError(
                f"there is no response {id[:80]!r}, or no longer",
                param=param,
                status=404 if param is None else 400,
                code="not_found" if param is None else "previous_response_not_found",
            )
        return stored

    def remove(self, owner: str | None, id: str) -> None:
        """Drops a response. Raises `RequestError` (404)."""
        self.num_bytes -= self.find(owner, id).num_bytes
        del self._stored[owner, id]


RESPONSE_STORE = web.AppKey("response_store", ResponseStore)
