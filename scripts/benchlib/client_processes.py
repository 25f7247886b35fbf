"""One load from several client processes, so that it is the server that is measured and not its
client."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import perf_counter
from types import TracebackType

from benchlib.client import Client, Record
from benchlib.load import Load, Run, merge_runs, prepare, send_load
from benchlib.workload import Call, Calls, RequestShape, Workload

END_TIMEOUT_S = 10.0
#: All processes begin so long after the last of them is ready, by which time each has heard of it.
START_DELAY_S = 0.05
#: How often a process reports its progress.
PROGRESS_S = 0.25


@dataclass(frozen=True, slots=True)
class Target:
    """The server, and the settings of all requests to it; see `Client`."""

    url: str
    shape: RequestShape
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a load that one process sends: the items of `workload` from `first` on."""

    target: Target
    workload: Workload
    load: Load
    process: int
    processes: int
    first: int = 0


class ClientProcesses:
    """Processes that wait for loads to send, as a context manager. Each has an event loop and
    connections of its own.

    Args:
        count: how many; a load of fewer streams uses as many as it has streams.
    """

    def __init__(self, count: int):
        self._count = count
        self._clients: list[tuple[BaseProcess, Connection]] = []

    def __enter__(self) -> ClientProcesses:
        # a fork would copy the locks of the caller's threads
        context = multiprocessing.get_context("spawn")
        for number in range(self._count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve_loads, args=(theirs,), name=f"client {number}", daemon=True
            )
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self._clients.append((process, ours))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for _, connection in self._clients:
            connection.close()
        for process, _ in self._clients:
            process.join(END_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._clients.clear()

    def send(
        self,
        target: Target,
        workload: Workload,
        load: Load,
        *,
        first: int = 0,
        on_progress: Callable[[int, int], None] = lambda done, failed: None,
    ) -> Run:
        """Sends a load and returns the run as if one client had sent it: all records are merged,
        not their percentiles.

        Args:
            first: the number of the first item of the workload that is sent.
            on_progress: called now and then with the numbers of requests that have ended and that
                have failed.

        Raises:
            RuntimeError: a process ended.
        """
        count = min(self._count, load.concurrency)
        return self._send(
            [Part(target, workload, load, number, count, first) for number in range(count)],
            on_progress,
        )

    def run_load(
        self, url: str, shape: RequestShape, calls: Sequence[Call], concurrency: int
    ) -> Run:
        """Sends `calls` as a closed loop of `concurrency` in all. The rest is as for `send`."""
        count = min(self._count, concurrency)
        whole = Load(concurrency)
        parts = []
        for number in range(count):
            own = Calls(calls[number::count])
            load = Load(whole.concurrency_of(number, count), num_items=len(own.calls))
            parts.append(Part(Target(url, shape), own, load, 0, 1))
        return self._send(parts, lambda done, failed: None)

    def _send(self, parts: Sequence[Part], on_progress: Callable[[int, int], None]) -> Run:
        connections = [connection for _, connection in self._clients[: len(parts)]]
        try:
            for connection, part in zip(connections, parts, strict=True):
                connection.send(part)
            for connection in connections:
                connection.recv()  # it is ready: none begins before all are
            begin = perf_counter() + START_DELAY_S
            for connection in connections:
                connection.send(begin)
            return merge_runs(_collect(connections, on_progress))
        except (EOFError, OSError) as error:
            raise RuntimeError("a client process ended before its load did") from error


def _collect(
    connections: Sequence[Connection], on_progress: Callable[[int, int], None]
) -> list[Run]:
    """Returns the run of each process, in their order.

    Until then they send the numbers of ended and of failed requests.
    """
    runs: dict[Connection, Run] = {}
    counts = dict.fromkeys(connections, (0, 0))
    while waiting := [connection for connection in connections if connection not in runs]:
        for ready in wait(waiting):
            assert isinstance(ready, Connection)
            message = ready.recv()
            if isinstance(message, Run):
                runs[ready] = message
                message = (
                    len(message.records),
                    sum(record.error is not None for record in message.records),
                )
            counts[ready] = message
        on_progress(
            sum(done for done, _ in counts.values()), sum(failed for _, failed in counts.values())
        )
    return [runs[connection] for connection in connections]


def _serve_loads(connection: Connection) -> None:
    """The body of a client process: sends one part after another until the pipe is closed."""
    try:
        while True:
            part = connection.recv()
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                connection.send(runner.run(_send_part(part, connection)))
    # in mid-load a task finds out, and the failure comes as one of a group
    except* (EOFError, ConnectionError, KeyboardInterrupt):
        pass


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns the factory of the event loop; uvloop's halves the CPU time of a chunk."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return None
    return new_event_loop


async def _send_part(part: Part, connection: Connection) -> Run:
    target, load = part.target, part.load
    numbers = load.arrivals(part.process, part.processes)
    arrivals = prepare((index, at, part.workload.item(part.first + index)) for index, at in numbers)
    progress = _Progress(connection)
    async with Client(
        target.url, timeout_s=target.timeout_s, headers=dict(target.headers)
    ) as client:
        connection.send(None)
        begin = connection.recv()
        concurrency = load.concurrency_of(part.process, part.processes)
        return await send_load(
            client,
            target.shape,
            arrivals,
            load,
            concurrency=concurrency,
            begin=begin,
            on_done=progress.add,
        )


class _Progress:
    """Reports to the parent the requests that have ended, not more often than it can be seen."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._done = self._failed = 0
        self._reported_at = perf_counter()

    def add(self, record: Record) -> None:
        """Counts one that ended."""
        self._done += 1
        self._failed += record.error is not None
        if (now := perf_counter()) - self._reported_at >= PROGRESS_S:
            self._reported_at = now
            self._connection.send((self._done, self._failed))
