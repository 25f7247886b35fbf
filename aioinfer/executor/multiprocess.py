"""The executor for worker processes on one host: a spawned process a rank, fed through shared
memory (`HostRanks`)."""

from __future__ import annotations

from pathlib import Path

from aioinfer.config import Config
from aioinfer.executor.host_ranks import HostRanks
from aioinfer.executor.worker_executor import WorkerExecutor, WorkerHost
from aioinfer.ipc.placement import place_on_hosts


class MultiprocessExecutor(WorkerExecutor):
    """Implements `Executor` with worker processes of this host."""

    def __init__(self, config: Config, folder: Path, engine: int = 0):
        super().__init__(config, folder, engine)
        places = place_on_hosts(self.groups, [0] * self._size)
        self.ranks = HostRanks(config, folder, engine, places, self.heartbeat, self)
        self._hosts = [self.ranks]

    async def _make_hosts(self) -> list[WorkerHost]:
        return [self.ranks]
