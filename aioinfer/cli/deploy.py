"""`aioinfer deploy`: replicas behind a gateway, under Ray Serve."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from contextlib import suppress
from typing import Any, NamedTuple

from aioinfer.checkpoint.source import check_files
from aioinfer.cli.interrupts import ended_by_interrupts
from aioinfer.cli.model_options import add_model_options, announce, load
from aioinfer.cli.serve import check_server
from aioinfer.errors import ConfigError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_model_options(parser)
    parser.add_argument("--replicas", type=int, metavar="N", help="so many replicas, always")
    parser.add_argument("--min-replicas", type=int, metavar="N")
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


class _Replicas(NamedTuple):
    """Bounds of the number of replicas."""

    min: int
    max: int


def _check(options: argparse.Namespace) -> _Replicas:
    """Returns the bounds of the number of replicas that the options describe. Raises `ConfigError`
    for options that contradict each other or are out of range."""
    counts = {
        "--replicas": options.replicas,
        "--min-replicas": options.min_replicas,
        "--max-replicas": options.max_replicas,
        "--gateways": options.gateways,
    }
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"{name} must be at least 1, not {count}")
    reserved = {
        "--cpus-per-replica": options.cpus_per_replica,
        "--gpus-per-replica": options.gpus_per_replica,
    }
    for name, amount in reserved.items():
        if amount is not None and not 0 <= amount < float("inf"):
            raise ConfigError(f"{name} must be at least 0, not {amount:g}")
    if not 0 < options.target_utilization <= 10:
        raise ConfigError(
            f"--target-utilization must be above 0 and at most 10, not "
            f"{options.target_utilization:g}"
        )
    if not options.name:
        raise ConfigError("--name must not be empty")
    if options.replicas is not None:
        if options.min_replicas is not None or options.max_replicas is not None:
            raise ConfigError(
                "--replicas fixes the number of replicas: leave it out, or --min-replicas and "
                "--max-replicas"
            )
        return _Replicas(options.replicas, options.replicas)
    lowest = options.min_replicas or 1
    highest = options.max_replicas or lowest
    if highest < lowest:
        raise ConfigError(f"--max-replicas is {highest}, less than --min-replicas, {lowest}")
    return _Replicas(lowest, highest)


def run(options: argparse.Namespace) -> int:
    """Deploys, and serves until SIGINT or SIGTERM; then takes the application down in order."""
    replicas = _check(options)
    config = load(options)
    if options.address is None:  # replicas and gateway run on this machine
        check_files(config.model)
        check_server(config)
    announce(f"deploys {config.name} under Ray Serve")

    with ended_by_interrupts():
        try:
            import ray
            from ray import serve
        except ImportError:
            raise ConfigError("deploy needs Ray Serve: pip install 'aioinfer[ray]'") from None
        from aioinfer.deploy.application import Arguments, deploy, watched

    arguments = Arguments(  # type: ignore[call-arg]  # defaults of pydantic's
        min_replicas=replicas.min,
        max_replicas=replicas.max,
        target_utilization=options.target_utilization,
        gateways=options.gateways,
        cpus_per_replica=options.cpus_per_replica,
        gpus_per_replica=options.gpus_per_replica,
    )
    for library in ("ray", "ray.serve"):  # their records go to Ray's folder of logs
        logging.getLogger(library).setLevel(logging.ERROR)
    where: dict[str, Any] = {"address": options.address}
    if options.address is None:
        # no other machine needs to reach a cluster that ends with this command
        where = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    try:
        cluster: Any = ray.init(**where, logging_level=logging.ERROR, log_to_driver=False)
    except ConnectionError as error:
        raise ConfigError(f"--address {options.address}: {error}") from error
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has set one of its own
    try:
        serve.start(proxy_location="Disabled")
        if options.name in serve.status().applications:
            raise ConfigError(
                f"an application {options.name!r} runs on this cluster already: --name gives "
                "this one another name"
            )
        model, logs = config.name, f"{cluster.address_info['session_dir']}/logs"
        count = f"{replicas.min} replica{'s' if replicas.min > 1 else ''}"
        _say(f"{model}: loading {count} (logs, and Ray's: {logs})")
        try:
            with watched(
                options.name, lambda n, wanted: _say(f"{n} of {wanted} replicas run"), _say
            ):
                urls = deploy(config, arguments, options.name)
                with suppress(KeyboardInterrupt):
                    _say(f"{model} is ready at {' '.join(urls)}")
                    threading.Event().wait()
            _say("ending once the requests that have come are answered")
        finally:  # also where a cluster that goes on would keep what is not loaded yet
            serve.delete(options.name)
    finally:
        ray.shutdown()  # which ends a cluster of this command's own with all that runs there
    return 0
