"""One request on its way through a gateway, and the part of the reply that its client has.

Nothing of a reply is passed on twice, and nothing is left out, however many replicas it takes. The
part of a stream that the client has is known in whole events and their marks, which hold the tokens
(see `api.event_stream`): a replica that is lost in the middle of an event has sent nothing of it.
`proxy` is the only caller.
"""

from __future__ import annotations

import re

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from aioinfer.api.errors import error_event
from aioinfer.api.event_stream import ERROR_HEADER, HANDOVER_HEADER, OFFER, STREAM_HEADER
from aioinfer.api.http.logs import REQUEST_ID_HEADER
from aioinfer.errors import RequestError
from aioinfer.gateway.prompt_reader import Prompt

#: A reply's header that names the replica, as Serve's logs and dashboard do; the header of a stream
#: names the one that began it.
REPLICA_HEADER = "X-Aioinfer-Replica"
#: Headers that concern one connection (RFC 9110, 7.6.1), headers that the client library sets, and
#: headers between gateways and replicas.
_HOP = frozenset(
    (
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        STREAM_HEADER.lower(),
        ERROR_HEADER.lower(),
        HANDOVER_HEADER.lower(),
    )
)
#: Error codes of a replica that has done nothing for a request.
_REFUSALS = frozenset(("not_ready", "overloaded"))
#: Media types of replies that come piece by piece.
_STREAMS = frozenset(("text/event-stream", "application/x-ndjson"))
#: Replicas that may be lost without a token between, until a request ends with an error: it may be
#: what kills them.
_MAX_LOSSES = 2
#: The mark of the events before it.
_MARK = re.compile(rb"^:(.+)\n", re.MULTILINE)


class ReplicaLostError(RequestError):
    """The replica that a request was sent to is gone; another may take the request on after
    `retry_after_s` seconds."""

    retry_after_s = 1

    def __init__(self) -> None:
        message = "the replica that served this request was lost; send the request again"
        super().__init__(message, status=502, code="replica_lost")


class RefusedError(Exception):
    """A replica did nothing for a request. `response` is its answer, if it sent one."""

    def __init__(self, response: web.Response | None = None):
        super().__init__("refused")
        self.response = response


class Relay:
    """A request, and the part of the reply that its client has.

    Attributes:
        request: the client's.
        target: its path and query below `server.root_path`.
        prompt: its prompt, as the router needs it.
        handover: the `Handover` of the server that has computed its prompt, in JSON; empty if none
            has, and None before one was asked.
    """

    def __init__(
        self, request: web.BaseRequest, target: str, body: bytes, prompt: Prompt, token: str
    ):
        """`token` identifies gateways to replicas."""
        self.request, self.target, self.prompt = request, target, prompt
        self._body, self._token = body, token
        self.handover: str | None = None
        self._request_id: str | None = None
        self._response: web.StreamResponse | None = None
        self._began: str | None = None  # what marked replies say of the stream
        self._marks: list[bytes] = []
        self._num_sent = 0  # bytes
        self._rest = b""
        self._num_marks_at_loss = self._num_losses = 0

    def offer_message(self) -> tuple[list[tuple[str, str]], bytes | None]:
        """Returns the headers and the body for the server that computes the prompt alone."""
        given = [(k, v) for k, v in self.request.headers.items() if k.lower() not in _HOP]
        return [*given, (STREAM_HEADER, self._token), (HANDOVER_HEADER, OFFER)], self._body

    def message(self) -> tuple[list[tuple[str, str]], bytes | None]:
        """Returns the headers and the body for the next replica."""
        given = [(k, v) for k, v in self.request.headers.items() if k.lower() not in _HOP]
        headers = CIMultiDict([*given, ("X-Forwarded-For", self.request.remote or "unknown")])
        if self._request_id is not None:  # ids of events are made of it
            headers[REQUEST_ID_HEADER] = self._request_id
        body = self._body
        if self.request.method == "POST":
            headers[STREAM_HEADER] = self._token
            if self.handover:
                headers[HANDOVER_HEADER] = self.handover
            if self._began is not None:
                marks = b"[%b]" % b",".join(self._marks)
                headers[STREAM_HEADER] += f" {self._began} {len(marks)}"
                body += marks
        return [*headers.items()], body or None

    async def take(self, reply: aiohttp.ClientResponse, replica: str) -> web.StreamResponse:
        """Passes on the reply of a replica.

        Raises `RefusedError` if it did nothing for the request, `ReplicaLostError`.
        """
        if self._request_id is None:
            self._request_id = reply.headers.get(REQUEST_ID_HEADER)
        if reply.content_type not in _STREAMS:
            return await self._pass_whole(reply, replica)
        if self._num_sent and STREAM_HEADER not in reply.headers:
            raise RefusedError
        if self._response is None:
            headers = CIMultiDict(_kept(reply, replica))
            self._response = web.StreamResponse(status=reply.status, headers=headers)
            await self._response.prepare(self.request)
        return await self._pass_stream(reply, self._response)

    def can_go_on(self) -> bool:
        """Whether another replica may take the request over, now that one was lost."""
        if len(self._marks) > self._num_marks_at_loss:
            self._num_losses = 0
        self._num_losses += 1
        self._num_marks_at_loss = len(self._marks)
        is_resumable = not self._num_sent or self._began is not None
        return is_resumable and self._num_losses < _MAX_LOSSES

    async def give_up(self) -> web.StreamResponse:
        """Ends a reply whose replica was lost. Raises `ReplicaLostError` if nothing has begun."""
        if self._response is None:
            raise ReplicaLostError
        if self._rest and self._began is None:  # in the midst of an event: nothing can follow it
            raise ConnectionAbortedError("the replica was lost")
        await self._response.write(error_event(ReplicaLostError(), self.target.partition("?")[0]))
        return self._response

    async def _pass_whole(self, reply: aiohttp.ClientResponse, replica: str) -> web.StreamResponse:
        """Passes on a reply that comes in one piece."""
        try:
            body = await reply.read()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ReplicaLostError from error
        code = reply.headers.get(ERROR_HEADER)
        headers = CIMultiDict(_kept(reply, replica))
        response = web.Response(status=reply.status, body=body, headers=headers)
        if code == "engine_dead":
            raise ReplicaLostError
        # an error cannot be the end of a stream that was going well: limits are of each replica
        if code in _REFUSALS or self._response is not None:
            raise RefusedError(response)
        return response

    async def _pass_stream(
        self, reply: aiohttp.ClientResponse, response: web.StreamResponse
    ) -> web.StreamResponse:
        """Passes on the data of a stream as it comes. Of a marked stream, the data behind the last
        mark is held back until the end of the stream shows that it is complete."""
        self._began, self._rest = reply.headers.get(STREAM_HEADER), b""
        end = b"\n\n" if reply.content_type == "text/event-stream" else b"\n"
        last = end
        while True:
            try:
                data = await reply.content.readany()
            except (aiohttp.ClientError, ConnectionError) as error:
                raise ReplicaLostError from error
            if not data:
                break
            if self._began is not None:
                data = self._read_marks(data)
            else:
                last = (last + data)[-2:]
                self._rest = b"" if last.endswith(end) else last
            await self._send(response, data)
        if self._began is not None:
            await self._send(response, self._rest)
        return response

    async def _send(self, response: web.StreamResponse, data: bytes) -> None:
        if data:
            self._num_sent += len(data)
            await response.write(data)

    def _read_marks(self, data: bytes) -> bytes:
        """Returns the events that are complete with `data`, and keeps their marks."""
        data = self._rest + data
        events, begin = [], 0
        for mark in _MARK.finditer(data):
            events.append(data[begin : mark.start()])
            self._marks.append(mark[1])
            begin = mark.end()
        self._rest = data[begin:]
        return b"".join(events)


def _kept(reply: aiohttp.ClientResponse, replica: str) -> list[tuple[str, str]]:
    """Returns the headers of a reply that its client gets."""
    found = [(k, v) for k, v in reply.headers.items() if k.lower() not in _HOP and k != "Date"]
    return [*found, (REPLICA_HEADER, replica)]
