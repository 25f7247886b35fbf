"""Common base of all executors with processes for ranks, on one host or several.

An executor of this kind has hosts (`WorkerHost`), each with some of the ranks: `HostRanks` on the
driver's own host, `RemoteHost` elsewhere. Its subclasses decide which hosts these are. Nothing here
waits. Only while steps are unanswered or workers start, a timer checks once a second for ranks that
do not run.

When one rank ends, all are ended, and the error names the one that was first: ranks that wait for
it in a collective fail a moment later, and must not be reported as the cause.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from aioinfer.config import Config
from aioinfer.errors import EngineDeadError
from aioinfer.executor.base import ProgressCallback, StageTime, WorkerReport
from aioinfer.executor.calls import WorkerCalls
from aioinfer.executor.capacity import Capacity, settle_capacity
from aioinfer.executor.host_ranks import NO_STEP, HostRanks
from aioinfer.ipc.anonymous_file import StackDump
from aioinfer.ipc.heartbeat import Heartbeat
from aioinfer.ipc.masks import ConstrainedRows, buffer_of, mask_words, num_mask_buffers
from aioinfer.ipc.placement import RankSpec, place_on_hosts
from aioinfer.ipc.plan import I32, StepPlan, StepResult, encode_section
from aioinfer.ipc.ring import RingFullError
from aioinfer.ipc.sections import Section
from aioinfer.worker.worker_spec import FailureReport

if TYPE_CHECKING:
    from aioinfer.worker.worker import LoadReport

# from a rank's error until it is reported: another rank's may have been first and not arrived yet
_GRACE_S = 2.0
#: Seconds that a step may take before its workers count as hung: some forty times the longest step
#: of a large model on a CPU.
STEP_TIMEOUT_S = 300.0
# from asking the ranks for their stacks until they are read: writing them takes milliseconds
_STACKS_S = 1.0
_log = logging.getLogger(__name__)


def parallel_groups(config: Config) -> tuple[tuple[str, int], ...]:
    """Returns the axes of an engine's world, as in `RankSpec`. The last is the tensor-parallel one:
    the ranks of a pipeline stage, which exchange the most, are neighbours."""
    parallel = config.parallel
    groups = (("tp", parallel.tensor_parallel_size),)
    if parallel.pipeline_parallel_size == 1:
        return groups
    return (("pp", parallel.pipeline_parallel_size), *groups)


class WorkerHost(Protocol):
    """A host with some of the ranks. Its methods are called on the event loop, and do not wait but
    for `start` and `end`. `HostRanks` documents them.

    Attributes:
        ranks: their numbers in the world, ascending.
        is_started: set once all ranks of the world serve.
    """

    ranks: list[int]
    is_started: bool

    @property
    def name(self) -> str: ...

    async def start(self) -> None: ...

    def allocate(self, num_blocks: Sequence[int], max_model_len: int, vocab_size: int) -> None: ...

    def post(self, step_id: int, message: Sequence[memoryview]) -> None: ...

    def post_masks(self, step_id: int, masks: I32) -> None: ...

    def call(self, method: str, arguments: Mapping[str, Any]) -> None: ...

    def find_fault(self) -> str: ...

    def request_stacks(self) -> None: ...

    def read_stacks(self) -> str: ...

    def kill(self) -> None: ...

    async def end(self) -> None: ...


class WorkerExecutor:
    """Implements `Executor` over hosts, and takes their `RankEvents`. Subclasses implement
    `_make_hosts`, and may extend `_release`.

    Attributes:
        groups: the axes of the world, as in `RankSpec`.
        heartbeat: the last record of each rank of the world.
        hosts: with the ranks.
        names: of the ranks.
        answers: of each rank, its messages that were not taken yet.
        check_every_s: how often the hosts are asked for faults while there is work.
    """

    #: Name of the first phase of the start.
    _FIRST_PHASE = "spawn workers"

    def __init__(self, config: Config, folder: Path, engine: int):
        self.config = config
        self.groups = parallel_groups(config)
        world_size = math.prod(size for _, size in self.groups)
        # their names and stages; on which hosts they are is up to `_make_hosts`
        self._ranks = place_on_hosts(self.groups, [0] * world_size)
        self.names = [rank.name for rank in self._ranks]
        self._num_stages = config.parallel.pipeline_parallel_size
        self.heartbeat = Heartbeat(world_size, self.names)
        self.check_every_s = 1.0
        self._folder, self._engine, self._size = folder, engine, world_size
        self.hosts: list[WorkerHost] = []
        self.answers: list[deque[Any]] = [deque() for _ in range(world_size)]
        self._news = asyncio.Event()  # an answer, or a failure
        self._calls = WorkerCalls()
        self._posted: deque[tuple[int, float]] = deque()  # (step id, when) of unanswered plans
        # posted steps whose masks are not posted yet, and how many rows they have
        self._unmasked: dict[int, int] = {}
        self._masks: I32 | None = None  # if no ranks of this host share it
        self._in_flight_s = 0.0  # while steps were in flight
        self._in_flight_since = 0.0
        self._last_result = 0.0
        self._last_check = 0.0
        self._resumed_at = 0.0
        self._watchdog: asyncio.TimerHandle | None = None
        self._reports: list[FailureReport] = []
        self._report_timer: asyncio.TimerHandle | None = None
        self._failure: Exception | None = None
        self._hang: Exception | None = None  # reported once the stacks have been read
        self._started = False
        self._ending: asyncio.Future[None] | None = None

    async def _make_hosts(self) -> list[WorkerHost]:
        """Places the ranks, and returns the hosts on which they are to run."""
        raise NotImplementedError

    async def _release(self) -> None:
        """Gives back the resources that `_make_hosts` took, once its hosts have ended. Called once,
        also if `_make_hosts` failed or was cancelled, or was never called."""

    # ---------------------------------------------------------------- start

    async def start(
        self,
        on_result: Callable[[StepResult], None],
        on_failure: Callable[[Exception], None],
        on_progress: ProgressCallback,
    ) -> WorkerReport:
        """See `Executor.start`. If it raises, or is cancelled, the workers are gone, however often
        it is cancelled."""
        self._loop = asyncio.get_running_loop()
        self._on_result, self._on_failure, self._on_progress = on_result, on_failure, on_progress
        try:
            report = await self._start()
        except BaseException:
            await self._shut_down_uncancelled()
            raise
        self._started = True
        for host in self.hosts:
            host.is_started = True
        return report

    async def _start(self) -> WorkerReport:
        began = time.perf_counter()
        self.hosts = await self._make_hosts()
        await asyncio.gather(*(host.start() for host in self.hosts))
        spawned = time.perf_counter()
        self._on_progress("load weights", 0, 0)
        self._check()
        reports = await self.gather("loaded")
        self._on_progress("allocate, warm up", 0, 0)
        capacity = settle_capacity(self.config, reports)
        self._vocab_size = reports[0].vocab_size
        for host in self.hosts:
            host.allocate(capacity.num_blocks, capacity.max_model_len, self._vocab_size)
        ready = await self.gather("ready")
        phases, graph_bytes, _ = ready[0]
        phases = [(self._FIRST_PHASE, spawned - began), *phases]
        stages = self._describe_stages(reports)
        step_times = _slowest([times for _, _, times in ready])
        return _describe_workers(reports, capacity, phases, graph_bytes, stages, step_times)

    def _describe_stages(self, reports: Sequence[LoadReport]) -> list[tuple[range, int]]:
        """Returns `WorkerReport.stages`."""
        if self._num_stages == 1:
            return []
        return [
            (reports[rank.rank].layers, reports[rank.rank].weights_bytes)
            for rank in self._first_ranks()
        ]

    def _first_ranks(self) -> list[RankSpec]:
        """Returns the first rank of each pipeline stage."""
        return [rank for rank in self._ranks if rank.index_in("tp") == 0]

    async def gather(self, kind: str) -> list[Any]:
        """Returns each rank's message of a kind, once all have sent one.

        Raises the error that ended one of them.
        """
        while self._failure is None and self._ending is None and not all(self.answers):
            self._news.clear()
            await self._news.wait()
        if self._failure is not None:
            raise self._failure
        if not all(self.answers):
            raise EngineDeadError("the workers have ended")
        answers = [answers.popleft() for answers in self.answers]
        assert all(answer[0] == kind for answer in answers), answers
        return [answer[1] for answer in answers]

    def on_progress(self, rank: int, done: int, total: int) -> None:
        """See `RankEvents`. The first rank's bar stands for all."""
        if rank == 0:
            self._on_progress("load weights", done, total)

    def on_answer(self, rank: int, kind: str, value: Any) -> None:
        """See `RankEvents`."""
        self.answers[rank].append((kind, value))
        self._news.set()

    # ---------------------------------------------------------------- steps

    def post(self, plan: StepPlan) -> None:
        """See `Executor.post`."""
        message = plan.encode()
        try:
            for host in self.hosts:
                host.post(plan.step_id, message)
        except RingFullError as error:
            self.fail(EngineDeadError(f"step {plan.step_id} could not be posted: {error}"))
            return
        now = time.monotonic()
        if not self._posted:
            self._in_flight_since = now
        self._posted.append((plan.step_id, now))
        if (constrained := plan.section(ConstrainedRows)) is not None:
            self._unmasked[plan.step_id] = len(constrained.rows)
        if self._watchdog is None:
            self._watchdog = self._loop.call_later(self._check_after_s, self._check)

    def post_section(self, section: Section) -> None:
        """See `Executor.post_section`."""
        message = encode_section(section)
        try:
            for host in self.hosts:
                host.post(NO_STEP, message)
        except RingFullError as error:
            self.fail(EngineDeadError(f"a section could not be posted: {error}"))

    def masks_of(self, step_id: int) -> I32:
        """See `Executor.masks_of`. The ranks of this host share this memory."""
        for host in self.hosts:
            if isinstance(host, HostRanks):
                return host.masks_of(step_id)
        if self._masks is None:
            rows, words = self.config.max_sampled_rows, mask_words(self._vocab_size)
            buffers = num_mask_buffers(self._num_stages)
            self._masks = np.zeros((buffers, rows, words), np.int32)
        return self._masks[buffer_of(step_id, len(self._masks))]

    def post_masks(self, step_id: int) -> None:
        """See `Executor.post_masks`."""
        masks = self.masks_of(step_id)[: self._unmasked.pop(step_id, 0)]
        try:
            for host in self.hosts:
                host.post_masks(step_id, masks)
        except RingFullError as error:
            self.fail(EngineDeadError(f"the masks of step {step_id} could not be posted: {error}"))

    async def call(
        self, method: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> Sequence[Any]:
        """See `Executor.call`."""
        return await self._calls.call(self, method, arguments, timeout_s)

    def stage_times(self) -> Sequence[StageTime]:
        """See `Executor.stage_times`. Reports of other hosts are up to a second old."""
        if self._num_stages == 1:
            return ()
        in_flight_s = self._in_flight_s
        if self._posted:
            in_flight_s += time.monotonic() - self._in_flight_since
        busy = (self.heartbeat.busy_ns(rank.rank) * 1e-9 for rank in self._first_ranks())
        return [StageTime(busy_s, max(0.0, in_flight_s - busy_s)) for busy_s in busy]

    def on_result(self, message: memoryview) -> None:
        """See `RankEvents`."""
        began = time.perf_counter_ns()
        result = StepResult.decode(message)
        result.take_ns = time.perf_counter_ns() - began
        self._posted.popleft()
        self._last_result = now = time.monotonic()
        if not self._posted:
            self._in_flight_s += now - self._in_flight_since
        if self._failure is None:
            self._deliver(result)

    def _deliver(self, result: StepResult) -> None:
        """Calls the engine with a result.

        After an error there, scheduler and workers disagree: nothing can go on.
        """
        try:
            self._on_result(result)
        except Exception as error:
            self.fail(
                EngineDeadError(
                    f"the result of step {result.step_id} could not be handled: {error!r}"
                )
            )
            raise

    # ---------------------------------------------------------------- checks

    @property
    def _check_after_s(self) -> float:
        return min(self.check_every_s, STEP_TIMEOUT_S)

    def _check(self) -> None:
        """Checks on the ranks, and comes back as long as steps are unanswered or workers start."""
        self._watchdog = None
        if self._failure is not None or (self._started and not self._posted):
            return
        now = time.monotonic()
        if now - self._last_check > 3 * self._check_after_s:  # this process itself was stopped
            self._resumed_at = now
        self._last_check = now
        faults = [fault for host in self.hosts if (fault := host.find_fault())]
        fault = "; ".join(faults) or self._describe_overdue()
        if fault and self._started:
            self._hang = EngineDeadError(fault)
            for host in self.hosts:
                host.request_stacks()
            self._watchdog = self._loop.call_later(_STACKS_S, self._fail_with_stacks, self._hang)
        elif fault:
            self.fail(EngineDeadError(fault))
        else:
            self._watchdog = self._loop.call_later(self._check_after_s, self._check)

    def _describe_overdue(self) -> str:
        """Returns which ranks have not finished the oldest unanswered step, if it has run for
        longer than `STEP_TIMEOUT_S`, or an empty text."""
        if not self._posted:
            return ""
        step_id, posted = self._posted[0]
        # a step runs once the one before is done
        began = max(posted, self._last_result, self._resumed_at)
        if time.monotonic() - began < STEP_TIMEOUT_S:
            return ""
        if step_id in self._unmasked:  # every rank waits for this process
            return f"the masks of step {step_id} were not filled within {STEP_TIMEOUT_S:g} s"
        laggards = self.heartbeat.laggards(step_id)
        first = self._ranks[laggards[0]].stage  # later stages wait for it
        states = "; ".join(
            self.heartbeat.describe(rank) for rank in laggards if self._ranks[rank].stage == first
        )
        return f"step {step_id} was not answered within {STEP_TIMEOUT_S:g} s: {states}"

    def _fail_with_stacks(self, error: Exception) -> None:
        """Logs the stacks of this process and of all ranks, and fails with `error`."""
        own = StackDump()
        own.write_own()
        parts = [f"stacks of the server (process {os.getpid()}):\n{own.read()}"]
        own.close()
        parts += [host.read_stacks() for host in self.hosts]
        _log.error("engine %d: %s\n%s", self._engine, error, "\n".join(parts))
        self.fail(error)

    # ---------------------------------------------------------------- the end

    def on_report(self, report: FailureReport) -> None:
        """See `RankEvents`. An error that may be the consequence of another rank's end that is not
        known yet is reported after `_GRACE_S` only."""
        self._reports.append(report)
        all_failed = len({report.rank for report in self._reports}) == self._size
        if all_failed or (report.error is not None and not report.in_collective):
            self._fail_with_first()
        elif self._report_timer is None:
            self._report_timer = self._loop.call_later(_GRACE_S, self._fail_with_first)

    def _fail_with_first(self) -> None:
        """Fails with the error that was first. One that did not arise in a collective comes before
        errors that did."""
        report = min(self._reports, key=lambda report: (report.in_collective, report.at_ns))
        name = self._ranks[report.rank].name
        self.fail(report.error or EngineDeadError(f"worker {name} failed:\n{report.trace}"))

    def on_exit(self, rank: int, how: str) -> None:
        """See `RankEvents`. The rank is itself the cause of others' errors in collectives."""
        if not all(report.in_collective for report in self._reports):
            self._fail_with_first()  # the error of another rank came before
            return
        name = self._ranks[rank].name
        self.fail(EngineDeadError(f"worker {name} {how}: {self.heartbeat.describe(rank)}"))

    def on_fault(self, fault: str) -> None:
        """See `RankEvents`."""
        self.fail(EngineDeadError(fault))

    def fail(self, error: Exception) -> None:
        """Reports the first failure and ends all workers: none can go on without the others."""
        if self._failure is not None or self._ending is not None:
            return
        self._failure = error = self._hang or error  # errors of the stopped ranks come later
        for host in self.hosts:
            host.kill()
        self._news.set()
        if self._started:
            self._on_failure(error)

    async def shutdown(self) -> None:
        """See `Executor.shutdown`."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._shut_down())
        await asyncio.shield(self._ending)

    async def _shut_down_uncancelled(self) -> None:
        """Shuts down, and raises a cancellation that comes meanwhile only behind that."""
        ending = asyncio.ensure_future(self.shutdown())
        cancelled: asyncio.CancelledError | None = None
        while not ending.done():
            try:
                await asyncio.wait([ending])
            except asyncio.CancelledError as error:
                cancelled = error
        ending.result()
        if cancelled is not None:
            raise cancelled

    async def _shut_down(self) -> None:
        self._news.set()  # a call would wait for its answers
        for timer in (self._watchdog, self._report_timer):
            if timer is not None:
                timer.cancel()
        try:
            await asyncio.gather(*(host.end() for host in self.hosts))
        finally:
            await self._release()
            self.heartbeat.close()
            # Hosts refer to this executor as well. The collector of such cycles seldom runs in a
            # server, and until then the memory that they shared with the ranks would be kept.
            self.hosts = []


def _describe_workers(
    reports: Sequence[LoadReport],
    capacity: Capacity,
    phases: list[tuple[str, float]],
    graph_bytes: int,
    stages: list[tuple[range, int]],
    step_times: list[tuple[int, float, bool]],
) -> WorkerReport:
    """Returns the rows of the start-up table."""
    first = reports[0]
    return WorkerReport(
        first.device,
        first.dtype,
        max(report.weights_bytes for report in reports),
        capacity.kv_cache_bytes,
        first.block_size,
        first.groups,
        capacity.num_blocks,
        capacity.max_model_len,
        capacity.reason,
        phases,
        graph_bytes,
        first.implementation,
        first.cache_dtype,
        stages,
        step_times,
        min(report.max_lookahead for report in reports),
    )


def _slowest(
    of_ranks: Sequence[list[tuple[int, float, bool]]],
) -> list[tuple[int, float, bool]]:
    """Returns the longest time of each kind of step among the ranks: the stages of a pipeline have
    steps of their own in flight, so the slowest one decides how soon they follow each other."""
    slowest: dict[tuple[int, bool], float] = {}
    for rows, seconds, has_lookahead in itertools.chain.from_iterable(of_ranks):
        kind = rows, has_lookahead
        slowest[kind] = max(seconds, slowest.get(kind, 0.0))
    return [(rows, seconds, ahead) for (rows, ahead), seconds in slowest.items()]
