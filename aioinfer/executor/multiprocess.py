"""The executor for worker processes on one host: a process a rank, fed through shared
memory (`HostRanks`)."""

from __future__ import annotations

from pathlib import Path

from aioinfer.config import Config
from aioinfer.executor.host_ranks import HostRanks
from aioinfer.executor.worker_executor import WorkerExecutor, WorkerHost
from aioinfer.ipc.anonymous_file import RendezvousFile
from aioinfer.ipc.placement import RankSpec, place_on_hosts


class MultiprocessExecutor(WorkerExecutor):
    """Implements `Executor` with worker processes of this host."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        engine: int = 0,
        rendezvous: RendezvousFile | None = None,
    ):
        """`rendezvous` is where its ranks find the ranks of other engines, if they compute with
        them."""
        super().__init__(config, folder, engine)
        places = self._places()
        ranks = HostRanks(
            config, folder, engine, places, self.heartbeat, self, rendezvous=rendezvous
        )
        self.hosts = [ranks]

    @property
    def ranks(self) -> HostRanks:
        """The processes, until the executor is shut down."""
        (host,) = self.hosts
        assert isinstance(host, HostRanks)
        return host

    def _places(self) -> list[RankSpec]:
        """Returns the places of this engine's ranks, in a world of all engines' ranks if they share
        the experts."""
        size, parallel = self._size, self.config.parallel
        if not parallel.data_parallel_attention:
            return place_on_hosts(self.groups, [0] * size)
        engines = parallel.data_parallel_size
        first, groups = self._engine * size, (("dp", engines), *self.groups)
        return [RankSpec(first + rank, engines * size, rank, groups=groups) for rank in range(size)]

    async def _make_hosts(self) -> list[WorkerHost]:
        return [self.ranks]
