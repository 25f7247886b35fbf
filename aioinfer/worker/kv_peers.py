"""Other servers as a connector of KV blocks: a rank reads blocks of the same rank of another
server, and serves the blocks that its own host has. The connections are `ipc.peer_link`'s; where
both sides have NIXL and are on different hosts, that copies (`ipc.nixl_link`).

The server finds a block by its hash, in memory of the host where the engine has put it. A block
that is about to be saved is waited for, for a moment. A block whose place gets another one while it
is sent counts as missing (`HostBlocks.version`). Whatever fails is a block that is computed again.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from aioinfer.config_keys import parse_address
from aioinfer.ipc.nixl_link import NixlError, NixlLink
from aioinfer.ipc.peer_link import (
    PeerError,
    PeerLink,
    agree_on_nixl,
    greet,
    receive,
    requests,
    send_head,
    unix_name,
)
from aioinfer.worker.host_blocks import HostBlocks, Wait
from aioinfer.worker.kv_connector import HostBlock, Identify, KVConnector

#: Threads that read, each over a connection of its own.
_READERS = 4
#: A read is divided among threads in parts of so many blocks, at least and at most: neither side
#: may be silent for long while a part is copied.
_MIN_PART, _MAX_PART = 16, 64
#: Readers that may be connected at a time, and for how long one may ask for nothing.
_MAX_CONNECTIONS = 64
_IDLE_S = 300.0
#: After this time a listener accepts again where it could not.
_RETRY_S = 0.05
#: How long a block may be waited for that the host is about to get.
_MAX_WAIT_S = 2.0
#: How long a part of a read may take.
_MAX_READ_S = 30.0
#: A server that failed is not asked for so long: other requests would wait for it as well.
_PAUSE_S = 5.0
#: A server whose transfers over NIXL failed is read over plain TCP so long.
_PLAIN_S = 60.0
_log = logging.getLogger(__name__)


class _Index:
    """The places of blocks on the host by group and hash."""

    def __init__(self, host: HostBlocks):
        self._host = host
        self._blocks: dict[tuple[int, bytes], tuple[int, int, Wait]] = {}
        self._hashes: dict[tuple[int, int], bytes] = {}  # by group and place
        self._changed = threading.Condition()

    def add(self, group: int, place: int, block_hash: bytes, saved: Wait) -> None:
        """Enters a block, which is there once `saved` returns."""
        with self._changed:
            former = self._hashes.get((group, place))
            if former is not None and self._blocks.get((group, former), (-1,))[0] == place:
                del self._blocks[group, former]
            self._hashes[group, place] = block_hash
            self._blocks[group, block_hash] = place, self._host.version(group, place), saved
            self._changed.notify_all()

    def remove(self, group: int, block_hash: bytes) -> None:
        """Removes a block, or all blocks if the group is -1."""
        with self._changed:
            if group < 0:
                self._blocks.clear()
            self._blocks.pop((group, block_hash), None)

    def find(self, group: int, block_hash: bytes, until: float) -> tuple[int, int] | None:
        """Returns place and version of a block that is there by `until`, of `time.monotonic`."""
        key = group, block_hash
        with self._changed:
            self._changed.wait_for(lambda: key in self._blocks, max(0.0, until - time.monotonic()))
            found = self._blocks.get(key)
        if found is None:
            return None
        place, version, saved = found
        saved()
        return (place, version) if self.is_whole(group, place, version) else None

    def is_whole(self, group: int, place: int, version: int) -> bool:
        """Whether a place still has the block that it had."""
        return self._host.version(group, place) == version


class _Server:
    """Serves the blocks of one rank at an address, and to processes of this host.

    Attributes:
        identity: of the model and the form of its blocks.
    """

    def __init__(
        self,
        address: tuple[str, int],
        host: HostBlocks,
        index: _Index,
        key: bytes,
        identity: bytes,
        nixl: NixlLink,
    ):
        """Listens. Raises OSError."""
        self._host, self._index, self._key, self.identity = host, index, key, identity
        self._nixl = nixl
        self._places = threading.Semaphore(_MAX_CONNECTIONS)
        self._readers: dict[threading.Thread, socket.socket] = {}
        self._is_closed = False
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        far = socket.create_server(address, family=family)
        near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            near.bind(unix_name(address))
            near.listen()
        except BaseException:
            far.close()
            near.close()
            raise
        self._listeners = {
            threading.Thread(target=self._accept, args=(listener,), daemon=True): listener
            for listener in (far, near)
        }
        for thread in self._listeners:
            thread.start()

    def close(self) -> None:
        """Cuts readers off, and ends the threads: one that computes with tensors while the
        interpreter ends would abort the process. Safe to call twice."""
        self._is_closed = True
        for sockets in (self._listeners, self._readers):  # no listener adds readers any more
            for thread, each in list(sockets.items()):
                with contextlib.suppress(OSError):  # wakes the thread
                    each.shutdown(socket.SHUT_RDWR)
                thread.join()
        for listener in self._listeners.values():
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_closed:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed, or there are too many descriptors
                time.sleep(_RETRY_S)
                continue
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._readers[thread] = connection
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        is_near = connection.family == socket.AF_UNIX
        try:
            with connection:
                identity = self.identity
                greet(connection, self._key, identity)
                answer = self._name_places
                if is_near:
                    socket.send_fds(connection, [b"\1"], self._host.descriptors)
                else:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    is_remote = agree_on_nixl(connection, self._nixl)
                    answer = self._name_remote_places if is_remote else self._send_blocks
                for names in requests(connection, _IDLE_S):
                    if any(group >= len(self._host.num_places) for group, _ in names):
                        raise PeerError("a request for a group that does not exist")
                    if identity != self.identity:
                        raise PeerError("it was greeted before the weights changed")
                    answer(connection, names, identity)
        except (OSError, PeerError) as error:
            _log.info("a reader of KV blocks is cut off: %s", error)
        finally:
            self._readers.pop(threading.current_thread(), None)
            self._places.release()

    def _send_blocks(
        self, connection: socket.socket, names: Sequence[tuple[int, bytes]], identity: bytes
    ) -> None:
        until = time.monotonic() + _MAX_WAIT_S
        for group, block_hash in names:
            found = self._index.find(group, block_hash, until)
            block = memoryview(b"") if found is None else self._host.bytes_of(group, found[0])
            send_head(connection, is_there=found is not None, value=len(block))
            if found is not None:
                connection.sendall(block)
                connection.sendall(bytes([self._is_meant(identity, group, *found)]))

    def _is_meant(self, identity: bytes, group: int, place: int, version: int) -> bool:
        """Whether a place has the block that it had, and that is one of the weights of `identity`:
        others may have come while the block was waited for."""
        return self._index.is_whole(group, place, version) and identity == self.identity

    def _name_places(
        self, connection: socket.socket, names: Sequence[tuple[int, bytes]], identity: bytes
    ) -> None:
        until = time.monotonic() + _MAX_WAIT_S
        found = [self._index.find(group, block_hash, until) for group, block_hash in names]
        for each in found:
            send_head(connection, is_there=each is not None, value=each[0] if each else 0)
        receive(connection, 1)  # they are copied
        flags = [
            each is not None and self._is_meant(identity, group, *each)
            for (group, _), each in zip(names, found, strict=True)
        ]
        connection.sendall(bytes(flags))

    def _name_remote_places(
        self, connection: socket.socket, names: Sequence[tuple[int, bytes]], identity: bytes
    ) -> None:
        connection.settimeout(_MAX_READ_S)  # the reader is silent meanwhile
        with self._nixl.being_read():
            self._name_places(connection, names, identity)


class PeerConnector(KVConnector):
    """Reads blocks of other servers, and serves the host's."""

    def __init__(
        self,
        host: HostBlocks,
        key: bytes,
        identify: Identify,
        address: tuple[str, int] | None,
        rank: int = 0,
    ):
        """`address` is where blocks are served; None: nowhere. `rank` is the number of this rank in
        its engine. Raises OSError."""
        super().__init__()
        self._rank = rank
        self._host, self._key, self._identify = host, key, identify
        self._identity = identify()
        self._index = _Index(host)
        self._nixl = NixlLink(host.descriptors, [memory.data_ptr() for memory in host.groups])
        self._server = None
        if address is not None:
            self._server = _Server(address, host, self._index, key, self._identity, self._nixl)
        self._threads = ThreadPoolExecutor(_READERS, "kv-peer")
        self._lock = threading.Lock()
        self._links: dict[str, list[PeerLink]] = {}
        self._paused: dict[str, float] = {}  # until when a server is not asked
        self._plain: dict[str, float] = {}  # until when a server is read without NIXL

    def save(self, group: int, place: int, block_hash: bytes, saved: Wait) -> None:
        """See `KVConnector.save`: others may read the block from now on."""
        self._index.add(group, place, block_hash, saved)

    def delete(self, group: int, block_hash: bytes) -> None:
        """See `KVConnector.delete`."""
        self._index.remove(group, block_hash)
        if group < 0:
            self._identity = self._identify()
            if self._server is not None:
                self._server.identity = self._identity
            self._close_links()

    def read(self, ticket: int, blocks: Sequence[HostBlock], free: Wait, source: str) -> None:
        """See `KVConnector.read`; `source` is the `HOST:PORT` of the server's first rank."""
        size = min(_MAX_PART, max(_MIN_PART, -(-len(blocks) // _READERS)))
        parts = [blocks[first : first + size] for first in range(0, len(blocks), size)]
        jobs = [(len(part), self._threads.submit(self._read, part, free, source)) for part in parts]
        self._reads.add(ticket, jobs)

    def _read(self, blocks: Sequence[HostBlock], free: Wait, source: str) -> int:
        free()
        identity = self._identity
        names = [(group, block_hash) for group, _, block_hash in blocks]
        outs = [self._host.bytes_of(group, place) for group, place, _ in blocks]
        if not names or time.monotonic() < self._paused.get(source, 0.0):
            return 0
        failure: Exception = PeerError("no connection")
        # a connection that was kept may have ended meanwhile; after a failure of NIXL, plain TCP
        for is_pooled in (True, False, False):
            link = None
            try:
                link = self._take_link(source) if is_pooled else self._connect(source)
                if link is None:
                    continue
                count = link.read(names, outs, time.monotonic() + _MAX_READ_S)
            except (OSError, OverflowError, PeerError, ValueError) as error:
                failure = error
                if isinstance(error, NixlError):
                    self._plain[source] = time.monotonic() + _PLAIN_S
                if link is not None:
                    link.close()
                if not is_pooled and not isinstance(error, NixlError):
                    break
                continue
            with self._lock:
                if identity == self._identity:
                    self._links.setdefault(source, []).append(link)
                    return count
            link.close()
            return count
        self._paused[source] = time.monotonic() + _PAUSE_S
        _log.warning("KV blocks of %s are computed here: %s", source, failure)
        return 0

    def _take_link(self, source: str) -> PeerLink | None:
        with self._lock:
            links = self._links.get(source)
            return links.pop() if links else None

    def _connect(self, source: str) -> PeerLink:
        host, port = parse_address(source)
        nixl = self._nixl if time.monotonic() >= self._plain.get(source, 0.0) else None
        return PeerLink((host, port + self._rank), self._key, self._identity, nixl)

    def close(self) -> None:
        """See `KVConnector.close`."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._server is not None:
            self._server.close()
        self._close_links()
        self._nixl.close()

    def _close_links(self) -> None:
        with self._lock:
            for links in self._links.values():
                for link in links:
                    link.close()
            self._links.clear()
