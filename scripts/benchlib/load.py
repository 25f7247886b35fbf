"""The shape of a load: how many requests there are at a time, or when each is sent; and sending it
on one event loop."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from benchlib.client import Client, Record
from benchlib.conversation import Conversation, converse
from benchlib.workload import Call, RequestShape

#: The number of an item, its time in seconds from the load's start, and the item.
Arrival = tuple[int, float, Call | Conversation]
#: So many requests are made before the clock starts, the rest as they are sent.
PREPARED = 1024


@dataclass(frozen=True, slots=True)
class Load:
    """How many items are sent, and when. An item is a request, or a conversation of several.

    Attributes:
        concurrency: the maximum of items in flight. Without a rate (a closed loop) there are always
            so many.
        rate: items a second, sent at the times of a Poisson process (an open loop), all at once if
            infinite; an item that finds `concurrency` others under way waits in the client, before
            its clock starts.
        num_items: how many are sent; None for no limit but `seconds`.
        seconds: so long are new ones sent; None for no limit but `num_items`. Those under way are
            waited for.
        seed: of the arrival times.
    """

    concurrency: int
    rate: float | None = None
    num_items: int | None = None
    seconds: float | None = None
    seed: int = 0

    def arrivals(self, process: int = 0, processes: int = 1) -> Iterator[tuple[int, float]]:
        """Yields the number and the time, in seconds from the start, of each item that one of
        several client processes sends.

        A closed loop distributes them round-robin. An open loop gives each arrival to a random
        process (thinning: each process sends a Poisson process again, and all of them together send
        the same arrivals as a single one).
        """
        if self.rate is None:
            arrivals = ((index, 0.0) for index in itertools.count(process, processes))
        else:
            owners = np.random.default_rng([self.seed, processes])
            times = enumerate(arrival_times(self.rate, self.seed))
            arrivals = (
                arrival
                for arrival in times
                if processes == 1 or owners.integers(processes) == process
            )
        for index, at in arrivals:
            if (self.num_items is not None and index >= self.num_items) or (
                self.seconds is not None and at >= self.seconds
            ):
                return
            yield index, at

    def concurrency_of(self, process: int, processes: int) -> int:
        """Returns the part of the concurrency that one of several client processes keeps."""
        return self.concurrency // processes + (process < self.concurrency % processes)


@dataclass(slots=True)
class Run:
    """The records of a load.

    Attributes:
        records: one a request, in order of completion.
        duration_s: from the first request's sending to the last reply's end.
        num_items: how many numbers of the workload were used up.
        client_cpus: CPU time of each client process over the duration; near 1 the client itself is
            measured.
    """

    records: list[Record] = field(default_factory=list)
    duration_s: float = 0.0
    num_items: int = 0
    client_cpus: list[float] = field(default_factory=list)

    @property
    def client_cpu(self) -> float:
        """The CPU time of the busiest client process over the duration."""
        return max(self.client_cpus, default=0.0)

    @property
    def peak_in_flight(self) -> int:
        """The maximum of requests in flight at a time."""
        if not self.records:
            return 0
        sent = np.array([record.sent for record in self.records])
        ended = sent + [record.e2e for record in self.records]
        times, steps = np.concatenate((ended, sent)), np.repeat([-1, 1], len(sent))
        # of equal times, ends come first
        return int(np.cumsum(steps[np.argsort(times, kind="stable")]).max())


def merge_runs(runs: Sequence[Run]) -> Run:
    """Returns the runs of processes of one machine (which share the clock of `perf_counter`) as
    one."""
    records = sorted(
        (record for run in runs for record in run.records),
        key=lambda record: record.sent + record.e2e,
    )
    begin = min((record.sent for record in records), default=0.0)
    end = max((record.sent + record.e2e for record in records), default=0.0)
    cpus = [cpu for run in runs for cpu in run.client_cpus]
    return Run(records, end - begin, num_items=max(run.num_items for run in runs), client_cpus=cpus)


def prepare(arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
    """Makes the first items of a load in advance, so that a burst at its start is not delayed."""
    arrivals = iter(arrivals)
    return itertools.chain(list(itertools.islice(arrivals, PREPARED)), arrivals)


async def send_load(
    client: Client,
    shape: RequestShape,
    arrivals: Iterable[Arrival],
    load: Load,
    *,
    concurrency: int,
    begin: float = 0.0,
    on_done: Callable[[Record], None] = lambda record: None,
) -> Run:
    """Sends items and waits for all of their replies.

    Args:
        arrivals: in order of time.
        load: gives how long a closed loop goes on.
        concurrency: the maximum of items in flight.
        begin: the start, on the clock of `perf_counter`; now, if that is past.
        on_done: called with each record when it is there.
    """
    run = Run()
    free = asyncio.Semaphore(concurrency)

    async def send(item: Call | Conversation) -> None:
        try:
            async for record in _records(client, shape, item):
                run.records.append(record)
                on_done(record)
        finally:
            free.release()

    await asyncio.sleep(begin - perf_counter())
    begin, cpu = max(begin, perf_counter()), time.process_time()
    async with asyncio.TaskGroup() as group:
        for index, at, item in arrivals:
            if at > 0.0:
                await asyncio.sleep(begin + at - perf_counter())
            await free.acquire()
            if load.seconds is not None and perf_counter() - begin >= load.seconds:
                break
            run.num_items = index + 1
            group.create_task(send(item))
    elapsed = perf_counter() - begin
    run.client_cpus = [(time.process_time() - cpu) / elapsed]
    run.duration_s = merge_runs([run]).duration_s
    return run


async def _records(
    client: Client, shape: RequestShape, item: Call | Conversation
) -> AsyncIterator[Record]:
    if isinstance(item, Call):
        yield await client.send(shape, item)
        return
    async for record in converse(client, shape, item):
        yield record


async def run_load(
    client: Client,
    shape: RequestShape,
    calls: Iterable[Call | Conversation],
    *,
    num_requests: int,
    concurrency: int,
    rate: float | None = None,
    seed: int = 0,
    on_done: Callable[[Record], None] = lambda record: None,
) -> Run:
    """Sends the first `num_requests` of `calls` from this process.

    For the other arguments see `Load` and `send_load`.
    """
    load = Load(concurrency, rate, num_requests, seed=seed)
    arrivals = (
        (index, at, item) for (index, at), item in zip(load.arrivals(), calls, strict=False)
    )
    return await send_load(
        client, shape, prepare(arrivals), load, concurrency=concurrency, on_done=on_done
    )


def arrival_times(rate: float, seed: int) -> Iterator[float]:
    """Yields the arrival times of a Poisson process of `rate` a second, in seconds from its
    start."""
    random = np.random.default_rng(seed)
    at = 0.0
    while True:
        at += random.exponential(1.0 / rate)
        yield at
