"""In-process requests of the server to itself: a batch's requests pass the same middleware and
handlers as a client's, without a socket."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from aioinfer.api.errors import PREFIX
from aioinfer.api.http.access import REQUEST_ID_HEADER
from aioinfer.api.http.limits import ACCOUNT, Account

#: A body comes in one piece, so its reader never asks the sender to wait.
_NO_LIMIT = 2**30


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply to an in-process request. `retry_after_s` is None where trying again will not
    help."""

    status: int
    body: bytes
    retry_after_s: float | None


class Dispatcher:
    """Makes in-process requests to an application that has been started."""

    def __init__(self, app: web.Application):
        self._app = app
        # aiohttp's public handlers belong to runners, which an application inside another has none
        # of; pyproject.toml pins the version for `_handle`
        loop = asyncio.get_running_loop()
        # a connection without a transport: aiohttp asks it for a request's peer, and there is none
        self._protocol = web.RequestHandler(web.Server(app._handle), loop=loop, access_log=None)  # type: ignore[arg-type]

    async def post(self, path: str, body: bytes, request_id: str, account: Account) -> Answer:
        """Posts a JSON body for the holder of an API key and returns the reply.

        The reply must not be a stream. Cancelling this call ends the request.
        """
        request = self._request(f"{self._app[PREFIX]()}{path}", body, request_id)
        request[ACCOUNT] = account
        response = await self._app._handle(request)
        if not isinstance(response, web.Response) or not isinstance(response.body, bytes):
            raise TypeError("the reply is a stream")
        retry = response.headers.get("Retry-After")
        return Answer(response.status, response.body, None if retry is None else float(retry))

    def _request(self, path: str, body: bytes, request_id: str) -> web.Request:
        loop = asyncio.get_running_loop()
        headers = CIMultiDictProxy(
            CIMultiDict(
                {
                    "Content-Type": "application/json",
                    "Content-Length": str(len(body)),
                    REQUEST_ID_HEADER: request_id,
                }
            )
        )
        message = RawRequestMessage(
            "POST", path, HttpVersion11, headers, (), False, None, False, False, URL(path)
        )
        payload = StreamReader(BaseProtocol(loop), _NO_LIMIT, loop=loop)
        payload.feed_data(body)
        payload.feed_eof()
        task = asyncio.current_task()
        # a reply that is no stream is returned unsent: nothing uses the writer
        return web.Request(message, payload, self._protocol, None, task, loop)  # type: ignore[arg-type]
