"""The HTTP server: the application, and the listening socket in front of it. `cli.server_process`
starts and stops it.

`create_app`, public as `aioinfer.create_app`, makes the whole server an application of aiohttp for
use inside another one. The settings of the socket stay with the outer application's server: TLS,
allowed hosts, and the time-outs and numbers of connections.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any, cast

from aiohttp import HttpVersion10, HttpVersion11, web
from yarl import URL

from aioinfer.api import context, errors, routes
from aioinfer.api.admin import info, page
from aioinfer.api.admin.control import mark_version
from aioinfer.api.admin.info import READINESS, Readiness
from aioinfer.api.admission import ADMISSION, AdmissionControl, bound_time
from aioinfer.api.batch import batches
from aioinfer.api.batch.store import FILES, OBJECT_STORE, FileStore, ObjectStore
from aioinfer.api.event_stream import GatewayAccess, name_code
from aioinfer.api.http import limits
from aioinfer.api.http.connections import CONNECTIONS, Connection, ConnectionServer, RequestCount
from aioinfer.api.http.keys import ApiKeys
from aioinfer.api.http.listener import Listener
from aioinfer.api.http.logs import REQUEST_ID_HEADER, RequestLog, request_id
from aioinfer.api.openai.responses import add_responses
from aioinfer.config import Config
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.model_group import ModelGroup
from aioinfer.errors import ConfigError, NotReadyError, RequestError

if TYPE_CHECKING:
    from aioinfer.api.http.tracing import Tracing

_log = logging.getLogger(__name__)

#: Handlers get this long to send their last events once the engine has ended their requests.
_LAST_EVENTS_S = 0.5
#: Connections that are kept alive stay open for this long when the server drains, at most: requests
#: that come over them are answered 503, where a closed connection would be reset.
_LAST_REQUESTS_S = 1.0
#: Response headers that a script of another origin may read.
_EXPOSED = ", ".join((REQUEST_ID_HEADER, "Retry-After", *limits.RATE_HEADERS))
#: Seconds for which a browser may remember the answer to a preflight.
_PREFLIGHT_AGE_S = 600


class HttpServer:
    """Serves models on a socket. It is made on the event loop. Nothing listens before `start`;
    before `serve`, requests are answered 503."""

    def __init__(
        self,
        config: Config,
        frontend: Frontend | None = None,
        gateways: GatewayAccess | None = None,
    ):
        """With a `frontend`, the only model, `start` calls `serve` as well. `gateways` recognizes
        the gateways that may resume streams of other servers."""
        self._gateways = gateways
        self._whole_config = config
        self._config = config.server
        self._root_path = config.server.path_prefix
        self._frontend = frontend
        self._connections = ConnectionServer(self._handle, self._make_request)
        self._listener = Listener(self._connections, self._config)
        self._tracing: Tracing | None = None
        self._readiness = Readiness("the server is starting")
        self._progress = ""
        self._application: web.AppRunner | None = None
        self._handler: web.Server | None = None
        self._files: FileStore | None = None
        self._draining = False
        self._handling = RequestCount()

    def make_app(self, models: ModelGroup) -> web.Application:
        """Returns the application that answers requests, after `open_files`."""
        longest = max(each.max_model_len for each in models)
        cors, max_bytes = Cors(self._config.cors_origins), context.largest_body(longest)
        log = RequestLog(self._whole_config, self._tracing.trace if self._tracing else None)
        app = web.Application(
            middlewares=[
                *([] if self._gateways is None else [self._gateways.accept]),
                self._count,
                log.record,
                errors.json_errors,
                cors.answer_preflight,
                limits.require_key,
                bound_time,
            ],
            client_max_size=max_bytes,
        )
        app.on_cleanup.append(log.close)
        app.on_response_prepare.append(mark_response)
        app.on_response_prepare.append(mark_version)
        app.on_response_prepare.append(cors.mark_response)
        app[context.MODELS] = models
        app[limits.ACCOUNTS] = self._accounts
        app[limits.OPEN_PATHS] = limits.MONITORING_PATHS | page.PAGE_PATHS
        app[ADMISSION] = {each.config.name: AdmissionControl(each) for each in models}
        app[limits.RATE_LIMITER] = limits.RateLimiter()
        app[OBJECT_STORE] = ObjectStore()
        add_responses(app)
        app[CONNECTIONS] = self._connections  # none within another application, which has its own
        app[context.REQUEST_BODIES] = context.RequestBodies(self._connections.counts, max_bytes)
        app[READINESS] = self._readiness
        app[context.STARTED] = int(time.time())
        app[context.FINGERPRINTS] = {each.config.name: info.fingerprint(each) for each in models}
        app[FILES] = self._files
        if self._files is not None:
            app[batches.BATCHES] = batches.Batches(app, self._files)
        routes.add_routes(app)
        page.add_page(app)
        return app

    # ---------------------------------------------------------------- requests

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Rejects requests that are refused by their heads alone, and hands the rest to the
        application."""
        try:
            self._check_head(request)
            if self._root_path and request.path == self._root_path and request.method == "GET":
                return await page.add_slash(request)
            # one that came before the application was there is not of its kind
            if self._handler is not None and isinstance(request, web.Request):
                return await self._handler.request_handler(request)
            path = request.path.removeprefix(self._root_path)
            if request.method == "GET" and path in page.HANDLERS:
                response = await page.HANDLERS[path](request)
            elif request.path == "/health/live":
                response = errors.json_response(await info.live(request))
            else:
                raise NotReadyError(f"the server is starting{self._progress}")
        except RequestError as error:
            response = errors.error_response(error, request.path)
            name_code(request, response)
            if not isinstance(error, NotReadyError):
                self._connections.refused.count(f"({error.code}) from {request.remote}")
        await mark_response(request, response)
        return response

    def _check_head(self, request: web.BaseRequest) -> None:
        """Raises `RequestError` for a name that is not the server's, or an expectation that is
        unknown; refuses versions of HTTP other than 1.0 and 1.1."""
        if request.version not in (HttpVersion10, HttpVersion11):
            cast(Connection, request.protocol).refuse(
                505, "only HTTP/1.1 and HTTP/1.0 are understood", "unsupported_http_version"
            )
        self._listener.hosts.check(request)
        expectation = request.headers.get("Expect", "100-continue")
        if request.version == HttpVersion11 and expectation.lower() != "100-continue":
            raise RequestError(
                "the only expectation that is understood is 100-continue",
                status=417,
                code="unknown_expectation",
            )

    def _make_request(
        self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any
    ) -> web.BaseRequest:
        if self._root_path:
            message = self._below_root(message)
        if self._handler is not None:
            return self._handler.request_factory(message, payload, protocol, writer, task)
        return web.BaseRequest(message, payload, protocol, writer, task, task.get_loop())

    def _below_root(self, message: Any) -> Any:
        """Returns the head of a request without `server.root_path` at the beginning of its path."""
        rest = message.path.removeprefix(self._root_path)
        if rest == message.path or not rest.startswith("/"):
            return message
        return message._replace(path=rest, url=URL(rest, encoded=True))

    @web.middleware
    async def _count(self, request: web.Request, handler: errors.Handler) -> web.StreamResponse:
        """Counts the requests that are being handled, for `drain`; while that waits, new requests
        on connections that are open still are refused."""
        response: web.StreamResponse
        with self._handling:
            if self._draining and request.path != "/health/live":
                error = NotReadyError("the server is shutting down")
                response = errors.error_response(error, errors.local_path(request))
            else:
                response = await handler(request)
            if self._draining:
                response.force_close()
            return response

    # ---------------------------------------------------------------- life

    async def start(self) -> str:
        """Begins to listen and returns the URL (`unix:PATH` for a Unix socket).

        Raises:
            ConfigError: the address cannot be bound, or the file of API keys, or a TLS file, cannot
                be used, or traces are to be sent without OpenTelemetry.
        """
        self._tracing = await _start_tracing(self._whole_config)
        await self.open_files()
        url = await self._listener.bind()
        if self._frontend is not None:
            await self.serve(ModelGroup([self._frontend]))
        self._listener.listen()
        return url

    async def open_files(self) -> None:
        """Reads the API keys, and takes the folder of files. Raises `ConfigError`."""
        keys = await asyncio.to_thread(ApiKeys.load, self._config)
        self._accounts = limits.Accounts(keys)
        self._files = await asyncio.to_thread(FileStore.open, self._config)

    def on_progress(self, phase: str, done: int, total: int) -> None:
        """Notes how far the start is, for requests that come before its end; `done` and `total`
        are as for `StartupDisplay.on_progress`."""
        part = f", {100 * done // total} %" if total else ""
        self._progress = f" ({phase}{part})"

    async def serve(self, models: ModelGroup) -> None:
        """From now on answers requests by models that are loaded."""
        application = web.AppRunner(self.make_app(models))
        await application.setup()
        self._application = application
        self._handler = application.server  # which has no socket of its own
        self.enter()

    def enter(self) -> None:
        """From now on reports on `/health/ready` that requests should be sent."""
        self._readiness.obstacle = None

    def leave(self) -> None:
        """From now on reports on `/health/ready` that no more requests should be sent, and answers
        requests that come all the same."""
        self._readiness.obstacle = "the server is shutting down"

    async def reload_keys(self) -> None:
        """Reads the file of API keys again; one that cannot be used leaves the keys as they are."""
        await self._accounts.reload(self._config)

    async def drain(self) -> None:
        """Stops listening, and returns when the requests that have come are answered.

        Requests that come over open connections are answered 503 and end their connection; for
        requests that are on their way, idle connections stay open for a second.

        A pause ends: from now on there is no `/resume` that could end it, and a server that is to
        end is expected to answer first what it has accepted. A second signal ends the requests with
        an error.
        """
        self.leave()
        self._draining = True
        if self._application is not None:
            await self._application.app[context.MODELS].end_pauses()
            await page.end_live_streams(self._application.app)
            if (under_way := self._application.app.get(batches.BATCHES)) is not None:
                await under_way.stop(self._application.app)
        await self._listener.stop()
        # not aiohttp's pre_shutdown: it would drop the part of a body that is still to come
        await self._connections.wait_closed(_LAST_REQUESTS_S)
        await self._handling.wait_for_none()

    async def close(self) -> None:
        """Closes all connections, after half a second for handlers that are about to end."""
        await self._listener.close()
        await asyncio.sleep(0)  # requests that have come begin to be handled
        self._connections.pre_shutdown()
        if self._application is not None:
            await self._application.cleanup()
        await self._connections.shutdown(_LAST_EVENTS_S)
        self._connections.close()
        if self._files is not None:
            self._files.close()
        if self._tracing is not None:  # last: requests have ended until here
            await self._tracing.close()


class Cors:
    """Lets the pages of some origins read replies (the CORS protocol of the Fetch standard); `*`
    stands for all origins."""

    def __init__(self, origins: Iterable[str]):
        self._origins = frozenset(origins)

    def _allowed(self, request: web.Request) -> str | None:
        """Returns the value of `Access-Control-Allow-Origin` if the request's origin may have
        one."""
        if "*" in self._origins:
            return "*"
        origin = request.headers.get("Origin")
        return origin if origin in self._origins else None

    @web.middleware
    async def answer_preflight(
        self, request: web.Request, handler: errors.Handler
    ) -> web.StreamResponse:
        """Answers the preflight request that a browser sends before another site's request; it
        carries no key."""
        is_preflight = (
            request.method == "OPTIONS"
            and "Origin" in request.headers
            and "Access-Control-Request-Method" in request.headers
        )
        if not is_preflight or self._allowed(request) is None:
            return await handler(request)
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": request.headers.get(
                "Access-Control-Request-Headers", "Authorization, Content-Type"
            ),
            "Access-Control-Max-Age": str(_PREFLIGHT_AGE_S),
        }
        return web.Response(status=204, headers=headers)

    async def mark_response(self, request: web.Request, response: web.StreamResponse) -> None:
        """Sets the headers of a response that name whose pages may read it."""
        if not self._origins:
            return
        if (origin := self._allowed(request)) is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED
        if origin != "*":
            response.headers.add("Vary", "Origin")


async def mark_response(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Sends the request's id back with a response, the server's name, and the state of the key's
    limits with a response to a POST request."""
    response.headers[REQUEST_ID_HEADER] = request_id(request)
    response.headers["Server"] = errors.SERVER_NAME  # instead of aiohttp's and Python's versions
    account = request.get(limits.ACCOUNT)
    if account is not None and request.method == "POST":
        response.headers.update(account.headers())


async def _start_tracing(config: Config) -> Tracing | None:
    """Returns the traces that the configuration asks for, None if it asks for none.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if not config.tracing.endpoint:
        return None
    try:
        module = await asyncio.to_thread(importlib.import_module, "aioinfer.api.http.tracing")
    except ImportError as error:
        raise ConfigError(
            "tracing.endpoint needs OpenTelemetry, as installed by pip install "
            f"'aioinfer[otel]': {error}"
        ) from error
    return await module.Tracing.start(config)


async def create_app(config: Config, frontend: Frontend | None = None) -> web.Application:
    """Returns the server's application, to be run by itself or mounted by `add_subapp`.

    Its middlewares (API keys, limits, errors as JSON, the request log) apply to its paths alone.
    Run the outer application with `handler_cancellation=True`, as in `web.run_app(outer,
    handler_cancellation=True)`: else a client that goes away leaves its request running.

    Args:
        config: the configuration.
        frontend: the engines, such as `AsyncLLM.frontend`, which then stay the caller's. Without
            it they are launched here, and end with the application.

    Raises:
        ConfigError: the configuration does not go with the model or the machine.
        EngineDeadError: a worker failed to start.
    """
    server = HttpServer(config)
    launched = None
    try:
        await server.open_files()
        if frontend is None:
            frontend = launched = await Frontend.launch(config)
        app = server.make_app(ModelGroup([frontend]))
    except BaseException:
        if launched is not None:
            await launched.close()
        await server.close()
        raise

    async def life(_: web.Application) -> AsyncIterator[None]:
        server.enter()
        yield
        if launched is not None:
            await launched.close()
        await server.close()

    async def end_pause(_: web.Application) -> None:
        # engines of a caller are the caller's to resume
        if launched is not None and launched.control.is_paused:
            await launched.control.end_pause()

    app.cleanup_ctx.append(life)
    app.on_shutdown.append(end_pause)  # as `HttpServer.drain` does
    return app
