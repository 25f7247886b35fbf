"""The executor for worker processes: one spawned process a rank, fed through shared memory.

The engine's event loop is woken by file descriptors alone: results by an eventfd, start-up messages by the
control connections, a worker's death by its process's sentinel. Nothing here waits or polls.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import multiprocessing

from aioinfer.config import Config
from aioinfer.errors import EngineDeadError
from aioinfer.executor.base import ProgressCallback, WorkerReport
from aioinfer.executor.capacity import settle_capacity
from aioinfer.executor.heartbeat import Heartbeat
from aioinfer.executor.ring import Ring
from aioinfer.scheduler.plan import StepPlan, StepResult
from aioinfer.worker.process import WorkerSpec, main

_JOIN_TIMEOUT_S = 3.0


class MultiprocessExecutor:
    """Implements `Executor` with worker processes."""

    def __init__(self, config: Config, folder: Path):
        self.config = config
        self._folder = folder
        self._size = config.parallel.tensor_parallel_size
        self._plans = Ring(self._size)
        self._results = Ring(1)
        self._heartbeat = Heartbeat(self._size)
        self._lifeline = os.pipe2(os.O_CLOEXEC)
        self._processes: list[Any] = []
        self._controls: list[Connection] = []
        self._answers: list[deque[Any]] = []
        self._posted: deque[tuple[int, float]] = deque()  # (step id, when) of unanswered plans
        self._watchdog: asyncio.TimerHandle | None = None
        self._failed = False
        self._closed = False

    # ---------------------------------------------------------------- start

    async def start(
        self, on_result: Callable[[StepResult], None], on_failure: Callable[[Exception], None], on_progress: ProgressCallback
    ) -> WorkerReport:
        """See `Executor.start`."""
        self._loop = asyncio.get_running_loop()
        self._on_result, self._on_failure, self._on_progress = on_result, on_failure, on_progress
        self._starting: asyncio.Future[None] = self._loop.create_future()
        began = time.perf_counter()
        await asyncio.to_thread(self._spawn_all)
        spawned = time.perf_counter()
        self._watch()
        reports = await self._gather("loaded")
        capacity = settle_capacity(self.config, reports)
        for control in self._controls:
            control.send((capacity.num_blocks, capacity.max_model_len))
        phases = (await self._gather("ready"))[0]
        first = reports[0]
        return WorkerReport(
            first.device,
            first.dtype,
            first.weights_bytes,
            capacity.num_blocks * first.bytes_per_block,
            first.block_size,
            capacity.num_blocks,
            capacity.max_model_len,
            capacity.reason,
            [("spawn workers", spawned - began), *phases],
        )

    def _spawn_all(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._store, store_port = _host_store(self._size)
        for rank in range(self._size):
            here, there = context.Pipe()
            spec = WorkerSpec(
                self.config, self._folder, rank, self._size, self._plans, self._results, self._heartbeat, there,
                _Inherited(self._lifeline[0]), store_port,
            )  # fmt: skip
            process = context.Process(target=main, args=(spec,), name=f"aioinfer-worker-{rank}", daemon=True)
            with _without_main_module():
                process.start()
            there.close()
            self._processes.append(process)
            self._controls.append(here)

    def _watch(self) -> None:
        """Has the event loop look at every descriptor from which something can come."""
        self._loop.add_reader(self._results.event_fd(0), self._take_results)
        for rank, (process, control) in enumerate(zip(self._processes, self._controls, strict=True)):
            self._answers.append(deque())
            self._loop.add_reader(control.fileno(), self._take_message, rank)
            self._loop.add_reader(process.sentinel, self._take_death, rank)

    async def _gather(self, kind: str) -> list[Any]:
        """Returns what each rank sent under `kind`, once all have. Raises what ended one of them."""
        while not all(answers and answers[0][0] == kind for answers in self._answers):
            self._starting = self._loop.create_future()
            await self._starting
        return [answers.popleft()[1] for answers in self._answers]

    def _take_message(self, rank: int) -> None:
        try:
            message = self._controls[rank].recv()
        except (EOFError, ConnectionError):
            self._loop.remove_reader(self._controls[rank].fileno())  # its death follows
            return
        if message[0] == "progress":
            if rank == 0:
                self._on_progress("load weights", *message[1:])
        elif message[0] == "failed":
            _, error, trace = message
            self._fail(error or EngineDeadError(f"worker {rank} failed:\n{trace}"))
        else:
            self._answers[rank].append(message)
            if not self._starting.done():
                self._starting.set_result(None)

    # ---------------------------------------------------------------- steps

    def post(self, plan: StepPlan) -> None:
        """See `Executor.post`."""
        self._plans.write(plan.encode())
        self._posted.append((plan.step_id, time.monotonic()))
        if self._watchdog is None:
            self._watchdog = self._loop.call_later(self.config.parallel.step_timeout_s, self._check_progress)

    def _take_results(self) -> None:
        self._results.clear_event(0)
        while (message := self._results.read(0)) is not None:
            result = StepResult.decode(message)
            self._results.release(0)
            self._posted.popleft()
            self._on_result(result)

    def _check_progress(self) -> None:
        """Runs once a timeout while there is work, not once a step: fails if the oldest plan is that old."""
        self._watchdog = None
        if not self._posted:
            return
        timeout = self.config.parallel.step_timeout_s
        step_id, posted = self._posted[0]
        left = posted + timeout - time.monotonic()
        if left > 0:
            self._watchdog = self._loop.call_later(left, self._check_progress)
            return
        states = "; ".join(self._heartbeat.describe(rank) for rank in range(self._size))
        self._fail(EngineDeadError(f"step {step_id} was not answered within {timeout:g} s: {states}"))

    # ---------------------------------------------------------------- the end

    def _take_death(self, rank: int) -> None:
        self._loop.remove_reader(self._processes[rank].sentinel)
        while not self._failed and self._controls[rank].poll():  # its last words explain more than its status
            try:
                self._take_message(rank)
            except OSError:
                break
        code = self._processes[rank].exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with status {code}"
        self._fail(EngineDeadError(f"worker {rank} {how}; {self._heartbeat.describe(rank)}"))

    def _fail(self, error: Exception) -> None:
        """Tells of the first failure and ends all workers: none can go on without the others."""
        if self._failed or self._closed:
            return
        self._failed = True
        for process in self._processes:
            process.kill()
        if not self._starting.done():
            self._starting.set_exception(error)
        else:
            self._on_failure(error)

    async def shutdown(self) -> None:
        """See `Executor.shutdown`."""
        if self._closed:
            return
        self._closed = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        for fd in [self._results.event_fd(0), *(c.fileno() for c in self._controls), *(p.sentinel for p in self._processes)]:
            self._loop.remove_reader(fd)
        await asyncio.to_thread(self._end_all)

    def _end_all(self) -> None:
        for control in self._controls:
            control.close()  # the worker's sign to end
        os.close(self._lifeline[1])
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
            process.close()
        os.close(self._lifeline[0])
        self._plans.close()
        self._results.close()
        self._heartbeat.close()


class _Inherited:
    """A descriptor for a process that is being spawned; `detach` gives it there."""

    def __init__(self, fd: int):
        self._fd = fd

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _identity, (reduction.DupFd(self._fd),)


def _identity(value: Any) -> Any:
    return value


def _host_store(size: int) -> tuple[Any, int]:
    """Returns the store through which ranks find each other, and its port: a free one, so that servers never meet."""
    if size == 1:
        return None, 0
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, store.port


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Keeps a spawned process from importing the caller's script again, which may have no `if __name__` guard."""
    actual = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = actual
