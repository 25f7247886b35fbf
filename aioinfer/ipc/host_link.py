"""A stream between the driver of an engine and one of its other hosts: frames over TCP, behind a
handshake in which both sides prove that they know a secret.

Plans, masks and small messages go to the host; results, heartbeats and small messages come back
(`FrameKind`). One plan travels to a host, whatever its number of ranks; there it goes through the
ring of that host. A frame is a header (`_HEADER`: length of the payload, kind, a number, which is
the step's where there is one) and its payload, in native byte order, like all messages of the ring.

A socket of its own instead of asyncio's transports: the transports of uvloop write at the end of
the loop's turn, and a plan must be on its way before the text of the previous step is emitted.

The handshake: each side sends a random challenge and answers the other's with an HMAC (RFC 2104,
SHA-256) under the secret. Strangers that can reach the port learn nothing and are cut off; before
that they can make a side read a few bytes. The frames behind the handshake are neither encrypted
nor signed, and neither is the traffic of NCCL and gloo: hosts of one engine belong on a network of
their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hmac
import secrets
import socket
import struct
from collections.abc import Callable, Sequence

from aioinfer.tasks import end_tasks

#: Length of the payload, kind, number.
_HEADER = struct.Struct("=IB3xq")
_MAX_PAYLOAD = 1 << 28
_READ_BYTES = 1 << 20
_HELLO = b"aioinfer host 1\n"
_NONCE_BYTES, _PROOF_BYTES = 32, 32
_HOST_NUMBER = struct.Struct("!I")
#: A plan is sent at once; a side that does not answer, idle or not, is lost after ten seconds.
_TCP_OPTIONS = (
    (socket.TCP_NODELAY, 1),
    (socket.TCP_KEEPIDLE, 4),
    (socket.TCP_KEEPINTVL, 2),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 10_000),
)
#: The whole handshake may take so long.
HANDSHAKE_S = 10.0


class FrameKind(enum.IntEnum):
    """The kind of a frame: the meaning of its payload and number.

    PLAN: an encoded plan, or a section; the number is the step's, or -1. MASKS: the masks of a
    step's constrained rows, int32 [rows, words]; the number is the step's. RESULT: an encoded
    result. BEAT: the last record of each rank of a host; the number is the host's clock. MESSAGE: a
    message in JSON.
    """

    PLAN = 1
    MASKS = 2
    RESULT = 3
    BEAT = 4
    MESSAGE = 5


_KINDS = frozenset(FrameKind)
#: Handshakes that may be under way at a time: further connections are cut off.
_MAX_HANDSHAKES = 64


class LinkError(RuntimeError):
    """The other side broke the protocol, does not know the secret, or is gone."""


class HostLink:
    """One side of the stream, watched by the running event loop.

    Args:
        connection: connected, behind the handshake, non-blocking. The link owns it.
        on_frame: called with the kind, the number and the payload, which holds during the call.
        on_lost: called once, with the reason, when the other side is gone; not after `close`.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_frame: Callable[[FrameKind, int, memoryview], None],
        on_lost: Callable[[str], None],
    ):
        self._connection = connection
        self._on_frame, self._on_lost = on_frame, on_lost
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._unsent = bytearray()
        self._is_open = True
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _TCP_OPTIONS:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._loop.add_reader(connection.fileno(), self._read)

    def send(self, kind: FrameKind, number: int = 0, parts: Sequence[memoryview] = ()) -> None:
        """Sends a frame, in this call as far as the kernel takes it. Never waits; does nothing once
        the link is closed or lost."""
        if not self._is_open:
            return
        buffers = [memoryview(_HEADER.pack(sum(map(len, parts)), kind, number)), *parts]
        sent = 0
        if not self._unsent:
            try:
                sent = self._connection.sendmsg(buffers)
            except BlockingIOError:
                pass
            except OSError as error:
                self._lose(f"the connection failed: {error}")
                return
        for buffer in buffers:
            self._unsent += buffer[sent:]
            sent = max(0, sent - len(buffer))
        if self._unsent:
            self._loop.add_writer(self._connection.fileno(), self._write_rest)

    def _write_rest(self) -> None:
        try:
            sent = self._connection.send(self._unsent)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"the connection failed: {error}")
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._connection.fileno())

    def _read(self) -> None:
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"the connection failed: {error}")
            return
        if not data:
            self._lose("the connection ended")
            return
        self._received += data
        self._take_frames()

    def _take_frames(self) -> None:
        """Passes on the frames that have come whole."""
        begin = 0
        with memoryview(self._received) as view:
            while self._is_open and len(view) - begin >= _HEADER.size:
                length, kind, number = _HEADER.unpack_from(view, begin)
                if length > _MAX_PAYLOAD or kind not in _KINDS:
                    self._lose("what it sent is no frame")
                    break
                end = begin + _HEADER.size + length
                if end > len(view):
                    break
                with view[begin + _HEADER.size : end] as payload:
                    self._on_frame(FrameKind(kind), number, payload)
                begin = end
        del self._received[:begin]

    def _lose(self, reason: str) -> None:
        if self._is_open:
            self.close()
            self._on_lost(reason)

    def close(self) -> None:
        """Closes the connection. Safe to call twice."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._connection.fileno())
            self._loop.remove_writer(self._connection.fileno())
            self._connection.close()


# -------------------------------------------------------------------- the handshake


async def accept_host(connection: socket.socket, secret: bytes) -> int:
    """Returns the number of the host that has connected, once it has proved that it knows the
    secret; it gets this side's proof.

    Raises:
        LinkError: it does not know the secret, or did not answer in `HANDSHAKE_S`.
    """
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            challenge = secrets.token_bytes(_NONCE_BYTES)
            await loop.sock_sendall(connection, _HELLO + challenge)
            answer = await _receive(connection, _HOST_NUMBER.size + _NONCE_BYTES + _PROOF_BYTES)
            claim, proof = answer[:-_PROOF_BYTES], answer[-_PROOF_BYTES:]
            if not hmac.compare_digest(proof, _prove(secret, b"host", challenge, claim)):
                raise LinkError("it does not know the secret")
            await loop.sock_sendall(connection, _prove(secret, b"driver", challenge, claim))
            return int(_HOST_NUMBER.unpack_from(claim)[0])
    except (OSError, TimeoutError) as error:
        raise LinkError(f"it did not prove that it knows the secret: {error!r}") from error


async def connect_to_driver(address: tuple[str, int], secret: bytes, host: int) -> socket.socket:
    """Returns a connection to the driver, behind the handshake, as the host of this number.

    Raises:
        LinkError: the driver cannot be reached, or does not know the secret.
    """
    loop = asyncio.get_running_loop()
    connection = socket.socket(
        socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM
    )
    connection.setblocking(False)
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            await loop.sock_connect(connection, address)
            hello = await _receive(connection, len(_HELLO) + _NONCE_BYTES)
            if hello[: len(_HELLO)] != _HELLO:
                raise LinkError("the other side is no driver of this version")
            challenge = hello[len(_HELLO) :]
            claim = _HOST_NUMBER.pack(host) + secrets.token_bytes(_NONCE_BYTES)
            proof = _prove(secret, b"host", challenge, claim)
            await loop.sock_sendall(connection, claim + proof)
            answer = await _receive(connection, _PROOF_BYTES)
            if not hmac.compare_digest(answer, _prove(secret, b"driver", challenge, claim)):
                raise LinkError("the driver does not know the secret")
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError | TimeoutError):
            raise LinkError(f"the driver at {address} cannot be reached: {error!r}") from error
        raise
    return connection


def _prove(secret: bytes, side: bytes, challenge: bytes, claim: bytes) -> bytes:
    """Returns the answer to both challenges, which only a side that knows the secret can make."""
    return hmac.digest(secret, side + challenge + claim, "sha256")


async def _receive(connection: socket.socket, count: int) -> bytes:
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < count:
        data = await loop.sock_recv(connection, count - len(received))
        if not data:
            raise LinkError("it closed the connection during the handshake")
        received += data
    return received


class HostListener:
    """Listens at one address for the hosts of an engine, and makes a connection of each that knows
    the secret.

    Attributes:
        address: where it listens.
        connections: of the hosts that have come, by number.
    """

    def __init__(self, host: str, secret: bytes, num_hosts: int, port: int = 0):
        """Raises OSError if it cannot listen there."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self.connections: dict[int, socket.socket] = {}
        self._secret = secret
        self._num_hosts = num_hosts
        self._handshakes: set[asyncio.Task[None]] = set()
        self._all_came = asyncio.Event()

    async def wait(self) -> dict[int, socket.socket]:
        """Returns the connections once all hosts have come; then no further host is let in. The
        caller owns them."""
        loop = asyncio.get_running_loop()
        accepting = loop.create_task(self._accept())
        try:
            await self._all_came.wait()
        finally:
            await end_tasks([accepting, *self._handshakes])
            self._socket.close()
        found, self.connections = self.connections, {}
        return found

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._socket)
            if len(self._handshakes) >= _MAX_HANDSHAKES:
                connection.close()
                continue
            task = loop.create_task(self._take_in(connection))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _take_in(self, connection: socket.socket) -> None:
        number = -1
        try:
            with contextlib.suppress(LinkError):  # a stranger
                number = await accept_host(connection, self._secret)
        finally:
            if number in self.connections or not 0 <= number < self._num_hosts:
                connection.close()
            else:
                self.connections[number] = connection
        if len(self.connections) == self._num_hosts:
            self._all_came.set()

    def close(self) -> None:
        """Stops listening, and closes the connections that no caller has taken. Safe to call
        twice."""
        self._socket.close()
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
