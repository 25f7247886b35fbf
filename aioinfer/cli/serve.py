"""`aioinfer serve MODEL`."""

from __future__ import annotations

import argparse
from typing import Any

from aioinfer.cli.model_options import add_model_options, load


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_model_options(parser)
    parser.add_argument("--host", help="address to listen on (server.host)")
    parser.add_argument("--port", type=int, help="port to listen on (server.port)")
    parser.add_argument(
        "--name",
        action="append",
        metavar="NAME",
        help="a name that requests may use for the model (server.served_model_names; repeatable)",
    )


def run(options: argparse.Namespace) -> int:
    """Serves until a signal or a failure ends it."""
    given: dict[str, Any] = {
        "server.host": options.host,
        "server.port": options.port,
        "server.served_model_names": options.name,
    }
    config = load(options, {key: value for key, value in given.items() if value is not None})
    from aioinfer.api.app import run as serve

    return serve(config)
