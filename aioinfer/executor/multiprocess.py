"""The executor for worker processes: one spawned process a rank, fed through shared memory.

The engine's event loop is woken by file descriptors alone: by an eventfd for results, by the
control connections for start-up messages, and by a pidfd when a worker has died. (The sentinel of
multiprocessing comes too early: when a process closes its descriptors it has no exit status yet.)
Nothing here waits. Only while steps are unanswered or workers start, a timer checks once a second
for ranks that do not run.

When one rank ends, all are ended, and the error names the one that was first: ranks that wait for
it in a collective fail a moment later, and must not be reported as the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import multiprocessing

from aioinfer.config import Config
from aioinfer.errors import EngineDeadError
from aioinfer.executor.base import ProgressCallback, StageTime, WorkerReport
from aioinfer.executor.capacity import settle_capacity
from aioinfer.ipc.heartbeat import Heartbeat, ProcessMonitor
from aioinfer.ipc.masks import ConstrainedRows, MaskMemory, MaskNotice, buffer_of, num_mask_buffers
from aioinfer.ipc.meeting_file import MeetingFile
from aioinfer.ipc.placement import place_ranks
from aioinfer.ipc.plan import I32, StepPlan, StepResult
from aioinfer.ipc.ring import Ring, RingFullError
from aioinfer.ipc.stack_dump import StackDump
from aioinfer.worker.process import FailureReport, WorkerSpec, main

if TYPE_CHECKING:
    from aioinfer.worker.worker import LoadReport

_JOIN_TIMEOUT_S = 3.0
# from a rank's error until it is reported: another rank's may have been first and not arrived yet
_GRACE_S = 2.0
# executors that start together would restore each other's substitute
_MAIN_MODULE_LOCK = threading.Lock()
# from asking the ranks for their stacks until they are read: writing them takes milliseconds
_STACKS_S = 1.0
_log = logging.getLogger(__name__)


class MultiprocessExecutor:
    """Implements `Executor` with worker processes."""

    def __init__(self, config: Config, folder: Path, engine: int = 0):
        self.config = config
        self._folder = folder
        self._engine = engine
        parallel = config.parallel
        self._places = place_ranks(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        self._size = len(self._places)
        self._num_stages = parallel.pipeline_parallel_size
        self._in_flight_s = 0.0  # while steps were in flight
        self._in_flight_since = 0.0
        self._plans = Ring(self._size)
        self._results = Ring(1)
        self._masks = MaskMemory(num_mask_buffers(self._num_stages))
        self._unmasked: set[int] = set()  # posted steps whose masks are not posted yet
        self._heartbeat = Heartbeat(self._size, [place.name for place in self._places])
        self._monitor = ProcessMonitor()
        self._processes: list[SpawnProcess] = []
        self._pidfds: list[int] = []
        self._controls: list[Connection] = []
        self._lifeline: Connection | None = None
        self._meeting = MeetingFile()
        self._spawning: asyncio.Future[None] | None = None
        self._answers: list[deque[Any]] = []
        self._news = asyncio.Event()  # an answer or a failure while starting
        self._posted: deque[tuple[int, float]] = deque()  # (step id, when) of unanswered plans
        self._last_result = 0.0
        self._watchdog: asyncio.TimerHandle | None = None
        self._reports: list[FailureReport] = []
        self._report_timer: asyncio.TimerHandle | None = None
        self._failure: Exception | None = None
        self._hang: Exception | None = None  # reported once the stacks have been read
        self._stacks = [StackDump() for _ in range(self._size)]
        self._started = False
        self._ending: asyncio.Future[None] | None = None
        # A program that ends without a shutdown would send its workers SIGTERM, which they ignore,
        # and wait for them.
        self._at_exit = Finalize(self, _kill_all, args=(self._processes,), exitpriority=1)

    # ---------------------------------------------------------------- start

    async def start(
        self,
        on_result: Callable[[StepResult], None],
        on_failure: Callable[[Exception], None],
        on_progress: ProgressCallback,
    ) -> WorkerReport:
        """See `Executor.start`. If it raises, or is cancelled, the workers are gone."""
        self._loop = asyncio.get_running_loop()
        self._on_result, self._on_failure, self._on_progress = on_result, on_failure, on_progress
        try:
            report = await self._start()
        except BaseException:
            await self.shutdown()
            raise
        self._started = True
        return report

    async def _start(self) -> WorkerReport:
        began = time.perf_counter()
        self._spawning = self._loop.run_in_executor(None, self._spawn_all)
        await asyncio.shield(self._spawning)
        spawned = time.perf_counter()
        self._watch()
        reports = await self._gather("loaded")
        capacity = settle_capacity(self.config, reports)
        self._vocab_size = reports[0].vocab_size
        self._masks.resize(self.config.scheduler.max_num_seqs, self._vocab_size)
        for control in self._controls:
            with contextlib.suppress(OSError):  # the worker is dead; its pidfd reports that
                control.send((capacity.num_blocks, capacity.max_model_len))
        phases, graph_bytes = (await self._gather("ready"))[0]
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
            [("spawn workers", spawned - began), *phases],
            graph_bytes,
            first.implementation,
            first.cache_dtype,
            self._describe_stages(reports),
        )

    def _describe_stages(self, reports: Sequence[LoadReport]) -> list[tuple[range, int]]:
        """Returns `WorkerReport.stages`."""
        if self._num_stages == 1:
            return []
        return [
            (report.layers, report.weights_bytes)
            for report, place in zip(reports, self._places, strict=True)
            if place.index_in("tp") == 0
        ]

    def _spawn_all(self) -> None:
        """Starts the processes; runs in a thread, since each start takes milliseconds."""
        context = multiprocessing.get_context("spawn")
        lifeline, self._lifeline = context.Pipe(duplex=False)
        for rank, place in enumerate(self._places):
            here, there = context.Pipe()
            self._controls.append(here)
            spec = WorkerSpec(
                self.config, self._folder, place, self._plans, self._results, self._heartbeat,
                there, lifeline, self._stacks[rank], self._meeting, self._masks, self._engine,
            )  # fmt: skip
            process = context.Process(
                target=main,
                args=(spec,),
                name=f"aioinfer-worker-{self._engine}.{rank}",
                daemon=True,
            )
            with _without_main_module():
                process.start()
            there.close()
            self._processes.append(process)
            self._pidfds.append(os.pidfd_open(cast(int, process.pid)))
            self._monitor.watch(cast(int, process.pid))
        lifeline.close()

    def _watch(self) -> None:
        """Has the event loop watch every descriptor that can become readable."""
        self._loop.add_reader(self._results.event_fd(0), self._read_results)
        for rank, (pidfd, control) in enumerate(zip(self._pidfds, self._controls, strict=True)):
            self._answers.append(deque())
            self._loop.add_reader(control.fileno(), self._receive, rank)
            self._loop.add_reader(pidfd, self._handle_exit, rank)
        self._check()

    async def _gather(self, kind: str) -> list[Any]:
        """Returns each rank's message of a kind, once all have sent one.

        Raises the error that ended one of them.
        """
        while self._failure is None and not all(self._answers):
            self._news.clear()
            await self._news.wait()
        if self._failure is not None:
            raise self._failure
        answers = [answers.popleft() for answers in self._answers]
        assert all(answer[0] == kind for answer in answers), answers
        return [answer[1] for answer in answers]

    def _receive(self, rank: int) -> bool:
        """Receives a worker's message. Returns False if there was none, because the worker has
        closed the connection."""
        try:
            message = self._controls[rank].recv()
        except (EOFError, OSError):
            self._loop.remove_reader(self._controls[rank].fileno())  # its pidfd comes next
            return False
        if message[0] == "progress":
            if rank == 0:
                self._on_progress("load weights", *message[1:])
        elif message[0] == "failed":
            self._handle_report(message[1])
        else:
            self._answers[rank].append(message)
            self._news.set()
        return True

    # ---------------------------------------------------------------- steps

    def post(self, plan: StepPlan) -> None:
        """See `Executor.post`."""
        try:
            self._plans.write(plan.encode())
        except RingFullError as error:
            self._fail(EngineDeadError(f"step {plan.step_id} could not be posted: {error}"))
            return
        now = time.monotonic()
        if not self._posted:
            self._in_flight_since = now
        self._posted.append((plan.step_id, now))
        if plan.section(ConstrainedRows) is not None:
            self._unmasked.add(plan.step_id)
        if self._watchdog is None:
            self._watchdog = self._loop.call_later(self._check_every_s, self._check)

    def masks_of(self, step_id: int) -> I32:
        """See `Executor.masks_of`."""
        rows = self.config.scheduler.max_num_seqs
        return self._masks.buffers(rows, self._vocab_size)[self._buffer_of(step_id)]

    def post_masks(self, step_id: int) -> None:
        """See `Executor.post_masks`."""
        try:
            self._plans.write(MaskNotice(step_id, self._buffer_of(step_id)).encode())
        except RingFullError as error:
            self._fail(EngineDeadError(f"the masks of step {step_id} could not be posted: {error}"))
        self._unmasked.discard(step_id)

    def _buffer_of(self, step_id: int) -> int:
        return buffer_of(step_id, self._masks.num_buffers)

    def stage_times(self) -> Sequence[StageTime]:
        """See `Executor.stage_times`."""
        if self._num_stages == 1:
            return ()
        in_flight_s = self._in_flight_s
        if self._posted:
            in_flight_s += time.monotonic() - self._in_flight_since
        firsts = (place.rank for place in self._places if place.index_in("tp") == 0)
        busy = (self._heartbeat.busy_ns(rank) * 1e-9 for rank in firsts)
        return [StageTime(busy_s, max(0.0, in_flight_s - busy_s)) for busy_s in busy]

    def _read_results(self) -> None:
        for _ in range(self._results.announced(0)):
            began = time.perf_counter_ns()
            result = StepResult.decode(self._results.read(0))
            self._results.release(0)
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
            self._fail(
                EngineDeadError(
                    f"the result of step {result.step_id} could not be handled: {error!r}"
                )
            )
            raise

    @property
    def _check_every_s(self) -> float:
        return min(self._monitor.check_every_s, self.config.parallel.step_timeout_s)

    def _check(self) -> None:
        """Checks on the ranks, and comes back as long as steps are unanswered or workers start."""
        self._watchdog = None
        if self._failure is not None or (self._started and not self._posted):
            return
        self._monitor.check()
        fault = self._describe_stopped() or self._describe_overdue()
        if fault and self._started:
            self._hang = EngineDeadError(fault)
            for process, stacks in zip(self._processes, self._stacks, strict=True):
                stacks.request(cast(int, process.pid))
            self._watchdog = self._loop.call_later(_STACKS_S, self._fail_with_stacks, self._hang)
        elif fault:
            self._fail(EngineDeadError(fault))
        else:
            self._watchdog = self._loop.call_later(self._check_every_s, self._check)

    def _describe_stopped(self) -> str:
        """Returns which ranks do not run at all, or an empty text."""
        # while a rank loads, a disk may keep it in an uninterruptible call for long
        stopped = self._monitor.find_stopped("TD" if self._started else "T")
        return "; ".join(
            f"worker {self._places[rank].name} {what}: {self._heartbeat.describe(rank)}"
            for rank, what in stopped.items()
        )

    def _describe_overdue(self) -> str:
        """Returns which ranks have not finished the oldest unanswered step, if it has run for
        longer than `parallel.step_timeout_s`, or an empty text."""
        if not self._posted:
            return ""
        step_id, posted = self._posted[0]
        timeout = self.config.parallel.step_timeout_s
        # a step runs once the one before is done
        began = max(posted, self._last_result, self._monitor.resumed_at)
        if time.monotonic() - began < timeout:
            return ""
        if step_id in self._unmasked:  # every rank waits for this process
            return f"the masks of step {step_id} were not filled within {timeout:g} s"
        laggards = self._heartbeat.laggards(step_id)
        first = self._places[laggards[0]].stage  # later stages wait for it
        states = "; ".join(
            self._heartbeat.describe(rank) for rank in laggards if self._places[rank].stage == first
        )
        return f"step {step_id} was not answered within {timeout:g} s: {states}"

    def _fail_with_stacks(self, error: Exception) -> None:
        """Logs the stacks of this process and of all ranks, and fails with `error`."""
        own = StackDump()
        own.write_own()
        parts = [f"stacks of the server (process {os.getpid()}):\n{own.read()}"]
        own.close()
        for rank, (process, stacks) in enumerate(zip(self._processes, self._stacks, strict=True)):
            text = stacks.read() or (
                "none came: it is stopped, or in a system call that cannot be interrupted\n"
            )
            name = self._places[rank].name
            parts.append(f"stacks of worker {name} (process {process.pid}):\n{text}")
        _log.error("engine %d: %s\n%s", self._engine, error, "\n".join(parts))
        self._fail(error)

    # ---------------------------------------------------------------- the end

    def _handle_report(self, report: FailureReport) -> None:
        """Handles a rank's error.

        If it may be the consequence of another rank's end that is not known yet, it is reported
        after `_GRACE_S` only.
        """
        self._reports.append(report)
        all_failed = len({report.rank for report in self._reports}) == self._size
        if all_failed or (report.error is not None and not report.in_collective):
            self._fail_with_first()
        elif self._report_timer is None:
            self._report_timer = self._loop.call_later(_GRACE_S, self._fail_with_first)

    def _fail_with_first(self) -> None:
        """Fails with the error that was first. One that did not arise in a collective comes before
        those that did."""
        report = min(self._reports, key=lambda report: (report.in_collective, report.at_ns))
        name = self._places[report.rank].name
        self._fail(report.error or EngineDeadError(f"worker {name} failed:\n{report.trace}"))

    def _handle_exit(self, rank: int) -> None:
        """Handles the end of a process.

        If it has reported no error, it is itself the cause of others' errors in collectives.
        """
        self._loop.remove_reader(self._pidfds[rank])
        code = self._processes[rank].exitcode or 0  # reading it also reaps the process
        # an error report that is still in the connection explains more than the status
        while self._failure is None and self._controls[rank].poll():
            if not self._receive(rank):
                break
        if any(report.rank == rank for report in self._reports):
            return
        if not all(report.in_collective for report in self._reports):
            self._fail_with_first()  # the error of another rank came before
            return
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with status {code}"
        )
        name = self._places[rank].name
        self._fail(EngineDeadError(f"worker {name} {how}: {self._heartbeat.describe(rank)}"))

    def _fail(self, error: Exception) -> None:
        """Reports the first failure and ends all workers: none can go on without the others."""
        if self._failure is not None or self._ending is not None:
            return
        self._failure = error = self._hang or error  # what the stopped ranks cause comes later
        _kill_all(self._processes)
        if self._started:
            self._on_failure(error)
        else:
            self._news.set()

    async def shutdown(self) -> None:
        """See `Executor.shutdown`."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._shut_down())
        await asyncio.shield(self._ending)

    async def _shut_down(self) -> None:
        if self._spawning is not None:
            await asyncio.wait([self._spawning])  # a cancelled start may still be spawning
        for timer in (self._watchdog, self._report_timer):
            if timer is not None:
                timer.cancel()
        if self._answers:
            for fd in [
                self._results.event_fd(0),
                *(control.fileno() for control in self._controls),
                *self._pidfds,
            ]:
                self._loop.remove_reader(fd)
        await asyncio.to_thread(self._end_all)

    def _end_all(self) -> None:
        self._at_exit.cancel()
        for control in self._controls:
            control.close()  # at which the worker ends
        deadline = time.monotonic() + (
            _JOIN_TIMEOUT_S if self._started and self._failure is None else 0
        )
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
            process.close()
        for pidfd in self._pidfds:
            os.close(pidfd)
        if self._lifeline is not None:
            self._lifeline.close()
        self._meeting.close()
        self._plans.close()
        self._masks.close()
        self._results.close()
        self._heartbeat.close()
        self._monitor.close()
        for stacks in self._stacks:
            stacks.close()


def _kill_all(processes: list[SpawnProcess]) -> None:
    for process in processes:
        process.kill()


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Keeps a spawned process from importing the caller's script again, which may have no `if
    __name__` guard."""
    with _MAIN_MODULE_LOCK:
        actual = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = actual
