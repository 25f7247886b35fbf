"""Simulates preemption by swapping: a server with a store of KV beside one that computes preempted
requests again, and beside one whose KV cache holds all requests.

    python scripts/simulate_preemption.py          # 2 000 / 500 tokens, twice what the cache holds
    python scripts/simulate_preemption.py --prompt 500 --output 2000 --spread 0.5

The scheduler is the production object; the worker is simulated. Its steps take what
`benchlib/step_times_h200.toml` says of Qwen3-8B. Loads cross the link one after the other, begin
with the step of their plan, and steps beside them take a tenth longer (notes/kv-store.md); saves
cost nothing. All requests come at the same moment. "again" are prompt and output tokens that were
computed more than once, "rows" the mean of the decode rows over the time.
"""

from __future__ import annotations

import argparse
from array import array
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from aioinfer.config import CacheConfig, Config, ModelConfig
from aioinfer.features.kv_store.planning import Planning as KVStorePlanning
from aioinfer.features.kv_store.sections import KVLoaded, KVMoves
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.ipc.sections import Section
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.features import StepFeatures
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.scheduler import Scheduler
from simulate_cluster import STEP_TIMES, StepTimes

VOCABULARY = 100_000
#: By which part of its time a step beside a load takes longer.
_SLOWED = 0.1


@dataclass(frozen=True, slots=True)
class Load:
    """A prefix on its way: the number of its ticket, and when it has come after how long."""

    ticket: int
    end: float
    seconds: float


class Server:
    """A scheduler and its simulated worker, with two steps in flight.

    Attributes:
        now: seconds, at which the last result came.
        scheduler: the production object.
        computed: prompt and output tokens that steps have computed.
        row_seconds: decode rows by the seconds of their steps, summed up.
    """

    def __init__(self, options: argparse.Namespace, *, num_blocks: int, num_stored: int = 0):
        self.now, self.computed, self.row_seconds = 0.0, 0, 0.0
        self._options = options
        self._times = StepTimes.load(STEP_TIMES)
        self._link_free = self._device_free = 0.0
        self._loads: list[Load] = []
        config = Config(model=ModelConfig(path=""), cache=CacheConfig(host_bytes=num_stored))
        host = SimpleNamespace(config=config, scheduler=lambda: self.scheduler)
        self.scheduler: Scheduler = Scheduler(
            SchedulerLimits(
                num_blocks=(num_blocks,),
                num_stored=(num_stored,) if num_stored else (),
                block_size=options.block_size,
                max_num_seqs=max(512, options.requests),
                token_budget=8192,
                prefill_cap=2048,
            ),
            clock=lambda: self.now,
            features=StepFeatures([KVStorePlanning(host)] if num_stored else []),
        )

    def run(self, requests: list[Request]) -> None:
        """Serves requests that come at once."""
        for request in requests:
            self.scheduler.add(request)
        posted: deque[tuple[StepPlan, float]] = deque()
        while posted or not self.scheduler.is_idle:
            plan = self.scheduler.schedule()
            if plan is not None:
                posted.append((plan, self._execute(plan)))
            if posted and (len(posted) > 1 or plan is None):
                self._take(*posted.popleft())

    def _execute(self, plan: StepPlan) -> float:
        """Returns when a step ends that begins behind the step before."""
        moves, began = plan.section(KVMoves), max(self._device_free, self.now)
        if moves is not None:
            self._begin_loads(moves, began)
        decodes, seconds = plan.lengths == 1, 0.0
        if plan.num_tokens:
            rows, context = int(decodes.sum()), int(plan.starts[decodes].sum())
            seconds = self._times.seconds(rows, context, plan.num_tokens - rows)
            seconds += _SLOWED * min(seconds, max(0.0, self._link_free - began))
            self.row_seconds += rows * seconds
            self.computed += plan.num_tokens
        self._device_free = began + seconds
        if moves is not None and len(moves.awaited):  # of a step that does nothing else
            first = min(load.end for load in self._loads)
            self._device_free = max(self._device_free, first)
        return self._device_free

    def _begin_loads(self, moves: KVMoves, began: float) -> None:
        block_bytes = self._options.block_size * self._options.token_bytes
        tickets, counts = np.unique(moves.loads[:, 3], return_counts=True)
        for ticket, count in zip(tickets.tolist(), counts.tolist(), strict=True):
            seconds = count * block_bytes / (1e9 * self._options.gb_per_s)
            self._link_free = max(self._link_free, began) + seconds
            self._loads.append(Load(ticket, self._link_free, seconds))

    def _take(self, plan: StepPlan, ended: float) -> None:
        """Has the scheduler take the result of a step."""
        self.now = ended
        there = [load for load in self._loads if load.end <= ended]
        self._loads = [load for load in self._loads if load.end > ended]
        sections: list[Section] = []
        if there:
            columns = zip(*((load.ticket, -1, 1e6 * load.seconds) for load in there), strict=True)
            sections.append(KVLoaded(*(np.array(column, np.int32) for column in columns)))
        tokens = np.full(int(plan.samples.sum()), 7, np.int32)
        self.scheduler.update(StepResult(plan.step_id, tokens, sections))


def make_requests(options: argparse.Namespace) -> list[Request]:
    """Returns requests whose prompts have nothing in common."""
    random, requests = np.random.default_rng(options.seed), []
    for number in range(options.requests):
        prompt = array("i", random.integers(8, VOCABULARY, options.prompt).tolist())
        output = round(options.output * random.uniform(1 - options.spread, 1 + options.spread))
        end = options.prompt + max(1, output)
        requests.append(
            Request(str(number), prompt, options.prompt, SamplingParams(), end, number, frozenset())
        )
    return requests


def main() -> None:
    """Prints a table of the three servers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=1000, help="of the device")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=500, help="tokens of an answer")
    parser.add_argument("--spread", type=float, default=0.0, help="of answers: 0.5 is +- 50 %%")
    parser.add_argument("--requests", type=int, help="default: twice what the device holds")
    parser.add_argument("--token-bytes", type=int, default=147_456, help="of a token's keys")
    parser.add_argument("--gb-per-s", type=float, default=50.0, help="of the link to the host")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    length = options.prompt + options.output
    capacity = options.blocks * options.block_size
    options.requests = options.requests or max(2, 2 * capacity // length)
    plenty = options.requests * (2 * length // options.block_size + 1)
    servers = {
        "recompute": Server(options, num_blocks=options.blocks),
        "swap": Server(options, num_blocks=options.blocks, num_stored=plenty),
        "all fit": Server(options, num_blocks=plenty),
    }
    print(f"{options.requests} requests of {options.prompt} / {options.output} tokens\n")
    print("| server | s | tokens/s | ratio | preemptions | loads | again | rows |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    slowest = 0.0
    for name, server in servers.items():
        requests = make_requests(options)
        server.run(requests)
        slowest = slowest or server.now
        tokens, stats = sum(len(request.tokens) for request in requests), server.scheduler.stats
        again = server.computed - tokens + len(requests)  # the last token is never computed
        print(
            f"| {name} | {server.now:.2f} | {tokens / server.now:.0f} | {slowest / server.now:.3f} "
            f"| {stats.preemptions} | {stats.loads} | {again} "
            f"| {server.row_seconds / server.now:.1f} |"
        )


if __name__ == "__main__":
    main()
