"""Rendezvous of the processes that torchrun has started on one host (`torchrun`).

They share no parent of ours, so the first of them hands its rings to the others: over a Unix socket
in a folder that only this user can enter. The folder's name follows from torchrun's process, which
is the parent of all. Behind it, `multiprocessing` passes the descriptors.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import stat
import struct
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import process as process_of_python
from multiprocessing.connection import Connection
from pathlib import Path

from aioinfer.errors import EngineDeadError
from aioinfer.executor.host_ranks import RankProcess, spawn
from aioinfer.worker.worker_spec import WorkerSpec

_POLL_S = 0.1
#: The others import torch meanwhile.
JOIN_TIMEOUT_S = 300.0
_CREDENTIALS = struct.Struct("iII")  # unix(7): process, user, group


@dataclass(frozen=True, slots=True)
class TorchrunPlace:
    """Place of this process among the processes that torchrun has started.

    Attributes:
        rank, world_size: in all.
        local_rank, local_size: on this host.
        address, port: of torchrun's own store; the port tells its runs on this host apart.
        host, num_hosts: the number of this host, and of how many.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    address: str
    port: str
    host: int = 0
    num_hosts: int = 1

    @property
    def folder(self) -> Path:
        """The folder in which the processes of this host and this run meet."""
        name = f"aioinfer-{os.getuid()}-{os.getppid()}-{self.port}"
        return Path(tempfile.gettempdir(), name)


def connect_to_local_leader(place: TorchrunPlace) -> Connection:
    """Returns a connection to the process of this host's first rank, as soon as it listens. If
    that never comes, torchrun ends this process."""
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


class ProcessRendezvous:
    """The side of the process that leads on this host: it waits for the other ranks here."""

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
        deadline = time.monotonic() + JOIN_TIMEOUT_S
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
        """Makes `launch` stop waiting."""
        self._is_open = False

    def close(self) -> None:
        """Ends the rendezvous. Safe to call twice."""
        self._is_open = False
        self._socket.close()
        for connection, _ in self._joined.values():
            connection.close()
        self._joined.clear()
        shutil.rmtree(self._place.folder, ignore_errors=True)
