"""`aioinfer serve MODEL`, and the start that it shares with `python -m aioinfer --config FILE`."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aioinfer.checkpoint.source import check_files
from aioinfer.cli.interrupts import ended_by_interrupts
from aioinfer.cli.model_options import add_model_options, announce, load_all
from aioinfer.config import Config
from aioinfer.executor import fork_server


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
    given = {key: value for key, value in given.items() if value is not None}
    return start(load_all(options, given))


def start(configs: Sequence[Config]) -> int:
    """Serves until a signal or a failure ends it, after the checks that need no PyTorch, whose
    import takes seconds: files of the models, API keys, TLS files, the address.

    `configs` has the configuration of each model. Returns the exit status. Raises what
    `aioinfer.cli.server_process.run` does.
    """
    for each in configs:
        check_files(each.model)
    with ended_by_interrupts(), _uncollected():
        _prepare(configs)
        from aioinfer.cli.server_process import run as serve  # imports PyTorch

    return serve(configs)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Context of imports. What they make lives as long as the process, and the garbage collector
    would go through it again and again, a sixth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _prepare(configs: Sequence[Config]) -> None:
    """Starts the fork server, which imports PyTorch meanwhile, checks what concerns the server, and
    says what is going to happen. Raises `ConfigError`."""
    config = configs[0]
    if config.parallel.executor in ("auto", "multiprocess") and "RANK" not in os.environ:
        fork_server.start()
    # of the ranks that torchrun has started, the first alone listens
    if os.environ.get("RANK", "0") == "0":
        check_server(config)
        address = f"{config.server.host}:{config.server.port}"
        if config.server.unix_socket is not None:
            address = config.server.host
        elif not config.server.port:
            address = "a free port"
        if config.logging.format == "text":  # a program reads JSON
            names = ", ".join(each.name for each in configs)
            announce(f"starts {names} at {address}")


def check_server(config: Config) -> None:
    """Checks the API keys, the TLS files and the address. Raises `ConfigError`."""
    from aioinfer.api.http.keys import ApiKeys
    from aioinfer.api.http.listener import check_address, tls_context

    ApiKeys.load(config.server)
    tls_context(config.server)
    check_address(config.server)
