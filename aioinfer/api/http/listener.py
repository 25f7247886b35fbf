"""The listening sockets, the names under which they may be addressed, and the bound on the
connections behind them. `server` and `gateway.proxy` own one `Listener`.

Connections are accepted here and not by the event loop's own server, which sets no bound: a
connection counts from the moment it is accepted, be it in a TLS handshake, idle or at work. File
descriptors are the process's scarcest resource; without any left, it could not even reject. When
there is no room, connections that wait for a request are closed first (`connections`).

`AllowedHosts` has the names that the `Host` header of a request may have, which is checked before
anything else: a web page of another site can let its own name resolve to 127.0.0.1 (DNS rebinding),
and for the browser the local server then belongs to that site. The request still has that name.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import ssl
import stat
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from aiohttp import web

from aioinfer.api.errors import error_body, raw_response
from aioinfer.api.http.connections import Connection, ConnectionServer
from aioinfer.config import ServerConfig
from aioinfer.errors import ConfigError, RequestError
from aioinfer.tasks import end_tasks

#: Connections that may wait to be accepted: clients that arrive together must not be rejected.
_BACKLOG = 1024
#: Connections that are accepted at a time, before the event loop does other work.
_MAX_ACCEPTS = 64
#: Descriptors for all else: workers, rings, files, connections that are being rejected.
_OTHER_DESCRIPTORS = 256
_HANDSHAKE_TIMEOUT_S = 10.0
#: So many rejected clients at a time get this long to read the reply: closing a socket at once can
#: discard the sent data.
_MAX_REJECTED = 64
_REJECTION_TIMEOUT_S = 1.0
#: Connections, idle ones included: some 30 KiB of memory each, and a file descriptor, of which the
#: process may have fewer. Beyond it, one that waits for a request is closed, and if there is none,
#: the new one is answered 503 (dropped under TLS).
MAX_CONNECTIONS = 8192
#: How long accepting pauses when the machine has no descriptor or memory left.
_PAUSE_S = 0.5
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_REJECTION = raw_response(
    503,
    error_body(
        503,
        "the server has as many connections as it may; try again later",
        code="too_many_connections",
    ),
    b"Retry-After: 1\r\n",
)


class Listener:
    """Accepts connections for an HTTP server until `stop`; connections beyond the bound are
    answered 503 and closed.

    Attributes:
        hosts: the names under which the server may be addressed, once it is bound.
    """

    hosts: AllowedHosts

    def __init__(self, server: ConnectionServer, config: ServerConfig):
        self._server = server
        self._config = config
        self._tls: ssl.SSLContext | None = None
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._unix_file: tuple[Path, int] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_rejected = 0

    async def bind(self) -> str:
        """Binds the address and returns the URL, `unix:PATH` for a Unix socket. Clients that
        connect have to wait for `listen`.

        Raises `ConfigError` if the address cannot be bound, or a TLS file cannot be used.
        """
        config = self._config
        self._max_connections = _allow_descriptors(MAX_CONNECTIONS)
        self._tls = await asyncio.to_thread(tls_context, config)
        self._sockets, self._unix_file = await asyncio.to_thread(_bind, config)
        names = [sock.getsockname() for sock in self._sockets]
        is_loopback = self._unix_file is None and all(
            ip_address(name[0]).is_loopback for name in names
        )
        self.hosts = AllowedHosts.of(config.allowed_hosts, config.host, is_loopback=is_loopback)
        if self._unix_file is not None:
            return config.host
        host, port = names[0][:2]
        return f"{'https' if self._tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    def listen(self) -> None:
        """Begins to accept connections."""
        for sock in self._sockets:
            self._listen(sock)

    async def stop(self) -> None:
        """Stops listening, before anything else happens; connections that were accepted stay."""
        for sock in self._sockets:
            self._loop.remove_reader(sock.fileno())
            sock.close()
        self._sockets.clear()
        if self._unix_file is not None:
            await asyncio.to_thread(_remove, *self._unix_file)
            self._unix_file = None

    async def close(self) -> None:
        """Stops listening and drops the connections that are being set up or rejected."""
        await self.stop()
        await end_tasks(self._tasks)

    # ---------------------------------------------------------------- connections

    def _listen(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0:  # `stop` may have come during a pause
            self._loop.add_reader(sock.fileno(), self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        """Accepts the connections that wait at a listening socket."""
        for _ in range(_MAX_ACCEPTS):
            try:
                connection, _ = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                # it would stay readable, and the loop would spin
                self._loop.remove_reader(sock.fileno())
                self._loop.call_later(_PAUSE_S, self._listen, sock)
                return
            connection.setblocking(False)
            if len(self._server.open) < self._max_connections or self._server.make_room():
                protocol = self._server()  # it counts from now on
                protocol.socket = connection
                self._spawn(self._set_up(connection, protocol))
            else:
                self._reject(connection)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _set_up(self, connection: socket.socket, protocol: Connection) -> None:
        timeout = _HANDSHAKE_TIMEOUT_S if self._tls else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._tls, ssl_handshake_timeout=timeout
            )
        except OSError:  # the client went away, or its handshake failed
            connection.close()
            self._server.forget(protocol)
        finally:
            protocol.socket = None

    def _reject(self, connection: socket.socket) -> None:
        """Answers a connection for which there is no room, and closes it."""
        self._server.counts.no_room += 1
        # no TLS handshake for this: it costs more than a request
        if self._tls is not None or self._num_rejected >= _MAX_REJECTED:
            connection.close()
            return
        self._num_rejected += 1
        self._spawn(self._send_rejection(connection))

    async def _send_rejection(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # a timeout is one, too
            try:
                connection.send(_REJECTION)
                connection.shutdown(socket.SHUT_WR)
                async with asyncio.timeout(_REJECTION_TIMEOUT_S):
                    while await self._loop.sock_recv(connection, 65536):
                        pass
            finally:
                self._num_rejected -= 1


def check_address(config: ServerConfig) -> None:
    """Binds the address and lets go of it again: a start that takes seconds can report a taken port
    before it imports anything large.

    Raises `ConfigError` if the address cannot be bound.
    """
    sockets, unix_file = _bind(config)
    for sock in sockets:
        sock.close()
    if unix_file is not None:
        _remove(*unix_file)


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Returns the TLS settings of `server.tls_files`, None without one.

    Raises `ConfigError`.
    """
    if not config.tls_files:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # a key under a passphrase fails to load: OpenSSL would ask for it at the terminal
        certificate, *key = config.tls_files
        context.load_cert_chain(certificate, key[0] if key else None, password=lambda: "")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"server.tls_files = {config.tls_files} must be a PEM file with the certificate and, "
            f"in it or behind it, one with its private key, without a passphrase: {error}"
        ) from error
    return context


def _bind(config: ServerConfig) -> tuple[list[socket.socket], tuple[Path, int] | None]:
    """Returns the listening sockets of the configured address, and of a Unix socket the file and
    its inode. Raises `ConfigError`."""
    sockets: list[socket.socket] = []
    try:
        if config.unix_socket is not None:
            path = Path(config.unix_socket)
            sock, inode = _bind_unix(path)
            return [sock], (path, inode)
        found = socket.getaddrinfo(
            config.host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, address in dict.fromkeys(found):
            sockets.append(socket.create_server(address[:2], family=family, backlog=_BACKLOG))
            sockets[-1].setblocking(False)
    except OSError as error:
        for sock in sockets:
            sock.close()
        place, remedy = f"server.host = {config.host!r}", ""
        if config.unix_socket is None:
            place += f", server.port = {config.port}"
            if error.errno == errno.EADDRINUSE:
                remedy = "; end the program that listens there, or set another server.port"
        raise ConfigError(f"cannot listen at {place}: {error}{remedy}") from error
    return sockets, None


def _bind_unix(path: Path) -> tuple[socket.socket, int]:
    """Returns a listening socket at `path`, and the file's inode; a file left there by a server
    that is gone is replaced. Raises OSError."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(errno.EEXIST, "there is a file that is no socket")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise OSError(errno.EADDRINUSE, "another server listens there")
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(os.fspath(path))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
        return sock, path.lstat().st_ino
    except OSError:
        sock.close()
        raise


def _remove(path: Path, inode: int) -> None:
    """Removes a Unix socket's file, unless another server's has taken its place."""
    with suppress(FileNotFoundError):
        if path.lstat().st_ino == inode:
            path.unlink()


def _allow_descriptors(connections: int) -> int:
    """Raises the process's limit of descriptors as far as so many connections need it.

    Returns how many there is room for.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHER_DESCRIPTORS
    if soft == resource.RLIM_INFINITY:
        return connections
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(connections, soft - _OTHER_DESCRIPTORS))


#: Names of this machine itself, for a server that only this machine can reach.
_LOCAL_NAMES = ("localhost", "*.localhost", "127.0.0.1", "[::1]")


class AllowedHosts:
    """The names under which the server may be addressed."""

    def __init__(self, names: Iterable[str]):
        """`names` are exact names, `*.example.org` for all below a domain, or `*` for any name; an
        IPv6 address may stand in brackets."""
        lowered = {name.lower().rstrip(".") for name in names}
        self._any = "*" in lowered
        self._suffixes = tuple(name[1:] for name in lowered if name.startswith("*."))
        self._exact = {_without_brackets(name) for name in lowered}

    @classmethod
    def of(cls, configured: list[str], host: str, *, is_loopback: bool) -> AllowedHosts:
        """Returns the configured names or, without any, localhost's and the name of `server.host`
        where the server listens on loopback, and any elsewhere."""
        if configured:
            return cls(configured)
        return cls([*_LOCAL_NAMES, host]) if is_loopback else cls("*")

    def check(self, request: web.BaseRequest) -> None:
        """Raises `RequestError` (421) for a request to another name."""
        if not self.admits(request.headers.get("Host")):
            raise RequestError(
                "the Host header names another server; server.allowed_hosts lists the names that "
                "are answered",
                status=421,
                code="host_not_allowed",
            )

    def admits(self, header: str | None) -> bool:
        """Whether a request with this `Host` header may be answered. Without one there is no web
        page behind it: browsers always send it."""
        if self._any or header is None:
            return True
        name = _name_of(header)
        return name in self._exact or name.endswith(self._suffixes)


def _name_of(header: str) -> str:
    """Returns the name in a `Host` header, in lower case: without port, brackets and final dot."""
    name, colon, port = header.rpartition(":")
    if not colon or not port.isdecimal() or (":" in name and not name.endswith("]")):
        name = header if port or not colon else name
    return _without_brackets(name.lower().rstrip("."))


def _without_brackets(name: str) -> str:
    """Returns an IPv6 address in its canonical form and without brackets, another name as it is."""
    if not (name.startswith("[") and name.endswith("]")):
        return name
    try:
        return str(ip_address(name[1:-1]))
    except ValueError:
        return name
