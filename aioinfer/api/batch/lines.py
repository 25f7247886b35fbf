"""The lines of batches, in OpenAI's format: reading and checking requests, writing results, and
finding out which results a file holds already.

All functions read or write files and are called in threads. `batch_run` answers the requests;
`batches` and the command line own the files.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from msgspec import Meta, Raw, Struct

from aioinfer.errors import ConfigError

#: Paths that the requests of a batch may name.
BATCH_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
#: Faults of an input that are reported; there may be as many as it has lines.
_MAX_FAULTS = 20
#: Lines that `Requests.read` returns at most, and about how many bytes.
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

    def encode(self) -> bytes:
        """Returns the line, with its line end."""
        return msgspec.json.encode(self) + b"\n"


class _Written(Struct):
    """The part of a result written before that is read again."""

    custom_id: str
    response: dict[str, Any] | None


@dataclass(slots=True)
class Fault:
    """An error in a line of an input; lines count from 1."""

    line: int
    code: str
    message: str


@dataclass(slots=True)
class InputReport:
    """The result of `check_input`: the number of requests, and the errors."""

    total: int = 0
    faults: list[Fault] = field(default_factory=list)


def check_input(
    file: Path,
    *,
    paths: Collection[str],
    max_line_bytes: int,
    max_requests: int | None = None,
) -> InputReport:
    """Checks every line of an input, but for the bodies, which their handlers check.

    Args:
        file: the input.
        paths: what requests may ask for.
        max_line_bytes: the longest line.
        max_requests: how many there may be.

    Raises OSError.
    """
    report, seen = InputReport(), set[str]()
    with file.open("rb") as stream:
        for number, raw in _lines(stream, max_line_bytes):
            fault = _check_line(raw, number, seen, paths, max_line_bytes)
            report.total += 1
            if fault is not None:
                report.faults.append(fault)
            if max_requests is not None and report.total > max_requests:
                message = f"a batch may hold at most {max_requests} requests"
                report.faults.append(Fault(number, "too_many_requests", message))
                break
            if len(report.faults) >= _MAX_FAULTS:
                break
    if not report.total:
        report.faults.append(Fault(1, "empty_file", "the file holds no request"))
    return report


def _check_line(
    raw: bytes, number: int, seen: set[str], paths: Collection[str], max_line_bytes: int
) -> Fault | None:
    if len(raw) > max_line_bytes:
        return Fault(number, "line_too_long", f"the line has more than {max_line_bytes} bytes")
    try:
        line = msgspec.json.decode(raw, type=BatchLine)
        body = msgspec.json.decode(line.body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Fault(number, "invalid_json_line", f"this is not a request of a batch: {error}")
    if line.custom_id in seen:
        return Fault(number, "duplicate_custom_id", "the custom_id is that of an earlier line")
    seen.add(line.custom_id)
    if line.method != "POST":
        return Fault(number, "invalid_method", "the method must be POST")
    if line.url not in paths:
        return Fault(number, "invalid_url", f"the url must be one of {', '.join(paths)}")
    if body.stream:
        return Fault(number, "invalid_body", "a request of a batch cannot be streamed")
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


class Requests:
    """The requests of an input that has been checked, in order; closed at the end of its `with`
    block."""

    def __init__(self, file: Path, done: Collection[str]):
        """Opens `file`; requests whose custom_id is in `done` are left out. Raises OSError."""
        self._stream = file.open("rb")
        self._done = done

    def read(self) -> list[BatchLine]:
        """Returns the next requests; none at the end of the file. Raises OSError, ValueError."""
        found: list[BatchLine] = []
        size = 0
        while len(found) < _LINES_PER_PIECE and size < _BYTES_PER_PIECE:
            raw = self._stream.readline()
            if not raw:
                break
            size += len(raw)
            if raw.strip():
                line = msgspec.json.decode(raw, type=BatchLine)
                if line.custom_id not in self._done:
                    found.append(line)
            if size >= _BYTES_PER_PIECE and not found:
                size = 0  # all of it is done: an empty list would mean the end
        return found

    def close(self) -> None:
        """Closes the file."""
        self._stream.close()


@dataclass(slots=True)
class Written:
    """Results that a file holds: their custom_ids, and how many of them are answers."""

    custom_ids: set[str] = field(default_factory=set)
    num_succeeded: int = 0


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
