"""`/v1/batches`: many requests from one file, answered beside clients' requests, in OpenAI's
shapes.

A batch is a record in `store.FileStore`. Its results are appended to files there as they come, in
the order of the requests; the files become objects of the API at the end. Results that were written
before the server ended, however it ended, are not computed again after the next start. `objects`
has the files that clients see; `server` answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Literal

from aiohttp import web

from aioinfer.api.batch import objects
from aioinfer.api.batch.server import BatchServer, run_batch
from aioinfer.api.batch.store import (
    ENDED,
    FILES,
    BatchFaults,
    BatchObject,
    FileStore,
    Metadata,
    Stored,
    owner_of,
)
from aioinfer.api.context import REQUEST_BODIES
from aioinfer.api.decoding import Body
from aioinfer.api.errors import shorten
from aioinfer.api.http.limits import ACCOUNTS, Account
from aioinfer.batch_file import BatchFault, BatchPath, BatchResult, check_input, take_up, to_lines
from aioinfer.errors import EngineDeadError, RequestError

_log = logging.getLogger(__name__)

#: Requests of all batches together that are served at a time, beside those of clients.
CONCURRENCY = 32
#: Batches that are in progress: each has a task, and its file open.
MAX_BATCHES = 16
#: Requests in a batch; OpenAI's bound.
MAX_REQUESTS = 50_000


class CreateBatch(Body, kw_only=True):
    """`POST /v1/batches`."""

    input_file_id: str
    endpoint: BatchPath
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class Batches:
    """The batches of a server that have not ended."""

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
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def create(self, asked: CreateBatch, owner: str) -> BatchObject:
        """Makes a batch and begins it. Raises `RequestError`."""
        self._store.find(owner, "file", asked.input_file_id)
        if (num_open := len(self._store.open_batches())) >= MAX_BATCHES:
            raise RequestError(
                f"{num_open} batches are in progress; one more is too many",
                status=429,
                code="too_many_batches",
            )
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
            raise RequestError(
                f"the batch has ended: it is {batch.status}", status=409, code="batch_ended"
            )
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
            with suppress(OSError):
                await self._store.save(record)

    async def _validate(self, record: Stored) -> None:
        """Checks the input; a batch whose input is wrong has failed."""
        batch: BatchObject = record.body
        batch.request_counts.total, faults = await asyncio.to_thread(
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


BATCHES = web.AppKey("batches", Batches)


def add_batches(app: web.Application) -> None:
    """Adds batches to an application that has its frontend and accounts, where it has a store of
    files. They begin when it starts."""
    if (store := app[FILES]) is not None:
        app[BATCHES] = Batches(app, store)


async def create_batch(request: web.Request, body: CreateBatch) -> BatchObject:
    """Begins a batch from a file of requests."""
    return await _require(request).create(body, owner_of(request))


async def cancel_batch(request: web.Request) -> BatchObject:
    """Ends a batch early."""
    record = objects.BATCHES.find(request)
    await _require(request).cancel(record)
    batch: BatchObject = record.body
    return batch


def _require(request: web.Request) -> Batches:
    objects.require_files(request)
    return request.app[BATCHES]
