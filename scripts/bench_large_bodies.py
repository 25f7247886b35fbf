"""Measures for how long a large request body keeps a server's event loop from other clients.

    python scripts/bench_large_bodies.py [--runs 3] [--only TEXT] [--tail 6] [--url URL --pid PID]

Starts `python -m aioinfer` with SmolLM2 on a free port, or takes a running server, and posts one
large body after the other (`benchlib.large_bodies`). Meanwhile another process requests `/health`
every 5 ms over a connection of its own, and notes how long each reply takes. A row of the table is
a body: its status, and the worst wait in each run, from sending the body until `--tail` seconds
after its reply: a server may clean up later. A client that has no reply after `--patience` seconds
leaves; its status is 0. The first row is the server at idle.

The machine's share is measured as well: a third process does the same polls with a fourth, which
only answers them. Its worst wait of all runs is the last column. "blocked" leaves that share out,
so that it can be measured on a busy machine, too: it is the worst wait without the time that the
event loop's thread waited for a core, and no more than the CPU time of all threads of the server
during the wait, both by the kernel's `schedstat`. Time in which a thread that holds the interpreter
waits for a core still counts, unless no other thread of the server has used a core either.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from benchlib.large_bodies import BODIES, LargeBody
from benchlib.server_process import ROOT, ServerProcess, exiting_at_signals

#: Between the beginnings of two polls.
INTERVAL_S = 0.005
#: How long the server is polled at idle.
IDLE_S = 5.0
#: The longest that a reply of `/health` may take.
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Worst:
    """The worst of some seconds of polls, in ms.

    Attributes:
        server: the wait for a reply of the server.
        blocked: a wait without the time in which the server waited for a core.
        machine: that for a reply of a process which only answers.
    """

    server: float
    blocked: float
    machine: float


class Schedule:
    """The CPU time of a process, by the kernel's accounts in ns."""

    def __init__(self, pid: int | None):
        """None stands for a process that is not of this host."""
        self._folder = None if pid is None else Path("/proc") / str(pid)

    def read(self) -> tuple[float, float]:
        """Returns in seconds the CPU time of all threads, and for how long the main thread was
        ready to run and had no core."""
        if self._folder is None:
            return time.perf_counter(), 0.0
        used = 0
        for file in self._folder.glob("task/*/schedstat"):
            with suppress(OSError):  # the thread has ended
                used += int(file.read_text().split()[0])
        delay = int((self._folder / "schedstat").read_text().split()[1])
        return used * 1e-9, delay * 1e-9


def answer(address: Connection) -> None:
    """A process that answers the polls of one connection, and does nothing else."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(65_536):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")


def poll(host: str, port: int, pid: int | None, control: Connection) -> None:
    """The polling process: at each message but the last it sends the worst wait and the longest
    time blocked since the one before, in ms; None ends it."""
    gc.disable()
    schedule = Schedule(pid)
    request = f"GET /health HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
    with socket.create_connection((host, port), timeout=TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wait = blocked = 0.0
        due = time.perf_counter()
        while True:
            if control.poll(max(0.0, due - time.perf_counter())):
                if control.recv() is None:
                    return
                control.send((wait * 1e3, blocked * 1e3))
                wait = blocked = 0.0
                continue
            used, delay = schedule.read()
            began = time.perf_counter()
            connection.sendall(request)
            _receive(connection)
            ended = time.perf_counter()
            wait = max(wait, ended - began)
            more_used, more_delay = (
                after - before for after, before in zip(schedule.read(), (used, delay), strict=True)
            )
            blocked = max(blocked, min(ended - began - more_delay, more_used))
            due = max(due + INTERVAL_S, ended)


def _receive(connection: socket.socket) -> None:
    """Reads one response. Raises `ConnectionError` if it is not 200."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := connection.recv(65_536)):
            raise ConnectionError("the server closed the connection of /health")
        data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise ConnectionError(f"/health answered {head[:60]!r}")
    (length,) = (
        int(line.split(b":")[1])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length:")
    )
    while len(rest) < length:
        rest += connection.recv(65_536)


class Pollers:
    """The processes that poll, as a context manager."""

    def __init__(self, host: str, port: int, pid: int | None):
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = []
        self._server = self._start(poll, host, port, pid)
        self._machine = self._start(poll, "127.0.0.1", self._start(answer).recv(), None)

    def _start(self, target: Callable[..., None], *arguments: Any) -> Connection:
        """Starts a process; its last argument is one end of a pipe, and the other is returned."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(*arguments, theirs), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        return ours

    def __enter__(self) -> Pollers:
        self.worst()  # the first request over a connection takes longer
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()

    def worst(self) -> Worst:
        """Returns the worst since the last call. Raises `EOFError` if the server has ended."""
        for control in (self._server, self._machine):
            control.send("worst")
        wait, blocked = self._server.recv()
        return Worst(wait, blocked, self._machine.recv()[0])


def post(host: str, port: int, path: str, body: bytes, patience_s: float) -> int:
    """Sends a body over a new connection and reads the reply. Returns its status, or 0 if there is
    none after `patience_s` seconds."""
    connection = HTTPConnection(host, port, timeout=patience_s)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    except TimeoutError:
        return 0
    finally:
        connection.close()


def measure(
    host: str, port: int, bodies: Sequence[LargeBody], options: argparse.Namespace
) -> dict[str, list[tuple[int, Worst]]]:
    """Returns the status and the worst waits of each body in each run, by its name."""
    found: dict[str, list[tuple[int, Worst]]] = {"(idle)": []}
    with Pollers(host, port, options.pid) as pollers:
        for run in range(options.runs):
            pollers.worst()
            time.sleep(IDLE_S)
            found["(idle)"].append((200, pollers.worst()))
            for body in bodies:
                data = body.make()
                pollers.worst()
                status = post(host, port, body.path, data, options.patience)
                time.sleep(options.tail)
                worst = pollers.worst()
                found.setdefault(body.name, []).append((status, worst))
                print(
                    f"run {run + 1}: {body.name}: {status}, {worst.server:.0f} ms, "
                    f"blocked {worst.blocked:.0f} ms, machine {worst.machine:.0f} ms",
                    file=sys.stderr,
                )
    return found


def show(found: dict[str, list[tuple[int, Worst]]], console: Console) -> None:
    """Prints a row for each body."""
    table = Table(title="worst wait of /health, ms", title_justify="left")
    table.add_column("body")
    for name in ("status", "each run", "median", "worst", "blocked", "machine"):
        table.add_column(name, justify="right")
    for name, results in found.items():
        waits = [worst.server for _, worst in results]
        table.add_row(
            name,
            ", ".join(sorted({str(status) for status, _ in results})),
            ", ".join(f"{wait:.0f}" for wait in waits),
            f"{sorted(waits)[len(waits) // 2]:.0f}",
            f"{max(waits):.0f}",
            f"{max(worst.blocked for _, worst in results):.0f}",
            f"{max(worst.machine for _, worst in results):.0f}",
        )
    console.print(table)


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description="How long large bodies hold the event loop.")
    parser.add_argument("--runs", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--only", default="", help="bodies whose names hold this text")
    parser.add_argument("--tail", type=float, default=6.0, help="seconds (default: %(default)s)")
    parser.add_argument("--patience", type=float, default=20.0, help="default: %(default)s s")
    parser.add_argument("--url", help="of a running server, such as http://127.0.0.1:8000")
    parser.add_argument("--pid", type=int, help="of that server, for the time blocked")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "smollm2.toml")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    bodies = [body for body in BODIES if options.only in body.name]
    with ExitStack() as stack:
        stack.enter_context(exiting_at_signals())
        if options.url is None:
            server = stack.enter_context(ServerProcess(options.config, options.set))
            options.url, options.pid = server.url, server.pid
        address = urlsplit(options.url)
        found = measure(address.hostname or "", address.port or 80, bodies, options)
    show(found, Console(width=120))


if __name__ == "__main__":
    main()
