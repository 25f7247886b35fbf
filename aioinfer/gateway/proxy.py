"""The gateway: an HTTP server in front of replicas, which passes each request to the one that the
router chooses, and the reply back as it comes.

It is what clients see of a deployment: TLS, allowed hosts and the bounds on connections and bodies
are its own, by the same code as a server's (`api.http.connections`, `api.http.listener`).
Everything else is the replicas': API keys, limits, errors and all endpoints; `/load` is the sum of
theirs. Only the state of a single replica (files, batches, stored responses and conversations,
pauses) is not available through a gateway.

A request that a replica has refused before anything was done for it (it leaves, its queue is full,
nothing listens there any more) goes to another. So does one whose replica is lost, unless its
client has a part of the reply that no other replica can go on with (`relay`). Whether the request
caused the loss is not known: when two replicas were lost without a token between, it ends with an
error, and takes no more of them down.

Prefill and decode may be on different replicas: some compute prompts alone (`prefill`), and the
gateway tells the replica that generates where the KV blocks are (`scheduler.handover`). Whatever
goes wrong with that, the replica that generates computes the prompt itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from yarl import URL

from aioinfer.api.admin.info import Load
from aioinfer.api.context import MAX_BYTES, HeldBody, RequestBodies
from aioinfer.api.errors import SERVER_NAME, error_response, json_response
from aioinfer.api.event_stream import decode_handover
from aioinfer.api.http.connections import ConnectionServer, RequestCount
from aioinfer.api.http.keys import ApiKeys
from aioinfer.api.http.limits import authorizations
from aioinfer.api.http.listener import Listener
from aioinfer.api.routes import ADMIN_PATHS
from aioinfer.cluster.router import Choice, ClusterRouter
from aioinfer.config import Config
from aioinfer.errors import NotReadyError, RequestError
from aioinfer.gateway.members import Members
from aioinfer.gateway.prompt_reader import Prompt, PromptReader
from aioinfer.gateway.relay import RefusedError, Relay, ReplicaLostError
from aioinfer.gateway.replica import Address

#: Replicas that a request is tried on.
_MAX_TRIES = 4
#: For so long, a request whose replica was lost waits for one that takes it, such as the one that
#: Serve starts in its place; how often it looks.
_MAX_WAIT_S, _LOOK_S = 30.0, 0.5
_CONNECT_S = 5.0
#: How long the replicas may take to tell their loads.
_LOAD_S = 2.0
#: A prompt of fewer tokens that are not in the cache is computed where it is generated.
MIN_HANDED_OVER = 256
#: How long another replica may take for a prompt: seconds, and one more for so many tokens.
_OFFER_S, _OFFER_TOKENS = 10.0, 1000
#: Bytes of a `Handover`, which goes into a header.
_MAX_HANDOVER_BYTES = 6000
#: Paths, or prefixes of paths, whose state a single replica keeps.
_KEPT = (
    "/v1/batches",
    "/v1/chat/completions/chatcmpl-",
    "/v1/conversations",
    "/v1/files",
    "/v1/responses/",
    *sorted(ADMIN_PATHS),
)


#: Bounds of the buckets of `/metrics`.
_ROUTING_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2)
_READING_S = (1e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0)


class _KeptResponse(msgspec.Struct):
    """The fields of `/v1/responses` that name what a single replica keeps, or have it keep the
    response until it is fetched."""

    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None


def _check_response(body: bytes) -> None:
    """Raises `RequestError` (501) for a response that continues one that a replica keeps, or that
    is to be fetched from there: most replicas would not find it."""
    try:
        found = msgspec.json.decode(body, type=_KeptResponse)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return  # the replica says what is wrong
    names, instead = "names what a single replica keeps", "send the items before as input"
    for name, value, what, advice in (
        ("previous_response_id", found.previous_response_id, names, instead),
        ("conversation", found.conversation, names, instead),
        (
            "background", found.background or None, "leaves the response with a single replica",
            "leave it out, and set stream if need be",
        ),
    ):  # fmt: skip
        if value is not None:
            raise RequestError(
                f"{name} {what}: it cannot be used through a gateway; {advice}",
                param=name,
                status=501,
                code="not_supported",
            )


def _is_kept(method: str, path: str) -> bool:
    """Whether a request asks for the state of a single replica."""
    if method == "GET" and path == "/v1/chat/completions":
        return True
    return path.startswith(_KEPT) and path != "/v1/responses/input_tokens"


def _sum_of(loads: Sequence[Load]) -> Load:
    """Returns the load of several replicas: that of a server with all of their engines."""
    return Load(
        server_load=sum(load.server_load for load in loads),
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        kv_cache_usage=max(load.kv_cache_usage for load in loads),
        paused=all(load.paused for load in loads),
    )


class GatewayMetrics:
    """The metrics of a gateway, as `/metrics` shows them."""

    def __init__(self, router: ClusterRouter):
        disable_created_metrics()  # or each counter and histogram has a gauge beside it
        registry = self.registry = CollectorRegistry()

        def counter(name: str, text: str) -> Counter:
            return Counter(f"aioinfer:gateway_{name}", text, registry=registry)

        def seconds(name: str, text: str, bounds: Sequence[float]) -> Histogram:
            name = f"aioinfer:gateway_{name}_seconds"
            return Histogram(name, text, buckets=bounds, registry=registry)

        self.requests = counter("requests", "Requests that were routed to a replica.")
        self.retries = counter("refusals", "Requests that a replica refused unserved.")
        self.lost = counter("lost_requests", "Requests whose replica was lost.")
        self.resumed = counter(
            "resumed_requests",
            "Requests that were sent on to another replica when the first one was lost.",
        )
        self.handed_over = counter(
            "handed_over_prompts",
            "Prompts that another replica computed than the one that generates.",
        )
        self.tokens = counter("prompt_tokens", "Prompt tokens of routed requests.")
        self.expected = counter(
            "expected_cached_tokens", "Prompt tokens that the chosen replica was expected to hold."
        )
        self.decision = seconds("routing", "Choosing a replica.", _ROUTING_S)
        self.reading = seconds("reading", "Encoding a prompt.", _READING_S)
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "replicas": ("Replicas that get requests.", lambda: len(router)),
            "fresh_replicas": ("Replicas whose last report counts.", lambda: router.num_fresh),
            "block_hashes": ("Block hashes that the router knows.", lambda: router.num_hashes),
        }
        for name, (text, source) in gauges.items():
            gauge = Gauge(f"aioinfer:gateway_{name}", text, registry=registry)
            gauge.set_function(source)


class Gateway:
    """One gateway. `start` listens; `discover` is asked for the replicas."""

    def __init__(
        self,
        config: Config,
        discover: Callable[[], Awaitable[Iterable[Address]]],
        token: str,
        discover_prefill: Callable[[], Awaitable[Iterable[Address]]] | None = None,
    ):
        """`discover_prefill` is asked for the replicas that compute prompts for the others."""
        self._config, self._settings = config, config.server
        self.router, self.prefill_router = ClusterRouter(), ClusterRouter()
        self.metrics = GatewayMetrics(self.router)
        self._token = token
        # of replicas that generate, and behind them of those that compute prompts for these
        self._discoveries = [(discover, self.router)]
        if discover_prefill is not None:
            self._discoveries.append((discover_prefill, self.prefill_router))
        self._reader = PromptReader(config)
        self._root = config.server.path_prefix
        # what ends the requests that are under way, by replica
        self._open: dict[str, set[Callable[[], object]]] = defaultdict(set)
        self._handling = RequestCount()
        self._obstacle: str | None = None

    # ---------------------------------------------------------------- life

    async def start(self) -> str:
        """Loads the tokenizer, and listens. Returns the URL. Raises `ConfigError`."""
        await self._reader.load()
        self._keys = await asyncio.to_thread(ApiKeys.load, self._settings)
        self._http = aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        on_block_size = self._reader.set_block_size
        self._members = [
            Members(
                discover,
                self._token,
                router,
                self._http,
                on_block_size,
                self._cut_off,
                self._open.__contains__,
            )
            for discover, router in self._discoveries
        ]
        if self._config.cache.block_size:
            self._reader.set_block_size(self._config.cache.block_size)
        self._connections = ConnectionServer(self._handle, self._make_request)
        self._bodies = RequestBodies(self._connections.counts, MAX_BYTES)
        self._listener = Listener(self._connections, self._settings)
        url = await self._listener.bind()
        for members in self._members:
            members.start()
        self._listener.listen()
        return url

    async def stop(self, at_once: asyncio.Event | None = None) -> None:
        """Takes no more requests, passes on the replies to the requests that have come within
        `server.shutdown_timeout_s`, and ends; does not wait once `at_once` is set."""
        self._obstacle = "the gateway is shutting down"
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future((at_once or asyncio.Event()).wait())
        ]
        try:
            await asyncio.wait(waits, timeout=self._settings.shutdown_delay_s)
            await self._listener.stop()
            waits.append(asyncio.ensure_future(self._handling.wait_for_none()))
            await asyncio.wait(
                waits,
                timeout=self._settings.shutdown_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for each in waits:
                each.cancel()
        for members in self._members:
            await members.close()
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
        path = self._path(request)
        with self._handling:
            try:
                response = await self._answer(request, path)
            except ConnectionError:
                raise  # the client is gone
            except Exception as error:
                response = error_response(error, path.partition("?")[0])
            if not response.prepared:  # instead of aiohttp's and Python's versions
                response.headers["Server"] = SERVER_NAME
            return response

    def _path(self, request: web.BaseRequest) -> str:
        """Returns path and query below `server.root_path`."""
        path = request.raw_path
        return path.removeprefix(self._root) if path.startswith(self._root + "/") else path

    async def _answer(self, request: web.BaseRequest, target: str) -> web.StreamResponse:
        self._listener.hosts.check(request)
        if not target.startswith("/"):  # behind the replica's address it would name another host
            raise RequestError("the request's target must be a path", code="malformed_request")
        path = target.partition("?")[0]
        if (own := self._own(path)) is not None:
            return own
        if _is_kept(request.method, path):
            raise RequestError(
                f"{path} is kept by a single replica: it is not to be had through a gateway",
                status=501,
                code="not_supported",
            )
        with HeldBody(self._bodies) as held:
            body = b"".join(await held.receive(cast(web.Request, request)))
            if path == "/v1/responses":
                _check_response(body)
            prompt = Prompt(1, [])
            if request.method == "POST" and self._has_key(request):
                began = time.perf_counter()
                prompt = await self._reader.read(path, body)
                self.metrics.reading.observe(time.perf_counter() - began)
            relay = Relay(request, target, body, prompt, self._token)
            if request.method == "GET" and path == "/load" and (loads := await self._loads(relay)):
                return json_response(_sum_of(loads))
            return await self._pass_on(relay)

    def _own(self, path: str) -> web.StreamResponse | None:
        """Returns the gateway's own answer, or None for a request that a replica answers."""
        match path:
            case "/health/live":
                return json_response({"status": "ok"})
            case "/health" | "/health/ready":
                if self._obstacle is not None and path == "/health/ready":
                    raise NotReadyError(self._obstacle)
                if not len(self.router):
                    raise NotReadyError("no replica is ready")
                return json_response({"status": "ok", "replicas": len(self.router)})
            case "/metrics/targets":
                targets = [target for each in self._members for target in each.targets()]
                return json_response(targets)
            case "/metrics":
                return web.Response(
                    body=generate_latest(self.metrics.registry),
                    headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
                )
        return None

    async def _loads(self, relay: Relay) -> list[Load]:
        """Returns what the replicas answer that do answer a request for their load."""
        headers, _ = relay.message()
        timeout = aiohttp.ClientTimeout(total=_LOAD_S)

        async def ask(base: str) -> Load | None:
            url = URL(base + relay.target, encoded=True)
            try:
                async with self._http.get(
                    url, headers=headers, allow_redirects=False, timeout=timeout
                ) as reply:
                    return msgspec.json.decode(await reply.read(), type=Load)
            except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError):
                return None  # the replica is gone or leaves, or it refuses the key

        urls = [url for members in self._members for url in members.urls.values()]
        return [load for load in await asyncio.gather(*map(ask, urls)) if load is not None]

    def _has_key(self, request: web.BaseRequest) -> bool:
        """Whether a replica will serve a request: only then its prompt is encoded."""
        return any(self._keys.find(value) is not None for value in authorizations(request))

    async def _pass_on(self, relay: Relay) -> web.StreamResponse:
        """Sends a request to the replicas that the router names, until one has answered it."""
        avoided: set[str] = set()
        last: web.Response | None = None
        num_tries, lost_at = 0, None
        while True:
            num_tries += 1
            unfit = avoided if lost_at is None else avoided | self._members[0].in_doubt()
            began = time.perf_counter()
            choice = self.router.route(relay.prompt.length, relay.prompt.hashes, unfit)
            self.metrics.decision.observe(time.perf_counter() - began)
            if choice is None or choice.replica in unfit or num_tries > _MAX_TRIES:
                if choice is not None:
                    self.router.end(choice)
                if lost_at is None or time.monotonic() > lost_at + _MAX_WAIT_S:
                    break
                avoided.clear()
                num_tries = 0
                await asyncio.sleep(_LOOK_S)
                continue
            avoided.add(choice.replica)
            try:
                if relay.handover is None and len(self._members) > 1:
                    num_tokens = relay.prompt.length - choice.num_tokens
                    relay.handover = await self._have_computed(relay, num_tokens)
                return await self._send(relay, choice)
            except RefusedError as error:
                self.metrics.retries.inc()
                last = error.response
            except ReplicaLostError:
                self.metrics.lost.inc()
                lost_at = time.monotonic()
                if not relay.can_go_on():
                    break
                self.metrics.resumed.inc()
                avoided, num_tries = {choice.replica}, 0
            finally:
                self.router.end(choice)
        if lost_at is not None:
            return await relay.give_up()
        if last is not None:
            return last
        raise NotReadyError("no replica is ready")

    async def _have_computed(self, relay: Relay, num_tokens: int) -> str:
        """Has another replica compute a prompt of which `num_tokens` tokens are not cached. Returns
        the `Handover` of its blocks, in JSON; empty where there is none."""
        if relay.request.method != "POST" or num_tokens < MIN_HANDED_OVER:
            return ""
        choice = self.prefill_router.route(relay.prompt.length, relay.prompt.hashes)
        if choice is None:
            return ""
        base = self._members[1].urls.get(choice.replica)
        asking = asyncio.ensure_future(self._ask_for_offer(relay, base))
        try:
            with self._ended_by_silence(choice.replica, asking.cancel):
                return await asking
        except (aiohttp.ClientError, ConnectionError, TimeoutError, RequestError):
            return ""
        except asyncio.CancelledError:
            asking.cancel()
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # the client is gone
            return ""
        finally:
            self.prefill_router.end(choice)

    async def _ask_for_offer(self, relay: Relay, base: str | None) -> str:
        if base is None:
            return ""
        headers, body = relay.offer_message()
        longest = _OFFER_S + relay.prompt.length / _OFFER_TOKENS
        async with self._http.post(
            URL(base + relay.target, encoded=True),
            data=body,
            headers=headers,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=longest, sock_connect=_CONNECT_S),
        ) as reply:
            offered = await reply.read()
            if reply.status != 200 or len(offered) > _MAX_HANDOVER_BYTES:
                return ""
        decode_handover(offered)
        self.metrics.handed_over.inc()
        return offered.decode()

    async def _send(self, relay: Relay, choice: Choice) -> web.StreamResponse:
        """Sends a request to a replica and passes its reply on.

        Raises `RefusedError` if the replica did nothing for it, `ReplicaLostError`.
        """
        base = self._members[0].urls.get(choice.replica)
        if base is None:
            raise RefusedError
        headers, body = relay.message()
        sending = asyncio.ensure_future(
            self._http.request(
                relay.request.method,
                URL(base + relay.target, encoded=True),
                data=body,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            )
        )
        with self._ended_by_silence(choice.replica, sending.cancel):
            try:
                reply = await sending
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                raise RefusedError from error
            except aiohttp.ClientError as error:
                raise ReplicaLostError from error
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise  # the client is gone
                raise ReplicaLostError from None
        with self._ended_by_silence(choice.replica, reply.close):
            # also where the client goes away: the replica sees its connection end
            async with reply:
                self.metrics.requests.inc()
                self.metrics.tokens.inc(relay.prompt.length)
                self.metrics.expected.inc(choice.num_tokens)
                return await relay.take(reply, choice.replica)

    @contextmanager
    def _ended_by_silence(self, replica: str, end: Callable[[], object]) -> Iterator[None]:
        """Has `end` called if the replica is silent before the end of the block."""
        self._open[replica].add(end)
        try:
            yield
        finally:
            self._open[replica].discard(end)
            if not self._open[replica]:
                del self._open[replica]

    def _cut_off(self, replica: str) -> None:
        """Ends the requests under way at a replica that is silent."""
        for end in list(self._open.get(replica, ())):
            end()
