"""The executor for processes that torchrun has started (`torchrun --nproc-per-node N -m aioinfer
...`), for those who bring their own placement.

Rank 0's process leads: it has the HTTP server or the program, the scheduler and the event loop, and
a worker process for its own rank, as with `MultiprocessExecutor`. Every other rank's process
becomes a worker itself (`follow`, called before anything else is made) and ends with the leader.
The alternative, a scheduler in each rank on the same inputs, works offline only, where no clock and
no client decides what a step has.

The processes of a host share no parent of ours, so the leader hands its rings to the others: over a
Unix socket in a folder that only this user can enter. The folder's name follows from torchrun's
process, which is the parent of all. Behind it, `multiprocessing` passes the descriptors.

When one rank fails, torchrun ends all of them. Hence workers are not started anew here; torchrun's
own `--max-restarts` starts everything anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import process as process_of_python
from multiprocessing.connection import Connection
from pathlib import Path

from aioinfer.config import Config
from aioinfer.errors import ConfigError, EngineDeadError
from aioinfer.executor.host_ranks import HostRanks, RankProcess, spawn
from aioinfer.executor.worker_executor import WorkerExecutor, WorkerHost
from aioinfer.ipc.placement import place_on_hosts
from aioinfer.worker.process import WorkerSpec, main

_POLL_S = 0.1
_JOIN_TIMEOUT_S = 300.0  # the others import torch meanwhile
_CREDENTIALS = struct.Struct("iII")  # unix(7): process, user, group
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TorchrunPlace:
    """Where this process stands among those that torchrun has started.

    Attributes:
        rank, world_size: in all.
        local_rank, local_size: on this host.
        port: torchrun's own, which tells its runs on this host apart.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    port: str

    @property
    def folder(self) -> Path:
        """Where the processes of this host and this run meet."""
        name = f"aioinfer-{os.getuid()}-{os.getppid()}-{self.port}"
        return Path(tempfile.gettempdir(), name)


def torchrun_place(config: Config, environ: Mapping[str, str] = os.environ) -> TorchrunPlace | None:
    """Returns where this process stands, or None if it is not one of several that torchrun has
    started, or the configuration names an executor.

    Raises:
        ConfigError: torchrun has started another number of ranks than the configuration says, or
            ranks on several hosts.
    """
    if config.parallel.executor != "auto" or "TORCHELASTIC_RUN_ID" not in environ:
        return None
    place = TorchrunPlace(
        int(environ["RANK"]), int(environ["WORLD_SIZE"]), int(environ["LOCAL_RANK"]),
        int(environ["LOCAL_WORLD_SIZE"]), environ["MASTER_PORT"],
    )  # fmt: skip
    if place.world_size == 1:
        return None
    if place.local_size != place.world_size:
        raise ConfigError(
            f"torchrun has started {place.world_size} ranks on several hosts, and aioinfer takes "
            "those of one: use parallel.executor = 'ray' for several hosts"
        )
    parallel = config.parallel
    if parallel.world_size != place.world_size or parallel.data_parallel_size > 1:
        ranks, stages = divmod(place.world_size, parallel.pipeline_parallel_size)
        remedy = f"set parallel.tensor_parallel_size to {place.world_size if stages else ranks}"
        if stages:
            remedy += ", parallel.pipeline_parallel_size to 1"
        raise ConfigError(
            f"torchrun has started {place.world_size} ranks: {remedy} and "
            "parallel.data_parallel_size to 1, or give torchrun another --nproc-per-node"
        )
    return place


def follow(config: Config) -> None:
    """Serves the leader as a worker, and then ends this process, if torchrun has started it as
    another rank than the first; else returns at once. Has to be called in the main thread, before
    an executor is made.

    Raises:
        ConfigError: as `torchrun_place`.
    """
    place = torchrun_place(config)
    if place is None or place.rank == 0:
        return
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("under torchrun, a model has to be made in the main thread")
    with _connect_to_leader(place) as leader:
        leader.send_bytes(place.local_rank.to_bytes(4, "little"))
        try:
            process_of_python.current_process().authkey = leader.recv_bytes()
            spec: WorkerSpec = leader.recv()
        except EOFError:  # the leader gave up before it had workers
            os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    main(spec)


def _connect_to_leader(place: TorchrunPlace) -> Connection:
    """Returns a connection to rank 0's process, as soon as it listens. If that never comes,
    torchrun ends this process."""
    while True:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            _require_own(place.folder)
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(os.fspath(place.folder / "leader"))
                return Connection(connection.detach())
            finally:
                connection.close()
        time.sleep(_POLL_S)


def _require_own(folder: Path) -> None:
    """Raises `EngineDeadError` if a folder is not this user's alone: its name can be guessed."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise EngineDeadError(f"{folder} is there, and not a folder of this user alone")


class JoinedProcess:
    """A process that has joined, and is no child of this one: its exit status is unknown."""

    def __init__(self, pid: int):
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    @property
    def exitcode(self) -> int | None:
        """None: only the parent process learns it."""
        return None

    def kill(self) -> None:
        """Ends it at once. Does nothing if it has ended."""
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        """Waits until it has ended."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.poll(None if timeout is None else 1000 * timeout)

    def close(self) -> None:
        """Closes the descriptor. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Meeting:
    """The leader's side of the meeting: waits for the other ranks of this host."""

    def __init__(self, place: TorchrunPlace):
        self._place = place
        folder = place.folder
        with contextlib.suppress(FileNotFoundError):
            _require_own(folder)
            shutil.rmtree(folder)  # of a process of the same number, long ago
        folder.mkdir(mode=0o700)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(os.fspath(folder / "leader"))
        self._socket.listen(place.local_size)
        self._socket.settimeout(_POLL_S)
        self._joined: dict[int, tuple[Connection, int]] = {}
        self._is_open = True

    def launch(self, spec: WorkerSpec) -> RankProcess:
        """Makes a rank's process its worker: for the first, a new process. Waits until it has come.

        Raises:
            EngineDeadError: it has not come.
        """
        number = spec.place.local_rank
        if number == 0:
            return spawn(spec)
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        while number not in self._joined:
            if not self._is_open or time.monotonic() > deadline:
                raise EngineDeadError(f"torchrun's rank {spec.rank} has not joined")
            self._accept()
        connection, pid = self._joined.pop(number)
        joined = JoinedProcess(pid)
        connection.send_bytes(process_of_python.current_process().authkey)
        connection.send(spec)
        connection.close()
        return joined

    def _accept(self) -> None:
        """Lets one process in, if one comes."""
        try:
            accepted, _ = self._socket.accept()
        except TimeoutError:
            return
        data = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, user, _ = _CREDENTIALS.unpack(data)
        accepted.setblocking(True)
        connection = Connection(accepted.detach())
        if user != os.getuid():
            connection.close()
            return
        self._joined[int.from_bytes(connection.recv_bytes(4), "little")] = connection, pid

    def cancel(self) -> None:
        """Has `launch` wait no longer."""
        self._is_open = False

    def close(self) -> None:
        """Ends the meeting. Safe to call twice."""
        self._is_open = False
        self._socket.close()
        for connection, _ in self._joined.values():
            connection.close()
        self._joined.clear()
        shutil.rmtree(self._place.folder, ignore_errors=True)


class TorchrunExecutor(WorkerExecutor):
    """Implements `Executor` with the processes that torchrun has started on this host; made in rank
    0's."""

    #: Whether this process has led an engine: the others have ended with it.
    _has_led = False

    def __init__(self, config: Config, folder: Path, place: TorchrunPlace):
        super().__init__(config, folder, 0)
        if TorchrunExecutor._has_led:
            raise EngineDeadError(
                "torchrun's other ranks served one engine and ended with it: torchrun's "
                "--max-restarts starts all of them anew"
            )
        TorchrunExecutor._has_led = True
        self._meeting: _Meeting | None = None
        self._place = place

    async def _make_hosts(self) -> list[WorkerHost]:
        self._meeting = _Meeting(self._place)
        places = place_on_hosts(self.groups, [0] * self._size)
        return [
            HostRanks(
                self.config, self._folder, 0, places, self.heartbeat, self,
                launch=self._meeting.launch,
            )
        ]  # fmt: skip

    async def _shut_down(self) -> None:
        if self._meeting is not None:
            self._meeting.cancel()
        await super()._shut_down()

    async def _release(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
