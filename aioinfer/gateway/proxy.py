"""The gateway: an HTTP server in front of replicas, which passes each request to the one that the
router chooses, and the reply back as it comes.

It is what clients see of a deployment: TLS, allowed hosts and the bounds on connections and bodies
are its own, by the same code as a server's (`api.connections`, `api.listener`). Everything else is
the replicas': API keys, limits, errors and all endpoints. Only what a replica keeps to itself
(files, batches, stored responses, pauses) is not to be had through a gateway.

A request that a replica has refused before anything was done for it (it leaves, its queue is full,
nothing listens there any more) goes to another. One that was sent to a replica which is then lost
ends with an error: whether it caused the loss is not known, and it may not take the others down.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, cast

import aiohttp
import orjson
from aiohttp import web
from multidict import CIMultiDict
from prometheus_client import generate_latest
from yarl import URL

from aioinfer.api.access import ADMIN_PATHS, KEY_HEADERS
from aioinfer.api.connections import ConnectionServer
from aioinfer.api.errors import anthropic_error, describe, error_response, json_response
from aioinfer.api.hosts import AllowedHosts
from aioinfer.api.keys import ApiKeys
from aioinfer.api.listener import Listener, tls_context
from aioinfer.api.request_body import RequestBodies
from aioinfer.api.sse import DONE, error_event
from aioinfer.cluster.router import Choice, ClusterRouter
from aioinfer.config import Config
from aioinfer.errors import NotReadyError, RequestError
from aioinfer.gateway.members import Members
from aioinfer.gateway.metrics import GatewayMetrics
from aioinfer.gateway.prompt_reader import Prompt, PromptReader
from aioinfer.gateway.replica import Address

#: A reply's header that names the replica, as Serve's logs and dashboard do.
REPLICA_HEADER = "X-Aioinfer-Replica"
#: Replicas that a request is tried on.
_MAX_TRIES = 4
_CONNECT_S = 5.0
#: Headers that concern one connection (RFC 9110, 7.6.1), and those that the client library sets.
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
    )
)
#: What a replica answers when it has done nothing for a request.
_REFUSALS = frozenset(("not_ready", "overloaded"))
#: Media types of replies that come piece by piece.
_STREAMS = frozenset(("text/event-stream", "application/x-ndjson"))
#: Paths, or what they begin with, whose state a single replica keeps.
_KEPT = ("/v1/batches", "/v1/files", "/v1/responses/", *sorted(ADMIN_PATHS))


class ReplicaLostError(RequestError):
    """The replica that a request was sent to is gone."""

    def __init__(self) -> None:
        message = "the replica that served this request was lost; send the request again"
        super().__init__(message, status=502, code="replica_lost")


class _RefusedError(Exception):
    """A replica did nothing for a request. `response` is what it answered, if anything."""

    def __init__(self, response: web.Response | None = None):
        super().__init__("refused")
        self.response = response


class Gateway:
    """One gateway. `start` listens; `discover` is asked for the replicas."""

    def __init__(
        self,
        config: Config,
        discover: Callable[[], Awaitable[Iterable[Address]]],
        token: str,
        router: ClusterRouter | None = None,
    ):
        self._config, self._settings = config, config.server
        self.router = router or ClusterRouter()
        self.metrics = GatewayMetrics(self.router)
        self._discover, self._token = discover, token
        self._reader = PromptReader(config)
        self._root = (
            "/" + config.server.root_path.strip("/") if config.server.root_path.strip("/") else ""
        )
        # replies that are being passed on, by replica
        self._open: dict[str, set[aiohttp.ClientResponse]] = defaultdict(set)
        self._num_handling = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._obstacle: str | None = None

    # ---------------------------------------------------------------- life

    async def start(self) -> str:
        """Loads the tokenizer, and listens. Returns the URL. Raises `ConfigError`."""
        await self._reader.load()
        self._keys = await asyncio.to_thread(ApiKeys.load, self._settings, self._config.limits)
        self._http = aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        self._members = Members(
            self._discover,
            self._token,
            self.router,
            self._http,
            self._reader.set_block_size,
            self._cut_off,
        )
        tls = await asyncio.to_thread(tls_context, self._settings)
        self._connections = ConnectionServer(self._handle, self._make_request, self._settings)
        self._bodies = RequestBodies(self._settings, self._connections.counts)
        self._listener = Listener(self._connections, self._settings, tls)
        url = await self._listener.bind()
        self._hosts = AllowedHosts.of(
            self._settings.allowed_hosts,
            self._settings.host,
            is_loopback=self._listener.is_loopback,
        )
        self._members.start()
        self._listener.listen()
        return url

    async def stop(self) -> None:
        """Takes no more requests, passes on the replies to those that have come within
        `server.shutdown_timeout_s`, and ends."""
        self._obstacle = "the gateway is shutting down"
        await asyncio.sleep(self._settings.shutdown_delay_s)
        await self._listener.stop()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self._settings.shutdown_timeout_s)
        await self._members.close()
        await self._listener.close()
        self._connections.pre_shutdown()
        await self._connections.shutdown(0.5)
        self._connections.close()
        await self._http.close()
        await self._reader.close()

    # ---------------------------------------------------------------- requests

    @staticmethod
    def _make_request(
        message: Any, payload: Any, protocol: Any, writer: Any, task: Any
    ) -> web.BaseRequest:
        return web.BaseRequest(message, payload, protocol, writer, task, task.get_loop())

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._num_handling += 1
        self._idle.clear()
        path = self._path(request)
        try:
            return await self._answer(request, path)
        except ConnectionError:
            raise  # the client is gone
        except Exception as error:
            return error_response(error, path.partition("?")[0])
        finally:
            self._num_handling -= 1
            if not self._num_handling:
                self._idle.set()

    def _path(self, request: web.BaseRequest) -> str:
        """Returns path and query below `server.root_path`."""
        path = request.raw_path
        return path.removeprefix(self._root) if path.startswith(self._root + "/") else path

    async def _answer(self, request: web.BaseRequest, target: str) -> web.StreamResponse:
        if not self._hosts.admits(request.headers.get("Host")):
            raise RequestError(
                "the Host header names another server; server.allowed_hosts lists the names that "
                "are answered",
                status=421,
                code="host_not_allowed",
            )
        if not target.startswith("/"):  # behind the replica's address it would name another host
            raise RequestError("the request's target must be a path", code="malformed_request")
        path = target.partition("?")[0]
        if (own := self._own(path)) is not None:
            return own
        if path.startswith(_KEPT):
            raise RequestError(
                f"{path} is kept by a single replica: it is not to be had through a gateway",
                status=501,
                code="not_supported",
            )
        with self._bodies.hold() as held:
            body = b"".join(await held.receive(cast(web.Request, request)))
            prompt = Prompt(1, [])
            if request.method == "POST" and self._has_key(request):
                began = time.perf_counter()
                prompt = await self._reader.read(path, body)
                self.metrics.reading.observe(time.perf_counter() - began)
            return await self._pass_on(request, target, body, prompt)

    def _own(self, path: str) -> web.StreamResponse | None:
        """Returns the gateway's own answer, None for what a replica answers."""
        match path:
            case "/health/live":
                return json_response({"status": "ok"})
            case "/health" | "/health/ready" | "/ping":
                if self._obstacle is not None and path == "/health/ready":
                    raise NotReadyError(self._obstacle)
                if not len(self.router):
                    raise NotReadyError("no replica is ready")
                return json_response({"status": "ok", "replicas": len(self.router)})
            case "/metrics":
                return web.Response(
                    body=generate_latest(self.metrics.registry),
                    headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
                )
        return None

    def _has_key(self, request: web.BaseRequest) -> bool:
        """Whether a replica will serve a request: encoding prompts is for those only."""
        given = [request.headers.get("Authorization")]
        given += [
            f"Bearer {request.headers[name]}" for name in KEY_HEADERS if name in request.headers
        ]
        return any(self._keys.find(value) is not None for value in given)

    async def _pass_on(
        self, request: web.BaseRequest, target: str, body: bytes, prompt: Prompt
    ) -> web.StreamResponse:
        """Sends a request to the replicas that the router names, until one does not refuse it."""
        refused: set[str] = set()
        last: web.Response | None = None
        for _ in range(_MAX_TRIES):
            began = time.perf_counter()
            choice = self.router.route(prompt.length, prompt.hashes, refused)
            self.metrics.decision.observe(time.perf_counter() - began)
            if choice is None or choice.replica in refused:
                if choice is not None:
                    self.router.end(choice)
                break
            try:
                reply = await self._send(request, target, body, choice, prompt)
            except _RefusedError as error:
                self.metrics.retries.inc()
                refused.add(choice.replica)
                last = error.response
            else:
                return reply
            finally:
                self.router.end(choice)
        if last is not None:
            return last
        raise NotReadyError("no replica is ready")

    async def _send(
        self, request: web.BaseRequest, target: str, body: bytes, choice: Choice, prompt: Prompt
    ) -> web.StreamResponse:
        """Sends a request to a replica and passes its reply on.

        Raises `_RefusedError` if the replica did nothing for it, `ReplicaLostError`.
        """
        base = self._members.urls.get(choice.replica)
        if base is None:
            raise _RefusedError
        headers = [(k, v) for k, v in request.headers.items() if k.lower() not in _HOP]
        headers.append(("X-Forwarded-For", request.remote or "unknown"))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        try:
            reply = await self._http.request(
                request.method,
                URL(base + target, encoded=True),
                data=body or None,
                headers=headers,
                allow_redirects=False,
                timeout=timeout,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _RefusedError from error
        except aiohttp.ClientError as error:
            self.metrics.lost.inc()
            raise ReplicaLostError from error
        opened = self._open[choice.replica]
        opened.add(reply)
        try:
            async with (
                reply
            ):  # also where the client goes away: the replica sees its connection end
                self.metrics.requests.inc()
                self.metrics.tokens.inc(prompt.length)
                self.metrics.expected.inc(choice.num_tokens)
                headers = [*_kept(reply), (REPLICA_HEADER, choice.replica)]
                if reply.content_type in _STREAMS:
                    return await self._stream(request, target, reply, headers)
                return await self._whole(reply, headers)
        finally:
            opened.discard(reply)
            if not opened:
                self._open.pop(choice.replica, None)

    async def _whole(
        self, reply: aiohttp.ClientResponse, headers: list[tuple[str, str]]
    ) -> web.Response:
        """Returns a reply that comes in one piece."""
        try:
            body = await reply.read()
        except (aiohttp.ClientError, ConnectionError) as error:
            self.metrics.lost.inc()
            raise ReplicaLostError from error
        response = web.Response(status=reply.status, body=body, headers=CIMultiDict(headers))
        if reply.status == 503 and _code(body) in _REFUSALS:
            raise _RefusedError(response)
        return response

    async def _stream(
        self,
        request: web.BaseRequest,
        target: str,
        reply: aiohttp.ClientResponse,
        headers: list[tuple[str, str]],
    ) -> web.StreamResponse:
        """Passes on what comes of a stream as it comes."""
        response = web.StreamResponse(status=reply.status, headers=CIMultiDict(headers))
        await response.prepare(request)
        end = b"\n\n" if reply.content_type == "text/event-stream" else b"\n"
        last = end
        while True:
            try:
                data = await reply.content.readany()
            except (aiohttp.ClientError, ConnectionError) as error:
                self.metrics.lost.inc()
                if not last.endswith(end):  # in the midst of an event: nothing can follow it
                    raise ConnectionAbortedError("the replica was lost") from error
                data = _lost_event(target)
                await response.write(data)
                break
            if not data:
                break
            await response.write(data)
            last = (last + data)[-2:]
        return response

    def _cut_off(self, replica: str) -> None:
        """Ends what is being passed on of a replica that is silent."""
        for reply in list(self._open.get(replica, ())):
            reply.close()


def _kept(reply: aiohttp.ClientResponse) -> list[tuple[str, str]]:
    return [(k, v) for k, v in reply.headers.items() if k.lower() not in _HOP and k != "Date"]


def _code(body: bytes) -> str | None:
    """Returns the code in the body of an error."""
    with suppress(orjson.JSONDecodeError, KeyError, TypeError):
        code = orjson.loads(body)["error"]["code"]
        return code if isinstance(code, str) else None
    return None


def _lost_event(target: str) -> bytes:
    """Returns what ends a stream whose replica is lost, in the shape of the path's API."""
    status, body = describe(ReplicaLostError())
    if target.startswith("/v1/messages"):
        return b"event: error\ndata: " + orjson.dumps(anthropic_error(status, body)) + b"\n\n"
    if target.startswith("/api/"):
        return orjson.dumps({"error": body["error"]["message"]}) + b"\n"
    return error_event(body) + DONE
