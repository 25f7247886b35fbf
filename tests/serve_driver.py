"""A deployment under Ray Serve in a process of its own, for `functional/test_serve.py`: Ray starts
threads and child processes, and warns, in whatever process joins a cluster.

    python -m tests.serve_driver SECTION.KEY=VALUE ...

It writes the URL of the gateway. Each line `scale N` on its standard input is answered `scaled`
once that many replicas run, a line `address` with the address of the cluster, and `applications`
with the names of the applications on it; at its end the deployment is taken down in order.
"""

from __future__ import annotations

import asyncio
import sys
import time

import ray
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from aioinfer.deploy.application import gateway_urls


def deploy(settings: list[str], replicas: int) -> None:
    """Does what `serve deploy` does with the file in `configs/`, in which the number of replicas is
    laid over the application's, and returns when so many run."""
    with open("configs/serve.yaml", encoding="utf-8") as file:
        document = yaml.safe_load(file)
    (application,) = document["applications"]
    application["args"] = {
        "config": "configs/smollm2.toml",
        "set": settings,
        "cpus_per_replica": 0.1,
        "gpus_per_replica": 0,
    }
    application["deployments"] = [{"name": "Replica", "num_replicas": replicas}]
    _get_global_client().deploy_apps(ServeDeploySchema(**document))
    while not is_done(replicas):
        time.sleep(0.1)


def is_done(replicas: int) -> bool:
    found = serve.status().applications.get("aioinfer")
    if found is not None and found.status == "DEPLOY_FAILED":
        raise RuntimeError(found.message)
    if found is None or "Replica" not in found.deployments:
        return False
    states = found.deployments["Replica"].replica_states
    return states == {"RUNNING": replicas} and found.status == "RUNNING"


def say(text: str) -> None:
    sys.stdout.write(f"driver: {text}\n")
    sys.stdout.flush()


def start_ray() -> None:
    """Starts a cluster, which Ray gives up after 30 s on a machine that does other work."""
    for left in reversed(range(5)):
        try:
            # nodes of one machine need nothing of the network
            ray.init("local", include_dashboard=False, num_cpus=1, _node_ip_address="127.0.0.1")
            return
        except Exception:
            ray.shutdown()
            if not left:
                raise


def main() -> None:
    start_ray()
    try:
        serve.start(proxy_location="Disabled")
        deploy(sys.argv[1:], 2)
        say(asyncio.run(gateway_urls("aioinfer"))[0])
        for line in sys.stdin:
            match line.split():
                case ["scale", number]:
                    deploy(sys.argv[1:], int(number))
                    say("scaled")
                case ["address"]:
                    say(ray.get_runtime_context().gcs_address)
                case ["applications"]:
                    say(" ".join(sorted(serve.status().applications)))
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
