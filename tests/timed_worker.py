"""A worker that computes nothing and takes, on a simulated clock, the time that a cost law gives
its steps; and closed-loop streams in front of a scheduler that plans for it."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.scheduler import Scheduler
from aioinfer.scheduler.step_time import StepWork

CostLaw = Callable[[StepWork], float]


def work_of(plan: StepPlan) -> StepWork:
    """Returns what a plan has computed, from its rows alone."""
    decodes = (plan.lengths == 1) & (plan.samples == 1)
    starts, lengths = plan.starts[~decodes].astype(float), plan.lengths[~decodes].astype(float)
    return StepWork(
        int(decodes.sum()),
        int(plan.starts[decodes].sum() + decodes.sum()),
        int(lengths.sum()),
        float((lengths * (starts + lengths / 2)).sum()),
    )


def eight_billion(work: StepWork) -> float:
    """Returns about the seconds that an H200 takes for a step of an 8B model: products are bound by
    the weights' bytes or by arithmetic, which no linear law has."""
    keys = 36e-9 * work.decode_keys + 1.1e-9 * work.prefill_pairs
    if not work.prefill_tokens:
        return 3.9e-3 + 6e-6 * work.decodes + keys
    return 1e-3 + max(4e-3, 30e-6 * (work.prefill_tokens + work.decodes)) + keys


@dataclass
class Simulation:
    """Streams that each send a request, wait for its end, and send the next one.

    Attributes:
        law: what a step takes, in seconds; may be replaced while it runs.
        now: the simulated clock.
        gaps: seconds between two tokens of a request.
        first: seconds from the arrival of a request to its first token.
        steps: (when its result came, its work, what it took) of each step.
    """

    law: CostLaw
    limits: SchedulerLimits
    now: float = 0.0
    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    steps: list[tuple[float, StepWork, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits, lambda: self.now)
        self._numbers = count()
        self._seen: dict[Request, float] = {}
        self._arrived: dict[Request, float] = {}
        self._posted: deque[tuple[StepPlan, float, float]] = deque()
        self._free_at = 0.0
        self.num_streams = 0
        self.prompt_len, self.output_len = 2000, 128

    def send(self) -> Request:
        """Adds a request of `prompt_len` tokens that nobody else has."""
        number = next(self._numbers)
        prompt = array("i", [number]) * self.prompt_len
        request = Request(
            str(number), prompt, self.prompt_len, SamplingParams(temperature=0.0),
            self.prompt_len + self.output_len,
        )  # fmt: skip
        self._arrived[request] = self.now
        self.scheduler.add(request)
        return request

    def run(self, seconds: float) -> float:
        """Runs for so many simulated seconds. Returns the sampled tokens a second."""
        end, tokens = self.now + seconds, 0
        while self.now < end:
            while len(self._arrived) < self.num_streams:
                self.send()
            self._plan()
            tokens += self._take()
        return tokens / seconds

    def _plan(self) -> None:
        while len(self._posted) < 2 and (plan := self.scheduler.schedule()) is not None:
            work = work_of(plan)
            took = self.law(work)
            self._free_at = max(self._free_at, self.now) + took
            self._posted.append((plan, self._free_at, took))
            self.steps.append((self._free_at, work, took))

    def _take(self) -> int:
        plan, came, _ = self._posted.popleft()
        self.now = max(self.now, came)
        sampled = int(plan.samples.sum())
        output = self.scheduler.update(
            StepResult(plan.step_id, np.full(sampled, 7, np.int32)), self.now
        )
        for request in output.requests:
            if request in self._seen:
                self.gaps.append(self.now - self._seen[request])
            else:
                self.first.append(self.now - self._arrived[request])
            self._seen[request] = self.now
            if request.finish_reason is not None:
                del self._seen[request], self._arrived[request]
        return len(output.requests)

    def forget(self) -> None:
        """Forgets what was measured so far."""
        self.gaps.clear()
        self.first.clear()
        self.steps.clear()


def simulate(
    law: CostLaw, *, cap: int | None = None, target_s: float | None = None, slots: int = 256
) -> Simulation:
    """Returns a simulation with a budget of 8192 tokens: with the rule of a fixed number of tokens
    if only `cap` is given."""
    limits = SchedulerLimits(
        num_blocks=(60_000,), block_size=128, max_num_seqs=slots, token_budget=8192,
        prefill_cap=cap or 8192, paces_prefill=cap is None or target_s is not None,
        target_itl_s=target_s, prefix_caching=False,
    )  # fmt: skip
    return Simulation(law, limits)
