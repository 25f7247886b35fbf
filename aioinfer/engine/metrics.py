"""Metrics: counts and times of requests, tokens and steps, and the lag of the event loop.

Each engine has an `EngineMetrics`, which `api.admin.metrics` reads for each scrape. All tokens of a
step share one time stamp, and most of them follow a token of the former step: these all fall into
one bucket of the histogram, which is incremented once a step. So a streamed token costs a
dictionary look-up and a comparison here, and nothing is kept of it.

For clients that watch the engine, a `StepLog` has the last steps: how many tokens each step
computed, and how long its phases took. The step loop feeds it only while it is watched: otherwise a
step costs two tests of an integer. `api.admin.page` reads it.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.scheduler.request import Request

#: Steps that are kept: a little more than a page shows.
LOG_LENGTH = 128


class StepRecord(NamedTuple):
    """A step after its result has been handled.

    Attributes:
        step_id: the number of its plan.
        prefill_tokens: tokens computed in rows that bring prompts (or, after a preemption, whole
            texts) into the cache.
        decode_tokens: rows of one token from which the next one is sampled.
        sampled: rows that sampled a token, including rows of requests that had ended meanwhile.
        worker_us: microseconds that the first rank spent on the step.
        result_us, update_us, plan_us, post_us, emit_us: microseconds that the event loop spent on
            reading the result from the ring, updating the scheduler, planning the step, posting
            it, and emitting the text of the former step (the text of this step is emitted last, and
            the time is not known yet when the step is recorded).
    """

    step_id: int
    prefill_tokens: int
    decode_tokens: int
    sampled: int
    worker_us: int
    result_us: int
    update_us: int
    plan_us: int
    post_us: int
    emit_us: int


class StepLog:
    """A ring of the last `LOG_LENGTH` steps, filled while `watched`."""

    def __init__(self) -> None:
        self.num_watchers = 0
        # (step id, prefill, decode, plan and post seconds)
        self._posted: deque[tuple[int, int, int, float, float]] = deque()
        self._steps: deque[StepRecord] = deque(maxlen=LOG_LENGTH)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Records steps until the end of the block.

        Blocks may overlap; when the last one ends, the log is emptied.
        """
        self.num_watchers += 1
        try:
            yield
        finally:
            self.num_watchers -= 1
            if not self.num_watchers:
                self._posted.clear()
                self._steps.clear()

    def record_plan(self, plan: StepPlan, plan_s: float, post_s: float) -> None:
        """Records a step that was posted."""
        decodes = int(np.count_nonzero((plan.lengths == 1) & (plan.samples == 1)))
        self._posted.append((plan.step_id, plan.num_tokens - decodes, decodes, plan_s, post_s))

    def forget_posted(self) -> None:
        """Forgets the posted steps: their results will not come."""
        self._posted.clear()

    def record_result(self, result: StepResult, update_s: float, emit_s: float) -> None:
        """Records the end of a step. A step that was posted before the log was watched is left
        out."""
        if not self._posted or self._posted[0][0] != result.step_id:
            return
        step_id, prefills, decodes, plan_s, post_s = self._posted.popleft()
        loop_us = (round(seconds * 1e6) for seconds in (update_s, plan_s, post_s, emit_s))
        self._steps.append(
            StepRecord(
                step_id,
                prefills,
                decodes,
                len(result.tokens),
                result.busy_ns // 1000,
                result.take_ns // 1000,
                *loop_us,
            )
        )

    def since(self, step_id: int) -> list[StepRecord]:
        """Returns the kept steps that come after `step_id`, oldest first."""
        return [step for step in self._steps if step.step_id > step_id]


#: Upper bounds of buckets in seconds: for events that last about as long as a step, for a phase of
#: a step on the event loop, for whole requests.
_STEP_BOUNDS = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04,
    0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0,
)  # fmt: skip
_PHASE_BOUNDS = (
    1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0,
)  # fmt: skip
_REQUEST_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 2560.0,
)  # fmt: skip
_LENGTH_BOUNDS = tuple(float(4**power) for power in range(10))
#: Timers of the event loop are exact to a millisecond.
_LAG_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_LAG_INTERVAL_S = 0.05

#: How a request may end.
FINISH_REASONS = ("stop", "length", "abort", "error")
#: The phases of the event loop's work for a step: it reads the result from the ring, updates the
#: scheduler, plans the next step, posts it, and emits text.
PHASES = ("result", "update", "plan", "post", "emit")


class Histogram:
    """Counts of values by bucket. A value falls into the bucket of the lowest bound that is not
    below it."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]):
        """Makes an empty histogram; `bounds` are ascending, and one more bucket counts values
        beyond the last."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Counts `times` equal values."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.counts)


class Stopwatch:
    """Measures the seconds that a `with` block takes, in about 0.3 us.

    Attributes:
        seconds: of the last block, or, if they add up, of all blocks since `reset`.
        ended: when the last block ended, of `time.perf_counter`.
    """

    __slots__ = ("_adds_up", "_began", "ended", "seconds")

    def __init__(self, *, adds_up: bool = False) -> None:
        self.seconds = 0.0
        self.ended = 0.0
        self._began = 0.0
        self._adds_up = adds_up

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.ended = now = time.perf_counter()
        self.seconds = now - self._began + (self.seconds if self._adds_up else 0.0)

    def reset(self) -> float:
        """Returns the seconds so far, and begins again from 0."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class StepTimer:
    """Stopwatches for the event loop's work for a step, run by the step loop.

    The text of a step may be emitted in several portions, between which the event loop does other
    work; `emit` adds them up.

    Attributes:
        began: when the step loop was given the last result, of `time.perf_counter`.
        update, plan, post, emit: the phases.
    """

    __slots__ = ("began", "emit", "plan", "post", "update")

    def __init__(self) -> None:
        self.began = 0.0
        self.update, self.plan, self.post = Stopwatch(), Stopwatch(), Stopwatch()
        self.emit = Stopwatch(adds_up=True)

    def begin(self) -> None:
        """Notes that a result has come."""
        self.began = time.perf_counter()


@dataclass(slots=True)
class RequestTimes:
    """The times of a request's events, of `time.perf_counter`; 0 stands for an event that has not
    happened.

    Attributes:
        arrived: when it was submitted.
        queued: when it joined the waiting requests.
        prompt_tokens: the number that its first token adds to the prompt tokens: 0 for all but one
            of n sequences.
        scheduled: when it was first planned.
        first_token, last_token: when the results with its first and its newest token came.
    """

    arrived: float
    queued: float
    prompt_tokens: int
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


class EngineMetrics:
    """Totals since the start. Every sequence of a request with n > 1 counts as a request.

    Attributes:
        prompt_tokens: of requests that got a first token; a prompt with n sequences counts once.
        generation_tokens: tokens that were sampled, end tokens included.
        finished: requests by finish reason.
        worker_busy_ns: nanoseconds that the first rank spent on steps.
        time_to_first_token: seconds from the submission of token ids to the first token.
        inter_token_latency: seconds between two tokens of a sequence; a token's time is the arrival
            of its step's result.
        time_per_output_token: the mean inter-token latency of a request, one value a request.
        queue_time: seconds from joining the waiting requests to the first plan with the request in
            it.
        prefill_time: seconds from that plan to the first token.
        decode_time: seconds from the first token to the last.
        e2e_latency: seconds from the submission to the last token. This and the other means and
            times of whole requests (`time_per_output_token`, `decode_time`, `request_*_tokens`)
            count requests that ended by a stop or their length.
        phases: seconds that the event loop spent on each phase of a step, by the names of `PHASES`.
        timer: measures these phases.
        counts, observed: the counters and histograms of features, by name.
        is_serving: whether the workers execute steps.
        restarts: attempts to restart the workers after they died or hung.
        interrupted: requests that ran when the workers were lost.
        moved: requests that went on with another engine when this one died.
        violations: checks of the engine's records that failed.
        steps: the last steps one by one, while a client watches them.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.worker_busy_ns = 0
        self.time_to_first_token = Histogram(_REQUEST_BOUNDS)
        self.inter_token_latency = Histogram(_STEP_BOUNDS)
        self.time_per_output_token = Histogram(_STEP_BOUNDS)
        self.queue_time = Histogram(_REQUEST_BOUNDS)
        self.prefill_time = Histogram(_REQUEST_BOUNDS)
        self.decode_time = Histogram(_REQUEST_BOUNDS)
        self.e2e_latency = Histogram(_REQUEST_BOUNDS)
        self.request_prompt_tokens = Histogram(_LENGTH_BOUNDS)
        self.request_generation_tokens = Histogram(_LENGTH_BOUNDS)
        self.phases = {phase: Histogram(_PHASE_BOUNDS) for phase in PHASES}
        self.timer = StepTimer()
        self.counts: Counter[str] = Counter()
        self.observed: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(_PHASE_BOUNDS))
        self.steps = StepLog()
        self.is_serving = False
        self.restarts = 0
        self.interrupted = 0
        self.moved = 0
        self.violations = 0
        self._open: dict[Request, RequestTimes] = {}
        self._step_time = -1.0

    # ---------------------------------------------------------------- requests

    def begin(self, request: Request, arrived: float, *, counts_prompt: bool) -> RequestTimes:
        """Records a request that is queued now and was submitted at `arrived`. Returns its times,
        which are kept up to date."""
        times = self._open[request] = RequestTimes(
            arrived, time.perf_counter(), request.prompt_len if counts_prompt else 0
        )
        return times

    def end(self, request: Request, reason: str, num_output: int = 0) -> None:
        """Records the end of a request that has passed on `num_output` tokens. Does nothing if it
        was recorded before."""
        times = self._open.pop(request, None)
        if times is None:
            return
        self.finished[reason] += 1
        if reason not in ("stop", "length"):
            return
        decoding = times.last_token - times.first_token
        self.e2e_latency.add(times.last_token - times.arrived)
        self.decode_time.add(decoding)
        if num_output > 1:
            self.time_per_output_token.add(decoding / (num_output - 1))
        self.request_prompt_tokens.add(request.prompt_len)
        generated = 0 if request.params.prompt_only else num_output
        self.request_generation_tokens.add(generated)

    def release(self, request: Request) -> None:
        """Records that a request goes on with another engine, which counts it from now on."""
        del self._open[request]
        self.moved += 1

    def import_request(self, request: Request, times: RequestTimes) -> None:
        """Records a request that another engine has released, with its times."""
        self._open[request] = times

    @property
    def open_requests(self) -> set[Request]:
        """The requests that have begun and not ended."""
        return set(self._open)

    def end_all(self, reason: str) -> None:
        """Records the end of all requests."""
        for request in list(self._open):
            self.end(request, reason)

    # ---------------------------------------------------------------- features

    def count(self, name: str, times: int = 1) -> None:
        """Adds to a counter of a feature."""
        self.counts[name] += times

    def observe(self, name: str, value: float) -> None:
        """Adds a value, in seconds, to a histogram of a feature."""
        self.observed[name].add(value)

    # ---------------------------------------------------------------- steps

    def record_plan(self, plan: StepPlan, running: Sequence[Request]) -> None:
        """Records a step that was posted: the time of posting it, by `timer`, and the requests that
        it admits, which are among the running ones."""
        timer = self.timer
        plan_s, post_s = timer.plan.seconds, timer.post.seconds
        self.phases["plan"].add(plan_s)
        self.phases["post"].add(post_s)
        if plan.sections and plan.admissions:
            slots = plan.admissions.records["slot"].tolist()
            self.record_admissions(running, slots, timer.plan.ended)
        if self.steps.num_watchers:
            self.steps.record_plan(plan, plan_s, post_s)

    def record_admissions(
        self, running: Sequence[Request], slots: Iterable[int], now: float
    ) -> None:
        """Records which of the running requests a plan has given `slots`; the newest are looked at
        first."""
        unseen = set(slots)
        for request in reversed(running):
            if not unseen:
                return
            if request.slot not in unseen:
                continue
            unseen.remove(request.slot)
            times = self._open.get(request)
            if times is not None and not times.scheduled:  # else it was preempted and comes back
                times.scheduled = now
                self.queue_time.add(now - times.queued)

    def record_step(
        self, result: StepResult, requests: Iterable[Request], tokens: Iterable[int]
    ) -> None:
        """Records a step after the scheduler has taken in its result.

        Args:
            result: of the workers.
            requests, tokens: the sampled tokens: one a request, or -1 for a row that failed.
        """
        timer, phases = self.timer, self.phases
        update_s, emit_s = timer.update.seconds, timer.emit.reset()
        phases["result"].add(result.take_ns * 1e-9)
        phases["update"].add(update_s)
        phases["emit"].add(emit_s)  # of the former step: the text of this one is emitted later
        self.worker_busy_ns += result.busy_ns
        self.record_tokens(requests, tokens, timer.began)
        if self.steps.num_watchers:
            self.steps.record_result(result, update_s, emit_s)

    def record_tokens(self, requests: Iterable[Request], tokens: Iterable[int], now: float) -> None:
        """Records a step's tokens, one for each of `requests`, or -1 for a row that failed. About
        0.1 us a token; `now` is when the step's result came."""
        before, self._step_time = self._step_time, now
        in_step = late = 0
        for times, token in zip(map(self._open.get, requests), tokens, strict=True):
            if times is None or token < 0:
                continue
            last = times.last_token
            times.last_token = now
            if last == before:
                in_step += 1
            elif last:
                late += 1
                self.inter_token_latency.add(now - last)
            else:
                self._record_first_token(times, now)
        if in_step:
            self.inter_token_latency.add(now - before, in_step)
        self.generation_tokens += in_step + late

    def _record_first_token(self, times: RequestTimes, now: float) -> None:
        times.first_token = now
        self.prompt_tokens += times.prompt_tokens
        self.generation_tokens += 1
        self.time_to_first_token.add(now - times.arrived)
        self.prefill_time.add(now - times.scheduled)


class LoopLag:
    """How late the event loop is. `Frontend` owns one: all engines share the loop.

    Attributes:
        seconds: by which a timer came late, measured 20 times a second while there are requests.
    """

    def __init__(self, is_busy: Callable[[], bool]):
        """`is_busy` returns whether there are requests: an idle loop is left alone."""
        self.seconds = Histogram(_LAG_BOUNDS)
        self.is_watched = False
        self._is_busy = is_busy

    def watch(self) -> None:
        """Begins to watch the running loop, if it is not watched yet."""
        if not self.is_watched:
            self.is_watched = True
            asyncio.get_running_loop().call_later(
                _LAG_INTERVAL_S, self._measure, time.perf_counter() + _LAG_INTERVAL_S
            )

    def _measure(self, due: float) -> None:
        self.is_watched = False
        self.seconds.add(max(0.0, time.perf_counter() - due))
        if self._is_busy():
            self.watch()
