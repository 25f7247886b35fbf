"""The executor without processes: one worker in one thread of the server, for tests and small
models on CPUs."""

from __future__ import annotations

import asyncio
import queue
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from aioinfer.config import Config
from aioinfer.errors import AioinferError, EngineDeadError, WorkerCallError
from aioinfer.executor.base import ProgressCallback, StageTime, WorkerReport
from aioinfer.executor.capacity import settle_capacity
from aioinfer.ipc.masks import NUM_MASK_BUFFERS, buffer_of, mask_words
from aioinfer.ipc.plan import I32, StepPlan, StepResult
from aioinfer.ipc.sections import Section


class InlineExecutor:
    """Implements `Executor` with one thread, which executes plans in the order of posting."""

    def __init__(self, config: Config, folder: Path):
        self.config = config
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")
        self._closed = False
        self._works: Any = None  # of the worker, once it is allocated
        # the steps whose masks are filled, in order; None where no more will come
        self._masked: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    async def start(
        self,
        on_result: Callable[[StepResult], None],
        on_failure: Callable[[Exception], None],
        on_progress: ProgressCallback,
    ) -> WorkerReport:
        """See `Executor.start`."""
        self._loop = asyncio.get_running_loop()
        self._on_result, self._on_failure = on_result, on_failure

        def report_progress(done: int, total: int) -> None:
            self._loop.call_soon_threadsafe(on_progress, "load weights", done, total)
            if done >= total:
                self._loop.call_soon_threadsafe(on_progress, "allocate, warm up", 0, 0)

        try:
            return await self._loop.run_in_executor(
                self._thread, self._start_worker, report_progress
            )
        except Exception as error:
            raise _as_engine_error(error) from error

    def _start_worker(self, on_progress: Callable[[int, int], None]) -> WorkerReport:
        from aioinfer.layers.parallel import ProcessGroups
        from aioinfer.worker.called_worker import extended
        from aioinfer.worker.worker import Worker

        began = time.perf_counter()
        kind = extended(Worker, self.config.parallel.worker_extension)
        self._worker = kind(self.config, self._folder, ProcessGroups.single())
        report = self._worker.load(on_progress)
        loaded = time.perf_counter()
        capacity = settle_capacity(self.config, [report])
        self._worker.allocate(capacity.num_blocks, capacity.max_model_len)
        self._works = self._worker.runner.works
        self._worker.warm_up()
        # of zeros that were never written: pages that no mask touches take no memory
        rows, words = self.config.max_sampled_rows, mask_words(report.vocab_size)
        self._masks = np.zeros((NUM_MASK_BUFFERS, rows, words), np.int32)
        return WorkerReport(
            report.device,
            report.dtype,
            report.weights_bytes,
            capacity.kv_cache_bytes,
            report.block_size,
            report.groups,
            capacity.num_blocks,
            capacity.max_model_len,
            capacity.reason,
            [("load weights", loaded - began), ("allocate, warm up", time.perf_counter() - loaded)],
            self._worker.graph_bytes,
            report.implementation,
            report.cache_dtype,
            step_times=self._worker.step_times,
            max_lookahead=report.max_lookahead,
        )

    def post(self, plan: StepPlan) -> None:
        """See `Executor.post`."""
        if not self._closed:
            self._thread.submit(self._execute, plan)

    def post_section(self, section: Section) -> None:
        """See `Executor.post_section`."""
        if not self._closed:
            self._thread.submit(self._take, section)

    def _take(self, section: Section) -> None:
        try:
            self._works.take(section)
        except Exception as error:
            self._call_on_loop(self._fail, _as_engine_error(error))

    def _execute(self, plan: StepPlan) -> None:
        try:
            result = self._worker.runner.step(plan, self._wait_for_masks).wait()
        except Exception as error:
            self._call_on_loop(self._fail, _as_engine_error(error))
        else:
            self._call_on_loop(self._deliver, result)

    def _wait_for_masks(self, plan: StepPlan, count: int) -> I32:
        """Implements `worker.features.AwaitMessage` in the worker's thread."""
        step_id = self._masked.get()
        if step_id != plan.step_id:
            raise EngineDeadError(
                f"step {plan.step_id} gets no masks"
                + ("" if step_id is None else f": those of step {step_id} came")
            )
        return self._masks[buffer_of(step_id), :count]

    def masks_of(self, step_id: int) -> I32:
        """See `Executor.masks_of`."""
        return self._masks[buffer_of(step_id)]

    def post_masks(self, step_id: int) -> None:
        """See `Executor.post_masks`."""
        self._masked.put(step_id)

    async def call(
        self, method: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> Sequence[Any]:
        """See `Executor.call`."""
        if self._closed:
            raise EngineDeadError("the worker has ended")
        calling = self._loop.run_in_executor(
            self._thread, lambda: self._worker.call(method, arguments)
        )
        try:
            async with asyncio.timeout(timeout_s):
                is_done, result = await calling
        except TimeoutError:
            error = EngineDeadError(f"{method} did not end within {timeout_s:g} s")
            self._fail(error)
            raise error from None
        except Exception as failure:
            self._fail(_as_engine_error(failure))
            raise _as_engine_error(failure) from failure
        if not is_done:
            raise WorkerCallError(f"{method} failed: {result}")
        return [result]

    def stage_times(self) -> Sequence[StageTime]:
        """See `Executor.stage_times`."""
        return ()

    def _call_on_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        if not self._closed:
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _deliver(self, result: StepResult) -> None:
        if self._closed:
            return
        try:
            self._on_result(result)
        except Exception as error:  # scheduler and worker disagree from now on: nothing can go on
            self._fail(
                EngineDeadError(
                    f"the result of step {result.step_id} could not be handled: {error!r}"
                )
            )
            raise

    def _fail(self, error: Exception) -> None:
        if not self._closed:
            self._closed = True
            self._on_failure(error)

    async def shutdown(self) -> None:
        """See `Executor.shutdown`."""
        self._closed = True
        self._masked.put(None)  # a step that waits for masks would keep the thread from ending
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._works is not None:
            self._works.close()


def _as_engine_error(error: Exception) -> Exception:
    """Returns the error to be reported for a worker's failure: an error of this package as it is,
    any other with its traceback."""
    if isinstance(error, AioinferError):
        return error
    return EngineDeadError("the worker failed:\n" + "".join(traceback.format_exception(error)))
