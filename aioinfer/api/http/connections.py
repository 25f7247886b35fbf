"""Client connections: time-outs for request heads and for clients that do not read, and which
connections are closed when there is no room for more.

aiohttp reads and parses requests; it bounds neither the time that a head takes nor the content of
its log messages about malformed heads. `ConnectionServer` makes the protocol object of each
connection and tracks the connections that wait for a request: `receiving` are new connections and
connections that have sent a part of a head, `idle` are kept-alive connections between two requests.
`stalled` are connections whose client does not read the response. The time-outs follow nginx's
`client_header_timeout`, `keepalive_timeout` and `send_timeout`. `listener` accepts connections;
`server` answers requests.

`HttpCounts` counts connections refused for lack of room, clients that are too slow, and requests
that are answered with an error, for `metrics`; `listener` and `context` count into it as well.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from aiohttp import HttpVersion11, StreamReader, http_exceptions, web

from aioinfer.api.errors import ERROR_CODE, SERVER_NAME, error_body, error_response, raw_response
from aioinfer.process_log import LimitedLog

#: A connection that has waited for less than this is not closed to make room for another.
MIN_WAIT_S = 1.0
#: The same while half of all connections wait for a request; see `ConnectionServer.make_room`.
CROWDED_WAIT_S = 0.1
#: Seconds in which a new connection must deliver a request's head, and a kept-alive one the rest of
#: a head that has begun, before it is answered 408 and closed: nginx's default for heads.
HEAD_TIMEOUT_S = 60.0
#: Seconds after which a kept-alive connection without a request is closed.
IDLE_TIMEOUT_S = 75.0
#: Seconds for which a client may leave unread what the server has to send before its connection is
#: dropped, and its request with it: nginx's default as well. Counts only while the system's buffers
#: and 64 KiB more are full.
SEND_TIMEOUT_S = 60.0
#: A request head may have so many bytes; aiohttp bounds its lines and their number.
MAX_HEAD_BYTES = 64 * 1024
#: aiohttp's own time-out of idle connections; it must never come before ours.
_NEVER_S = 10 * 365 * 86400.0

_log = logging.getLogger(__name__)

RequestFactory = Callable[..., web.BaseRequest]
RequestHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Connection(web.RequestHandler):
    """One connection of a client.

    Attributes:
        socket: the accepted socket until the connection is set up, and None from then on.
        body: the body of the request that came last.
    """

    __slots__ = ("_head_bytes", "_server", "body", "socket")

    def __init__(self, server: ConnectionServer, loop: asyncio.AbstractEventLoop):
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=_NEVER_S,
            access_log=None,  # type: ignore[arg-type]  # it is optional, and annotated otherwise
            auto_decompress=False,  # a small body could unpack to a huge one
        )
        self.socket: socket.socket | None = None
        self.body: StreamReader | None = None
        self._server = server
        self._head_bytes = 0  # bytes received of a head that is not complete

    def data_received(self, data: bytes) -> None:
        """Parses the data that a client has sent, and bounds the size of a head."""
        body = self.body
        if body is not None and not body.is_eof():
            super().data_received(data)
            # aiohttp's own queue of parsed heads: pyproject.toml pins the version for it
            if self._messages and not body.is_eof() and not body.exception():
                # a request behind a body that has not ended: the parser gave up in its midst, and
                # aiohttp leaves the body's reader waiting
                body.set_exception(web.RequestPayloadError("the body is malformed"))
            return
        if data and self._server.idle.discard(self):
            self._server.receiving.add(self)  # a head begins
        super().data_received(data)
        if self._messages or self not in self._server.receiving:
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._reject(431, "the request's head is too long", "header_too_large")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._server.stalled.add(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._server.stalled.discard(self)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Sends what remains of a response; from now on the connection is idle."""
        if resp.status >= 400:
            self._server.counts.count_error(resp.status, resp.get(ERROR_CODE))
        result = await super().finish_response(request, resp, start_time)
        if request.version < HttpVersion11 and resp.content_length is None:
            resp.force_close()  # HTTP/1.0 knows no chunks: only the connection's end ends the body
        self._head_bytes = 0
        if self.transport is not None:
            self._server.idle.add(self)
        return result

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers a request that aiohttp could not parse, or whose handler raised.

        aiohttp would log the request's raw line, which may hold an API key.
        """
        if isinstance(exc, ConnectionError):  # the client is gone
            raise exc
        if isinstance(exc, http_exceptions.HttpProcessingError):
            self._server.malformed.count(f"({type(exc).__name__}) from {request.remote}")
            self.refuse(*_malformed(exc))
        response = error_response(exc if isinstance(exc, Exception) else RuntimeError(status))
        if request.writer.output_size > 0:
            raise ConnectionAbortedError("a response has begun")
        response.headers["Server"] = SERVER_NAME
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Logs an unexpected exception of aiohttp's own, unless it is about what a client sent."""
        error = kw.get("exc_info")
        if isinstance(error, http_exceptions.HttpProcessingError | web.RequestPayloadError):
            self._server.malformed.count(f"({type(error).__name__})")
        else:
            super().log_exception(*args, **kw)

    def refuse(self, status: int, message: str, code: str | None = None) -> NoReturn:
        """Answers a request in HTTP/1.1 whatever its version, and ends the connection.

        Raises `ConnectionAbortedError`, which no handler may catch.
        """
        self._answer(status, message, code)
        raise ConnectionAbortedError("the request was refused")

    def drop(self) -> None:
        """Closes the connection now; what the client has not fetched of a response is lost."""
        if self.socket is not None:  # its TLS handshake fails by this
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        transport = self.transport
        self.force_close()
        if transport is not None and transport.get_write_buffer_size():
            transport.abort()  # or it would wait for a client that does not read

    def time_out(self) -> None:
        """Answers 408 if a part of a request head has come, and closes the connection."""
        if self._head_bytes:
            self._reject(408, "the request's head took longer than it may", "timeout")
        else:
            self.drop()

    def _reject(self, status: int, message: str, code: str) -> None:
        """Answers a request whose head is not complete, and closes the connection."""
        self._answer(status, message, code)
        self.force_close()

    def _answer(self, status: int, message: str, code: str | None) -> None:
        """Counts an error and sends it, without a request that it would answer."""
        self._server.counts.count_error(status, code)
        if self.transport is not None:
            self.transport.write(raw_response(status, error_body(status, message, code=code)))


class ConnectionServer(web.Server):
    """Makes the protocol object of each connection, and ends connections that wait too long for a
    request.

    Attributes:
        open: all connections, from accepting them until they are lost or dropped.
        receiving, idle: connections that wait for a request; see the module.
        stalled: connections whose client does not read a response; they may be idle as well.
        counts: counters of connections that were refused or closed.
        malformed: the log of malformed requests.
        refused: the log of requests that are refused by their heads alone.
    """

    def __init__(self, handler: RequestHandler, make_request: RequestFactory):
        """`make_request` is a request factory of aiohttp's."""
        super().__init__(
            handler,
            request_factory=self._begin_request,
            # or the handler of a client that went away would wait for the whole output
            handler_cancellation=True,
        )
        self._make = make_request
        self.open: set[Connection] = set()
        self._all_closed = asyncio.Event()
        self.counts = HttpCounts()
        expire = self._expire
        self.receiving = WaitingConnections(
            HEAD_TIMEOUT_S, partial(expire, "head", Connection.time_out)
        )
        self.idle = WaitingConnections(IDLE_TIMEOUT_S, partial(expire, "idle", Connection.drop))
        self.stalled = WaitingConnections(SEND_TIMEOUT_S, partial(expire, "send", Connection.drop))
        self.malformed = LimitedLog(_log, "malformed requests")
        self.refused = LimitedLog(_log, "requests refused by their heads")

    def _expire(self, kind: str, end: Callable[[Connection], None], connection: Connection) -> None:
        """Counts a time-out and ends its connection."""
        self.counts.timeouts[kind] += 1
        end(connection)

    def __call__(self) -> Connection:
        """Returns the protocol object of a connection that has been accepted."""
        connection = Connection(self, asyncio.get_running_loop())
        self.open.add(connection)
        self.receiving.add(connection)
        return connection

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        """Forgets a connection that is closed; its handler may still run."""
        if isinstance(handler, Connection):
            self.forget(handler)
        super().connection_lost(handler, exc)

    def forget(self, connection: Connection) -> None:
        """Counts a connection no longer."""
        self.open.discard(connection)
        if not self.open:
            self._all_closed.set()
        self.receiving.discard(connection)
        self.idle.discard(connection)
        self.stalled.discard(connection)

    async def wait_closed(self, timeout_s: float) -> None:
        """Returns when no connection is open, or after `timeout_s` seconds."""
        if self.open:
            self._all_closed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._all_closed.wait()

    def make_room(self) -> bool:
        """Closes a connection that waits for a request: the one that has been idle for longest, or
        else the one that has been receiving a head for longest. Returns whether there was one.

        It must have waited for `MIN_WAIT_S`. That alone would let whoever opens as many connections
        a second as there are places keep all others out. So while at least half of all connections
        wait for a request, `CROWDED_WAIT_S` is enough, be the head begun or not: a head of which
        one byte has come costs an attacker no more than none. A client in the midst of a head is
        safe all the same: it goes only when it has waited for longest, which is after at least half
        as many connections as there are places have come behind it, and a head follows its
        connection at once (under TLS, after a round trip or two). Where fewer wait, fewer would
        have to come, and the whole second holds.

        There is a least time in any case, since of many clients that connect at the same moment
        the first must be served: without it each would push out another, and none would be.
        """
        waiting = len(self.idle) + len(self.receiving)
        is_crowded = 2 * waiting >= len(self.open)
        min_wait_s = min(MIN_WAIT_S, CROWDED_WAIT_S) if is_crowded else MIN_WAIT_S
        for kind in (self.idle, self.receiving):
            if (connection := kind.longest(min_wait_s)) is not None:
                self.forget(connection)
                connection.drop()
                self.counts.closed_for_room += 1
                return True
        return False

    def close(self) -> None:
        """Stops the timers."""
        for waiting in (self.receiving, self.idle, self.stalled):
            waiting.close()
        self.malformed.close()
        self.refused.close()

    def _begin_request(
        self, message: Any, payload: StreamReader, protocol: Any, writer: Any, task: Any
    ) -> web.BaseRequest:
        """Makes the request whose head has come; its connection does not wait any more."""
        self.receiving.discard(protocol)
        self.idle.discard(protocol)
        protocol.body = payload
        return self._make(message, payload, protocol, writer, task)


class WaitingConnections:
    """Connections in the order in which they began to wait, and one timer for all: they wait for
    the same time, so the first is always the next to expire."""

    def __init__(self, timeout_s: float, expire: Callable[[Connection], None]):
        """`expire` is called with each connection that has waited for `timeout_s` seconds."""
        self._timeout_s = timeout_s
        self._expire = expire
        self._since: OrderedDict[Connection, float] = OrderedDict()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._since

    def add(self, connection: Connection) -> None:
        """Lets a connection wait from now on."""
        now = self._since[connection] = self._loop.time()
        self._since.move_to_end(connection)
        if self._timer is None:
            self._timer = self._loop.call_at(now + self._timeout_s, self._expire_due)

    def discard(self, connection: Connection) -> bool:
        """Removes a connection. Returns whether it waited."""
        return self._since.pop(connection, None) is not None

    def longest(self, min_wait_s: float) -> Connection | None:
        """Returns the connection that has waited for longest, if for `min_wait_s` seconds."""
        for connection, since in self._since.items():
            return connection if self._loop.time() - since >= min_wait_s else None
        return None

    def close(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _expire_due(self) -> None:
        self._timer = None
        while self._since:
            connection, since = next(iter(self._since.items()))
            if since + self._timeout_s > self._loop.time():
                self._timer = self._loop.call_at(since + self._timeout_s, self._expire_due)
                return
            del self._since[connection]
            self._expire(connection)


class RequestCount:
    """Counts the requests that are being handled, each within a `with` block.

    Attributes:
        number: how many there are.
    """

    def __init__(self) -> None:
        self.number = 0
        self._none = asyncio.Event()
        self._none.set()

    def __enter__(self) -> None:
        self.number += 1
        self._none.clear()

    def __exit__(self, *error: object) -> None:
        self.number -= 1
        if not self.number:
            self._none.set()

    async def wait_for_none(self) -> None:
        """Returns when no request is being handled."""
        await self._none.wait()


CONNECTIONS = web.AppKey("connections", ConnectionServer)


def _malformed(error: http_exceptions.HttpProcessingError) -> tuple[int, str, str]:
    """Returns status, message and code for a request that could not be parsed. The parser's own
    message, which is not shown, may hold the raw line."""
    if isinstance(error, http_exceptions.LineTooLong):
        return 431, "the request line or a header is too long", "header_too_large"
    if "Too many headers" in error.message:
        return 431, "the request has too many headers", "header_too_large"
    if "Missing 'Host'" in error.message:
        return 400, "a request of HTTP/1.1 must have a Host header", "malformed_request"
    return 400, "this is not a well-formed HTTP request", "malformed_request"


#: Time-outs of clients, by the phase that took too long; `idle` is a kept-alive connection without
#: a request.
TIMEOUTS = ("head", "body", "idle", "send")

_REASON_OF_STATUS = {
    401: "api_key",
    404: "not_found",
    408: "client_timeout",
    413: "too_large",
    421: "host",
    429: "rate_limit",
    431: "too_large",
    500: "failure",
    504: "deadline",
}
_REASON_OF_CODE = {
    "overloaded": "overloaded",
    "not_ready": "not_ready",
    "engine_dead": "engine_dead",
    "malformed_request": "malformed",
}
#: Reasons for which a request is answered with an error; `bad_request` and `failure` stand for 4xx
#: and 5xx without a reason of their own. No reason comes from a client, so the number of reasons is
#: fixed.
REASONS = tuple(
    dict.fromkeys(("bad_request", *_REASON_OF_STATUS.values(), *_REASON_OF_CODE.values()))
)


class HttpCounts:
    """Totals since the start.

    Attributes:
        no_room: connections that were answered 503, or dropped, because there was no room.
        closed_for_room: connections that waited for a request and were closed for others.
        timeouts: clients that were too slow, by the phase (`TIMEOUTS`).
        errors: requests that were answered with an error, by reason (`REASONS`).
    """

    def __init__(self) -> None:
        self.no_room = 0
        self.closed_for_room = 0
        self.timeouts = dict.fromkeys(TIMEOUTS, 0)
        self.errors = dict.fromkeys(REASONS, 0)

    def count_error(self, status: int, code: str | None) -> None:
        """Counts a reply with an error status; `code` is the one of its body, if it has one."""
        reason = _REASON_OF_CODE.get(code or "") or _REASON_OF_STATUS.get(status)
        self.errors[reason or ("bad_request" if status < 500 else "failure")] += 1
