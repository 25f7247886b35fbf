"""Answers the requests of a batch: many at a time, with the results in the order of the requests.

`batches` and the command line call `run_batch`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import msgspec

from aioinfer.api.batch.lines import BatchError, BatchLine, BatchReply, BatchResult, Requests
from aioinfer.api.http.dispatch import Dispatcher
from aioinfer.api.http.limits import Account
from aioinfer.errors import EngineDeadError

_log = logging.getLogger(__name__)

Results = AsyncGenerator[list[BatchResult], None]
#: Results that may wait for an earlier one, for each request that is served at a time.
_WINDOW = 4
#: A request that found no room is tried again after this long at the latest.
_MAX_RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class BatchServer:
    """The parts that answer a batch's requests.

    Attributes:
        dispatcher: makes them.
        account: returns for whom: the account of an API key, looked up for each request.
        places: bounds how many are served at a time; batches may share it.
        concurrency: how many places there are.
    """

    dispatcher: Dispatcher
    account: Callable[[], Account]
    places: asyncio.Semaphore
    concurrency: int

    async def answer(self, line: BatchLine) -> BatchResult:
        """Returns the result of a request. A request that the server has no room for waits; one
        whose handler fails has an error, and does not end the others.

        Raises `EngineDeadError` where no answer will come; the request counts as not made then; and
        what `account` does.
        """
        name = f"batch_req_{secrets.token_hex(12)}"
        while True:
            async with self.places:
                account = self.account()
                try:
                    reply = await self.dispatcher.post(line.url, bytes(line.body), name, account)
                except Exception as error:
                    _log.exception("request %s of a batch failed", name)
                    fault = BatchError(code="server_error", message=type(error).__name__)
                    return BatchResult(id=name, custom_id=line.custom_id, error=fault)
            if reply.status not in (429, 503):
                return BatchResult(
                    id=name,
                    custom_id=line.custom_id,
                    response=BatchReply(
                        status_code=reply.status, request_id=name, body=msgspec.Raw(reply.body)
                    ),
                )
            if reply.retry_after_s is None:
                raise EngineDeadError("the server stopped before the batch was complete")
            await asyncio.sleep(min(reply.retry_after_s, _MAX_RETRY_S))


async def run_batch(requests: Requests, server: BatchServer) -> Results:
    """Yields the results of all requests in order, in groups that are ready together.

    Raises what `BatchServer.answer` and `Requests.read` do. Closing this iterator ends the
    requests that are being answered.
    """
    window = server.concurrency * _WINDOW
    pending: deque[asyncio.Task[BatchResult]] = deque()
    try:
        while lines := await asyncio.to_thread(requests.read):
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
