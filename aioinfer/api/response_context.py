"""The context of a response: the items before its input, its input, and the store that keeps it
when it has ended. `responses` finds it, for a reply and for a run in the background."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from aioinfer.api.object_store import OBJECT_STORE, owner_of
from aioinfer.api.responses_body import ResponseRequest, input_items, to_messages
from aioinfer.engine.chat_turn import encode_turn

if TYPE_CHECKING:
    from aioinfer.api.response_events import Response
    from aioinfer.engine.frontend import Frontend

#: Tokens of a prompt before `truncation` drops items of it.
_MAX_UNCUT_TOKENS = 2**20


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """The context that a response is generated from.

    Attributes:
        before: the items of the conversation, or of the previous response and its output.
        new: the items of the input.
        conversation: the id of the conversation that gets the input and the output when the
            response is complete.
    """

    before: Sequence[dict[str, Any]]
    new: Sequence[dict[str, Any]]
    conversation: str | None = None

    @classmethod
    def find(cls, request: web.Request, body: ResponseRequest) -> ResponseContext:
        """Returns the context of a request. Raises `RequestError` naming the id of an object that
        is not stored."""
        store, owner = request.app[OBJECT_STORE], owner_of(request)
        before: Sequence[dict[str, Any]] = ()
        conversation = body.conversation_id
        if conversation is not None:
            before = store.find(owner, "conversation", conversation, "conversation").items
        elif (id := body.previous_response_id) is not None:
            previous = store.find(owner, "response", id, "previous_response_id")
            before = [*previous.items, *_output(previous.body)]
        return cls(before, input_items(body.input, {item["id"] for item in before}), conversation)

    @property
    def items(self) -> list[dict[str, Any]]:
        """All items before the output."""
        return [*self.before, *self.new]

    async def encode(self, frontend: Frontend, body: ResponseRequest) -> list[int]:
        """Returns the prompt: the instructions, which are of one response alone, and the items.
        With `truncation` as many of the first ones are left out as do not fit.

        Raises `RequestError` if the rest does not fit.
        """
        items, middle = self.items, 0
        if body.truncation != "auto":
            return await _encode(frontend, body, items)
        room = frontend.max_model_len - (body.max_output_tokens or 1)
        low, high = 0, len(items) - 1  # the last one stays
        while low < high:
            ids = await _encode(frontend, body, items[middle:], max_tokens=_MAX_UNCUT_TOKENS)
            low, high = (low, middle) if len(ids) <= room else (middle + 1, high)
            middle = (low + high) // 2  # at first all items are tried
        while low < len(items) - 1 and items[low]["type"] == "function_call_output":
            low += 1  # its call is left out
        return await _encode(frontend, body, items[low:])

    def keep(
        self,
        request: web.Request,
        body: ResponseRequest,
        response: Response,
        events: Sequence[bytes] = (),
    ) -> None:
        """Stores a response that has ended, unless `store` is false, and adds it to its
        conversation if it is complete and that is still stored."""
        store, owner = request.app[OBJECT_STORE], owner_of(request)
        ended = msgspec.structs.asdict(response)
        if body.store is not False:
            store.add(owner, ended, self.items, events)
        if self.conversation is None or ended["status"] not in ("completed", "incomplete"):
            return
        if (owner, self.conversation) in store:
            conversation = store.find(owner, "conversation", self.conversation)  # as it is by now
            taken = {item["id"] for item in conversation.items}
            new = [item for item in self.new if item["id"] not in taken]
            items = [*conversation.items, *new, *_output(ended)]
            store.change_items(owner, conversation, items)


async def _encode(
    frontend: Frontend,
    body: ResponseRequest,
    items: Sequence[dict[str, Any]],
    *,
    max_tokens: int | None = None,
) -> list[int]:
    messages = to_messages(items)
    if body.instructions:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    return await encode_turn(
        frontend,
        messages,
        body.tool_use(),
        template_kwargs=body.template_kwargs(),
        max_tokens=max_tokens,
    )


def _output(ended: dict[str, Any]) -> Sequence[dict[str, Any]]:
    """Returns the items of a response's output; an empty message where it has none, since chat
    templates want the roles to alternate."""
    if ended["output"]:
        return ended["output"]
    id = f"msg_{ended['id'].removeprefix('resp_')}"
    head = {"id": id, "type": "message", "status": ended["status"]}
    return [head | {"role": "assistant", "content": []}]
