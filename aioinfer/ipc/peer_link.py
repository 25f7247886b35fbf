"""Connections over which one server's rank reads KV blocks of another's, in blocking calls for
threads.

The reader connects, and both sides prove that they know one key: each answers the other's random
challenge with an HMAC (RFC 2104, SHA-256). Then the reader names the model and the form of its
blocks (`identity`), and is sent away unless the other side's are the same. Strangers learn nothing
and are cut off after a few bytes. Nothing is encrypted, and blocks are not signed: servers that
hand prompts over belong on a network of their own.

A request is a count and so many (group, hash); nothing that comes is executed or unpickled, and
sizes are known before a byte is read. There are three kinds of connections:

- TCP: each block comes as a header (whether it is there, its bytes), its bytes, and a byte that
  says whether they were still the block's when they had been sent.
- Between processes of one host, a Unix socket with an abstract name (unix(7)), made of the TCP
  address: behind the handshake come the descriptors of the memory that holds the blocks. A reply
  names places; the reader copies them, says so, and gets a byte for each block as above.
- TCP, with NIXL beside it where both sides have that: behind the handshake the server sends its
  agent's metadata and the addresses of its memory (`nixl_link`). Replies are those of the Unix
  socket, and NIXL copies.
"""

from __future__ import annotations

import contextlib
import hmac
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from aioinfer.errors import ConfigError

_HELLO = b"aioinfer kv 2\n"
_NONCE_BYTES = _PROOF_BYTES = 32
IDENTITY_BYTES = 16
_COUNT = struct.Struct("=I")
#: Group and hash of a block that is asked for.
_NAME = struct.Struct("=I16s")
#: Whether a block is there, and its bytes or its place.
_HEAD = struct.Struct("=?Q")
#: Blocks of a request.
MAX_BLOCKS = 4096
_MAX_GROUPS = 64
_MIN_KEY_BYTES = 16
#: Of what a server offers for NIXL, at most.
_MAX_OFFER = 2**20
_CONNECT_S = 2.0
#: For so long a side may be silent.
STALL_S = 5.0
#: For so long while NIXL begins, which registers the memory of the host.
NIXL_START_S = 20.0


class PeerError(Exception):
    """The other side is gone, does not know the key, has another model, or broke the protocol."""


class Channel(Protocol):
    """What reads from another side's memory: `nixl_link.NixlChannel`."""

    def read(self, pieces: Sequence[tuple[int, int, memoryview]], until: float) -> None:
        """Reads blocks: each one's group, its first byte there, and where it goes."""

    def close(self) -> None:
        """Closes the channel."""


class Nixl(Protocol):
    """A rank's NIXL: `nixl_link.NixlLink`."""

    def offer(self) -> bytes:
        """Returns what the other side needs; nothing where NIXL is not available."""

    def connect(self, offer: bytes) -> Channel:
        """Returns a channel to another side. Raises `PeerError` or OSError."""


def read_key(path: str) -> bytes:
    """Returns the key in a file, without surrounding white space. Raises `ConfigError`."""
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cache.peer_key_file cannot be read: {error}") from error
    if len(key) < _MIN_KEY_BYTES:
        raise ConfigError(f"cache.peer_key_file needs a key of {_MIN_KEY_BYTES} bytes or more")
    return key


def unix_name(address: tuple[str, int]) -> str:
    """Returns the abstract name at which processes of the same host find a server."""
    return f"\0aioinfer-kv {address[0]} {address[1]}"


def receive(connection: socket.socket, size: int) -> bytearray:
    """Receives `size` bytes. Raises `PeerError` or OSError."""
    data = bytearray(size)
    receive_into(connection, memoryview(data))
    return data


def receive_into(connection: socket.socket, out: memoryview) -> None:
    """Fills `out`. Raises `PeerError` or OSError."""
    done = 0
    while done < len(out):
        count = connection.recv_into(out[done:])
        if not count:
            raise PeerError("the connection ended")
        done += count


def _prove(key: bytes, side: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join((side, *parts)), "sha256")


def greet(connection: socket.socket, key: bytes, identity: bytes) -> None:
    """The server's side of the handshake. Raises `PeerError` or OSError."""
    connection.settimeout(STALL_S)
    challenge = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_HELLO + challenge)
    answer = bytes(receive(connection, _NONCE_BYTES + IDENTITY_BYTES + _PROOF_BYTES))
    claim, proof = answer[:-_PROOF_BYTES], answer[-_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _prove(key, b"reader", challenge, claim)):
        raise PeerError("the reader does not know the key")
    is_equal = claim[_NONCE_BYTES:] == identity
    verdict = bytes([is_equal])
    connection.sendall(verdict + _prove(key, b"server", challenge, claim, verdict))
    if not is_equal:
        raise PeerError("the reader has another model, or keeps its KV blocks in another form")


def _introduce(connection: socket.socket, key: bytes, identity: bytes) -> None:
    """The reader's side of the handshake. Raises `PeerError` or OSError."""
    hello = bytes(receive(connection, len(_HELLO) + _NONCE_BYTES))
    if hello[: len(_HELLO)] != _HELLO:
        raise PeerError("the other side is no server of this version")
    challenge, claim = hello[len(_HELLO) :], secrets.token_bytes(_NONCE_BYTES) + identity
    connection.sendall(claim + _prove(key, b"reader", challenge, claim))
    answer = bytes(receive(connection, 1 + _PROOF_BYTES))
    verdict, proof = answer[:1], answer[1:]
    if not hmac.compare_digest(proof, _prove(key, b"server", challenge, claim, verdict)):
        raise PeerError("the server does not know the key")
    if verdict != b"\1":
        raise PeerError("the server has another model, or keeps its KV blocks in another form")


def agree_on_nixl(connection: socket.socket, nixl: Nixl) -> bool:
    """The server's side of the agreement behind the handshake. Returns whether the reader uses
    NIXL. Raises `PeerError` or OSError."""
    connection.settimeout(NIXL_START_S)
    if receive(connection, 1) != b"\1":
        return False
    offer = nixl.offer()
    connection.sendall(_COUNT.pack(len(offer)) + offer)
    return bool(offer) and receive(connection, 1) == b"\1"


class PeerLink:
    """A reader's connection.

    Attributes:
        is_shared: whether blocks are copied from memory of the server.
        channel: with which blocks are read over NIXL; None if they are not.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        identity: bytes,
        nixl: Nixl | None = None,
    ):
        """Connects, over a Unix socket if the server is on this host; else with NIXL, if that is
        given and the server has it, too. Raises `PeerError` or OSError."""
        self._memory: list[np.ndarray] = []
        self.channel: Channel | None = None
        self._connection, self.is_shared = _connect(address)
        try:
            self._connection.settimeout(STALL_S)
            _introduce(self._connection, key, identity)
            if self.is_shared:
                self._map()
            else:
                self.channel = self._agree(nixl)
        except BaseException:
            self._connection.close()
            raise

    def _agree(self, nixl: Nixl | None) -> Channel | None:
        """The reader's side of `agree_on_nixl`. Returns the channel, if both sides have NIXL."""
        has_nixl = nixl is not None and nixl.offer() != b""
        self._connection.sendall(bytes([has_nixl]))
        if nixl is None or not has_nixl:
            return None
        self._connection.settimeout(NIXL_START_S)
        (size,) = _COUNT.unpack(receive(self._connection, _COUNT.size))
        self._connection.settimeout(STALL_S)
        if size > _MAX_OFFER:
            raise PeerError(f"an offer of NIXL of {size} bytes")
        offer, channel = bytes(receive(self._connection, size)), None
        if offer:
            with contextlib.suppress(OSError, PeerError):
                channel = nixl.connect(offer)
            self._connection.sendall(bytes([channel is not None]))
        return channel

    def _map(self) -> None:
        """Maps the server's memory, of each group."""
        data, descriptors, _, _ = socket.recv_fds(self._connection, 1, _MAX_GROUPS)
        try:
            if not data:
                raise PeerError("the connection ended")
            for fd in descriptors:
                try:
                    mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
                except ValueError:  # without bytes
                    self._memory.append(np.empty(0, np.uint8))
                else:
                    self._memory.append(np.frombuffer(mapped, np.uint8))
        finally:
            for fd in descriptors:
                os.close(fd)

    def read(
        self, names: Sequence[tuple[int, bytes]], outs: Sequence[memoryview], until: float
    ) -> int:
        """Reads blocks (group, hash) into `outs`, which are as long as these. Returns how many
        there are, from the first one on; what is behind them may hold anything.

        Raises `PeerError` or OSError, also where it takes longer than `until` (of
        `time.monotonic`); the link is of no use then.
        """
        request = b"".join([_COUNT.pack(len(names)), *(_NAME.pack(*name) for name in names)])
        self._connection.sendall(request)
        if self.is_shared or self.channel is not None:
            return self._copy(names, outs, until)
        count, is_whole = 0, True
        for out in outs:
            if time.monotonic() > until:
                raise PeerError("the server is too slow")
            is_there, size = _HEAD.unpack(receive(self._connection, _HEAD.size))
            if is_there:
                if size != len(out):
                    raise PeerError(f"a block of {size} bytes came in the place of {len(out)}")
                receive_into(self._connection, out)
                is_there = receive(self._connection, 1) == b"\1"
            is_whole &= is_there
            count += is_whole
        return count

    def _copy(
        self, names: Sequence[tuple[int, bytes]], outs: Sequence[memoryview], until: float
    ) -> int:
        """Copies the blocks of a request from the server's memory; see `read`."""
        heads = receive(self._connection, len(outs) * _HEAD.size)
        found = list(_HEAD.iter_unpack(heads))
        pieces = [
            (group, place * len(out), out)
            for (group, _), out, (is_there, place) in zip(names, outs, found, strict=True)
            if is_there and len(out)
        ]
        if self.channel is not None:
            self.channel.read(pieces, until)
        else:
            for group, first, out in pieces:
                end = first + len(out)
                if group >= len(self._memory) or end > len(self._memory[group]):
                    raise PeerError("a block is beyond the server's memory")
                np.copyto(np.frombuffer(out, np.uint8), self._memory[group][first:end])
        self._connection.sendall(b"\1")
        valid = receive(self._connection, len(outs))
        flags = [is_there and good == 1 for (is_there, _), good in zip(found, valid, strict=True)]
        return [*flags, False].index(False)

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()
        if self.channel is not None:
            self.channel.close()


def _connect(address: tuple[str, int]) -> tuple[socket.socket, bool]:
    """Returns a connection, and whether it is a Unix socket."""
    near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    near.settimeout(_CONNECT_S)
    try:
        near.connect(unix_name(address))
    except OSError:
        near.close()
    else:
        return near, True
    far = socket.create_connection(address, _CONNECT_S)
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return far, False


def requests(connection: socket.socket, idle_s: float) -> Iterator[list[tuple[int, bytes]]]:
    """Yields the requests that a reader sends, behind the handshake, until it is silent for
    `idle_s` seconds or gone. Raises `PeerError` for one that is no request."""
    while True:
        connection.settimeout(idle_s)
        with contextlib.suppress(TimeoutError):
            if not connection.recv(1, socket.MSG_PEEK):
                return
            connection.settimeout(STALL_S)
            (count,) = _COUNT.unpack(receive(connection, _COUNT.size))
            if not 0 < count <= MAX_BLOCKS:
                raise PeerError(f"a request for {count} blocks")
            yield list(_NAME.iter_unpack(receive(connection, count * _NAME.size)))
            continue
        return


def send_head(connection: socket.socket, *, is_there: bool, value: int) -> None:
    """Sends whether a block is there, and its bytes or its place."""
    connection.sendall(_HEAD.pack(is_there, value))
