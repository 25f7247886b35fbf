"""The HTTP server: its routes, and the listening socket in front of them. `app` starts and stops
it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from aiohttp import web

from aioinfer.api import chat, completions, info, limits, metrics, page, tokenization
from aioinfer.api.access import Cors, mark_response, require_key
from aioinfer.api.admission import ADMISSION, Admission, bound_time
from aioinfer.api.context import FRONTEND, STARTED
from aioinfer.api.errors import Handler, json_errors
from aioinfer.api.keys import ApiKeys
from aioinfer.api.limits import ACCOUNTS, Accounts
from aioinfer.api.listener import Listener, tls_context
from aioinfer.api.rate_limit import RATE_LIMITER, RateLimiter
from aioinfer.api.request_log import RequestLog
from aioinfer.config import ServerConfig

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend

#: Handlers get this long to send their last events once the engine has ended their requests.
_LAST_EVENTS_S = 0.5


def check_files(config: ServerConfig) -> None:
    """Raises `ConfigError` if the file of API keys, or a TLS file, cannot be used."""
    ApiKeys.load(config)
    tls_context(config)


class HttpServer:
    """Serves a model on a socket. Nothing listens before `start`."""

    def __init__(self, frontend: Frontend):
        self._config = frontend.config.server
        self._limits = frontend.config.limits
        self._listener: Listener | None = None
        self._draining = False
        self._num_handling = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._runner = web.AppRunner(
            self._make_app(frontend),
            # or the handler of a client that went away would wait for the whole output
            handler_cancellation=True,
            auto_decompress=False,  # a small body could unpack to a huge one
            access_log=None,
            shutdown_timeout=_LAST_EVENTS_S,
        )

    def _make_app(self, frontend: Frontend) -> web.Application:
        cors = Cors(self._config.cors_origins)
        app = web.Application(
            middlewares=[
                self._count,
                RequestLog(frontend.config).record,
                json_errors,
                cors.answer_preflight,
                require_key,
                limits.bound_use,
                bound_time,
            ],
            client_max_size=self._config.max_body_bytes,
        )
        app.on_response_prepare.append(mark_response)
        app.on_response_prepare.append(cors.mark_response)
        app.on_response_prepare.append(limits.mark_response)
        app[FRONTEND] = frontend
        app[ADMISSION] = Admission(frontend)
        app[RATE_LIMITER] = RateLimiter()
        app[STARTED] = int(time.time())
        app.router.add_post("/v1/completions", completions.create_completion)
        app.router.add_post("/v1/chat/completions", chat.create_chat_completion)
        app.router.add_get("/v1/models", info.list_models)
        app.router.add_get("/v1/models/{id:.+}", info.get_model)
        app.router.add_post("/tokenize", tokenization.tokenize)
        app.router.add_post("/detokenize", tokenization.detokenize)
        app.router.add_get("/health", info.health)
        app.router.add_get("/metrics", metrics.show_metrics)
        app.router.add_get("/version", info.version)
        page.add_page(app)
        return app

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Counts the requests that are being handled, for `drain`; while that waits, replies close
        their connections."""
        self._num_handling += 1
        self._idle.clear()
        try:
            response = await handler(request)
            if self._draining:
                response.force_close()
            return response
        finally:
            self._num_handling -= 1
            if not self._num_handling:
                self._idle.set()

    async def start(self) -> str:
        """Begins to listen and returns the URL (`unix:PATH` for a Unix socket).

        Raises:
            ConfigError: the address cannot be bound, or the file of API keys, or a TLS file, cannot
                be used.
        """
        keys = await asyncio.to_thread(ApiKeys.load, self._config, self._limits)
        self._runner.app[ACCOUNTS] = Accounts(keys)
        tls = await asyncio.to_thread(tls_context, self._config)
        await self._runner.setup()
        assert self._runner.server is not None
        self._listener = Listener(self._runner.server, self._config, tls)
        return await self._listener.start()

    async def reload_keys(self) -> None:
        """Reads the file of API keys again; one that cannot be used leaves the keys as they are."""
        app = self._runner.app
        await app[ACCOUNTS].reload(app[FRONTEND].config)

    async def drain(self) -> None:
        """Stops listening, and returns when the requests that have come are answered."""
        self._draining = True
        await page.end_live_streams(self._runner.app)
        if self._listener is not None:
            await self._listener.stop()
        # not aiohttp's pre_shutdown: it would drop what is still to come of a body
        await self._idle.wait()

    async def close(self) -> None:
        """Closes all connections, after half a second for handlers that are about to end."""
        if self._listener is not None:
            await self._listener.close()
        await self._runner.cleanup()
