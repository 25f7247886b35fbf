"""OpenTelemetry traces, if they are configured: start, shutdown, and logging of export failures.

`server` starts and closes `Tracing`; `request_log` has it trace each request that ends. The module
`spans` makes the spans; it is imported here when it is needed: without `[tracing]`, OpenTelemetry
need not be installed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from aiohttp import web

from aioinfer.api.http.logs import LimitedLog
from aioinfer.api.http.record import RequestRecord
from aioinfer.config import Config
from aioinfer.errors import ConfigError

if TYPE_CHECKING:
    from aioinfer.api.http.spans import RequestTracer

_log = logging.getLogger(__name__)

#: Seconds that the last spans get when the server ends.
_LAST_SPANS_S = 3.0
#: Seconds that the thread gets to see that they are abandoned.
_ABANDON_S = 0.2
#: Seconds between two lines about a collector that cannot be reached.
_LOG_INTERVAL_S = 60.0
_MAX_DETAIL = 200  # characters


class Tracing:
    """Traces requests. Its methods run on the event loop and never block it."""

    def __init__(self, tracer: RequestTracer, errors: _SdkLog):
        self._tracer = tracer
        self._errors = errors

    @classmethod
    async def start(cls, config: Config) -> Tracing | None:
        """Returns the traces that the configuration asks for, None if it asks for none.

        Raises:
            ConfigError: OpenTelemetry is not installed.
        """
        if not config.tracing.endpoint:
            return None
        errors = _SdkLog()
        try:
            tracer = await asyncio.to_thread(_make_tracer, config)
        except ImportError as error:
            errors.remove()
            raise ConfigError(
                "tracing.endpoint needs OpenTelemetry, as installed by pip install "
                f"'aioinfer[otel]': {error}"
            ) from error
        return cls(tracer, errors)

    def trace(self, request: web.Request, record: RequestRecord) -> str:
        """See `RequestTracer.trace`."""
        return self._tracer.trace(request, record)

    async def close(self) -> None:
        """Sends the spans that are left; after some seconds the server ends without them."""
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            self._tracer.shutdown()
            self._errors.remove()
            with suppress(RuntimeError):  # the loop is closed: no task waits any more
                loop.call_soon_threadsafe(sent.set)

        # a daemon, unlike the threads of an executor: the process ends without waiting for it
        threading.Thread(target=send, name="last spans", daemon=True).start()
        is_sent = await _within(_LAST_SPANS_S, sent)
        self._errors.close_log()
        if not is_sent:
            _log.warning("the collector has not taken the last spans in %g s", _LAST_SPANS_S)
            self._tracer.abandon()
            await _within(_ABANDON_S, sent)


async def _within(seconds: float, event: asyncio.Event) -> bool:
    """Waits for an event, but no longer. Returns whether it has come."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


def _make_tracer(config: Config) -> RequestTracer:
    from aioinfer.api.http.spans import RequestTracer

    return RequestTracer(config)


class _SdkLog(logging.Handler):
    """Log handler of OpenTelemetry's packages, which log one or more lines a batch while the
    collector is down: passes on one line a minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._loop = asyncio.get_running_loop()
        self._limited = LimitedLog(_log, "problems with sending traces", _LOG_INTERVAL_S)
        self._logger = logging.getLogger("opentelemetry")
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Counts a line; called by any thread."""
        if record.name.startswith("opentelemetry.trace"):
            return  # a traceparent or tracestate that is malformed: the line quotes it
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._limited.count, record.getMessage()[:_MAX_DETAIL])

    def close_log(self) -> None:
        """Logs the lines counted since the last line."""
        self._limited.close()

    def remove(self) -> None:
        """Leaves OpenTelemetry's logger as it was."""
        self._logger.removeHandler(self)
        self._logger.propagate = not any(isinstance(h, _SdkLog) for h in self._logger.handlers)
