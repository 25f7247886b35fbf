"""`aioinfer gateway`: one address in front of servers that are already there."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from aioinfer.cli.model_options import add_model_options, announce, load
from aioinfer.config import Config
from aioinfer.errors import ConfigError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_model_options(parser)
    parser.add_argument("--host", help="address to listen on (server.host)")
    parser.add_argument("--port", type=int, help="port to listen on (server.port)")
    parser.add_argument(
        "--server",
        action="append",
        required=True,
        metavar="URL",
        help="of a server that generates (repeatable); what servers have cached is not known: each "
        "request goes to the one with the fewest of this gateway's requests under way",
    )
    parser.add_argument(
        "--prefill",
        action="append",
        default=[],
        metavar="URL",
        help="of a server that computes prompts for the others (repeatable)",
    )


def run(options: argparse.Namespace) -> int:
    """Passes requests on until SIGINT or SIGTERM; a second signal does not wait for the requests
    under way."""
    given = {"server.host": options.host, "server.port": options.port}
    config = load(options, {key: value for key, value in given.items() if value is not None})
    if config.cache.peer_key_file is None:
        raise ConfigError("a gateway needs the key of its servers: cache.peer_key_file")
    announce(f"starts a gateway to {', '.join(options.server + options.prefill)}")
    asyncio.run(_serve(config, options.server, options.prefill))
    return 0


async def _serve(config: Config, servers: Sequence[str], prefill: Sequence[str]) -> None:
    from aioinfer.api.event_stream import gateway_token  # imports PyTorch
    from aioinfer.cli.server_process import StopSignals
    from aioinfer.gateway.proxy import Gateway
    from aioinfer.gateway.replica import Address

    def addresses(urls: Sequence[str]) -> list[Address]:
        return [Address(url, url.rstrip("/"), "") for url in urls]

    async def discover() -> list[Address]:
        return addresses(servers)

    async def discover_prefill() -> list[Address]:
        return addresses(prefill)

    assert config.cache.peer_key_file is not None
    gateway = Gateway(
        config,
        discover,
        gateway_token(config.cache.peer_key_file),
        discover_prefill=discover_prefill if prefill else None,
    )
    url = await gateway.start()
    sys.stdout.write(f"The gateway is ready at {url}\n")
    sys.stdout.flush()
    stop = StopSignals()
    try:
        await stop.first.wait()
        await gateway.stop(stop.second)
    finally:
        stop.close()
