"""The whole server as an application of aiohttp, for use inside another one.

`create_app` is public as `aioinfer.create_app`. The settings of the socket stay with the outer
application's server: TLS, allowed hosts, and the time-outs and numbers of connections.
"""

from __future__ import annotations

from aiohttp import web

from aioinfer.api.server import HttpServer
from aioinfer.config import Config
from aioinfer.engine.frontend import Frontend


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
        app = server.make_app(frontend)
    except BaseException:
        if launched is not None:
            await launched.close()
        await server.close()
        raise

    async def begin(_: web.Application) -> None:
        server.enter()

    async def end_pause(_: web.Application) -> None:
        # engines of a caller are the caller's to resume
        if launched is not None and launched.is_paused:
            launched.resume()

    async def end(_: web.Application) -> None:
        if launched is not None:
            await launched.close()
        await server.close()

    app.on_startup.append(begin)
    app.on_shutdown.append(end_pause)  # as `HttpServer.drain` does
    app.on_cleanup.append(end)
    return app
