"""A deployment under Ray Serve on a cluster of several nodes, all of which are this machine, in a
process of its own, for `functional/test_serve_cluster.py`.

    python -m tests.serve_cluster_driver SECTION.KEY=VALUE ...

It writes the URLs of the gateways. Each line on its standard input is answered with the nodes'
addresses of the replicas that run. At its end the deployment and the cluster are taken down.
"""

from __future__ import annotations

import sys

import ray
from ray import serve
from ray.cluster_utils import Cluster

from aioinfer.config import load_config
from aioinfer.deploy.application import Arguments, deploy
from tests.serve_driver import say

#: CPUs by address. The head has no room for replicas. (Ray takes 127.0.0.1 for another address of
#: this machine.)
NODES = {"127.0.0.2": 0, "127.0.0.3": 1, "127.0.0.4": 1}


def replica_nodes() -> list[str]:
    """Returns the addresses of the nodes on which replicas run."""
    details = serve.context._get_global_client().get_serve_details()
    (application,) = details["applications"].values()
    replicas = application["deployments"]["Replica"]["replicas"]
    return sorted(each["node_ip"] for each in replicas if each["state"] == "RUNNING")


def main() -> None:
    cluster = Cluster()
    try:
        for address, cpus in NODES.items():
            cluster.add_node(num_cpus=cpus, node_ip_address=address, include_dashboard=False)
        ray.init(cluster.address, _node_ip_address=next(iter(NODES)), log_to_driver=False)
        arguments = Arguments(
            min_replicas=1, max_replicas=3, target_utilization=0.5, upscale_delay_s=1,
            downscale_delay_s=1, gateways=2, gateway_address="node", cpus_per_replica=0.5,
            gpus_per_replica=0,
        )  # fmt: skip
        config = load_config("configs/smollm2.toml", sys.argv[1:])
        say(" ".join(deploy(config, arguments, "aioinfer")))
        for _ in sys.stdin:
            say(" ".join(replica_nodes()))
    finally:
        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
