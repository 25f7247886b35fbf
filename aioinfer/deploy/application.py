"""The application of Ray Serve: a deployment of replicas, and one of gateways in front of it.

Serve places the actors, checks their health, restarts them, scales the replicas and tells the
gateways which of them run. Requests do not pass through Serve: its own proxies take a request apart
and send each piece of a reply through an actor call, and its routers get the state of a replica
through the controller, every ten seconds unless set otherwise. So a replica actor runs the HTTP
server of this package on a port of its own, and a gateway actor passes bytes on (`gateway.proxy`).
Serve 2.60 could put HAProxy in the gateway's place, with a router that is asked about each request:
it passes requests on to a server of Serve's in each replica (uvicorn), and not to ours.

A Serve file names `build` as its application (`configs/serve.yaml`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import ray
from pydantic import BaseModel, Field
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import DeploymentStatusOverview

from aioinfer.config import Config, load_config
from aioinfer.deploy.scaling import UTILIZATION
from aioinfer.errors import AioinferError, ConfigError
from aioinfer.gateway.proxy import Gateway
from aioinfer.gateway.replica import Address, ReplicaServer

#: Added by Serve to the time that a replica or a gateway may take to end, before Serve kills it.
_MARGIN_S = 10.0
#: A replica that has not said where it is after this long is asked again.
_ANSWER_S = 5.0
#: How often a deployment is asked for the states of its replicas.
_WATCH_S = 1.0
#: In Serve's messages of replicas that no node has room for.
_WAITS = "to be scheduled"
#: Gateways ask replicas for their addresses each second.
_QUIET = {"enable_access_log": False}


class DeploymentError(AioinferError):
    """Serve could not start the replicas or the gateways."""


class Arguments(BaseModel, extra="forbid"):
    """The `args` of the application in a Serve file.

    Attributes:
        config: the path of a TOML file, on the machine that builds the application.
        set: values over it, such as "server.port=8001".
        min_replicas, max_replicas: bounds of their number; equal ones switch scaling off.
        target_utilization: of slots and KV tokens at which replicas are added or removed.
        upscale_delay_s, downscale_delay_s: for how long that has to hold before it is done.
        gateways: how many; several are on nodes of their own, at the same port.
        gateway_address: where each listens: at `server.host`, or at the address of its node.
        cpus_per_replica, gpus_per_replica: what Ray reserves; GPUs by default as many as the
            replica's engines use, where the cluster has any.
        token: the token that gateways send to replicas for their reports; if missing, a digest of
            the configuration, API keys included, so that a new start with the same gives the same.
    """

    config: str | None = None
    set: list[str] = Field(default_factory=list)
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    target_utilization: float = Field(0.6, gt=0, le=10)
    upscale_delay_s: float = Field(15.0, ge=0)
    downscale_delay_s: float = Field(300.0, ge=0)
    gateways: int = Field(1, ge=1)
    gateway_address: Literal["server.host", "node"] = "server.host"
    cpus_per_replica: float = Field(1.0, ge=0)
    gpus_per_replica: float | None = Field(None, ge=0)
    token: str | None = None


class ReplicaActor:
    """A replica in an actor of Serve's. Its constructor ends when the model is loaded, and only
    then Serve counts it."""

    async def __init__(self, config: Config, token: str):  # type: ignore[misc]  # Serve awaits it
        name = serve.get_replica_context().replica_id.unique_id
        host = ray.util.get_node_ip_address()
        self._replica = await ReplicaServer.start(config, host, name, token)

    async def address(self) -> Address:
        """Returns where gateways reach it."""
        return self._replica.address

    async def check_health(self) -> None:
        """Raises once no engine lives: Serve then puts another replica in its place."""
        self._replica.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the numbers that the autoscaling policy uses."""
        return {UTILIZATION: self._replica.load().utilization}

    async def __del__(self) -> None:  # what Serve awaits before it ends the actor
        if (replica := getattr(self, "_replica", None)) is not None:
            await replica.stop()


class GatewayActor:
    """A gateway in an actor of Serve's."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Config, token: str, replicas: DeploymentHandle[Any], address: str
    ):
        if address == "node":
            server = dataclasses.replace(config.server, host=ray.util.get_node_ip_address())
            config = dataclasses.replace(config, server=server)
        self._replicas = replicas
        self._found: list[Address] = []
        self._gateway = Gateway(config, self._discover, token)
        self.url = await self._gateway.start()

    async def _discover(self) -> list[Address]:
        try:
            asked = self._replicas.broadcast("address")
            answers = await asked.results_async(timeout_s=_ANSWER_S, return_exceptions=True)
        except DeploymentUnavailableError:  # while the first replica loads, and during the end
            return self._found
        found = [Address(*answer) for answer in answers if not isinstance(answer, BaseException)]
        self._found = found
        return found

    async def where(self) -> str:
        """Returns its URL."""
        return self.url

    async def __del__(self) -> None:
        if (gateway := getattr(self, "_gateway", None)) is not None:
            await gateway.stop()


def build(arguments: dict[str, Any]) -> serve.Application:
    """Returns the application; `arguments` has the fields of `Arguments`. Raises `ConfigError`, or
    ValueError for arguments that are wrong."""
    checked = Arguments.model_validate(arguments)
    return application(load_config(checked.config, checked.set), checked)


def application(config: Config, arguments: Arguments) -> serve.Application:
    """Returns the application for a configuration that was loaded."""
    if arguments.max_replicas < arguments.min_replicas:
        raise ConfigError("max_replicas is less than min_replicas")
    if config.server.port == 0 and arguments.gateways > 1:
        raise ConfigError("several gateways need a server.port that is known")
    token = arguments.token or hashlib.sha256(repr(config).encode()).hexdigest()
    server = config.server
    grace_s = server.shutdown_delay_s + server.shutdown_timeout_s + _MARGIN_S
    actor = {
        "num_cpus": arguments.cpus_per_replica,
        "num_gpus": _gpus(config, arguments.gpus_per_replica),
    }
    replica = serve.deployment(
        name="Replica",
        ray_actor_options=actor,
        graceful_shutdown_timeout_s=grace_s,
        health_check_period_s=5,
        health_check_timeout_s=15,
        logging_config=_QUIET,
        **_scale(arguments),
    )(ReplicaActor)
    gateway = serve.deployment(
        name="Gateway",
        num_replicas=arguments.gateways,
        ray_actor_options={"num_cpus": 0},  # or a machine with a core a replica would have none
        graceful_shutdown_timeout_s=grace_s,
        logging_config=_QUIET,
    )(GatewayActor)
    if arguments.gateways > 1:
        gateway = gateway.options(max_replicas_per_node=1)  # all listen at the same port
    bound: serve.Application = gateway.bind(
        config, token, replica.bind(config, token), arguments.gateway_address
    )
    return bound


def _scale(arguments: Arguments) -> dict[str, Any]:
    """Returns the options that say how many replicas there are."""
    if arguments.min_replicas == arguments.max_replicas:
        return {"num_replicas": arguments.min_replicas}
    policy = AutoscalingPolicy(
        policy_function="aioinfer.deploy.scaling:UtilizationPolicy",
        policy_kwargs={"target": arguments.target_utilization},
    )
    scaling = AutoscalingConfig(
        min_replicas=arguments.min_replicas,
        initial_replicas=arguments.min_replicas,
        max_replicas=arguments.max_replicas,
        upscale_delay_s=arguments.upscale_delay_s,
        downscale_delay_s=arguments.downscale_delay_s,
        look_back_period_s=max(11.0, arguments.upscale_delay_s),
        policy=policy,
    )
    return {"autoscaling_config": scaling}


def _gpus(config: Config, given: float | None) -> float:
    """Returns the GPUs that Ray reserves for a replica. An executor that places its workers by Ray
    reserves them itself."""
    parallel = config.parallel
    if given is not None:
        return given
    if str(parallel.executor) == "ray" or parallel.device_type == "cpu":
        return 0
    if parallel.device_type == "auto" and not ray.cluster_resources().get("GPU"):
        return 0
    return parallel.world_size * parallel.data_parallel_size


async def gateway_urls(name: str) -> list[str]:
    """Returns where the gateways of a running application listen."""
    handle = serve.get_deployment_handle("Gateway", name)
    found: list[str] = await handle.broadcast("where").results_async(timeout_s=_ANSWER_S)
    return found


def deploy(config: Config, arguments: Arguments, name: str) -> list[str]:
    """Runs the application on the cluster that `ray.init` has joined, without Serve's own proxies,
    and returns where its gateways listen once all replicas are ready.

    Raises `DeploymentError` if it cannot be deployed.
    """
    serve.start(proxy_location="Disabled")
    try:
        serve.run(application(config, arguments), name=name, route_prefix=None)
    except RuntimeError as error:
        raise DeploymentError(_cause(name) or str(error)) from error
    return asyncio.run(gateway_urls(name))


def _cause(name: str) -> str | None:
    """Returns the last lines of Serve's messages about the deployments that failed."""
    found = serve.status().applications.get(name)
    messages = [each.message for each in found.deployments.values()] if found else []
    lines = [message.strip().splitlines()[-1].strip() for message in messages if message.strip()]
    return "; ".join(dict.fromkeys(lines)) or None


@contextmanager
def watched(
    name: str, on_change: Callable[[int, int], None], on_delay: Callable[[str], None]
) -> Iterator[None]:
    """Calls `on_change`, in a thread, with the numbers of replicas that run and that should run,
    whenever one of them changes until the end of the block, and not before the first replica runs;
    and `on_delay`, once for each wait, with Serve's message that a deployment waits for resources
    such as CPUs. `serve.start` has to come before."""
    end = threading.Event()

    def watch() -> None:
        known, said = (0, 0), set[str]()
        while not end.wait(_WATCH_S):
            deployments = _deployments(name)
            counts = _count_replicas(deployments)
            if counts != known and (counts[0] or known[0]):
                known = counts
                on_change(*counts)
            for kind, deployment in deployments.items():
                if _WAITS not in deployment.message:
                    said.discard(kind)
                elif kind not in said:
                    said.add(kind)
                    on_delay(deployment.message)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _deployments(name: str) -> dict[str, DeploymentStatusOverview]:
    """Returns the states of the application's deployments, by their names."""
    found = serve.status().applications.get(name)
    return found.deployments if found is not None else {}


def _count_replicas(deployments: dict[str, DeploymentStatusOverview]) -> tuple[int, int]:
    """Returns how many replicas run, and how many there should be."""
    if "Replica" not in deployments:
        return 0, 0
    states = deployments["Replica"].replica_states
    counts = {str(state): count for state, count in states.items()}
    return counts.get("RUNNING", 0), sum(counts.values()) - counts.get("STOPPING", 0)
