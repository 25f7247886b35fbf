"""`aioinfer deploy`: replicas behind a gateway, under Ray Serve."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

from aioinfer.checkpoint.source import check_files
from aioinfer.cli.interrupts import ended_by_interrupts
from aioinfer.cli.model_options import add_model_options, announce, load
from aioinfer.errors import ConfigError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_model_options(parser)
    parser.add_argument("--replicas", type=int, metavar="N", help="so many replicas, always")
    parser.add_argument("--min-replicas", type=int, default=1, metavar="N")
    parser.add_argument(
        "--max-replicas", type=int, metavar="N", help="scale by what there is to do, up to so many"
    )
    parser.add_argument(
        "--target-utilization",
        type=float,
        default=0.6,
        metavar="PART",
        help="of slots and KV cache, which scaling aims at (0.6)",
    )
    parser.add_argument(
        "--gateways", type=int, default=1, metavar="N", help="each on a node of its own (1)"
    )
    parser.add_argument("--cpus-per-replica", type=float, default=1.0, metavar="N")
    parser.add_argument("--gpus-per-replica", type=float, metavar="N")
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="of a Ray cluster, or auto for the one of this machine; without it one is started",
    )
    parser.add_argument("--name", default="aioinfer", help="of the application (aioinfer)")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(options: argparse.Namespace) -> int:
    """Deploys, and serves until SIGINT or SIGTERM; then takes the application down in order."""
    config = load(options)
    if options.address is None:  # the replicas run on this machine
        check_files(config.model)
    announce(f"deploys {config.name} under Ray Serve")

    with ended_by_interrupts():
        try:
            import ray
            from ray import serve
        except ImportError:
            raise ConfigError("deploy needs Ray Serve: pip install 'aioinfer[ray]'") from None
        from aioinfer.deploy.application import Arguments, deploy, watched

    fixed = options.replicas
    try:
        arguments = Arguments(  # type: ignore[call-arg]  # defaults of pydantic's
            min_replicas=fixed or options.min_replicas,
            max_replicas=fixed or options.max_replicas or options.min_replicas,
            target_utilization=options.target_utilization,
            gateways=options.gateways,
            cpus_per_replica=options.cpus_per_replica,
            gpus_per_replica=options.gpus_per_replica,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for library in ("ray", "ray.serve"):  # their records go to Ray's folder of logs
        logging.getLogger(library).setLevel(logging.ERROR)
    where: dict[str, Any] = {"address": options.address}
    if options.address is None:
        # no other machine needs to reach a cluster that ends with this command
        where = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    cluster: Any = ray.init(**where, logging_level=logging.ERROR, log_to_driver=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has set one of its own
    try:
        serve.start(proxy_location="Disabled")
        model, logs = config.name, f"{cluster.address_info['session_dir']}/logs"
        _say(f"{model}: loading {arguments.min_replicas} replicas (logs, and Ray's: {logs})")
        with watched(options.name, lambda n, wanted: _say(f"{n} of {wanted} replicas run")):
            urls = deploy(config, arguments, options.name)
            with suppress(KeyboardInterrupt):
                _say(f"{model} is ready at {' '.join(urls)}")
                threading.Event().wait()
        _say("ending once the requests that have come are answered")
        serve.delete(options.name)
    finally:
        ray.shutdown()  # which ends a cluster of this command's own with all that runs there
    return 0
