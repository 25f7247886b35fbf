"""NIXL between hosts: a rank's handle on the process that has its agent (`nixl_process`), for
`peer_link`, where the package is installed and the host has a device for RDMA. The process is
started when the first reader or server that has NIXL as well is connected, and registers the memory
of the rank's host once, which it has mapped.

Whatever fails ends the process: only then does nothing write into places of blocks any more. The
next connection starts another one.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np

from aioinfer.ipc.nixl_process import ADDRESS, PACKAGES, PIECE
from aioinfer.ipc.peer_link import NIXL_START_S, STALL_S, PeerError, receive

_SIZE = struct.Struct("=I")
#: A transfer has so many bytes, if a block has not more: each has to end within `STALL_S`.
_TRANSFER_BYTES = 2**26
#: Where Linux has a folder for each device that does RDMA.
_RDMA_DEVICES = Path("/sys/class/infiniband")
#: Variables of the environment that the process gets.
_ENV = re.compile("(UCX_|NIXL_|CUDA_|PYTHON|LD_LIBRARY_PATH$|PATH$|HOME$|LANG$)")
_log = logging.getLogger(__name__)

#: A block that is read: its group, its first byte in the group's memory there, and where it goes.
Piece = tuple[int, int, memoryview]


def has_rdma() -> bool:
    """Whether this host has a device for RDMA. Without one UCX copies by software over TCP, at a
    third of the rate of plain TCP."""
    with suppress(OSError):
        return any(_RDMA_DEVICES.iterdir())
    return False


def is_available() -> bool:
    """Whether NIXL is installed, and of use."""
    return any(importlib.util.find_spec(name) for name in PACKAGES) and has_rdma()


class NixlError(PeerError):
    """A transfer of NIXL has failed, or it is not available."""


class NixlLink:
    """A rank's NIXL. Threads may share it."""

    def __init__(self, descriptors: Sequence[int], bases: Sequence[int]):
        """`descriptors` and `bases` are of the memory of each group: the file and the address."""
        self._descriptors, self._bases = tuple(descriptors), tuple(bases)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._offer = b""
        self._is_usable = bool(self._descriptors) and is_available()

    def offer(self) -> bytes:
        """Returns the addresses of the memory and the agent's metadata; nothing where NIXL is not
        available. Starts the process if there is none."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()
            if self._process is None and self._is_usable:
                try:
                    self._start()
                except (OSError, PeerError) as error:
                    _log.warning("NIXL is not used: %s", error)
                    self._is_usable = False
                    self._end()
            return self._offer

    def _start(self) -> None:
        self._control, process_end = socket.socketpair()
        fds = [process_end.fileno(), *self._descriptors]
        program = str(Path(__file__).with_name("nixl_process.py"))
        with process_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", program, *map(str, fds)],
                pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                # without secrets: UCX may show others what the process has
                env={name: value for name, value in os.environ.items() if _ENV.match(name)},
            )  # fmt: skip
        self._control.settimeout(NIXL_START_S)
        (size,) = _SIZE.unpack(receive(self._control, _SIZE.size))
        self._offer = bytes(receive(self._control, size))

    def _end(self) -> None:
        """Ends the process; the lock is held."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._control = None
        self._offer = b""

    def close(self, control: socket.socket | None = None) -> None:
        """Ends the process, and the registration of its memory with it; only that process whose
        control socket is `control`, if that is given."""
        with self._lock:
            if control is None or control is self._control:
                self._end()

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """Another side reads meanwhile."""
        control = self._control
        try:
            with suppress(OSError):
                if control is not None:
                    control.send(b"+")
            yield
        finally:
            with suppress(OSError):
                if control is not None:
                    control.send(b"-")

    def connect(self, offer: bytes) -> NixlChannel:
        """Returns a channel to the agent of an `offer`. Raises `PeerError` or OSError."""
        self.offer()
        control = self._control
        if control is None:
            raise NixlError("NIXL is not available")
        own_end, process_end = socket.socketpair()
        with process_end:
            socket.send_fds(control, [b"c"], [process_end.fileno()])
        return NixlChannel(own_end, offer, self._bases, partial(self.close, control))


class NixlChannel:
    """Reads from the memory of one other agent, for one thread at a time."""

    def __init__(
        self,
        connection: socket.socket,
        offer: bytes,
        bases: Sequence[int],
        end_process: Callable[[], None],
    ):
        """Raises `PeerError` or OSError."""
        self._connection, self._bases, self._end_process = connection, bases, end_process
        connection.settimeout(STALL_S)
        try:
            (count,) = _SIZE.unpack_from(offer)
            ends = _SIZE.size + count * ADDRESS.size
            self._remote = list(ADDRESS.iter_unpack(offer[_SIZE.size : ends]))
        except struct.error as error:
            self.close()
            raise PeerError("malformed metadata of NIXL") from error
        self._ask(offer[ends:])

    def read(self, pieces: Sequence[Piece], until: float) -> None:
        """Reads blocks to where they go. Raises `PeerError` if one is beyond the memory there, if
        it takes longer than `until`, or if a transfer fails, once nothing writes any more."""
        batch, size = list[bytes](), 0
        for group, first, out in pieces:
            address, length = self._remote[group] if group < len(self._remote) else (0, 0)
            if first + len(out) > length:
                raise PeerError("a block is beyond the server's memory")
            if batch and size + len(out) > _TRANSFER_BYTES:
                self._ask(b"".join(batch))
                batch, size = [], 0
                if time.monotonic() > until:
                    raise PeerError("the server is too slow")
            here = np.frombuffer(out, np.uint8).ctypes.data - self._bases[group]
            batch.append(PIECE.pack(address + first, group, here, len(out)))
            size += len(out)
        if batch:
            self._ask(b"".join(batch))

    def _ask(self, data: bytes) -> None:
        """Has the process do something, or ends it. Raises `NixlError`."""
        try:
            self._connection.sendall(_SIZE.pack(len(data)) + data)
            receive(self._connection, 1)
        except (OSError, PeerError) as error:
            self._connection.close()
            self._end_process()
            raise NixlError(f"a transfer of NIXL has failed: {error}") from error

    def close(self) -> None:
        """Closes the channel."""
        self._connection.close()
