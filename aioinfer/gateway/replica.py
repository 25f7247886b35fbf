"""A replica behind gateways: the HTTP server of this package in a process that something else owns,
and its reports.

`deploy.application` runs it in an actor of Ray Serve; nothing here needs Ray.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from aioinfer.api.event_stream import GatewayAccess
from aioinfer.api.server import HttpServer
from aioinfer.cluster.reports import ReplicaLoad
from aioinfer.config import Config
from aioinfer.engine.frontend import Frontend
from aioinfer.errors import EngineDeadError
from aioinfer.gateway.reporter import Reporter, ReportServer
from aioinfer.startup import settle_process

#: From the report that a replica leaves until it refuses requests: they may be on their way.
_LEAVING_S = 0.5


class Address(NamedTuple):
    """The address of a replica. `name` differs after each start. One without `reports_url` is
    asked for its health."""

    name: str
    url: str
    reports_url: str


class ReplicaServer:
    """One replica: engines, HTTP server and reports."""

    def __init__(
        self,
        config: Config,
        frontend: Frontend,
        server: HttpServer,
        reports: ReportServer,
        address: Address,
    ):
        """Made by `start`."""
        self.address = address
        self._config, self._frontend, self._server = config.server, frontend, server
        self._reports, self._reporter = reports, reports.reporter

    @classmethod
    async def start(cls, config: Config, host: str, name: str, token: str) -> ReplicaServer:
        """Loads the model and serves it on a free port of `host`, for gateways that have `token`.

        Raises what `Frontend.launch` and `HttpServer.start` do.
        """
        config = replica_config(config, host)
        frontend = await Frontend.launch(config)
        server = HttpServer(config, frontend, GatewayAccess(token))
        reports = ReportServer(Reporter(frontend), token)
        try:
            address = Address(name, await server.start(), await reports.start(host))
        except BaseException:
            await frontend.close()
            await server.close()
            raise
        settle_process()
        return cls(config, frontend, server, reports, address)

    def load(self) -> ReplicaLoad:
        """Returns the current load."""
        return self._reporter.load()

    def check(self) -> None:
        """Raises `EngineDeadError` once no engine lives."""
        if not self._frontend.is_healthy():
            raise EngineDeadError(self._frontend.dead_reason)

    async def stop(self) -> None:
        """Takes no more requests, answers the requests that have come within
        `server.shutdown_timeout_s`, and ends."""
        self._reporter.leave()
        self._server.leave()
        if self._frontend.is_healthy():
            await asyncio.sleep(max(_LEAVING_S, self._config.shutdown_delay_s))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._server.drain(), self._config.shutdown_timeout_s)
        await self._frontend.close()
        await self._reports.close()
        await self._server.close()


def replica_config(config: Config, host: str) -> Config:
    """Returns the configuration of a replica: settings of the address, TLS and names are the
    gateway's."""
    server = replace(
        config.server,
        host=host,
        port=0,
        tls_files=[],
        allowed_hosts=[],
        root_path="",
    )
    return replace(config, server=server)
