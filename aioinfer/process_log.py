"""The log on stderr: a line of text or JSON a record.

A pipe that no process reads would block the event loop at its first write. So records go through a
queue to a thread, and records that do not fit are dropped and counted. A server runs a `LogWriter`
for as long as it serves; libraries and `LLM` leave logging as the program has it.

`LimitedLog` logs events that clients can cause at will: at most one line in some seconds.
`LoopErrors` handles the exceptions that no code catches, of tasks that are never awaited, of
callbacks and of transports; a server installs it on its event loop. asyncio would log the message
of such an exception, which may hold the text of a prompt or a key, and the arguments of a callback.
Here the log gets the exception's type and the place where it was raised.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

#: Records that wait for the thread, at most.
_MAX_QUEUED = 10_000
#: Seconds that the last lines get when the server ends.
_LAST_LINES_S = 1.0
#: Control characters, and the separators of lines and of paragraphs.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


#: A text that needs no quotes in a line of the log.
_WORD = re.compile(r"[A-Za-z0-9_.:/@,+-]+")


class FieldsMessage:
    """A log message of named values. They are made text by the thread that writes them.

    Attributes:
        event: what has happened, the first word of the line.
        fields: text and numbers by name; None stands for an unknown value, and is left out.
    """

    __slots__ = ("event", "fields")

    def __init__(self, event: str, fields: Mapping[str, str | float | None]):
        self.event = event
        self.fields = fields

    def __str__(self) -> str:
        """Returns `event name=value ...`; values that could be taken for something else are in
        quotation marks."""
        shown = (f" {name}={_shown(v)}" for name, v in self.fields.items() if v is not None)
        return self.event + "".join(shown)


def _shown(value: str | float) -> str:
    return (
        json.dumps(value) if isinstance(value, str) and not _WORD.fullmatch(value) else str(value)
    )


class TextFormatter(logging.Formatter):
    """A line a record; a traceback follows on lines of its own. A message cannot forge a line,
    whatever of a client's text it holds."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        """Returns the line without line breaks and other control characters."""
        return super().formatMessage(record).translate(_ESCAPES)


class JsonFormatter(logging.Formatter):
    """A JSON object a record: time (UTC), level, logger, and the message or its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the object as one line."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        entry: dict[str, Any] = {"time": when, "level": record.levelname, "logger": record.name}
        if isinstance(record.msg, FieldsMessage):
            entry["event"] = record.msg.event
            entry |= {name: v for name, v in record.msg.fields.items() if v is not None}
        else:
            entry["message"] = record.getMessage()
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        # in ASCII: no reader takes an exotic separator for the end of the line
        return json.dumps(entry, default=str, separators=(",", ":"))


class LogWriter(logging.Handler):
    """While its `with` block runs, all log records go to a file through a thread: aioinfer's
    records from INFO on, records of other packages from WARNING on.

    Attributes:
        num_dropped: records that found the queue full and that no line has reported yet.
    """

    def __init__(self, form: str, descriptor: int = 2):
        """`form` is "text" or "json"; `descriptor` is the file descriptor to write to, stderr by
        default."""
        super().__init__()
        self.num_dropped = 0
        self._queue: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._descriptor = descriptor
        self._form = JsonFormatter() if form == "json" else TextFormatter()
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._own_logger = logging.getLogger("aioinfer")
        self._old_level = self._own_logger.level

    def __enter__(self) -> LogWriter:
        logging.getLogger().addHandler(self)
        self._own_logger.setLevel(logging.INFO)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger().removeHandler(self)
        self._own_logger.setLevel(self._old_level)
        self._queue.put(None)
        self._thread.join(_LAST_LINES_S)  # no longer: perhaps no process reads

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a record."""
        if self._queue.qsize() >= _MAX_QUEUED:
            self.num_dropped += 1
            return
        if self.num_dropped:
            dropped, self.num_dropped = self.num_dropped, 0
            text = f"{dropped} lines were dropped: stderr is not read fast enough"
            self._queue.put(
                logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)
            )
        if record.args:  # they may change before the thread reads them
            record.msg, record.args = record.getMessage(), None
        self._queue.put(record)

    def _write(self) -> None:
        # neither a StreamHandler nor sys.stderr: the process would wait for their locks at its end
        while (record := self._queue.get()) is not None:
            with suppress(Exception):  # there is nowhere to report it
                data = f"{self._form.format(record)}\n".encode("utf-8", "backslashreplace")
                while data:
                    data = data[os.write(self._descriptor, data) :]


class LimitedLog:
    """Counts events of one kind and logs them: the first at once, later ones together, one line in
    `interval_s` seconds.

    Used on the event loop. A line holds a number and the detail of the last event.
    """

    def __init__(self, logger: logging.Logger, kind: str, interval_s: float = 10.0):
        """`kind` names the events in the plural, such as "malformed requests"."""
        self._logger = logger
        self._kind = kind
        self._interval_s = interval_s
        self._number = 0
        self._detail = ""
        self._timer: asyncio.TimerHandle | None = None

    def count(self, detail: str) -> None:
        """Counts an event. `detail` must hold no text of the client's."""
        self._number += 1
        self._detail = detail
        if self._timer is None:
            self._write()

    def close(self) -> None:
        """Logs the events counted since the last line."""
        if self._timer is not None:
            self._timer.cancel()
            self._write()

    def _write(self) -> None:
        """Logs the counted events, and waits for more."""
        self._timer = None
        if self._number:
            self._logger.warning("%s: %d, the last %s", self._kind, self._number, self._detail)
            self._number = 0
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._write)


#: Beginnings of the messages of asyncio, uvloop and aiohttp. The rest of a message may hold
#: arguments.
_KINDS = (
    "Task exception was never retrieved",
    "Task was destroyed but it is pending",
    "Future exception was never retrieved",
    "Exception in callback",
    "Fatal",
    "SSL",
    "Unclosed",
    "unhandled exception during asyncio.run() shutdown",
)


class LoopErrors:
    """The exception handler of an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        """Installs itself, for as long as the loop lives."""
        self._loop = loop
        self._errors = LimitedLog(_log, "errors that nothing handled")
        loop.set_exception_handler(self._handle)

    def close(self) -> None:
        """Logs the errors counted since the last line; called on the loop."""
        self._errors.close()

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Counts an error. The collector of garbage may find a task in any thread, or after the
        loop has run."""
        detail = describe_context(context)
        if loop.is_closed():
            _log.error("an error that nothing handled: %s", detail)
        else:
            loop.call_soon_threadsafe(self._errors.count, detail)


def describe_context(context: dict[str, Any]) -> str:
    """Returns the kind of the error, the type of the exception and where it was raised, without any
    text of requests or arguments.

    `context` is what asyncio gives to a handler of exceptions.
    """
    message = str(context.get("message"))
    parts = [next((kind for kind in _KINDS if message.startswith(kind)), "error")]
    error = context.get("exception")
    if isinstance(error, BaseException):
        parts.append(f"{type(error).__name__}{_place(error)}")
    task = context.get("task") or context.get("future")
    if isinstance(task, asyncio.Task):
        parts.append(f"task {getattr(task.get_coro(), '__qualname__', '?')}")
    return ", ".join(parts)


def _place(error: BaseException) -> str:
    """Returns the innermost place of an exception, "" if it was never raised."""
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return f" at {Path(code.co_filename).name}:{trace.tb_lineno} in {code.co_name}"
