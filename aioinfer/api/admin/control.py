"""Endpoints that act on the whole server, behind an admin key: `POST /pause`, `/resume`, `/abort`
and `/reset_prefix_cache`.

`access` checks the key before a handler sees the request.
"""

from __future__ import annotations

from typing import Literal

from aiohttp import web
from msgspec import Struct

from aioinfer.api.admin.info import READINESS, Status
from aioinfer.api.context import FRONTEND, read_body
from aioinfer.api.decoding import Body
from aioinfer.api.errors import json_response
from aioinfer.errors import RequestError

_PAUSED = "the server is paused"


class AbortRequest(Body, kw_only=True):
    """`POST /abort`. `request_id` is the `X-Request-Id` of a request, or the `id` of its reply."""

    request_id: str


class AbortReply(Struct, kw_only=True):
    """The number of aborted requests: one for each prompt of the body."""

    status: Literal["aborted"] = "aborted"
    count: int


async def pause(request: web.Request) -> web.Response:
    """Lets all requests wait until `/resume`: no further step is planned. New requests are taken,
    and `/health/ready` is 503 meanwhile."""
    request.app[FRONTEND].pause()
    readiness = request.app[READINESS]
    if readiness.obstacle is None:
        readiness.obstacle = _PAUSED
    return json_response(Status(status="paused"))


async def resume(request: web.Request) -> web.Response:
    """Goes on with all requests after `/pause`."""
    request.app[FRONTEND].resume()
    readiness = request.app[READINESS]
    if readiness.obstacle == _PAUSED:
        readiness.obstacle = None
    return json_response(Status(status="running"))


async def abort(request: web.Request) -> web.Response:
    """Aborts a request: its client gets the tokens generated so far, with "abort" as the finish
    reason.

    404 for one that is not known, or has ended.
    """
    wanted = (await read_body(request, AbortRequest)).request_id

    def is_meant(request_id: str) -> bool:
        # such as cmpl-ID-0: the kind of reply, the request's own id, and the number of the prompt
        reply_id = request_id.rpartition("-")[0]
        return wanted in (request_id, reply_id, reply_id.partition("-")[2])

    count = request.app[FRONTEND].abort(is_meant) if wanted else 0
    if not count:
        raise RequestError(
            "no request of this id is queued or runs",
            param="request_id",
            status=404,
            code="request_not_found",
        )
    return json_response(AbortReply(count=count))


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Clears the prefix cache: the next prompts are computed from scratch. Running requests go
    on."""
    request.app[FRONTEND].reset_prefix_cache()
    return json_response(Status(status="reset"))
