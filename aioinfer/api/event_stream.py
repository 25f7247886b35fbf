"""A reply that is a stream of events, and the marks by which a gateway resumes it on another
server.

A gateway sends `STREAM_HEADER` with its token. Where a request can be resumed from its tokens, the
reply then has the same header, and behind the events of each delta comes a line that begins with a
colon (in a stream of server-sent events a comment): its mark, a `KnownDelta`.

    :[index, [token, ...], cached prompt tokens, finish reason, stop reason]

When the server is lost, the gateway sends the request to another one with all marks behind its
body. That server restores the output (`RequestOutput.restore`): the restored deltas go through
everything that makes events, so that parsers, numbers and usage are where they were, and nothing is
written for them. `gateway.relay` is the other side of this.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import orjson
from aiohttp import web

from aioinfer.api.context import RECEIVED, REQUEST_BODIES, STREAM_HEADERS, HeldBody
from aioinfer.api.errors import ERROR_CODE, Handler, error_response
from aioinfer.config import Config
from aioinfer.config_keys import parse_address
from aioinfer.engine.output import KnownDelta, StopReason
from aioinfer.errors import EngineDeadError, NotReadyError, OverloadedError, RequestError
from aioinfer.ipc.peer_link import read_key
from aioinfer.scheduler.handover import Handover

if TYPE_CHECKING:
    from aioinfer.engine.output import Delta, RequestOutput

#: In a gateway's request: its token, and for a stream that is to be resumed the values of the
#: header in its first reply, and the bytes of the marks behind the body. In the reply: when the
#: stream began in Unix seconds, and a key, of which the ids are made that several of its events
#: share.
STREAM_HEADER = "X-Aioinfer-Stream"
#: In a gateway's request: `offer` where the server is to compute the prompt alone, and its reply to
#: be a `Handover`; or the `Handover` of another server that has computed it.
HANDOVER_HEADER = "X-Aioinfer-Handover"
OFFER = "offer"
#: In a reply to a gateway: the code of an error, whose body may have the shape of any API.
ERROR_HEADER = "X-Aioinfer-Error"


class StreamState(NamedTuple):
    """The state of a request's stream, and what a gateway adds to the request.

    Attributes:
        created: when the stream began, in Unix seconds.
        key: of the stream.
        known: the part of it that the client has.
        is_gateways: whether a gateway has sent the request.
        wants_offer: whether it wants the prompt computed, and nothing generated.
        handover: the KV blocks that another server has computed for it.
    """

    created: int
    key: str
    known: Sequence[KnownDelta] = ()
    is_gateways: bool = False
    wants_offer: bool = False
    handover: Handover | None = None


_STATE: web.RequestKey[StreamState] = web.RequestKey("stream_state")
_decoder = msgspec.json.Decoder(list[KnownDelta])
_handover_decoder = msgspec.json.Decoder(Handover)
#: Errors of a server that has no engine for a stream.
_LOST = EngineDeadError, OverloadedError, NotReadyError
#: Restored deltas, some 10 us each, between which other work of the event loop gets its turn.
_RESTORED_AT_ONCE = 64


def stream_state(request: web.Request) -> StreamState:
    """Returns the state of a request's stream: of the one that a gateway goes on with, or of a new
    one."""
    if _STATE not in request:
        request[_STATE] = StreamState(int(time.time()), secrets.token_hex(24))
    return request[_STATE]


def gateway_token(key_file: str) -> str:
    """Returns the token of gateways that have a key of `cache.peer_key_file`. Raises
    `ConfigError`."""
    return hmac.digest(read_key(key_file), b"gateway", "sha256").hex()


def name_code(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Names the code of an error to a gateway, which sends on what was refused."""
    code = response.get(ERROR_CODE)
    if code is not None and STREAM_HEADER in request.headers and not response.prepared:
        response.headers[ERROR_HEADER] = code


class GatewayAccess:
    """Knows the requests of gateways by their token."""

    def __init__(self, token: str):
        self._token = token.encode()

    @classmethod
    def of(cls, config: Config) -> GatewayAccess | None:
        """Returns the access of gateways that have the key of `cache.peer_key_file`; None without
        one. Raises `ConfigError`."""
        path = config.cache.peer_key_file
        return None if path is None else cls(gateway_token(path))

    @web.middleware
    async def accept(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Reads a gateway's additions to a request, and names the codes of errors to it."""
        given = request.headers.get(STREAM_HEADER)
        if given is None:
            return await handler(request)
        try:
            await self._read(request, given)
        except Exception as error:  # `json_errors` comes behind
            return error_response(error, request.path)
        response = await handler(request)
        name_code(request, response)
        return response

    async def _read(self, request: web.Request, given: str) -> None:
        token, *state = given.split()
        if not secrets.compare_digest(token.encode(), self._token):
            raise RequestError(f"{STREAM_HEADER} needs the token of a gateway", status=403)
        found = stream_state(request)._replace(is_gateways=True)
        if (handover := request.headers.get(HANDOVER_HEADER)) == OFFER:
            found = found._replace(wants_offer=True)
        elif handover is not None:
            found = found._replace(handover=decode_handover(handover.encode()))
        if state:
            created, key, size = state
            with HeldBody(request.app[REQUEST_BODIES]) as held:
                body = b"".join(await held.receive(request))
            end = len(body) - int(size)
            request[RECEIVED] = [body[:end]]
            try:
                known = _decoder.decode(body[end:])
            except msgspec.DecodeError as error:
                raise RequestError(f"the marks behind the body are wrong: {error}") from error
            found = found._replace(created=int(created), key=key, known=known)
        request[_STATE] = found


def decode_handover(data: bytes) -> Handover:
    """Returns the handover that a header or a reply holds. Raises `RequestError`."""
    try:
        found = _handover_decoder.decode(data)
        parse_address(found.address)
    except (msgspec.DecodeError, ValueError) as error:
        raise RequestError(f"{HANDOVER_HEADER} is wrong: {error}") from error
    return found


class EventStream(web.StreamResponse):
    """A reply that is a stream of events."""

    def __init__(
        self,
        request: web.Request,
        outputs: Sequence[RequestOutput],
        content_type: str = STREAM_HEADERS["Content-Type"],
    ):
        """Raises `RequestError` if the request resumes a stream and the reply cannot."""
        super().__init__(headers=STREAM_HEADERS | {"Content-Type": content_type})
        can_resume = len(outputs) == 1 and outputs[0].can_resume
        state = stream_state(request)
        if state.known and not can_resume:
            raise RequestError("this request cannot be gone on with", status=409)
        self.is_marked = can_resume and state.is_gateways
        self._num_restored = 0
        if self.is_marked:
            self._output = outputs[0]
            self.headers[STREAM_HEADER] = f"{state.created} {state.key}"

    async def write_delta(self, delta: Delta, events: bytes) -> None:
        """Sends the events of a delta, unless the client has them."""
        if delta.is_restored:
            self._num_restored += 1
            if self._num_restored % _RESTORED_AT_ONCE == 0:
                await asyncio.sleep(0)
            return
        if self.is_marked:
            fields = [
                delta.index, delta.token_ids, self._output.num_cached_tokens,
                delta.finish_reason, delta.stop_reason,
            ]  # fmt: skip
            events += b":%b\n" % orjson.dumps(fields)
        await self.write(events)


@asynccontextmanager
async def event_stream(
    request: web.Request, response: EventStream, failure: Callable[[Exception], bytes]
) -> AsyncIterator[None]:
    """Begins a reply, whose events are sent in the block; where something fails in it, `failure`
    returns the last ones. (The reply must not refer to it: aiohttp keeps the reply, and with it
    would go the prompt, until the next request of the connection.) Where an engine is lost, and no
    other of this server has room, the connection ends instead: a gateway can go on with the stream
    elsewhere."""
    await response.prepare(request)
    try:
        yield
    except ConnectionError:  # the client is gone, which is not worth a line in the log
        raise
    except Exception as error:
        if response.is_marked and isinstance(error, _LOST):
            raise ConnectionResetError("a gateway goes on with the stream") from error
        await response.write(failure(error))


def mark_frame(index: int, token: int, reason: str | None, stop_reason: StopReason) -> bytes:
    """Returns the mark of one token in a frame of HTTP's chunked coding, to follow the frame of the
    token's events."""
    if reason is None:
        line = b":[%d,[%d]]\n" % (index, token)
    else:
        line = b":%b\n" % orjson.dumps([index, [token], None, reason, stop_reason])
    return b"%x\r\n%b\r\n" % (len(line), line)
