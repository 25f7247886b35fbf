"""Measures the ring: a plan encoded, posted and read back with its result by a second process, in
microseconds.

The second process decodes each plan and answers at once, so the round trip is all that an executor
adds to the work itself. Prints medians of several runs: the round trip, and the parent's own CPU
time in it.

    python scripts/bench_ring.py [--requests 256] [--steps 2000] [--runs 5]
"""

from __future__ import annotations

import argparse
import select
import statistics
import time

import numpy as np
from torch import multiprocessing

from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.ipc.ring import Ring


def answer(plans: Ring, results: Ring, requests: int) -> None:
    """The second process: a token for each row of each plan, until an empty plan comes."""
    poll = select.poll()
    poll.register(plans.event_fd(0), select.POLLIN)
    tokens = np.arange(requests, dtype=np.int32)
    while True:
        poll.poll()
        for _ in range(plans.announced(0)):
            plan = StepPlan.decode(plans.read(0))
            rows = len(plan.slots)
            step_id = plan.step_id
            plans.release(0)
            if not rows:
                return
            results.write(StepResult(step_id, tokens[:rows]).encode())


def decode_plan(step_id: int, requests: int) -> StepPlan:
    """Returns a step that decodes for all requests, one in sixteen of which gets a block."""
    slots = np.arange(requests, dtype=np.int32)
    ones, none, growing = (
        np.ones(requests, np.int32),
        np.empty(0, np.int32),
        slots[: requests // 16],
    )
    return StepPlan(step_id, slots, slots + 500, ones, ones, growing, growing, growing, none, none)


def measure(plans: Ring, results: Ring, requests: int, steps: int) -> tuple[float, float]:
    """Returns the median round trip and the mean CPU time of this process, in microseconds a
    step."""
    poll = select.poll()
    poll.register(results.event_fd(0), select.POLLIN)
    trips = []
    cpu = time.process_time()
    for step_id in range(steps):
        plan = decode_plan(step_id, requests)
        begin = time.perf_counter()
        plans.write(plan.encode())
        poll.poll()
        for _ in range(results.announced(0)):
            result = StepResult.decode(results.read(0))
            results.release(0)
        trips.append(time.perf_counter() - begin)
        assert result.step_id == step_id
    return statistics.median(trips) * 1e6, (time.process_time() - cpu) / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    plans, results = Ring(1), Ring(1)
    process = multiprocessing.get_context("spawn").Process(
        target=answer, args=(plans, results, arguments.requests), daemon=True
    )
    process.start()
    measure(plans, results, arguments.requests, 200)  # until both sides are warm
    runs = [
        measure(plans, results, arguments.requests, arguments.steps) for _ in range(arguments.runs)
    ]
    plans.write(decode_plan(0, 0).encode())
    process.join()
    trip, cpu = (statistics.median(column) for column in zip(*runs, strict=True))
    print(
        f"{arguments.requests} requests: round trip {trip:.1f} µs, CPU of the posting process "
        f"{cpu:.1f} µs"
    )


if __name__ == "__main__":
    main()
