"""One load from several client processes, so that it is the server that is measured and not its client."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType

from benchlib.client import Client
from benchlib.load import Run, run_load
from benchlib.workload import Call, RequestShape

END_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Share:
    """What one process sends: its calls, at most `concurrency` at a time."""

    url: str
    shape: RequestShape
    calls: Sequence[Call]
    concurrency: int


class ClientProcesses:
    """Processes that wait for loads to send, as a context manager.

    Args:
        count: how many; a load of fewer streams uses as many as it has streams.
    """

    def __init__(self, count: int):
        self._count = count
        self._clients: list[tuple[BaseProcess, Connection]] = []

    def __enter__(self) -> ClientProcesses:
        context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks of whatever the caller runs
        for number in range(self._count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve_loads, args=(theirs,), name=f"client {number}", daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self._clients.append((process, ours))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for _, connection in self._clients:
            connection.close()
        for process, _ in self._clients:
            process.join(END_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._clients.clear()

    def run_load(self, url: str, shape: RequestShape, calls: Sequence[Call], concurrency: int) -> Run:
        """Sends `calls` as a closed loop of `concurrency` in all and returns the run as if one client had sent it.

        Its duration is from the first request's sending to the last reply's end, its CPU that of the busiest process,
        and `peak_in_flight` the sum of theirs. Raises `RuntimeError` if a process ended.
        """
        count = min(self._count, concurrency)
        connections = [connection for _, connection in self._clients[:count]]
        try:
            for number, connection in enumerate(connections):
                streams = concurrency // count + (number < concurrency % count)
                connection.send(Share(url, shape, calls[number::count], streams))
            for connection in connections:
                connection.recv()  # it has its share: none begins before all have theirs
            for connection in connections:
                connection.send(None)
            return merge_runs([connection.recv() for connection in connections])
        except (EOFError, OSError) as error:
            raise RuntimeError("a client process ended before its load did") from error


def merge_runs(runs: Sequence[Run]) -> Run:
    """Returns the runs of processes of one machine (which share the clock of `perf_counter`) as one."""
    records = sorted((record for run in runs for record in run.records), key=lambda record: record.sent + record.e2e)
    begin = min(record.sent for record in records)
    return Run(
        records,
        duration_s=records[-1].sent + records[-1].e2e - begin,
        peak_in_flight=sum(run.peak_in_flight for run in runs),
        client_cpu=max(run.client_cpu for run in runs),
    )


def _serve_loads(connection: Connection) -> None:
    """The life of a client process: sends one share after another until the pipe is closed."""
    try:
        while True:
            share = connection.recv()
            connection.send(None)
            connection.recv()
            connection.send(asyncio.run(_send_share(share)))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return


async def _send_share(share: Share) -> Run:
    async with Client(share.url) as client:
        return await run_load(client, share.shape, share.calls, num_requests=len(share.calls), concurrency=share.concurrency)
