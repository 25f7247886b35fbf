"""Simulates conversations with a model with states: how many prompt tokens the prefix cache finds.

The scheduler is the production object, with the blocks that a worker would get of the memory; the
worker is simulated: it takes the time of `step_seconds` and samples random tokens. The defaults are
35B-A3B in bf16 on an H200 (58 GiB are left for the cache), and 64 conversations of six turns with a
system prompt of 4 000 tokens, where a turn has 600 tokens and its answer 300. A user sends the next
turn `--think` seconds after an answer (exponentially distributed), with all that was said before.

    python scripts/simulate_conversations.py                     # all conversations at once
    python scripts/simulate_conversations.py --memory 12 --think 20

"possible" is what an unbounded cache could find: the tokens that an earlier prompt or its answer
have computed, in whole blocks.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
from array import array
from dataclasses import dataclass, field

import numpy as np

from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup, StateSpec
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.request import Request, RequestStatus
from aioinfer.scheduler.scheduler import Scheduler
from aioinfer.worker.memory import GIB, CacheDemand, divide_memory

#: What the layers of Qwen3.5 35B-A3B keep: every fourth one keys, the others two states.
GROUPS = (
    KVGroup(AttentionSpec(2, 256), tuple(range(3, 40, 4))),
    KVGroup(StateSpec((8192, 3), "bfloat16"), tuple(n for n in range(40) if n % 4 != 3)),
    KVGroup(StateSpec((32, 128, 128), "float32"), tuple(n for n in range(40) if n % 4 != 3)),
)
MAX_LEN, VOCABULARY = 262_144, 200_000


@dataclass
class Talk:
    """One conversation.

    Attributes:
        tokens: all that was said.
        turn: how many turns were sent.
        first: seconds of each turn from its arrival to the first token.
        found: (prompt tokens, found in the cache, possible) of each turn.
    """

    tokens: array[int]
    turn: int = 0
    sent: float = 0.0
    first: list[float] = field(default_factory=list)
    found: list[tuple[int, int, int]] = field(default_factory=list)


def step_seconds(plan: StepPlan) -> float:
    """Returns about the seconds that an H200 takes for a step of 35B-A3B, of measured throughputs:
    75 000 prompt tokens a second; decodes 3 ms, and 70 us a row up to some 13 ms at 128 rows."""
    prefill = int(plan.lengths[plan.lengths > 1].sum())
    decodes = int((plan.lengths == 1).sum())
    return 0.003 + 80e-6 * decodes + prefill / 75_000


class Simulation:
    """The conversations in front of a scheduler, on a simulated clock."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.random = np.random.default_rng(options.seed)
        self.num_blocks = _count_blocks(options)
        self.scheduler = Scheduler(
            SchedulerLimits(
                num_blocks=tuple(self.num_blocks),
                groups=GROUPS,
                block_size=options.block_size,
                max_num_seqs=options.max_num_seqs,
                token_budget=options.budget,
                prefill_cap=options.budget // 4,
            )
        )
        self.now = 0.0
        self.arrivals: list[tuple[float, int]] = []
        self.talks = [Talk(array("i")) for _ in range(options.conversations)]
        self.system = self._words(options.system)
        self.running: dict[Request, int] = {}

    def _words(self, count: int) -> array[int]:
        return array("i", self.random.integers(3, VOCABULARY, count).tolist())

    def run(self) -> None:
        """Runs all conversations to their ends."""
        width = self.options.concurrency or len(self.talks)
        for number, talk in enumerate(self.talks):
            talk.tokens += self.system
            if number < width:
                self.arrivals.append((0.0, number))
        following = iter(range(width, len(self.talks)))
        posted: list[tuple[StepPlan, list[Request], float]] = []
        while self.arrivals or self.running or posted:
            self._arrive()
            plan = self.scheduler.schedule()
            if plan is not None:
                sampled = [r for r in self.scheduler.running if r.slot in _sampling_slots(plan)]
                posted.append((plan, sampled, step_seconds(plan)))
            if posted and (len(posted) > 1 or plan is None):
                self._take(*posted.pop(0), following)
            elif plan is None and self.arrivals:
                self.now = max(self.now, self.arrivals[0][0])

    def _arrive(self) -> None:
        while self.arrivals and self.arrivals[0][0] <= self.now:
            _, number = heapq.heappop(self.arrivals)
            talk = self.talks[number]
            talk.turn += 1
            before = len(talk.tokens)
            talk.tokens += self._words(self.options.input)
            length, size = len(talk.tokens), self.options.block_size
            known = before if talk.turn == 1 else before - 1  # the last token is never computed
            talk.found.append((length, 0, min(known, length - 1) // size * size))
            talk.sent = self.now
            request = Request(
                f"{number}-{talk.turn}",
                array("i", talk.tokens),
                length,
                SamplingParams(),
                length + self.options.output,
                number,
                frozenset(),
            )
            self.running[request] = number
            self.scheduler.add(request)

    def _take(
        self, plan: StepPlan, sampled: list[Request], seconds: float, following: object
    ) -> None:
        self.now += seconds
        tokens = self.random.integers(3, VOCABULARY, int(plan.samples.sum())).astype(np.int32)
        self.scheduler.update(StepResult(plan.step_id, tokens))
        for request in sampled:
            talk = self.talks[self.running[request]]
            if len(talk.first) < talk.turn and len(request.tokens) > request.prompt_len:
                talk.first.append(self.now - talk.sent)
            if request.status is RequestStatus.FINISHED:
                self._finish(request, talk, following)

    def _finish(self, request: Request, talk: Talk, following: object) -> None:
        number = self.running.pop(request)
        length, _, possible = talk.found[-1]
        talk.found[-1] = length, request.num_cached, possible
        talk.tokens = array("i", request.tokens)
        pause = self.random.exponential(self.options.think) if self.options.think else 0.0
        if talk.turn < self.options.turns:
            heapq.heappush(self.arrivals, (self.now + pause, number))
        elif (new := next(following, None)) is not None:  # type: ignore[call-overload]
            heapq.heappush(self.arrivals, (self.now, new))


def _sampling_slots(plan: StepPlan) -> set[int]:
    return set(plan.slots[plan.samples == 1].tolist())


def _count_blocks(options: argparse.Namespace) -> list[int]:
    size = options.block_size
    demand = CacheDemand(
        groups=GROUPS,
        block_bytes=tuple(group.bytes_per_block(size, options.kv_bytes) for group in GROUPS),
        block_size=size,
        max_num_seqs=options.max_num_seqs,
        max_chunk=options.budget,
    )
    available = int(options.memory * GIB)
    alone = min(demand.longest_alone(available, MAX_LEN), demand.len_of_full_windows)
    blocks = divide_memory(demand, available, alone, MAX_LEN)
    if options.state_blocks is not None:
        blocks[1:] = [options.state_blocks] * (len(blocks) - 1)
    return blocks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=0, help="conversations at once; 0: all")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--system", type=int, default=4000, help="tokens that all share")
    parser.add_argument("--input", type=int, default=600, help="tokens of a turn")
    parser.add_argument("--output", type=int, default=300, help="tokens of an answer")
    parser.add_argument("--think", type=float, default=0.0, help="mean seconds before a turn")
    parser.add_argument("--memory", type=float, default=58.0, help="GiB of the KV cache")
    parser.add_argument("--state-blocks", type=int, help="instead of the memory's division")
    parser.add_argument("--kv-bytes", type=int, default=2, help="bytes of an element of a key")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    simulation = Simulation(options)
    simulation.run()
    report(simulation)


def report(simulation: Simulation) -> None:
    """Prints the tokens found in each turn, and in all."""
    talks, blocks = simulation.talks, simulation.num_blocks
    print(f"{blocks[0]} blocks of keys, {blocks[-1]} of states; {simulation.now:.1f} s simulated")
    print("| turn | prompt tokens | found | possible | median TTFT ms |\n|--:|--:|--:|--:|--:|")
    rows = []
    for turn in range(simulation.options.turns):
        of_turn = [talk.found[turn] for talk in talks if len(talk.found) > turn]
        prompt, found, possible = (sum(column) for column in zip(*of_turn, strict=True))
        first = statistics.median(t.first[turn] for t in talks if len(t.first) > turn)
        rows.append((prompt, found, possible))
        share = f"{found / prompt:.1%} | {possible / prompt:.1%}"
        print(f"| {turn + 1} | {prompt} | {share} | {first * 1e3:.0f} |")
    prompt, found, possible = (sum(column) for column in zip(*rows, strict=True))
    print(f"| all | {prompt} | {found / prompt:.2%} | {possible / prompt:.2%} | |")
    print(f"preemptions: {simulation.scheduler.stats.preemptions}")


if __name__ == "__main__":
    main()
