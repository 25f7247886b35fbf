"""The executor for processes that torchrun has started (`torchrun --nproc-per-node N -m aioinfer
...`), for users with a placement of their own, on one host or several.

Rank 0's process leads: it has the HTTP server or the program, the scheduler and the event loop, and
a worker process for its own rank, as with `MultiprocessExecutor`. On every other host, the process
of its first rank becomes that host's agent (`host_agent`), also with a worker process for its own
rank. All remaining processes become workers themselves. They do so in `follow`, called before
anything else is made, and end with the leader. The alternative, a scheduler in each rank on the
same inputs, works offline only, where no clock and no client decides what a step has.

The processes of a host meet in a folder (`torchrun_rendezvous`), the hosts in torchrun's own store
(`torchrun_hosts`).

When one rank fails, torchrun ends all of them. Hence workers are not restarted here; torchrun's own
`--max-restarts` restarts everything.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing import process as process_of_python
from pathlib import Path
from typing import Any

from aioinfer.config import Config
from aioinfer.errors import ConfigError, EngineDeadError
from aioinfer.executor.host_ranks import HostRanks
from aioinfer.executor.remote_host import RemoteHost
from aioinfer.executor.torchrun_hosts import HostRendezvous, serve_host
from aioinfer.executor.torchrun_rendezvous import (
    ProcessRendezvous,
    TorchrunPlace,
    connect_to_local_leader,
)
from aioinfer.executor.worker_executor import WorkerExecutor, WorkerHost
from aioinfer.ipc.placement import RankSpec, place_on_hosts
from aioinfer.worker.process import main
from aioinfer.worker.worker_spec import WorkerSpec


def torchrun_place(config: Config, environ: Mapping[str, str] = os.environ) -> TorchrunPlace | None:
    """Returns the place of this process, or None if it is not one of several that torchrun has
    started, or the configuration names an executor.

    Raises:
        ConfigError: torchrun has started another number of ranks than the configuration says.
    """
    if config.parallel.executor != "auto" or "TORCHELASTIC_RUN_ID" not in environ:
        return None
    place = TorchrunPlace(
        int(environ["RANK"]), int(environ["WORLD_SIZE"]), int(environ["LOCAL_RANK"]),
        int(environ["LOCAL_WORLD_SIZE"]), environ["MASTER_ADDR"], environ["MASTER_PORT"],
        int(environ["GROUP_RANK"]), int(environ["GROUP_WORLD_SIZE"]),
    )  # fmt: skip
    if place.world_size == 1:
        return None
    parallel = config.parallel
    if parallel.world_size != place.world_size or parallel.data_parallel_size > 1:
        ranks, stages = divmod(place.world_size, parallel.pipeline_parallel_size)
        remedy = f"set parallel.tensor_parallel_size to {place.world_size if stages else ranks}"
        if stages:
            remedy += ", parallel.pipeline_parallel_size to 1"
        raise ConfigError(
            f"torchrun has started {place.world_size} ranks: {remedy} and "
            "parallel.data_parallel_size to 1, or give torchrun another --nproc-per-node or "
            "--nnodes"
        )
    return place


def follow(config: Config, find: Callable[[Config], Path]) -> None:
    """Serves the leader, and then ends this process, if torchrun has started it as another rank
    than the first; else returns at once. Has to be called in the main thread, before an executor is
    made.

    Args:
        find: finds the model on this host.

    Raises:
        ConfigError: as `torchrun_place`, or the model is not on this host.
        EngineDeadError: the leader is not there, or lost.
    """
    place = torchrun_place(config)
    if place is None or place.rank == 0:
        return
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("under torchrun, a model has to be made in the main thread")
    if place.local_rank == 0:
        serve_host(config, place, find)
        _end(0)
    with connect_to_local_leader(place) as leader:
        leader.send_bytes(place.local_rank.to_bytes(4, "little"))
        try:
            process_of_python.current_process().authkey = leader.recv_bytes()
            spec: WorkerSpec = leader.recv()
        except EOFError:  # it gave up before it had workers
            _end(1)
    _flush()
    main(spec)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _end(status: int) -> None:
    """Ends this process: code after `LLM(...)` is for rank 0 alone."""
    _flush()
    os._exit(status)


class TorchrunExecutor(WorkerExecutor):
    """Implements `Executor` with the processes that torchrun has started; made in rank 0's."""

    #: Whether this process has led an engine: the others have ended with it.
    _has_led = False

    def __init__(self, config: Config, folder: Path, place: TorchrunPlace):
        super().__init__(config, folder, 0)
        if TorchrunExecutor._has_led:
            raise EngineDeadError(
                "torchrun's other ranks served one engine and ended with it: torchrun's "
                "--max-restarts restarts all of them"
            )
        TorchrunExecutor._has_led = True
        self._rendezvous: ProcessRendezvous | None = None
        self._others: HostRendezvous | None = None
        self._place = place

    async def _make_hosts(self) -> list[WorkerHost]:
        self._rendezvous = ProcessRendezvous(self._place)
        if self._place.num_hosts == 1:
            return [self._make_local(place_on_hosts(self.groups, [0] * self._size))]
        self._others = HostRendezvous(self.config, self._place)
        places, connections = await self._others.gather(self.groups)
        hosts: list[WorkerHost] = [
            RemoteHost(name, ranks, connection, self.heartbeat, self)
            for name, ranks, connection in connections
        ]
        # made last: until it is among the hosts, nothing would end it
        return [*hosts, self._make_local(places[: self._place.local_size])]

    def _make_local(self, places: list[RankSpec]) -> HostRanks:
        assert self._rendezvous is not None
        launch: Any = self._rendezvous.launch
        return HostRanks(self.config, self._folder, 0, places, self.heartbeat, self, launch=launch)

    async def _shut_down(self) -> None:
        for rendezvous in (self._rendezvous, self._others):
            if rendezvous is not None:
                rendezvous.cancel()
        await super()._shut_down()

    async def _release(self) -> None:
        for rendezvous in (self._rendezvous, self._others):
            if rendezvous is not None:
                rendezvous.close()
