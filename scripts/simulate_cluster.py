"""Simulates replicas behind a router: how throughput, TTFT and prefix hits grow with their number.

A discrete-event simulation with production objects: `aioinfer.cluster.router` routes, each replica
is an `aioinfer.scheduler.Scheduler` with its block pool and prefix cache, and its reports come from
`aioinfer.scheduler.stats`. Simulated are the workers (step times from
`benchlib/step_times_h200.toml`), the clients, and the network (no time). Beside the router:
round-robin, and the replica with the fewest requests that have not ended, which a router without
reports knows as well.

    python scripts/simulate_cluster.py                            # 1, 10 and 100 replicas
    python scripts/simulate_cluster.py --replicas 1000 --rate 100   # 100 000 requests a minute
    python scripts/simulate_cluster.py --replicas 100 --lose-at 20  # a replica is lost after 20 s

Requests arrive at random (Poisson), at a rate for each replica; `--share` of them begin with one of
`--prefixes` prefixes, the more popular ones more often (Zipf), and every ten seconds `--burst` of a
second's requests come at once, all with one prefix. The state of a lost replica is lost; the
replica comes back empty after 20 seconds.

While nothing arrives at a replica and nothing is prefilled there, up to 16 of its decode steps are
computed as one: the tokens of a row but the first are forced. It ends when a request of it ends or
when one arrives, so nothing that is measured depends on it but the time of allocating blocks;
without that, a thousand replicas would take an hour. Steps are not planned ahead: a step takes the
device's time alone. All times but "router" are simulated; "router" is the processor time that
choosing a replica took here, hashing of prompts left out.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import random
import resource
import time
import tomllib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from aioinfer.cluster.reports import Report
from aioinfer.cluster.router import Choice, ClusterRouter
from aioinfer.gateway.reporter import load_of, take_changes
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.block_pool import extend_hashes, root_hash
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.request import Request, RequestStatus
from aioinfer.scheduler.scheduler import Scheduler

STEP_TIMES = Path(__file__).parent / "benchlib" / "step_times_h200.toml"
#: From a change of a replica's state to its report, as of `gateway.reporter`.
REPORT_S = 0.05
HEARTBEAT_S = 1.0
#: From the loss of a replica until the router knows, and until it is back.
NOTICE_S, BACK_S = 0.05, 20.0
BURST_EVERY_S = 10.0
MAX_MERGED_STEPS = 16
#: Tokens of a merged step: the rest of the budget is for prompts.
MAX_MERGED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of a step on a device; see the data file."""

    decode: tuple[tuple[int, float], ...]
    context: float
    prefill: float
    kv_tokens: int
    block_size: int

    @classmethod
    def load(cls, file: Path) -> StepTimes:
        """Reads a data file. Times become seconds."""
        data = tomllib.loads(file.read_text("utf-8"))
        return cls(
            tuple((rows, ms * 1e-3) for rows, ms in data["decode_ms"]),
            data["context_us"] * 1e-6,
            data["prefill_us"] * 1e-6,
            data["kv_tokens"],
            data["block_size"],
        )

    def seconds(self, decodes: int, context: int, prefill: int) -> float:
        """Returns the time of a step with so many decoding rows, which attend to `context` tokens
        in all, beside `prefill` prompt tokens."""
        if not decodes:
            return max(self.decode[0][1], prefill * self.prefill)
        place = min(max(bisect_left(self.decode, (decodes, 0.0)), 1), len(self.decode) - 1)
        (low, first), (high, second) = self.decode[place - 1 : place + 1]
        rows = first + (second - first) * (decodes - low) / (high - low)
        return rows + context * self.context + prefill * self.prefill


@dataclass(slots=True)
class Job:
    """A request of a client: its arrival and its outcome."""

    arrived: float
    prompt: array[int]
    hashes: list[bytes]
    output: int
    request: Request | None = None
    choice: Any = None
    first: float = -1.0


class Policy(Protocol):
    """Chooses a replica by number."""

    def route(self, job: Job) -> int | None: ...
    def end(self, job: Job) -> None: ...
    def report(self, replica: int, report: Report) -> None: ...
    def join(self, replica: int) -> None: ...
    def leave(self, replica: int) -> None: ...


class ByCost:
    """The production router."""

    def __init__(self, clock: Any):
        self.router = ClusterRouter(clock=clock)

    def route(self, job: Job) -> int | None:
        choice: Choice | None = self.router.route(len(job.prompt), job.hashes)
        job.choice = choice
        return None if choice is None else int(choice.replica)

    def end(self, job: Job) -> None:
        if job.choice is not None:
            self.router.end(job.choice)

    def report(self, replica: int, report: Report) -> None:
        self.router.report(str(replica), report)

    def join(self, replica: int) -> None:
        self.router.join(str(replica))

    def leave(self, replica: int) -> None:
        self.router.leave(str(replica))


class FewestRequests:
    """The replica with the fewest requests that have not ended; of equal ones, at random."""

    def __init__(self, clock: Any):
        self._open: dict[int, int] = {}
        self._random = random.Random(1)
        self._heap: list[tuple[int, float, int]] = []

    def _push(self, replica: int) -> None:
        if replica in self._open:
            heapq.heappush(self._heap, (self._open[replica], self._random.random(), replica))

    def route(self, job: Job) -> int | None:
        while self._heap:
            number, _, replica = heapq.heappop(self._heap)
            if self._open.get(replica) == number:
                self._open[replica] += 1
                job.choice = replica
                self._push(replica)
                return replica
        return None

    def end(self, job: Job) -> None:
        if job.choice in self._open:
            self._open[job.choice] -= 1
            self._push(job.choice)

    def report(self, replica: int, report: Report) -> None: ...

    def join(self, replica: int) -> None:
        self._open[replica] = 0
        self._push(replica)

    def leave(self, replica: int) -> None:
        self._open.pop(replica, None)


class RoundRobin:
    """One replica after the other."""

    def __init__(self, clock: Any):
        self._replicas: list[int] = []
        self._next = 0

    def route(self, job: Job) -> int | None:
        if not self._replicas:
            return None
        self._next += 1
        return self._replicas[self._next % len(self._replicas)]

    def end(self, job: Job) -> None: ...
    def report(self, replica: int, report: Report) -> None: ...

    def join(self, replica: int) -> None:
        self._replicas.append(replica)

    def leave(self, replica: int) -> None:
        self._replicas.remove(replica)


POLICIES: dict[str, Any] = {"cost": ByCost, "fewest": FewestRequests, "round-robin": RoundRobin}


@dataclass(slots=True, eq=False)
class Replica:
    """A scheduler, and the step that its device computes.

    Attributes:
        plan: the step; None while there is nothing to do.
        began, single: when the step began, and the time of one token a row.
        steps: how many tokens each row is to take.
        version: of the step; an event of another is void.
    """

    number: int
    scheduler: Scheduler
    jobs: dict[Request, Job] = field(default_factory=dict)
    plan: StepPlan | None = None
    began: float = 0.0
    single: float = 0.0
    steps: int = 1
    version: int = 0
    reports_at: float = -1.0
    lost: bool = False


@dataclass(slots=True)
class Outcome:
    """The figures that are printed."""

    ttft: list[float] = field(default_factory=list)
    tokens: int = 0
    ended: int = 0
    failed: int = 0
    queried: int = 0
    hit: int = 0
    steps: int = 0
    routing: list[float] = field(default_factory=list)


class Simulation:
    """Replicas, a router and clients, on one clock."""

    def __init__(self, options: argparse.Namespace, replicas: int, policy: str):
        self.now = 0.0
        self._options, self._times = options, StepTimes.load(STEP_TIMES)
        self._policy: Policy = POLICIES[policy](lambda: self.now)
        self._replicas = [Replica(n, self._scheduler()) for n in range(replicas)]
        self._events: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self._numbers = count()
        self._random = random.Random(options.seed)
        self.outcome = Outcome()
        self._prefixes: list[tuple[array[int], list[bytes]]] = []
        self._open: set[int] = set()

    def _scheduler(self) -> Scheduler:
        block = self._times.block_size
        scheduler = Scheduler(
            SchedulerLimits(
                num_blocks=(self._times.kv_tokens // block,),
                block_size=block,
                max_num_seqs=256,
                token_budget=8192,
                prefill_cap=2048,
            )
        )
        scheduler.kv_cache.leading_pool.changed = set()
        return scheduler

    def run(self) -> Outcome:
        """Runs the simulation and returns its outcome."""
        self._make_prefixes()
        for replica in self._replicas:
            self._policy.join(replica.number)
            self._report(replica, is_first=True)
        self._at(self._gap(), self._arrive)
        if self._options.burst:
            self._at(BURST_EVERY_S / 2, self._burst)
        if self._options.lose_at is not None:
            self._at(self._options.lose_at, self._lose, self._replicas[0])
        end = self._options.seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
        self.now = end
        for replica in self._replicas:
            self._count(replica.scheduler)
        return self.outcome

    def _at(self, when: float, action: Any, *arguments: Any) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), action, arguments))

    # ---------------------------------------------------------------- clients

    def _make_prefixes(self) -> None:
        size = self._options.prefix_tokens
        for _ in range(self._options.prefixes):
            tokens = self._tokens(size)
            hashes: list[bytes] = []
            extend_hashes(hashes, tokens, self._times.block_size, root_hash())
            self._prefixes.append((tokens, hashes))
        self._weights = list(accumulate(1 / (n + 1) for n in range(len(self._prefixes))))

    def _tokens(self, size: int) -> array[int]:
        return array("i", self._random.randbytes(4 * size)) if size else array("i")

    def _gap(self) -> float:
        return self._random.expovariate(self._options.rate * len(self._replicas) / 60)

    def _arrive(self) -> None:
        self._at(self.now + self._gap(), self._arrive)
        prefix = None
        if self._random.random() < self._options.share:
            (prefix,) = self._random.choices(self._prefixes, cum_weights=self._weights)
        self._submit(self._job(prefix))

    def _burst(self) -> None:
        self._at(self.now + BURST_EVERY_S, self._burst)
        prefix = self._random.choice(self._prefixes)
        size = int(self._options.burst * self._options.rate * len(self._replicas) / 60)
        for _ in range(size):
            self._submit(self._job(prefix))

    def _job(self, prefix: tuple[array[int], list[bytes]] | None) -> Job:
        before, hashes = prefix or (array("i"), [])
        tokens = before + self._tokens(self._random.randint(*self._options.prompt_tokens))
        known = list(hashes)
        extend_hashes(known, tokens, self._times.block_size, root_hash())
        return Job(self.now, tokens, known, self._random.randint(*self._options.output_tokens))

    def _submit(self, job: Job) -> None:
        number = None
        for _ in range(3):
            began = time.thread_time()
            number = self._policy.route(job)
            self.outcome.routing.append(time.thread_time() - began)
            if number is None or not self._replicas[number].lost:
                break
            self._policy.end(job)  # nothing listens there: another one
            number = None
        if number is None:
            self.outcome.failed += 1
            return
        replica = self._replicas[number]
        size = len(job.prompt)
        job.request = request = Request("", job.prompt, size, _PARAMS, size + job.output)
        request.block_hashes = job.hashes
        replica.jobs[request] = job
        replica.scheduler.add(request)
        if replica.plan is None:
            self._begin(replica)
        else:
            self._shorten(replica)
        self._changed(replica)

    # ---------------------------------------------------------------- steps

    def _begin(self, replica: Replica) -> None:
        """Posts the next step, if there is anything to compute."""
        plan = replica.plan = replica.scheduler.schedule()
        if plan is None:
            return
        self.outcome.steps += 1
        running = {request.slot: request for request in replica.scheduler.running}
        decodes = context = prefill = 0
        left = MAX_MERGED_STEPS
        slots, starts, lengths = plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist()
        for slot, start, length in zip(slots, starts, lengths, strict=True):
            request = running[slot]
            if start >= request.prompt_len:
                decodes += 1
                context += start + length
                left = min(left, request.max_len - len(request.tokens))
            else:
                prefill += length
        replica.began, replica.version = self.now, replica.version + 1
        replica.single = self._times.seconds(decodes, context, prefill)
        is_plain = not prefill and not replica.scheduler.num_waiting
        replica.steps = max(1, min(left, MAX_MERGED_TOKENS // max(1, decodes))) if is_plain else 1
        self._at(self.now + replica.steps * replica.single, self._end, replica, replica.version)

    def _shorten(self, replica: Replica) -> None:
        """Ends a step of several tokens with the token that is being computed."""
        if replica.steps > 1:
            done = int((self.now - replica.began) / replica.single) + 1
            if done < replica.steps:
                replica.steps, replica.version = done, replica.version + 1
                end = replica.began + done * replica.single
                self._at(end, self._end, replica, replica.version)

    def _end(self, replica: Replica, version: int) -> None:
        """Takes the result of a step."""
        if version != replica.version or replica.plan is None:
            return
        scheduler, rows = replica.scheduler, int(replica.plan.samples.sum())
        result = StepResult(replica.plan.step_id, np.full(rows, _TOKEN, np.int32))
        more = [_TOKEN] * (replica.steps - 1)  # of the steps that are merged with this one
        for request in scheduler.update(result).requests:
            self.outcome.tokens += 1
            if more and request.status is not RequestStatus.FINISHED:
                self.outcome.tokens += scheduler.append(request, more)[0]
            job = replica.jobs[request]
            if job.first < 0:
                job.first = self.now
                self.outcome.ttft.append(self.now - job.arrived)
            if request.status is RequestStatus.FINISHED:
                self.outcome.ended += 1
                self._policy.end(job)
                del replica.jobs[request]
        self._changed(replica)
        self._begin(replica)

    # ---------------------------------------------------------------- reports, losses

    def _changed(self, replica: Replica) -> None:
        """Schedules a report, if none is on its way."""
        if replica.reports_at < self.now:
            replica.reports_at = self.now + REPORT_S
            self._at(replica.reports_at, self._report, replica)

    def _report(self, replica: Replica, is_first: bool = False) -> None:
        if replica.lost or (not is_first and replica.reports_at > self.now):
            return
        added, removed = take_changes([replica.scheduler.kv_cache.leading_pool])
        self._policy.report(
            replica.number,
            Report(
                load_of([replica.scheduler]),
                added,
                removed,
                self._times.block_size,
                is_first=is_first,
            ),
        )
        replica.reports_at = self.now + HEARTBEAT_S
        self._at(replica.reports_at, self._report, replica)
        replica.reports_at = -1.0 if replica.plan is not None else replica.reports_at

    def _lose(self, replica: Replica) -> None:
        replica.lost, replica.plan = True, None
        replica.version += 1
        self.outcome.failed += len(replica.jobs)
        for job in replica.jobs.values():
            self._policy.end(job)
        replica.jobs.clear()
        self._count(replica.scheduler)
        replica.scheduler = self._scheduler()
        self._at(self.now + NOTICE_S, self._policy.leave, replica.number)
        self._at(self.now + BACK_S, self._return, replica)

    def _return(self, replica: Replica) -> None:
        replica.lost = False
        self._policy.join(replica.number)
        self._report(replica, is_first=True)

    def _count(self, scheduler: Scheduler) -> None:
        self.outcome.queried += scheduler.stats.prefix_queried
        self.outcome.hit += scheduler.stats.prefix_hit


_PARAMS = SamplingParams(temperature=0.0)
_TOKEN = 7


def percentile(values: Sequence[float], part: float) -> float:
    """Returns a percentile; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def show(replicas: int, policy: str, options: argparse.Namespace) -> None:
    """Simulates one case and prints its row."""
    gc.collect()
    began = time.perf_counter()
    simulation = Simulation(options, replicas, policy)
    found = simulation.run()
    ttft, routing = found.ttft, found.routing
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    router = getattr(simulation._policy, "router", None)  # of the policy `cost` alone
    hashes = router.num_hashes if router is not None else 0
    cells = (
        f"{replicas}",
        policy,
        f"{len(routing):,}",
        f"{found.ended:,}",
        f"{found.failed}",
        f"{found.tokens / options.seconds:,.0f}",
        *(f"{percentile(ttft, part) * 1e3:.0f}" for part in (0.5, 0.9, 0.99)),
        f"{100 * found.hit / max(1, found.queried):.1f}",
        *(f"{percentile(routing, part) * 1e6:.0f}" for part in (0.5, 0.99)),
        f"{hashes:,}",
        f"{memory:.2f}",
        f"{time.perf_counter() - began:.0f}",
    )
    print("| " + " | ".join(cells) + " |", flush=True)


def bounds(text: str) -> tuple[int, int]:
    """Reads "64-512"."""
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", default="1,10,100", help="numbers of replicas")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a minute and replica")
    parser.add_argument("--seconds", type=float, default=60.0, help="of simulated time")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--share", type=float, default=0.8, help="part that begins with a prefix")
    parser.add_argument("--prefixes", type=int, default=200)
    parser.add_argument("--prefix-tokens", type=int, default=2048)
    parser.add_argument("--prompt-tokens", type=bounds, default=(64, 512), metavar="LOW-HIGH")
    parser.add_argument("--output-tokens", type=bounds, default=(32, 256), metavar="LOW-HIGH")
    parser.add_argument("--burst", type=float, default=1.0, help="seconds of requests, at once")
    parser.add_argument("--lose-at", type=float, metavar="SECONDS", help="when a replica is lost")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(
        "| replicas | router | requests | ended | failed | tokens/s | TTFT p50 ms | p90 | p99 "
        "| prefix hits % | router p50 us | p99 | hashes | max RSS GiB | took s |"
    )
    print("|--:|---|" + "--:|" * 13)
    for replicas in map(int, options.replicas.split(",")):
        for policy in options.policies.split(","):
            show(replicas, policy, options)


if __name__ == "__main__":
    main()
