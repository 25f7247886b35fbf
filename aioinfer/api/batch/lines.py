"""The lines of batches, in OpenAI's format: reading, checking and answering requests, many at a
time, and finding out which results a file holds already.

What reads or writes files is called in threads. `batches` and the command line own the files.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, get_args

import msgspec
from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import RawRequestMessage
from msgspec import Meta, Raw, Struct
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from aioinfer.api.errors import PREFIX
from aioinfer.api.http.limits import ACCOUNT, Account
from aioinfer.api.http.logs import REQUEST_ID_HEADER
from aioinfer.errors import ConfigError, EngineDeadError

_log = logging.getLogger(__name__)

#: Paths that the requests of a batch may name.
BatchPath = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
BATCH_PATHS: tuple[BatchPath, ...] = get_args(BatchPath)
#: Faults of an input that are reported; there may be as many as it has lines.
_MAX_FAULTS = 20
#: Lines that `read_requests` yields at most at a time, and about how many bytes.
_LINES_PER_PIECE = 64
_BYTES_PER_PIECE = 2**20
#: Results that may wait for an earlier one, for each request that is served at a time.
_WINDOW = 4
#: A request that found no room is tried again after this long at the latest.
_MAX_RETRY_S = 30.0

#: A body comes in one piece, so its reader never asks the sender to wait.
_NO_LIMIT = 2**30


class BatchLine(Struct, kw_only=True):
    """A request of a batch; its body is left as it is."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    url: str
    body: Raw
    method: str = "POST"


class _Body(Struct):
    """The part of a body that is checked beforehand."""

    stream: bool | None = None


class BatchReply(Struct, kw_only=True):
    """The server's reply to a request of a batch."""

    status_code: int
    request_id: str
    body: Raw


class BatchError(Struct, kw_only=True):
    """Why a request of a batch was not answered."""

    code: str
    message: str


class BatchResult(Struct, kw_only=True):
    """A line of a batch's results."""

    id: str
    custom_id: str
    response: BatchReply | None = None
    error: BatchError | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the reply is an answer and not an error."""
        return self.response is not None and self.response.status_code < 400


class _Written(Struct):
    """The part of a result written before that is read again."""

    custom_id: str
    response: dict[str, Any] | None


class BatchFault(Struct, kw_only=True):
    """An error in a batch, with the line of its input; lines count from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


def check_input(
    file: Path,
    *,
    paths: Collection[str],
    max_line_bytes: int,
    max_requests: int | None = None,
) -> tuple[int, list[BatchFault]]:
    """Checks every line of an input, but for the bodies, which their handlers check. Returns the
    number of requests, and what is wrong.

    Args:
        file: the input.
        paths: what requests may ask for.
        max_line_bytes: the longest line.
        max_requests: how many there may be.

    Raises OSError.
    """
    total, faults, seen = 0, list[BatchFault](), set[str]()
    with file.open("rb") as stream:
        for total, (number, raw) in enumerate(_lines(stream, max_line_bytes), 1):
            found = _check_line(raw, seen, paths, max_line_bytes)
            if found is None and max_requests is not None and total > max_requests:
                found = "too_many_requests", f"a batch may hold at most {max_requests} requests"
            if found is not None:
                faults.append(BatchFault(code=found[0], message=found[1], line=number))
            if len(faults) >= _MAX_FAULTS or total > (max_requests or total):
                break
    if not total:
        faults.append(BatchFault(code="empty_file", message="the file holds no request", line=1))
    return total, faults


def _check_line(
    raw: bytes, seen: set[str], paths: Collection[str], max_line_bytes: int
) -> tuple[str, str] | None:
    """Returns the code and the message of what is wrong with a line."""
    if len(raw) > max_line_bytes:
        return "line_too_long", f"the line has more than {max_line_bytes} bytes"
    try:
        line = msgspec.json.decode(raw, type=BatchLine)
        body = msgspec.json.decode(line.body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return "invalid_json_line", f"this is not a request of a batch: {error}"
    if line.custom_id in seen:
        return "duplicate_custom_id", "the custom_id is that of an earlier line"
    seen.add(line.custom_id)
    if line.method != "POST":
        return "invalid_method", "the method must be POST"
    if line.url not in paths:
        return "invalid_url", f"the url must be one of {', '.join(paths)}"
    if body.stream:
        return "invalid_body", "a request of a batch cannot be streamed"
    return None


def _lines(stream: BinaryIO, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not blank with their numbers. Of one that is too long, only the
    beginning is kept."""
    number = 0
    while raw := stream.readline(max_line_bytes + 1):
        number += 1
        rest = raw
        while not rest.endswith(b"\n") and (rest := stream.readline(2**20)):
            pass
        if raw.strip():
            yield number, raw


def read_requests(file: Path, done: Collection[str]) -> Iterator[list[BatchLine]]:
    """Yields the requests of an input that has been checked, in order and in pieces; requests whose
    custom_id is in `done` are left out. Raises OSError, ValueError."""
    piece: list[BatchLine] = []
    size = 0
    with file.open("rb") as stream:
        for raw in filter(bytes.strip, stream):
            line = msgspec.json.decode(raw, type=BatchLine)
            if line.custom_id not in done:
                piece.append(line)
                size += len(raw)
            if len(piece) >= _LINES_PER_PIECE or size >= _BYTES_PER_PIECE:
                yield piece
                piece, size = [], 0
    if piece:
        yield piece


@dataclass(slots=True)
class Written:
    """Results that a file holds: their custom_ids, and how many of them are answers."""

    custom_ids: set[str] = field(default_factory=set)
    num_succeeded: int = 0

    def add(self, results: Sequence[BatchResult]) -> None:
        """Notes further results."""
        self.custom_ids.update(result.custom_id for result in results)
        self.num_succeeded += sum(result.succeeded for result in results)


def take_up(file: Path) -> Written:
    """Returns the results that `file` holds, and removes a last line that was not written to its
    end. A missing file holds none.

    Raises:
        ConfigError: it holds something else: it must not be overwritten.
        OSError: it cannot be read or written.
    """
    written = Written()
    if not file.exists():
        return written
    with file.open("r+b") as stream:
        end = 0
        for number, raw in enumerate(stream, 1):
            if not raw.endswith(b"\n"):
                break
            try:
                result = msgspec.json.decode(raw, type=_Written)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                message = f"{file}: line {number} is not a result of a batch: {error}"
                raise ConfigError(message) from error
            written.custom_ids.add(result.custom_id)
            reply = result.response
            written.num_succeeded += reply is not None and reply.get("status_code", 500) < 400
            end += len(raw)
        stream.truncate(end)
        os.fsync(stream.fileno())
    return written


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


def to_lines(results: Iterable[BatchResult]) -> bytes:
    """Returns results as lines."""
    return b"".join(msgspec.json.encode(result) + b"\n" for result in results)
