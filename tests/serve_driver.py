"""A deployment under Ray Serve in a process of its own, for `functional/test_serve.py`: Ray starts
threads and child processes, and warns, in whatever process joins a cluster.

    python -m tests.serve_driver SECTION.KEY=VALUE ...

It writes the URL of the gateway. Each line `scale N` on its standard input is answered `scaled`
once that many replicas run; at its end the deployment is taken down in order.
"""

from __future__ import annotations

import sys
import time

import ray
from ray import serve

from aioinfer.config import load_config
from aioinfer.deploy.application import Arguments, deploy


def count_replicas() -> int:
    (application,) = serve.status().applications.values()
    return application.deployments["Replica"].replica_states.get("RUNNING", 0)


def say(text: str) -> None:
    sys.stdout.write(f"driver: {text}\n")
    sys.stdout.flush()


def main() -> None:
    config = load_config("configs/smollm2.toml", sys.argv[1:])

    def scale(replicas: int) -> list[str]:
        arguments = Arguments(
            min_replicas=replicas, max_replicas=replicas, cpus_per_replica=0.1, gpus_per_replica=0
        )
        return deploy(config, arguments, "aioinfer")

    # nodes of one machine need nothing of the network
    ray.init("local", include_dashboard=False, num_cpus=1, _node_ip_address="127.0.0.1")
    try:
        say(scale(2)[0])
        for line in sys.stdin:
            replicas = int(line.split()[1])
            scale(replicas)
            while count_replicas() != replicas:
                time.sleep(0.1)
            say("scaled")
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
