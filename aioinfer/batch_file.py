"""The files of batches, in OpenAI's format: lines of requests and of results; reading and checking
them, and finding out which results a file holds already.

What reads or writes files is called in threads. The server's batches and the command line own the
files.
"""

from __future__ import annotations

import codecs
import fcntl
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta, Raw, Struct

from aioinfer.errors import ConfigError

#: Paths that the requests of a batch may name.
BatchPath = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
BATCH_PATHS: tuple[BatchPath, ...] = get_args(BatchPath)
#: Faults of an input that are reported; there may be as many as it has lines.
_MAX_FAULTS = 20
#: Lines that `read_requests` yields at most at a time, and about how many bytes.
_LINES_PER_PIECE = 64
_BYTES_PER_PIECE = 2**20


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


class CheckedInput(NamedTuple):
    """An input that was checked: how many requests it has, their custom_ids, and what is wrong."""

    total: int
    custom_ids: set[str]
    faults: list[BatchFault]


def check_input(
    file: Path,
    *,
    paths: Collection[str],
    max_line_bytes: int,
    max_requests: int | None = None,
) -> CheckedInput:
    """Checks every line of an input, but for the bodies, which their handlers check.

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
    return CheckedInput(total, seen, faults)


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
    _skip_mark(stream)
    while raw := stream.readline(max_line_bytes + 1):
        number += 1
        rest = raw
        while not rest.endswith(b"\n") and (rest := stream.readline(2**20)):
            pass
        if raw.strip():
            yield number, raw


def _skip_mark(stream: BinaryIO) -> None:
    """Goes behind the byte-order mark with which some editors begin a file."""
    if stream.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
        stream.seek(0)


def read_requests(file: Path, done: Collection[str]) -> Iterator[list[BatchLine]]:
    """Yields the requests of an input that has been checked, in order and in pieces; requests whose
    custom_id is in `done` are left out. Raises OSError, ValueError."""
    piece: list[BatchLine] = []
    size = 0
    with file.open("rb") as stream:
        _skip_mark(stream)
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


def open_results(file: Path) -> BinaryIO:
    """Opens a file to add results to, which is the caller's alone until it is closed.

    Raises:
        ConfigError: another process adds results to it.
        OSError: it cannot be written.
    """
    stream = file.open("ab", 0)
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise ConfigError(f"{file}: another process writes its results there") from None
    return stream


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
            end += len(raw)
            if result.custom_id in written.custom_ids:
                continue
            written.custom_ids.add(result.custom_id)
            reply = result.response
            written.num_succeeded += reply is not None and reply.get("status_code", 500) < 400
        stream.truncate(end)
        os.fsync(stream.fileno())
    return written


def to_lines(results: Iterable[BatchResult]) -> bytes:
    """Returns results as lines."""
    return b"".join(msgspec.json.encode(result) + b"\n" for result in results)
