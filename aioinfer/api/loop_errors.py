"""Handler of exceptions that no code catches: of tasks that are never awaited, of callbacks, of
transports. `app` installs `LoopErrors` on the server's event loop.

asyncio would log the message of such an exception, which may hold the text of a prompt or a key,
and the arguments of a callback. Here the log gets the exception's type and the place where it was
raised, and at most one line in some seconds.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from aioinfer.api.limited_log import LimitedLog

_log = logging.getLogger(__name__)

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
        try:
            is_here = asyncio.get_running_loop() is loop
        except RuntimeError:
            is_here = False
        if is_here:
            self._errors.count(detail)
        elif loop.is_closed():
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
