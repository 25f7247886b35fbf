"""`/v1/batches`: many requests from one file, answered beside clients' requests, in OpenAI's
shapes.

A batch is a record in the folder of `file_store`. Its results are appended to files there as they
come, in the order of the requests; results that were written before the server ended, however it
ended, are not computed again after the next start. `files` has the inputs and results, `batch_run`
answers.

A batch as OpenAI describes it, and the request that makes one. `batches` does the work.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import ExitStack, aclosing, suppress
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from aioinfer.api.batch.file_store import FILES, FileStore, require_store, write_record
from aioinfer.api.batch.lines import (
    BATCH_PATHS,
    BatchError,
    BatchResult,
    Requests,
    Written,
    check_input,
    take_up,
)
from aioinfer.api.batch.object_store import page_of
from aioinfer.api.batch.run import BatchServer, run_batch
from aioinfer.api.context import FRONTEND, read_body
from aioinfer.api.decoding import Body
from aioinfer.api.errors import json_response, shorten
from aioinfer.api.http.dispatch import Dispatcher
from aioinfer.api.http.limits import ACCOUNT, ACCOUNTS, Account, Accounts
from aioinfer.api.http.request_body import REQUEST_BODIES
from aioinfer.errors import EngineDeadError, RequestError

_log = logging.getLogger(__name__)

_WINDOW_S = 24 * 3600


class _Record(Struct):
    """A batch and the name of the API key that it belongs to. `outcome` is the status that it has
    once its results are in the store."""

    owner: str
    batch: BatchObject
    outcome: str = "completed"


#: Batches that are in progress: each has a task, and its file open.
MAX_BATCHES = 16
#: Requests in a batch; OpenAI's bound.
MAX_REQUESTS = 50_000


class Batches:
    """All batches of a server."""

    def __init__(
        self, store: FileStore, accounts: Accounts, *, concurrency: int, max_line_bytes: int
    ):
        self._store = store
        self._accounts = accounts
        self._concurrency = concurrency
        self._places = asyncio.Semaphore(concurrency)
        self._max_line_bytes = max_line_bytes
        self._records: dict[str, _Record] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._dispatcher: Dispatcher | None = None
        self._saving = asyncio.Lock()

    async def start(self, dispatcher: Dispatcher) -> None:
        """Reads the records, and goes on with batches that have not ended.

        Raises `ConfigError`, OSError.
        """
        self._dispatcher = dispatcher
        for record in await asyncio.to_thread(self._store.read_batches, _Record):
            self._records[record.batch.id] = record
            if record.batch.status not in ENDED:
                self._begin(record)

    async def stop(self) -> None:
        """Ends all work. Batches that have not ended go on at the next start."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def uses(self, file_id: str) -> bool:
        """Whether a batch that has not ended reads this file."""
        return any(
            record.batch.input_file_id == file_id and record.batch.status not in ENDED
            for record in self._records.values()
        )

    def find(self, batch_id: str, owner: str) -> BatchObject:
        """Returns a batch of an API key. Raises `RequestError` (404)."""
        record = self._records.get(batch_id)
        if record is None or record.owner != owner:
            raise RequestError(
                "there is no batch of this id",
                param="batch_id",
                status=404,
                code="batch_not_found",
            )
        return record.batch

    def of(self, owner: str) -> list[BatchObject]:
        """Returns the batches of an API key, the newest first."""
        return [r.batch for r in reversed(self._records.values()) if r.owner == owner]

    async def create(self, asked: CreateBatch, owner: str) -> BatchObject:
        """Makes a batch and begins it. Raises `RequestError`."""
        self._store.find(asked.input_file_id, owner)
        num_open = sum(record.batch.status not in ENDED for record in self._records.values())
        if num_open >= MAX_BATCHES:
            raise RequestError(
                f"{num_open} batches are in progress; one more is too many",
                status=429,
                code="too_many_batches",
            )
        now = int(time.time())
        record = _Record(
            owner,
            BatchObject(
                id=f"batch_{secrets.token_hex(12)}",
                endpoint=asked.endpoint,
                input_file_id=asked.input_file_id,
                completion_window=asked.completion_window,
                created_at=now,
                expires_at=now + _WINDOW_S,
                metadata=asked.metadata,
            ),
        )
        self._records[record.batch.id] = record
        try:
            await self._save(record)
        except OSError:  # drop it: it would never end, and a later start might run it
            del self._records[record.batch.id]
            raise
        self._begin(record)
        return record.batch

    async def cancel(self, batch_id: str, owner: str) -> BatchObject:
        """Ends a batch early; its results so far are kept. Raises `RequestError`."""
        batch = self.find(batch_id, owner)
        if batch.status in ENDED:
            raise RequestError(
                f"the batch has ended: it is {batch.status}", status=409, code="batch_ended"
            )
        if batch.status in ("validating", "in_progress"):
            batch.enter("cancelling")
            record = self._records[batch_id]
            record.outcome = "cancelled"
            try:
                await self._save(record)
            finally:
                if (serving := self._serving.get(batch_id)) is not None:
                    serving.cancel()
        return batch

    # ---------------------------------------------------------------- the work

    def _begin(self, record: _Record) -> None:
        task = asyncio.create_task(self._run(record))
        self._tasks[record.batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(record.batch.id, None))

    async def _save(self, record: _Record) -> None:
        place = self._store.batch_file(record.batch.id, "json")
        async with self._saving:  # the last to begin writes the current state
            await asyncio.to_thread(write_record, place, msgspec.to_builtins(record))

    async def _run(self, record: _Record) -> None:
        """Processes a batch from its current status to its end. A batch that meets an error has
        failed; only if the server stops does the batch stay as it is, for the next start."""
        try:
            await self._advance(record)
        except EngineDeadError as error:
            _log.warning("batch %s goes on at the next start: %s", record.batch.id, error)
        except Exception as error:
            await self._fail(record, error)

    async def _advance(self, record: _Record) -> None:
        """Processes a batch from its current status to its end. Raises the error that keeps it from
        its end."""
        batch = record.batch
        if batch.status == "validating":
            await self._validate(record)
        if batch.status == "in_progress":
            serving = asyncio.create_task(self._serve(record))
            self._serving[batch.id] = serving
            try:
                await asyncio.wait([serving])
            finally:
                del self._serving[batch.id]
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
            if not serving.cancelled():
                serving.result()
        if batch.status in ("in_progress", "cancelling", "finalizing"):
            await self._finalize(record)

    async def _fail(self, record: _Record, error: Exception) -> None:
        """Ends a batch for an error; results that are written are kept, where that can be done."""
        batch = record.batch
        if isinstance(error, RequestError):
            fault = BatchFault(code=error.code or "failed", message=error.message)
        else:
            _log.error("batch %s has failed: %r", batch.id, error)
            kind = type(error).__name__  # its text may name files of the server
            message = f"the server could not go on with the batch ({kind}); its log has more"
            fault = BatchFault(code="server_error", message=message)
        batch.errors = BatchFaults(data=[fault])
        record.outcome = "failed"
        try:
            await self._finalize(record)
        except Exception as again:
            _log.error("batch %s has failed without files: %r", batch.id, again)
            batch.output_file_id = batch.error_file_id = None
            batch.enter("failed")
            with suppress(OSError):
                await self._save(record)

    async def _validate(self, record: _Record) -> None:
        batch = record.batch
        report = await asyncio.to_thread(
            check_input,
            self._store.data(batch.input_file_id),
            paths=(batch.endpoint,),
            max_line_bytes=self._max_line_bytes,
            max_requests=MAX_REQUESTS,
        )
        batch.request_counts.total = report.total
        if batch.status != "validating":
            return  # it was cancelled meanwhile
        if report.faults:
            faults = [
                BatchFault(code=fault.code, message=shorten(fault.message), line=fault.line)
                for fault in report.faults
            ]
            batch.errors = BatchFaults(data=faults)
            batch.enter("failed")
        else:
            batch.enter("in_progress")
        await self._save(record)

    def _account(self, owner: str) -> Account:
        account = self._accounts.named(owner)
        if account is None:
            raise RequestError(
                "the batch's API key is not one of the server's any more", code="invalid_api_key"
            )
        return account

    async def _serve(self, record: _Record) -> None:
        """Answers the requests that have no result yet. Raises `EngineDeadError` if the server
        stops."""
        batch, store = record.batch, self._store
        assert self._dispatcher is not None
        outputs, errors = store.batch_file(batch.id, "output"), store.batch_file(batch.id, "error")
        done = await asyncio.to_thread(lambda: (take_up(outputs), take_up(errors)))
        _count(batch, done)
        source = store.data(batch.input_file_id)
        ids = done[0].custom_ids | done[1].custom_ids
        server = BatchServer(
            self._dispatcher,
            lambda: self._account(record.owner),
            self._places,
            self._concurrency,
        )
        with ExitStack() as stack:
            requests = await asyncio.to_thread(Requests, source, ids)
            stack.callback(requests.close)
            try:
                async with (
                    asyncio.timeout(max(0.0, batch.expires_at - time.time())) as window,
                    aclosing(run_batch(requests, server)) as results,
                ):
                    async for ready in results:
                        await self._write(batch, ready)
                        ids.update(result.custom_id for result in ready)
            except TimeoutError:
                if not window.expired():
                    raise
                record.outcome = "expired"
                await self._write_expired(batch, source, ids)

    async def _write(self, batch: BatchObject, results: list[BatchResult]) -> None:
        good = b"".join(result.encode() for result in results if result.succeeded)
        bad = b"".join(result.encode() for result in results if not result.succeeded)

        def append() -> None:
            for kind, data in (("output", good), ("error", bad)):
                if data:
                    with self._store.batch_file(batch.id, kind).open("ab") as stream:
                        stream.write(data)

        writing = asyncio.ensure_future(asyncio.to_thread(append))
        try:
            await asyncio.shield(writing)
        finally:  # a batch that is cancelled is not left with half of a line
            await writing
            succeeded = sum(result.succeeded for result in results)
            batch.request_counts.completed += succeeded
            batch.request_counts.failed += len(results) - succeeded

    async def _write_expired(self, batch: BatchObject, source: Any, done: set[str]) -> None:
        requests = await asyncio.to_thread(Requests, source, done)
        error = BatchError(code="batch_expired", message="the batch was not answered in time")
        try:
            while lines := await asyncio.to_thread(requests.read):
                results = [
                    BatchResult(
                        id=f"batch_req_{secrets.token_hex(12)}",
                        custom_id=line.custom_id,
                        error=error,
                    )
                    for line in lines
                ]
                await self._write(batch, results)
        finally:
            requests.close()

    async def _finalize(self, record: _Record) -> None:
        """Makes files of the results. Safe to repeat, whenever the process ended."""
        batch, store = record.batch, self._store
        if batch.finalizing_at is None:
            found = await asyncio.to_thread(
                lambda: [
                    kind
                    for kind in ("output", "error")
                    if store.batch_file(batch.id, kind).is_file()
                ]
            )
            if "output" in found:
                batch.output_file_id = f"file-{secrets.token_hex(12)}"
            if "error" in found:
                batch.error_file_id = f"file-{secrets.token_hex(12)}"
            batch.enter("finalizing")
            await self._save(record)
        for kind, file_id in (("output", batch.output_file_id), ("error", batch.error_file_id)):
            if file_id is not None:
                name, source = f"{batch.id}_{kind}.jsonl", store.batch_file(batch.id, kind)
                file = await asyncio.to_thread(
                    store.keep, source, record.owner, name, "batch_output", file_id
                )
                store.note(record.owner, file)
        batch.enter(record.outcome)
        await self._save(record)


def _count(batch: BatchObject, done: tuple[Written, Written]) -> None:
    """Sets the counts from the results that are written."""
    succeeded = sum(written.num_succeeded for written in done)
    batch.request_counts.completed = succeeded
    batch.request_counts.failed = sum(len(w.custom_ids) for w in done) - succeeded


BATCHES: web.AppKey[Batches | None] = web.AppKey("batches")


# -------------------------------------------------------------------- endpoints


def add_batches(app: web.Application) -> None:
    """Adds batches to an application that has its frontend, accounts and store. They begin when it
    starts."""
    app[BATCHES] = None
    if (store := app[FILES]) is not None:
        config = app[FRONTEND].config.server
        batches = app[BATCHES] = Batches(
            store,
            app[ACCOUNTS],
            concurrency=config.batch_concurrency,
            max_line_bytes=app[REQUEST_BODIES].max_bytes,
        )

        async def begin(app: web.Application) -> None:
            await batches.start(Dispatcher(app))

        app.on_startup.append(begin)
        app.on_shutdown.append(stop)


async def stop(app: web.Application) -> None:
    """Ends the work on batches; the next start goes on with it."""
    if (batches := app[BATCHES]) is not None:
        await batches.stop()


def _require(request: web.Request) -> Batches:
    require_store(request)
    batches = request.app[BATCHES]
    assert batches is not None
    return batches


async def create_batch(request: web.Request) -> web.Response:
    """Begins a batch from a file of requests."""
    batches = _require(request)
    body = await read_body(request, CreateBatch)
    batch = await batches.create(body, request[ACCOUNT].key.name)
    return json_response(msgspec.to_builtins(batch))


async def list_batches(request: web.Request) -> web.Response:
    """Lists the batches of the API key, the newest first; `limit`, `after`."""
    found = _require(request).of(request[ACCOUNT].key.name)
    return json_response(page_of(found, request.query, max_limit=100))


async def get_batch(request: web.Request) -> web.Response:
    """Describes a batch."""
    batch = _require(request).find(request.match_info["batch_id"], request[ACCOUNT].key.name)
    return json_response(msgspec.to_builtins(batch))


async def cancel_batch(request: web.Request) -> web.Response:
    """Ends a batch early."""
    owner = request[ACCOUNT].key.name
    batch = await _require(request).cancel(request.match_info["batch_id"], owner)
    return json_response(msgspec.to_builtins(batch))


#: The statuses in which a batch stays.
ENDED = frozenset(("completed", "failed", "expired", "cancelled"))
_MAX_METADATA = 16


class CreateBatch(Body, kw_only=True):
    """`POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: (
        dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]] | None
    ) = None
    output_expires_after: dict[str, Any] | None = None

    def check(self) -> None:
        if self.endpoint not in BATCH_PATHS:
            raise RequestError(
                f"endpoint must be one of {', '.join(BATCH_PATHS)}, not {shorten(self.endpoint)!r}",
                param="endpoint",
            )
        if self.completion_window != "24h":
            raise RequestError("completion_window must be '24h'", param="completion_window")
        if self.metadata is not None and len(self.metadata) > _MAX_METADATA:
            raise RequestError(f"metadata may hold at most {_MAX_METADATA} pairs", param="metadata")
        if self.output_expires_after is not None:
            raise RequestError(
                "output_expires_after is not supported: results stay until they are deleted",
                param="output_expires_after",
            )


class RequestCounts(Struct, kw_only=True):
    """The number of requests of a batch, in total, completed and failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchFault(Struct, kw_only=True):
    """An error in a batch, with the line of its input."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchFaults(Struct, kw_only=True):
    """Everything that is wrong with a batch."""

    data: list[BatchFault]
    object: str = "list"


class BatchObject(Struct, kw_only=True):
    """A batch, as OpenAI describes it."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = "validating"
    object: str = "batch"
    errors: BatchFaults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    def enter(self, status: str) -> None:
        """Changes the status, now."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))
