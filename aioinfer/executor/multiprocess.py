"""The executor for worker processes: one spawned process a rank, fed through shared memory.

The engine's event loop is woken by file descriptors alone: results by an eventfd, start-up messages
by the control connections, a worker's death by its pidfd. (The sentinel of multiprocessing comes
too early: when a process closes its descriptors it has no exit status yet.) Nothing here waits, and
only while steps are unanswered or workers start does it look once a second for ranks that do not
run.

Whatever ends one rank ends all, and the error names the one with which it began: ranks that wait
for others in an exchange fail a moment after one that died, and are not to be taken for the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, cast

from torch import multiprocessing

from aioinfer.config import Config
from aioinfer.errors import EngineDeadError
from aioinfer.executor.base import ProgressCallback, WorkerReport
from aioinfer.executor.capacity import settle_capacity
from aioinfer.ipc.heartbeat import Heartbeat, Pulse
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.ipc.ring import Ring, RingFullError
from aioinfer.worker.process import FailureReport, WorkerSpec, main

_JOIN_TIMEOUT_S = 3.0
# from a rank's error until it is told: other ranks may have failed before, and not be heard of yet
_GRACE_S = 2.0
# executors that start together would put back each other's stand-in
_MAIN_MODULE_LOCK = threading.Lock()


class MultiprocessExecutor:
    """Implements `Executor` with worker processes."""

    def __init__(self, config: Config, folder: Path, engine: int = 0):
        self.config = config
        self._folder = folder
        self._engine = engine
        self._size = config.parallel.tensor_parallel_size
        self._plans = Ring(self._size)
        self._results = Ring(1)
        self._heartbeat = Heartbeat(self._size)
        self._pulse = Pulse()
        self._processes: list[SpawnProcess] = []
        self._pidfds: list[int] = []
        self._controls: list[Connection] = []
        self._lifeline: Connection | None = None
        self._store: Any = None
        self._spawning: asyncio.Future[None] | None = None
        self._answers: list[deque[Any]] = []
        self._news = asyncio.Event()  # an answer or a failure while starting
        self._posted: deque[tuple[int, float]] = deque()  # (step id, when) of unanswered plans
        self._last_result = 0.0
        self._watchdog: asyncio.TimerHandle | None = None
        self._reports: list[FailureReport] = []
        self._verdict: asyncio.TimerHandle | None = None
        self._failure: Exception | None = None
        self._started = False
        self._ending: asyncio.Future[None] | None = None
        # A program that ends without a shutdown would send its workers SIGTERM, which they leave to
        # their parent, and wait.
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
        for control in self._controls:
            with contextlib.suppress(OSError):  # the worker is dead, as we shall hear
                control.send((capacity.num_blocks, capacity.max_model_len))
        phases, graph_bytes = (await self._gather("ready"))[0]
        first = reports[0]
        return WorkerReport(
            first.device,
            first.dtype,
            first.weights_bytes,
            capacity.kv_cache_bytes,
            first.block_size,
            first.groups,
            capacity.num_blocks,
            capacity.max_model_len,
            capacity.reason,
            [("spawn workers", spawned - began), *phases],
            graph_bytes,
        )

    def _spawn_all(self) -> None:
        """Starts the processes; runs in a thread, since each start takes milliseconds."""
        context = multiprocessing.get_context("spawn")
        self._store, store_port = _host_store(self._size)
        lifeline, self._lifeline = context.Pipe(duplex=False)
        for rank in range(self._size):
            here, there = context.Pipe()
            self._controls.append(here)
            spec = WorkerSpec(
                self.config, self._folder, rank, self._size, self._plans, self._results,
                self._heartbeat, there, lifeline, store_port,
                self._engine,
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
            self._pulse.watch(cast(int, process.pid))
        lifeline.close()

    def _watch(self) -> None:
        """Has the event loop look at every descriptor from which something can come."""
        self._loop.add_reader(self._results.event_fd(0), self._take_results)
        for rank, (pidfd, control) in enumerate(zip(self._pidfds, self._controls, strict=True)):
            self._answers.append(deque())
            self._loop.add_reader(control.fileno(), self._take_message, rank)
            self._loop.add_reader(pidfd, self._take_death, rank)
        self._look()

    async def _gather(self, kind: str) -> list[Any]:
        """Returns what each rank sent under `kind`, once all have.

        Raises what ended one of them.
        """
        while self._failure is None and not all(self._answers):
            self._news.clear()
            await self._news.wait()
        if self._failure is not None:
            raise self._failure
        answers = [answers.popleft() for answers in self._answers]
        assert all(answer[0] == kind for answer in answers), answers
        return [answer[1] for answer in answers]

    def _take_message(self, rank: int) -> bool:
        """Takes a worker's message; returns False if there was none, since the worker has hung
        up."""
        try:
            message = self._controls[rank].recv()
        except (EOFError, OSError):
            self._loop.remove_reader(self._controls[rank].fileno())  # its death follows
            return False
        if message[0] == "progress":
            if rank == 0:
                self._on_progress("load weights", *message[1:])
        elif message[0] == "failed":
            self._take_report(message[1])
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
        self._posted.append((plan.step_id, time.monotonic()))
        if self._watchdog is None:
            self._watchdog = self._loop.call_later(self._look_every_s, self._look)

    def _take_results(self) -> None:
        for _ in range(self._results.announced(0)):
            began = time.perf_counter_ns()
            result = StepResult.decode(self._results.read(0))
            self._results.release(0)
            result.take_ns = time.perf_counter_ns() - began
            self._posted.popleft()
            self._last_result = time.monotonic()
            if self._failure is None:
                self._hand_on(result)

    def _hand_on(self, result: StepResult) -> None:
        """Gives a result to the engine.

        An error there leaves its books and the workers apart: nothing can go on.
        """
        try:
            self._on_result(result)
        except Exception as error:
            self._fail(
                EngineDeadError(
                    f"the result of step {result.step_id} could not be taken: {error!r}"
                )
            )
            raise

    @property
    def _look_every_s(self) -> float:
        return min(self._pulse.look_every_s, self.config.parallel.step_timeout_s)

    def _look(self) -> None:
        """Looks after the ranks again and again, as long as steps are unanswered or workers
        start."""
        self._watchdog = None
        if self._failure is not None or (self._started and not self._posted):
            return
        self._pulse.look()
        trouble = self._find_lost() or self._find_overdue()
        if trouble:
            self._fail(EngineDeadError(trouble))
        else:
            self._watchdog = self._loop.call_later(self._look_every_s, self._look)

    def _find_lost(self) -> str:
        """Returns which ranks do not run at all, or nothing."""
        # while a rank loads, a disk may keep it waiting for long
        lost = self._pulse.find_lost("TD" if self._started else "T")
        return "; ".join(
            f"worker {rank} {what}: {self._heartbeat.describe(rank)}" for rank, what in lost.items()
        )

    def _find_overdue(self) -> str:
        """Returns which ranks keep the oldest unanswered step from its end, if it has run for too
        long, or nothing."""
        if not self._posted:
            return ""
        step_id, posted = self._posted[0]
        timeout = self.config.parallel.step_timeout_s
        # a step runs once the one before is done
        began = max(posted, self._last_result, self._pulse.resumed_at)
        if time.monotonic() - began < timeout:
            return ""
        states = "; ".join(
            self._heartbeat.describe(rank) for rank in self._heartbeat.laggards(step_id)
        )
        return f"step {step_id} was not answered within {timeout:g} s: {states}"

    # ---------------------------------------------------------------- the end

    def _take_report(self, report: FailureReport) -> None:
        """Takes a rank's error.

        If it may come of another's end, of which nothing is known yet, that gets a moment to show.
        """
        self._reports.append(report)
        is_everybodys = len({report.rank for report in self._reports}) == self._size
        if is_everybodys or (report.error is not None and not report.in_collective):
            self._judge()
        elif self._verdict is None:
            self._verdict = self._loop.call_later(_GRACE_S, self._judge)

    def _judge(self) -> None:
        """Fails with the error that was first; one that did not arise in an exchange comes before
        those that did."""
        report = min(self._reports, key=lambda report: (report.in_collective, report.at_ns))
        self._fail(report.error or EngineDeadError(f"worker {report.rank} failed:\n{report.trace}"))

    def _take_death(self, rank: int) -> None:
        """Takes the end of a process.

        Only one that told of no error is the cause of others' errors in exchanges.
        """
        self._loop.remove_reader(self._pidfds[rank])
        code = self._processes[rank].exitcode or 0  # asking for it also takes the zombie away
        # its last words explain more than its status
        while self._failure is None and self._controls[rank].poll():
            if not self._take_message(rank):
                break
        if any(report.rank == rank for report in self._reports):
            return
        if not all(report.in_collective for report in self._reports):
            self._judge()  # the error of another rank came before
            return
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with status {code}"
        )
        self._fail(EngineDeadError(f"worker {rank} {how}: {self._heartbeat.describe(rank)}"))

    def _fail(self, error: Exception) -> None:
        """Tells of the first failure and ends all workers: none can go on without the others."""
        if self._failure is not None or self._ending is not None:
            return
        self._failure = error
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
            await asyncio.wait([self._spawning])  # a start that was cancelled may still be at it
        for timer in (self._watchdog, self._verdict):
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
            control.close()  # the worker's sign to end
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
        self._store = None  # closes its socket
        self._plans.close()
        self._results.close()
        self._heartbeat.close()
        self._pulse.close()


def _kill_all(processes: list[SpawnProcess]) -> None:
    for process in processes:
        process.kill()


def _host_store(size: int) -> tuple[Any, int]:
    """Returns the store through which ranks find each other, and its port: a free one, so that
    servers never meet.

    `TCPStore` by itself would listen on every address of the machine, so it is given a socket that
    does not.
    """
    if size == 1:
        return None, 0
    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    ), port


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
