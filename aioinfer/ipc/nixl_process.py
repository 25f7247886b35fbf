"""The process that has a rank's NIXL agent: `nixl_link` starts it, with descriptors of the memory
that holds the blocks of the rank's host. It imports nothing of aioinfer.

It is a process of its own for what UCX does where its transports copy by software, as over TCP:

- a transfer that is given up may still write, also when its handle is released and the other agent
  removed. Once the process is killed nothing writes any more;
- the agent whose memory is read aborts its process where the reader goes in mid-transfer;
- its port answers whoever reaches it, with any memory of the process;
- the agent has to be called while others read, and holds Python's lock meanwhile.

Arguments: the descriptors of the control socket and of each group's memory. It sends the agent's
metadata and the addresses of the groups, and takes bytes: "+" and "-" when another side's read
begins and ends, "c" with the descriptor of a channel's socket. On a channel comes another agent's
metadata, and then reads; a byte answers each (1: done). It ends with the control socket.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import select
import socket
import struct
import sys
import uuid
from typing import Any

import numpy as np

_SIZE = struct.Struct("=I")
#: A piece of a read: where it is there, the group and the place in its memory here, and its bytes.
PIECE = struct.Struct("=QIQQ")
#: Metadata of an agent is behind the addresses of so many groups.
ADDRESS = struct.Struct("=QQ")
#: How often the agent is called while no transfer runs.
_IDLE_S = 0.005
#: The packages that have NIXL for hosts; they differ in the CUDA that they are built for.
PACKAGES = ("nixl_cu12", "nixl_cu13")


class Agent:
    """NIXL's agent of this process, and the memory that is registered with it."""

    def __init__(self, descriptors: list[int]):
        """Raises whatever NIXL raises."""
        nixl = _import_nixl()
        config = nixl.nixl_agent_config(backends=["UCX"], enable_prog_thread=False)
        self._agent = nixl.nixl_agent(uuid.uuid4().hex, config)
        sizes = [os.fstat(fd).st_size for fd in descriptors]
        self._memory = [
            np.frombuffer(mmap.mmap(fd, size), np.uint8) if size else np.empty(0, np.uint8)
            for fd, size in zip(descriptors, sizes, strict=True)
        ]
        self._bases = [memory.ctypes.data if len(memory) else 0 for memory in self._memory]
        places = [place for place in zip(self._bases, sizes, strict=True) if place[1]]
        self._agent.register_memory([(*place, 0, "") for place in places], "DRAM")
        addresses = (ADDRESS.pack(*place) for place in zip(self._bases, sizes, strict=True))
        parts = (_SIZE.pack(len(sizes)), *addresses, self._agent.get_agent_metadata())
        self.offer = b"".join(parts)

    def add(self, metadata: bytes) -> str:
        """Returns the name of another agent."""
        return str(_text(self._agent.add_remote_agent(metadata)))

    def start(self, other: str, pieces: list[tuple[int, int, int, int]]) -> Any:
        """Begins to read pieces from another agent's memory. Returns the transfer."""
        remote = [(address, size, 0) for address, _, _, size in pieces]
        local = [(self._bases[group] + first, size, 0) for _, group, first, size in pieces]
        transfer = self._agent.initialize_xfer(
            "READ", self._agent.get_xfer_descs(local, "DRAM"),
            self._agent.get_xfer_descs(remote, "DRAM"), other,
        )  # fmt: skip
        if self._agent.transfer(transfer) == "ERR":
            raise OSError("NIXL has refused a transfer")
        return transfer

    def has_ended(self, transfer: Any) -> bool:
        """Whether a transfer is done. Raises OSError or what NIXL raises if it has failed."""
        state = self._agent.check_xfer_state(transfer)
        if state == "ERR":
            raise OSError("a transfer of NIXL has failed")
        if state == "DONE":
            transfer.release()
        return bool(state == "DONE")

    def progress(self) -> None:
        """Has UCX answer other agents."""
        self._agent.get_new_notifs()


def _import_nixl() -> Any:
    for name in PACKAGES:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"{name}._api")
    raise ModuleNotFoundError("NIXL is not installed")


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _receive(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise EOFError
    return data


def serve(agent: Agent, control: socket.socket) -> None:
    """Transfers until the control socket ends. Raises where a transfer fails: the process then
    ends, and its channels with it."""
    others: dict[socket.socket, str | None] = {}
    transfers: dict[socket.socket, Any] = {}
    num_read = 0
    while True:
        wait_s = 0.0 if transfers or num_read else _IDLE_S
        for ready in select.select([control, *others], [], [], wait_s)[0]:
            if ready is control:
                data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
                if not data:
                    return
                num_read += {b"+": 1, b"-": -1}.get(data, 0)
                others.update({socket.socket(fileno=fd): None for fd in descriptors})
                continue
            try:
                (size,) = _SIZE.unpack(_receive(ready, _SIZE.size))
                data = _receive(ready, size)
            except (EOFError, ConnectionError):
                if ready in transfers:
                    raise  # it would still write
                del others[ready]
                ready.close()
                continue
            other = others[ready]
            if other is None:
                others[ready] = agent.add(data)
                ready.sendall(b"\1")
            else:
                transfers[ready] = agent.start(other, list(PIECE.iter_unpack(data)))
        agent.progress()
        for channel, transfer in list(transfers.items()):
            if agent.has_ended(transfer):
                del transfers[channel]
                channel.sendall(b"\1")


def main() -> None:
    """Runs the agent. The process ends without NIXL's destructors, which wait for other sides."""
    control = socket.socket(fileno=int(sys.argv[1]))
    code = 0
    try:
        agent = Agent([int(fd) for fd in sys.argv[2:]])
        control.sendall(_SIZE.pack(len(agent.offer)) + agent.offer)
        serve(agent, control)
    except Exception as error:  # whatever it is, the process ends and says why
        print(f"NIXL: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        code = 1
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
