"""`/v1/batches`: many requests from one file, answered beside clients' requests, in OpenAI's
shapes.

A batch is a record in `store.FileStore`. Its results are appended to files there as they come, in
the order of the requests; the files become objects of the API at the end. Results that were written
before the server ended, however it ended, are not computed again after the next start. `objects`
has the files that clients see, `batch_file` the lines of files. A `BatchServer` answers the
requests in-process, many at a time; the command `batch` has one as well.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Literal

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import RawRequestMessage
from msgspec import Raw
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from aioinfer.api.batch import objects
from aioinfer.api.batch.store import (
    ENDED,
    BatchFaults,
    BatchObject,
    FileStore,
    Metadata,
    Stored,
    owner_of,
)
from aioinfer.api.context import REQUEST_BODIES
from aioinfer.api.decoding import Body
from aioinfer.api.errors import ERROR_CODE, PREFIX, shorten
from aioinfer.api.http.limits import ACCOUNT, ACCOUNTS, Account
from aioinfer.api.http.logs import REQUEST_ID_HEADER
from aioinfer.batch_file import (
    BatchError,
    BatchFault,
    BatchLine,
    BatchPath,
    BatchReply,
    BatchResult,
    check_input,
    read_requests,
    take_up,
    to_lines,
)
from aioinfer.errors import EngineDeadError, RequestError
from aioinfer.tasks import end_tasks

_log = logging.getLogger(__name__)

#: Requests of all batches together that are served at a time, beside those of clients.
CONCURRENCY = 32
#: Batches that are in progress: each has a task, and its file open.
MAX_BATCHES = 16
#: Requests in a batch; OpenAI's bound.
MAX_REQUESTS = 50_000
#: Results that may wait for an earlier one, for each request that is served at a time.
_WINDOW = 4
#: A request that found no room is tried again after this long at the latest.
_MAX_RETRY_S = 30.0
#: A body comes in one piece, so its reader never asks the sender to wait.
_NO_LIMIT = 2**30


class CreateBatch(Body, kw_only=True):
    """`POST /v1/batches`."""

    input_file_id: str
    endpoint: BatchPath
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class Batches:
    """The batches of a server that have not ended; they go on when its application starts."""

    def __init__(self, app: web.Application, store: FileStore):
        """`app` has its frontend, accounts and request bodies."""
        self._store, self._accounts = store, app[ACCOUNTS]
        self._max_line_bytes = app[REQUEST_BODIES].max_bytes
        self._places = asyncio.Semaphore(CONCURRENCY)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        app.on_startup.append(self.start)
        app.on_shutdown.append(self.stop)

    async def start(self, app: web.Application) -> None:
        """Goes on with batches that have not ended."""
        self._app = app
        for record in self._store.open_batches():
            self._begin(record)

    async def stop(self, app: web.Application) -> None:
        """Ends all work. Batches that have not ended go on at the next start."""
        await end_tasks(self._tasks.values())

    async def create(self, asked: CreateBatch, owner: str) -> BatchObject:
        """Makes a batch and begins it. Raises `RequestError`."""
        self._store.find(owner, "file", asked.input_file_id, "input_file_id")
        if (num_open := len(self._store.open_batches())) >= MAX_BATCHES:
            message = f"{num_open} batches are in progress; one more is too many"
            raise RequestError(message, status=429, code="too_many_batches")
        batch = BatchObject(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            created_at=int(time.time()),
            metadata=asked.metadata,
        )
        record = Stored(owner, batch)
        await self._store.save(record)
        self._begin(record)
        return batch

    async def cancel(self, record: Stored) -> None:
        """Ends a batch early; its results so far are kept. Raises `RequestError`."""
        batch: BatchObject = record.body
        if batch.status in ENDED:
            message = f"the batch has ended: it is {batch.status}"
            raise RequestError(message, status=409, code="batch_ended")
        if batch.status in ("validating", "in_progress"):
            batch.enter("cancelling")
            try:
                await self._store.save(record)
            finally:
                if batch.status == "cancelling" and batch.id in self._tasks:
                    self._tasks[batch.id].cancel()

    # ---------------------------------------------------------------- the work

    def _begin(self, record: Stored) -> None:
        task = asyncio.create_task(self._run(record))
        self._tasks[record.body.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(record.body.id, None))

    async def _run(self, record: Stored) -> None:
        """Processes a batch from its current status to its end. A batch that meets an error has
        failed; only if the server stops does the batch stay as it is, for the next start."""
        batch: BatchObject = record.body
        try:
            if batch.status == "validating":
                await self._validate(record)
            if batch.status == "in_progress":
                await self._serve(record)
            if batch.status in ENDED:
                return  # its input is wrong
        except asyncio.CancelledError:
            if batch.status != "cancelling":
                raise
        except EngineDeadError as error:
            _log.warning("batch %s goes on at the next start: %s", batch.id, error)
            return
        except Exception as error:
            _fail(batch, error)
        try:
            await self._finalize(record)
        except Exception as error:
            _log.error("batch %s has failed without files: %r", batch.id, error)
            _fail(batch, error)
            batch.output_file_id = batch.error_file_id = None
            batch.enter("failed")
            await self._store.save_failure(record)

    async def _validate(self, record: Stored) -> None:
        """Checks the input; a batch whose input is wrong has failed."""
        batch: BatchObject = record.body
        batch.request_counts.total, _, faults = await asyncio.to_thread(
            check_input,
            self._store.data(batch.input_file_id),
            paths=(batch.endpoint,),
            max_line_bytes=self._max_line_bytes,
            max_requests=MAX_REQUESTS,
        )
        if batch.status != "validating":
            return  # it was cancelled meanwhile
        for fault in faults:
            fault.message = shorten(fault.message)
        batch.errors = BatchFaults(data=faults) if faults else None
        batch.enter("failed" if faults else "in_progress")
        await self._store.save(record)

    async def _serve(self, record: Stored) -> None:
        """Answers the requests that have no result yet. Raises `EngineDeadError` if the server
        stops."""
        batch, counts = record.body, record.body.request_counts
        files = [self._store.data(result_id(batch, kind)) for kind in _RESULTS]
        written = await asyncio.to_thread(lambda: [take_up(file) for file in files])
        done = frozenset[str]().union(*(each.custom_ids for each in written))
        counts.completed = sum(each.num_succeeded for each in written)
        counts.failed = len(done) - counts.completed

        def account() -> Account:
            if (found := self._accounts.named(record.owner)) is None:
                message = "the batch's API key is not one of the server's any more"
                raise RequestError(message, code="invalid_api_key")
            return found

        server = BatchServer(self._app, account, self._places, CONCURRENCY)
        source = self._store.data(batch.input_file_id)
        async with aclosing(run_batch(source, done, server)) as results:
            async for ready in results:
                writing = asyncio.ensure_future(asyncio.to_thread(_append, files, ready))
                try:
                    await asyncio.shield(writing)
                finally:  # a batch that is cancelled is not left with half of a line
                    await writing
                    num_good = sum(result.succeeded for result in ready)
                    counts.completed += num_good
                    counts.failed += len(ready) - num_good

    async def _finalize(self, record: Stored) -> None:
        """Makes files of the results. Safe to repeat, whenever the process ended."""
        batch, store = record.body, self._store
        outcome = "cancelled" if batch.status == "cancelling" else "completed"
        batch.enter("finalizing")
        for kind in _RESULTS:
            file_id = result_id(batch, kind)
            if await asyncio.to_thread(store.data(file_id).is_file):
                name = f"{batch.id}_{kind}.jsonl"
                await store.keep(store.data(file_id), record.owner, name, "batch_output")
                setattr(batch, f"{kind}_file_id", file_id)
        batch.enter("failed" if batch.errors else outcome)
        await store.save(record)


#: The files of a batch's results: replies with status 200, and all others.
_RESULTS = ("output", "error")


def result_id(batch: BatchObject, kind: str) -> str:
    """Returns the id of a file of a batch's results."""
    return f"file-{kind}-{batch.id.removeprefix('batch_')}"


def _append(files: Sequence[Path], results: Sequence[BatchResult]) -> None:
    """Appends results to the files of `_RESULTS`. Raises OSError, and leaves no half of a line."""
    for file, succeeded in zip(files, (True, False), strict=True):
        if part := [result for result in results if result.succeeded == succeeded]:
            end = file.stat().st_size if file.exists() else 0
            try:
                with file.open("ab") as stream:
                    stream.write(to_lines(part))
            except OSError:
                with suppress(OSError):
                    os.truncate(file, end)
                    if not end:
                        file.unlink()
                raise


def _fail(batch: BatchObject, error: Exception) -> None:
    """Notes the error for which a batch ends."""
    if isinstance(error, RequestError):
        fault = BatchFault(code=error.code or "failed", message=error.message)
    else:
        _log.error("batch %s has failed: %r", batch.id, error)
        kind = type(error).__name__  # its text may name files of the server
        message = f"the server could not go on with the batch ({kind}); its log has more"
        fault = BatchFault(code="server_error", message=message)
    batch.errors = BatchFaults(data=[fault])


# -------------------------------------------------------------------- answers to requests


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
            if reply.get(ERROR_CODE) == EngineDeadError.code:
                raise EngineDeadError("the server stopped before the batch was complete")
            await asyncio.sleep(min(float(reply.headers["Retry-After"]), _MAX_RETRY_S))

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
        await end_tasks(pending)


def _take_ready(pending: deque[asyncio.Task[BatchResult]]) -> list[BatchResult]:
    """Removes the finished requests at the head, and returns their results."""
    ready: list[BatchResult] = []
    while pending and pending[0].done():
        if ready and pending[0].exception() is not None:
            break  # raised next time, when these are written
        ready.append(pending.popleft().result())
    return ready


BATCHES = web.AppKey("batches", Batches)


async def create_batch(request: web.Request, body: CreateBatch) -> BatchObject:
    """Begins a batch from a file of requests."""
    objects.require_files(request)
    return await request.app[BATCHES].create(body, owner_of(request))


async def cancel_batch(request: web.Request) -> BatchObject:
    """Ends a batch early."""
    record = objects.BATCHES.find(request)
    await request.app[BATCHES].cancel(record)
    batch: BatchObject = record.body
    return batch
