"""The executor for the hosts of a Ray cluster (`parallel.executor = "ray"`).

Ray gives out nodes and their resources (`ray_cluster`), starts an actor on each, and knows which
nodes live. What happens each step does not go through it: the ranks of the driver's own host share
memory with it, as with `MultiprocessExecutor`, and each other host gets one plan a step over a
stream of its own (`ipc.host_link`), where the actor there puts it into the ring of that host.
`scripts/bench_host_link.py` measures the stream beside Ray's own channels.

The ranks themselves are child processes: of the driver on its host, of the actor elsewhere. A ring
is anonymous memory that is inherited by the processes that are spawned, so nothing has to be handed
over between processes that do not know each other; a rank's end is seen at once by its parent, with
its cause; and it ends with its parent, whatever ends that. The actors hold what Ray has given out,
also on the driver's host.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from aioinfer.config import Config
from aioinfer.errors import ConfigError, EngineDeadError
from aioinfer.executor import ray_cluster
from aioinfer.executor.host_ranks import HostRanks
from aioinfer.executor.remote_host import RemoteHost, open_store
from aioinfer.executor.worker_executor import WorkerExecutor, WorkerHost
from aioinfer.ipc.host_link import HostListener
from aioinfer.ipc.placement import RankSpec, place_on_hosts

_AGENT_TIMEOUT_S = 120.0  # from the placement until all agents have connected
_log = logging.getLogger(__name__)


class RayExecutor(WorkerExecutor):
    """Implements `Executor` over the nodes of a Ray cluster. The driver runs on any of them.

    Args:
        find: finds the model on a node that does not have `folder`.
    """

    _FIRST_PHASE = "place, spawn workers"

    def __init__(
        self,
        config: Config,
        folder: Path,
        engine: int = 0,
        find: Callable[[Config], Path] | None = None,
    ):
        super().__init__(config, folder, engine)
        self._find = find
        self._placement: ray_cluster.RayPlacement | None = None
        self._placing: asyncio.Future[None] | None = None
        self._cancelled = threading.Event()
        self._has_joined = False
        self._listener: HostListener | None = None
        self._store: Any = None
        self._agents: list[asyncio.Future[Any]] = []

    async def _make_hosts(self) -> list[WorkerHost]:
        self._placing = asyncio.get_running_loop().run_in_executor(None, self._place)
        await asyncio.shield(self._placing)
        assert self._placement is not None
        nodes = self._placement.nodes
        own_id, own_address = self._own_node
        host_of = {rank: number for number, node in enumerate(nodes) for rank in node.ranks}
        master = ("127.0.0.1", 0)
        if len(nodes) > 1:
            self._store, port = await asyncio.to_thread(open_store, own_address)
            master = (own_address, port)
        places = place_on_hosts(
            self.groups,
            [host_of[rank] for rank in range(self._size)],
            master,
            owns_devices=any(node.devices for node in nodes),
        )
        remote = [node for node in nodes if node.node_id != own_id]
        hosts = await self._connect(remote, places, own_address) if remote else []
        for node in nodes:
            if (
                node.node_id == own_id
            ):  # made last: until it is among the hosts, nothing would end it
                local = [places[rank] for rank in node.ranks]
                hosts.append(self._make_local(local, _visible_devices(node)))
        return hosts

    def _place(self) -> None:
        """Connects to Ray and finds room for the ranks; runs in a thread."""
        parallel = self.config.parallel
        ray_cluster.RaySession.join(self._size * parallel.data_parallel_size)
        self._has_joined = True
        self._own_node = ray_cluster.own_node()
        self._placement = ray_cluster.place(
            self.config, self._size, self.groups[-1][1], self._cancelled
        )
        if self._placement is not None:
            where = ", ".join(f"{node.ranks} on {node.name}" for node in self._placement.nodes)
            _log.info("engine %d: ranks %s", self._engine, where)

    def _make_local(self, places: list[RankSpec], visible_devices: str | None) -> HostRanks:
        return HostRanks(
            self.config, self._folder, self._engine, places, self.heartbeat, self,
            visible_devices=visible_devices,
        )  # fmt: skip

    async def _connect(
        self, nodes: list[ray_cluster.Node], places: list[RankSpec], own_address: str
    ) -> list[WorkerHost]:
        """Starts the agents of other hosts, and returns these once they have connected."""
        secret = secrets.token_bytes(32)
        self._listener = HostListener(own_address, secret, len(nodes))
        for number, node in enumerate(nodes):
            reference = node.actors[0].run_agent.remote(
                self.config, self._folder, self._find, self._engine,
                [places[rank] for rank in node.ranks], _visible_devices(node),
                self._listener.address, secret, number,
            )  # fmt: skip
            agent = asyncio.wrap_future(reference.future())
            agent.add_done_callback(partial(self._handle_end, node))
            self._agents.append(agent)
        coming = asyncio.ensure_future(self._listener.wait())
        try:
            await asyncio.wait(
                {coming, *self._agents},
                timeout=_AGENT_TIMEOUT_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            if not coming.done():
                coming.cancel()
        if self._failure is not None:
            raise self._failure
        if not coming.done() or coming.cancelled():
            raise EngineDeadError(f"not all hosts have connected within {_AGENT_TIMEOUT_S:g} s")
        connections = coming.result()
        return [
            RemoteHost(node.name, node.ranks, connections[number], self.heartbeat, self)
            for number, node in enumerate(nodes)
        ]

    def _handle_end(self, node: ray_cluster.Node, agent: asyncio.Future[Any]) -> None:
        """Handles the end of an agent: a report of it over the stream, if there is any, comes first
        and is more exact."""
        if agent.cancelled() or self._ending is not None:
            return
        error = agent.exception()
        text = "its agent ended" if error is None else str(error).strip().partition("\n")[0]
        if isinstance(getattr(error, "cause", None), ConfigError):
            self.fail(error.cause)  # type: ignore[union-attr]
            return
        self._loop.call_later(1.0, self.on_fault, f"{node.name} was lost: {text}")
        if not self.hosts:
            self._failure = self._failure or EngineDeadError(f"{node.name}: {text}")

    async def _release(self) -> None:
        self._cancelled.set()
        if self._placing is not None:
            await asyncio.wait([self._placing])  # a cancelled start may still be placing
        if self._listener is not None:
            self._listener.close()
        for agent in self._agents:
            agent.cancel()
        if self._has_joined:
            await asyncio.to_thread(self._leave)

    def _leave(self) -> None:
        try:
            if self._placement is not None:
                self._placement.release()
        except Exception as error:  # of a cluster that is gone: nothing is left to give back
            _log.warning("Ray could not be asked to release the placement: %r", error)
        finally:
            self._store = None
            ray_cluster.RaySession.leave()


def _visible_devices(node: ray_cluster.Node) -> str | None:
    return ",".join(node.devices) if node.devices else None
