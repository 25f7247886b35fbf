"""The shape of a load: how many requests there are at a time, or when each is sent."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from benchlib.client import Client, Record
from benchlib.workload import Call, RequestShape


@dataclass(slots=True)
class Run:
    """The records of a load.

    Attributes:
        records: one a request, in order of completion.
        duration_s: from the first request's sending to the last reply's end.
        peak_in_flight: the most requests that were under way at a time.
        client_cpu: CPU time of this process over the duration; near 1 the client itself is what is measured.
    """

    records: list[Record] = field(default_factory=list)
    duration_s: float = 0.0
    peak_in_flight: int = 0
    client_cpu: float = 0.0


async def run_load(
    client: Client,
    shape: RequestShape,
    calls: Iterable[Call],
    *,
    num_requests: int,
    concurrency: int,
    rate: float | None = None,
    seed: int = 0,
    on_done: Callable[[Record], None] = lambda record: None,
) -> Run:
    """Sends requests and waits for all of their replies.

    Args:
        calls: at least `num_requests` of them.
        concurrency: the most requests at a time. Without a rate (a closed loop) there are always so many.
        rate: requests a second, sent at the times of a Poisson process (an open loop); a request that finds
            `concurrency` others under way waits here, before its clock starts.
        seed: of the arrival times.
        on_done: called with each record when it is there.
    """
    run = Run()
    free = asyncio.Semaphore(concurrency)
    in_flight = 0

    async def send(call: Call) -> None:
        nonlocal in_flight
        in_flight += 1
        run.peak_in_flight = max(run.peak_in_flight, in_flight)
        try:
            record = await client.send(shape, call)
        finally:
            in_flight -= 1
            free.release()
        run.records.append(record)
        on_done(record)

    begin, cpu = perf_counter(), time.process_time()
    due = itertools.repeat(0.0) if rate is None else arrival_times(rate, seed)
    async with asyncio.TaskGroup() as group:
        for call, at in zip(itertools.islice(calls, num_requests), due, strict=False):
            if at > 0.0:
                await asyncio.sleep(begin + at - perf_counter())
            await free.acquire()
            group.create_task(send(call))
    run.duration_s = perf_counter() - begin
    run.client_cpu = (time.process_time() - cpu) / run.duration_s
    return run


def arrival_times(rate: float, seed: int) -> Iterator[float]:
    """Yields the arrival times of a Poisson process of `rate` a second, in seconds from its start."""
    random = np.random.default_rng(seed)
    at = 0.0
    while True:
        at += random.exponential(1.0 / rate)
        yield at
