"""Requests of the Ray executor to Ray: a connection, and a placement of ranks on nodes. Everything
here may block for seconds, and is called in a thread.

A tensor-parallel group is placed whole, as one bundle of a placement group, which Ray never
divides between nodes. On CPUs, where no node has room for it, it is divided into equal parts as
large as possible; GPUs sum over ranks through each other's memory, which ends with the host. In
each bundle runs one actor (`HostActor`), which holds its resources.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from aioinfer.config import Config
from aioinfer.errors import ConfigError, EngineDeadError
from aioinfer.ipc.placement import RankSpec

#: Ray gives out resources that are free within milliseconds; resources of a placement group that
#: was removed or of a node that has just joined may take a second.
_READY_S = 2.0
_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 15.0
#: A placement that is not there by then fails the start, which the engine may repeat.
PLACEMENT_TIMEOUT_S = 240.0
_ACTOR_TIMEOUT_S = 120.0
_log = logging.getLogger(__name__)


class RaySession:
    """This process's connection to Ray: one for all engines, as Ray allows only one. It is made by
    the first that joins and ends with the last, unless the program had made it before."""

    _lock = threading.Lock()
    _num_users = 0
    _is_own = False

    @classmethod
    def join(cls, num_ranks: int) -> None:
        """Connects to the cluster that Ray's own variable `RAY_ADDRESS` names, or that this host is
        a node of; where there is none, starts Ray on this host for `num_ranks` ranks.

        Raises:
            ConfigError: there is no cluster at that address.
        """
        with cls._lock:
            if not cls._num_users and not ray.is_initialized():
                _connect(num_ranks)
                cls._is_own = True
            cls._num_users += 1

    @classmethod
    def leave(cls) -> None:
        """Gives the connection up. The last one ends it, and the Ray that was started for it."""
        with cls._lock:
            cls._num_users -= 1
            if not cls._num_users and cls._is_own:
                cls._is_own = False
                ray.shutdown()


def _connect(num_ranks: int) -> None:
    # it would take SIGTERM away from the server, which drains then
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    address = os.environ.get("RAY_ADDRESS")
    if address is not None and "://" in address:
        raise ConfigError(
            f"RAY_ADDRESS = {address!r}: the server has to run on a node of the cluster; write "
            "'auto' or HOST:PORT"
        )
    if address != "local":
        try:
            ray.init(address or "auto", log_to_driver=False, logging_level=logging.ERROR)
            return
        except (ConnectionError, OSError, ValueError, RuntimeError) as error:
            if address is not None:
                message = f"RAY_ADDRESS = {address!r}: no Ray cluster answers: {error}"
                raise ConfigError(message) from error
    # otherwise Ray reports its usage to its makers
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        "local",
        num_cpus=max(os.cpu_count() or 1, num_ranks),
        object_store_memory=100 * 2**20,  # nothing goes through it
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


class HostActor:
    """The actor in a bundle: it holds the resources, and is the agent of its host where that is not
    the driver's."""

    def describe(self) -> tuple[str, str, str]:
        """Returns the id and the address of the node, and the GPUs that Ray gave the bundle in the
        form of `CUDA_VISIBLE_DEVICES`."""
        node = ray.get_runtime_context().get_node_id()
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return node, ray.util.get_node_ip_address(), devices

    def run_agent(
        self,
        config: Config,
        folder: Path,
        find: Callable[[Config], Path] | None,
        engine: int,
        places: Sequence[RankSpec],
        visible_devices: str | None,
        address: tuple[str, int],
        secret: bytes,
        number: int,
    ) -> None:
        """Serves the driver as a host's agent until it ends this; see `HostAgent`."""
        from aioinfer.executor.host_agent import HostAgent

        # Ray runs its workers at niceness 15, which would hold every step up on a busy host; only
        # root may undo that, and others start Ray with RAY_worker_niceness=0
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        if not folder.exists() and find is not None:
            folder = find(config)
        agent = HostAgent(config, folder, engine, places, visible_devices=visible_devices)
        asyncio.run(agent.run(address, secret, number))


@dataclass(slots=True)
class Node:
    """A node with ranks.

    Attributes:
        node_id: Ray's.
        address: of the node.
        ranks: on it, ascending.
        actors: of its bundles.
        devices: the GPUs of its ranks, in their order.
    """

    node_id: str
    address: str
    ranks: list[int] = field(default_factory=list)
    actors: list[Any] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the node in errors."""
        return f"host {self.address} (Ray node {self.node_id[:8]})"


@dataclass(slots=True)
class RayPlacement:
    """Placement of the ranks: the resources that Ray holds for them until `release`.

    Attributes:
        group: Ray's placement group.
        nodes: the nodes with ranks, in the order of their first rank.
    """

    group: PlacementGroup
    nodes: list[Node]

    def release(self) -> None:
        """Ends the actors, and gives the resources back."""
        for node in self.nodes:
            for actor in node.actors:
                ray.kill(actor)
        remove_placement_group(self.group)


def rank_resources(config: Config) -> dict[str, float]:
    """Returns the resources that a rank takes of a node. Needs a connection."""
    parallel = config.parallel
    num_gpus = ray.cluster_resources().get("GPU", 0)
    if parallel.device_type == "cuda" or (parallel.device_type == "auto" and num_gpus):
        return {"CPU": 1.0, "GPU": 1.0}
    return {"CPU": float(parallel.cpu_threads or 1)}


def part_sizes(group_size: int) -> list[int]:
    """Returns the sizes of the parts that a tensor-parallel group may be divided into, the largest
    first."""
    return [size for size in range(group_size, 0, -1) if group_size % size == 0]


def place(
    config: Config, world_size: int, group_size: int, cancelled: threading.Event
) -> RayPlacement | None:
    """Returns a placement of all ranks, as soon as the cluster has room for it; attempts follow
    each other with growing delays. Returns None once `cancelled` is set.

    Args:
        world_size: the number of ranks.
        group_size: ranks of a tensor-parallel group, which follow each other.

    Raises:
        EngineDeadError: there was no room within `PLACEMENT_TIMEOUT_S`.
    """
    delay_s, deadline = _FIRST_DELAY_S, time.monotonic() + PLACEMENT_TIMEOUT_S
    resources = rank_resources(config)
    sizes = [group_size] if "GPU" in resources else part_sizes(group_size)
    while not cancelled.is_set():
        for size in sizes:
            if (group := _reserve(world_size // size, size, resources)) is not None:
                try:
                    return _start_actors(group, world_size // size, size, resources)
                except Exception:
                    remove_placement_group(group)
                    raise
        shortage = (
            f"the Ray cluster has no room for {world_size} ranks of "
            f"{_resources_text(resources)}; free are {_resources_text(ray.available_resources())}"
        )
        if time.monotonic() + delay_s > deadline:
            raise EngineDeadError(shortage)
        _log.warning("%s; the next attempt follows in %g s", shortage, delay_s)
        cancelled.wait(delay_s)
        delay_s = min(2 * delay_s, _MAX_DELAY_S)
    return None


def _reserve(count: int, size: int, resources: Mapping[str, float]) -> PlacementGroup | None:
    """Returns a placement group of `count` bundles for `size` ranks each, or None if the cluster
    has no room for it now."""
    bundle = {name: amount * size for name, amount in resources.items()}
    holds_bundle = any(
        all(node["Resources"].get(name, 0) >= amount for name, amount in bundle.items())
        for node in ray.nodes()
        if node["Alive"]
    )
    if not holds_bundle:
        return None
    group = placement_group([bundle] * count, strategy="PACK")
    if group.wait(_READY_S):
        return group
    remove_placement_group(group)
    return None


def _start_actors(
    group: PlacementGroup, count: int, size: int, resources: Mapping[str, float]
) -> RayPlacement:
    """Returns the placement, with an actor in each bundle."""
    actor_class: Any = ray.remote(HostActor)
    actors = [
        actor_class.options(
            num_cpus=resources["CPU"] * size,
            num_gpus=resources.get("GPU", 0) * size,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        ).remote()
        for index in range(count)
    ]
    try:
        found = ray.get([actor.describe.remote() for actor in actors], timeout=_ACTOR_TIMEOUT_S)
    except ray.exceptions.RayError as error:
        raise EngineDeadError(f"an actor on a node of Ray could not start: {error}") from error
    # bundles are alike: the bundles of a node get ranks that follow each other, and the driver's
    # node the first ranks, whose results then need no stream (results of a pipeline come from its
    # last stage)
    own, _ = own_node()
    held = sorted(zip(actors, found, strict=True), key=lambda each: (each[1][0] != own, each[1][0]))
    nodes: dict[str, Node] = {}
    for index, (actor, (node_id, address, devices)) in enumerate(held):
        node = nodes.setdefault(node_id, Node(node_id, address))
        node.ranks += range(index * size, (index + 1) * size)
        node.actors.append(actor)
        if "GPU" in resources:
            node.devices += devices.split(",")
    return RayPlacement(group, list(nodes.values()))


def _resources_text(resources: Mapping[str, float]) -> str:
    named = {name: resources[name] for name in ("CPU", "GPU") if name in resources}
    return " and ".join(f"{amount:g} {name}" for name, amount in named.items()) or "none"


def own_node() -> tuple[str, str]:
    """Returns the id and the address of this process's node. Needs a connection."""
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
