"""The HTTP server: its routes, and the listening socket in front of them. `app` owns its life."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from aiohttp import web

from aioinfer.api import chat, completions, info, metrics, tokenization
from aioinfer.api.context import ENGINE, STARTED
from aioinfer.api.errors import Handler, json_errors
from aioinfer.errors import ConfigError

if TYPE_CHECKING:
    from aioinfer.engine.engine import Engine

#: Handlers get this long to send their last events once the engine has ended their requests.
_LAST_EVENTS_S = 0.5
#: Connections that may wait to be accepted: clients that arrive together are not to be turned away.
_BACKLOG = 1024


class HttpServer:
    """Serves an engine on a socket. Nothing listens before `start`."""

    def __init__(self, engine: Engine):
        self._config = engine.config.server
        self._draining = False
        self._num_handling = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._runner = web.AppRunner(
            self._make_app(engine),
            handler_cancellation=True,  # or the handler of a client that went away would wait for the whole output
            auto_decompress=False,  # a small body could unpack to a huge one
            access_log=None,
            shutdown_timeout=_LAST_EVENTS_S,
        )

    def _make_app(self, engine: Engine) -> web.Application:
        app = web.Application(middlewares=[self._count, json_errors], client_max_size=self._config.max_body_bytes)
        app[ENGINE] = engine
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
        return app

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Keeps count of the requests that are being handled, for `drain`; while it waits, replies close their connections."""
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
        """Begins to listen and returns the URL. Raises `ConfigError` if the address cannot be had."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._config.host, self._config.port, backlog=_BACKLOG).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"cannot listen at server.host = {self._config.host!r}, server.port = {self._config.port}: {error}"
            ) from error
        host, port = self._runner.addresses[0][:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def drain(self) -> None:
        """Refuses new connections, and returns when the requests that have come are answered."""
        self._draining = True
        for site in self._runner.sites:
            await site.stop()
        # not aiohttp's pre_shutdown: it would drop what is still to come of a body
        await self._idle.wait()

    async def close(self) -> None:
        """Closes all connections, after a moment for those whose handlers are about to end."""
        await self._runner.cleanup()
