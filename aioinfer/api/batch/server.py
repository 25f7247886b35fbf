"""Answers the requests of a batch in-process, many at a time; `batch_file` has their lines."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection
from pathlib import Path
from typing import Any

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import RawRequestMessage
from msgspec import Raw
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from aioinfer.api.errors import PREFIX
from aioinfer.api.http.limits import ACCOUNT, Account
from aioinfer.api.http.logs import REQUEST_ID_HEADER
from aioinfer.batch_file import BatchError, BatchLine, BatchReply, BatchResult, read_requests
from aioinfer.errors import EngineDeadError

_log = logging.getLogger(__name__)

#: Results that may wait for an earlier one, for each request that is served at a time.
_WINDOW = 4
#: A request that found no room is tried again after this long at the latest.
_MAX_RETRY_S = 30.0

#: A body comes in one piece, so its reader never asks the sender to wait.
_NO_LIMIT = 2**30


class BatchServer:
    """Answers requests of batches in-process, by an application that has been started."""

    def __init__(
        self,
        app: web.Application,
        account: Callable[[], Account],
        places: asyncio.Semaphore,
        concurrency: int,
    ):
        """Makes the server of a batch.

        Args:
            app: answers the requests.
            account: returns for whom: the account of an API key, looked up for each request.
            places: bounds how many are served at a time; batches may share it.
            concurrency: how many places there are.
        """
        self.concurrency = concurrency
        self._app, self._account, self._places = app, account, places
        # aiohttp's public handlers belong to runners, which an application inside another has none
        # of; pyproject.toml pins the version for `_handle`
        loop = asyncio.get_running_loop()
        # a connection without a transport: aiohttp asks it for a request's peer, and there is none
        handle: Any = app._handle  # typed for `web.Request`, where a server takes any request
        no_log: Any = None  # typed as a logger; None writes no access log
        self._protocol = web.RequestHandler(web.Server(handle), loop=loop, access_log=no_log)

    async def answer(self, line: BatchLine) -> BatchResult:
        """Returns the result of a request. A request that the server has no room for waits; one
        whose handler fails has an error, and does not end the others.

        Raises `EngineDeadError` where no answer will come; the request counts as not made then; and
        what `account` does.
        """
        name = f"batch_req_{secrets.token_hex(12)}"
        while True:
            async with self._places:
                account = self._account()
                try:
                    reply = await self._post(line, name, account)
                except Exception as error:
                    _log.exception("request %s of a batch failed", name)
                    fault = BatchError(code="server_error", message=type(error).__name__)
                    return BatchResult(id=name, custom_id=line.custom_id, error=fault)
            if reply.status not in (429, 503):
                assert isinstance(reply.body, bytes)
                shown = BatchReply(status_code=reply.status, request_id=name, body=Raw(reply.body))
                return BatchResult(id=name, custom_id=line.custom_id, response=shown)
            if (retry := reply.headers.get("Retry-After")) is None:
                raise EngineDeadError("the server stopped before the batch was complete")
            await asyncio.sleep(min(float(retry), _MAX_RETRY_S))

    async def _post(self, line: BatchLine, request_id: str, account: Account) -> web.Response:
        """Returns the reply to a request, for the holder of an API key. Cancelling this call ends
        the request."""
        loop, body, path = asyncio.get_running_loop(), bytes(line.body), self._app[PREFIX]()
        headers = CIMultiDict(
            {
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                REQUEST_ID_HEADER: request_id,
            }
        )
        path += line.url
        message = RawRequestMessage(
            "POST", path, HttpVersion11, CIMultiDictProxy(headers), (), False, None, False, False,
            URL(path),
        )  # fmt: skip
        payload = StreamReader(BaseProtocol(loop), _NO_LIMIT, loop=loop)
        payload.feed_data(body)
        payload.feed_eof()
        writer: Any = None  # a reply that is no stream is returned unsent
        task: Any = asyncio.current_task()
        request = web.Request(message, payload, self._protocol, writer, task, loop)
        request[ACCOUNT] = account
        response = await self._app._handle(request)
        if not isinstance(response, web.Response) or not isinstance(response.body, bytes):
            raise TypeError("the reply is a stream")
        return response


async def run_batch(
    file: Path, done: Collection[str], server: BatchServer
) -> AsyncGenerator[list[BatchResult], None]:
    """Yields the results of all requests of an input in order, in groups that are ready together;
    requests whose custom_id is in `done` are left out.

    Raises what `BatchServer.answer` and `read_requests` do. Closing this iterator ends the
    requests that are being answered.
    """
    window = server.concurrency * _WINDOW
    pending: deque[asyncio.Task[BatchResult]] = deque()
    pieces, none = read_requests(file, done), list[BatchLine]()
    try:
        while lines := await asyncio.to_thread(next, pieces, none):
            for line in lines:
                if len(pending) >= window:
                    await asyncio.wait([pending[0]])
                    yield _take_ready(pending)
                pending.append(asyncio.create_task(server.answer(line)))
        while pending:
            await asyncio.wait([pending[0]])
            yield _take_ready(pending)
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def _take_ready(pending: deque[asyncio.Task[BatchResult]]) -> list[BatchResult]:
    """Removes the finished requests at the head, and returns their results."""
    ready: list[BatchResult] = []
    while pending and pending[0].done():
        if ready and pending[0].exception() is not None:
            break  # raised next time, when these are written
        ready.append(pending.popleft().result())
    return ready
