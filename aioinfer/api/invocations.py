"""`POST /invocations`, the one path that SageMaker sends every request to: the fields of the body
say which endpoint is meant. `/ping` is the other path that it asks."""

from __future__ import annotations

import asyncio

from aiohttp import web

from aioinfer.api import chat, completions, pooling
from aioinfer.api.context import FRONTEND, RECEIVED
from aioinfer.api.errors import Handler
from aioinfer.api.json_members import find_members
from aioinfer.api.request_body import REQUEST_BODIES
from aioinfer.errors import RequestError

#: Endpoints by a field that none of the others requires, in the order in which these are looked
#: for.
_MEANT: tuple[tuple[str, Handler], ...] = (
    ("messages", chat.create_chat_completion),
    ("prompt", completions.create_completion),
    ("query", pooling.rerank),
    ("queries", pooling.score),
    ("text_1", pooling.score),
    ("data_1", pooling.score),
    ("input", pooling.create_embeddings),
)


async def invoke(request: web.Request) -> web.StreamResponse:
    """Answers the request of any other endpoint: completions, chats, embeddings, classes, scores
    and reranking, by the fields of the body."""
    with request.app[REQUEST_BODIES].hold() as held:
        parts = await held.receive(request)
        request[RECEIVED] = parts
        is_short = len(parts) == 1
        names = _names(parts) if is_short else await asyncio.to_thread(_names, parts)
    has_head = request.app[FRONTEND].pooling.head is not None
    for name, handler in _MEANT:
        if b'"%b"' % name.encode() in names:
            if name == "input" and has_head:
                handler = pooling.classify
            return await handler(request)
    known = ", ".join(name for name, _ in _MEANT)
    raise RequestError(f"the body must hold one of {known}", code="missing_required_parameter")


def _names(parts: list[bytes]) -> frozenset[bytes]:
    """Returns the names of a body's fields; only the names before the first error, if it is not
    valid."""
    return frozenset(member.key.strip() for member in find_members(b"".join(parts)))
