"""The engine: one replica of the model, and the step loop that keeps it busy.

Everything here runs on one event loop. The step loop is `Engine._step`, which runs when a result
arrives:

    take step N-1's result ─► update the scheduler ─► plan step N+1 ─► post it ─► emit N-1's text

Meanwhile the workers execute step N, so they never wait for text. The loop neither polls nor
blocks: results wake it through the executor, and new requests through `add`. An idle engine does
nothing. `Frontend` owns the engines and routes requests to them.

When workers die or hang, the engine ends what is left of them and, as far as
`parallel.restart_workers` allows, starts new ones. Its requests stay meanwhile: those that wait are
not touched, and those that ran are queued again with all tokens known so far, as after a
preemption. What was posted and has not come back is computed again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from aioinfer.config import Config
from aioinfer.engine.metrics import EngineMetrics
from aioinfer.engine.output import OutputSequence, RequestOutput, TokenLogprob
from aioinfer.engine.prompt_outputs import PromptOutputs
from aioinfer.engine.recovery import (
    MAX_END_S,
    MAX_INTERRUPTIONS,
    MAX_START_S,
    SLOWEST_START,
    EngineState,
    RestartPolicy,
)
from aioinfer.errors import EngineDeadError, GenerationError
from aioinfer.executor.base import Executor, ProgressCallback, WorkerReport
from aioinfer.ipc.plan import Logprobs, StepResult
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.request import Request, Status
from aioinfer.scheduler.scheduler import Scheduler, StepOutput

#: Tokens that are emitted in one go, in about 2 ms.
_PORTION = 256
_ALL_EMITTED = object()
#: Seconds between two checks of the records, while there are requests.
_CHECK_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class Engine:
    """A scheduler, the workers that it plans for, and the requests that they serve. All methods are
    called on one event loop.

    Attributes:
        number: which of the engines it is, from 0 on.
        metrics: its counts and times.
        scheduler, report: set once `start` has returned; `report` has the sizes of the workers.
        state: whether it serves.
        dead_reason: why it serves no more requests, or None.
    """

    scheduler: Scheduler
    report: WorkerReport

    def __init__(
        self,
        number: int,
        config: Config,
        executor: Executor,
        on_death: Callable[[str], None],
        renew: Callable[[], Executor] | None = None,
    ):
        """Makes an engine; nothing runs before `start`.

        Args:
            number: which of the engines it is.
            config: the whole configuration.
            executor: runs its workers.
            on_death: called with the reason when it serves no more requests, because its workers
                died or hung. Its requests have been ended then.
            renew: makes an executor of the same kind, for a restart; without it there is none.
        """
        self.number = number
        self.metrics = EngineMetrics()
        self._prompt_outputs = PromptOutputs()
        self.state = EngineState.STARTING
        self.dead_reason: str | None = None
        self._config = config
        self._executor = executor
        self._on_death = on_death
        self._renew = renew
        self._restarts = RestartPolicy(config.parallel.restart_workers if renew else 0)
        self._name = f"engine {number}: " if config.parallel.data_parallel_size > 1 else ""
        self._pipeline_depth = 2 if config.scheduler.plan_ahead else 1
        self._sequences: dict[Request, OutputSequence] = {}
        self._planning_is_due = False
        self._emission: Iterator[None] = iter(())
        # whether all tokens that the scheduler took were emitted or are about to be
        self._text_is_whole = True
        self._recovery: asyncio.Future[None] | None = None
        self._next_check: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()

    # ---------------------------------------------------------------- life

    async def start(self, on_progress: ProgressCallback) -> None:
        """Starts the workers, and makes the scheduler with the limits that they report.

        Raises:
            ConfigError: the configuration does not go with the model or the machine.
            EngineDeadError: a worker failed to start.
        """
        began = time.monotonic()
        try:
            self.report = report = await self._executor.start(
                self._step, self._handle_loss, on_progress
            )
        except EngineDeadError as error:
            raise EngineDeadError(f"{self._name}{error}") from error
        self._start_s = time.monotonic() - began
        self.scheduler = Scheduler(self._limits(report))

    def _limits(self, report: WorkerReport) -> SchedulerLimits:
        limits = self._config.scheduler
        return SchedulerLimits(
            groups=report.groups,
            num_blocks=report.num_blocks,
            block_size=report.block_size,
            max_num_seqs=limits.max_num_seqs,
            token_budget=limits.max_num_batched_tokens,
            prefill_cap=self._config.max_prefill_tokens_beside_decode,
            prefix_caching=self._config.cache.enable_prefix_caching,
            by_priority=limits.policy == "priority",
        )

    def begin_service(self) -> None:
        """Makes the engine serve, once all engines have started. From now on its workers may be
        started anew."""
        self.state = EngineState.SERVING
        self.metrics.is_serving = True
        self._restarts.begin_service()

    @property
    def is_idle(self) -> bool:
        """Whether every request has ended and all of its text is emitted."""
        return not self._sequences

    async def wait_idle(self) -> None:
        """Returns when no request is left."""
        if self._sequences:
            self._idle.clear()
            await self._idle.wait()

    def end_all(self, reason: str) -> None:
        """Ends all requests with an error, and takes no further step."""
        self.state = EngineState.DEAD
        self.metrics.is_serving = False
        if self.dead_reason is None:
            self.dead_reason = reason
        for sequence in list(self._sequences.values()):
            sequence.output.fail(EngineDeadError(self.dead_reason))
        self._sequences.clear()
        self.metrics.end_all("error")
        self._idle.set()

    async def shutdown(self) -> None:
        """Ends the workers, and waits until they are gone. Safe to call twice."""
        if self._next_check is not None:
            self._next_check.cancel()
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)
        await self._executor.shutdown()

    # ---------------------------------------------------------------- requests

    def add(self, output: RequestOutput, arrived: float) -> None:
        """Queues the sequences of a request that was submitted at `arrived` (of
        `time.perf_counter`)."""
        for sequence in output.sequences:
            self._sequences[sequence.request] = sequence
            sequence.times = self.metrics.begin(
                sequence.request, arrived, counts_prompt=sequence.index == 0
            )
            self.scheduler.add(sequence.request)
        if self._next_check is None:
            self._check_later()
        self._plan_soon()

    def abort(self, output: RequestOutput, reason: str = "abort") -> None:
        """Ends the sequences of a request. Their blocks are free for the next plan."""
        for sequence in output.sequences:
            self.scheduler.finish(sequence.request, reason)
            # also where the scheduler had finished it: its text may have failed after that
            self._forget(sequence.request, reason)
        self._plan_soon()

    def _fail(self, output: RequestOutput, error: Exception) -> None:
        """Ends one request with an error; the others go on."""
        self.abort(output, "error")
        output.fail(error)

    def _forget(self, request: Request, outcome: str) -> None:
        self._sequences.pop(request, None)
        self.metrics.end(request, outcome)
        if not self._sequences:
            self._idle.set()

    # ---------------------------------------------------------------- lost workers

    def _handle_loss(self, error: Exception) -> None:
        """Restarts the workers, or gives up: one of them died or hung, or the step loop failed and
        does not know any more what they hold."""
        reason = f"{self._name}{error}"
        if self.state is EngineState.SERVING and self._restarts.max_restarts:
            self.state = EngineState.RESTARTING
            self.metrics.is_serving = False
            _log.warning("%s; the workers are started anew", reason)
            self._requeue_all(reason)
            self._recovery = asyncio.ensure_future(self._restart(reason))
        elif self.state is EngineState.RESTARTING and not self._text_is_whole:
            self._requeue_all(reason)  # the last tokens of the lost workers could not be emitted
        elif self.state in (EngineState.STARTING, EngineState.SERVING):
            self._give_up(reason)
            self._recovery = asyncio.ensure_future(self._executor.shutdown())

    def _give_up(self, reason: str) -> None:
        self.end_all(reason)
        if hasattr(self, "scheduler"):  # it counts for nothing while other engines go on
            self.scheduler.restart(self.scheduler.limits, ())
        self._on_death(reason)

    def _requeue_all(self, reason: str) -> None:
        """Puts the requests that ran back into the queue, and ends those that cannot be resumed:

        - text of the output may be missing, since the step loop failed between taking a step's
          tokens and emitting them;
        - the request ran each time when workers were lost, `MAX_INTERRUPTIONS` times: it may be
          what ends them, and would do it again.
        """
        ended: list[OutputSequence] = []
        waiting: list[Request] = []
        for request, sequence in self._sequences.items():
            if request.slot >= 0:
                request.num_interruptions += 1
                self.metrics.interrupted += 1
            has_begun = request.status is Status.FINISHED or request.num_output > 0
            if request.num_interruptions >= MAX_INTERRUPTIONS or (
                has_begun and not self._text_is_whole
            ):
                ended.append(sequence)
            if request.status is not Status.FINISHED:  # else only its text is still to come
                waiting.append(request)
        self.scheduler.restart(self.scheduler.limits, waiting)
        self._prompt_outputs.clear()
        self.metrics.steps.forget_posted()
        self._text_is_whole = True
        cause = reason.partition("\n")[0]  # without a traceback
        for sequence in ended:
            message = f"the request ran when workers were lost, and cannot be resumed: {cause}"
            self._fail(sequence.output, GenerationError(message))

    async def _restart(self, reason: str) -> None:
        """Ends what is left of the workers and starts new ones, until they serve or there were too
        many attempts."""
        while (delay_s := self._restarts.next_delay_s()) is not None:
            try:
                async with asyncio.timeout(MAX_END_S):
                    await self._executor.shutdown()
                await asyncio.sleep(delay_s)
                self._executor = self._renewed()
                self.metrics.restarts += 1
                async with asyncio.timeout(max(MAX_START_S, SLOWEST_START * self._start_s)):
                    report = await self._executor.start(self._step, self._handle_loss, _no_progress)
                self._resume(report)
                return
            except Exception as error:  # whatever it is, the next attempt may do better
                reason = f"{self._name}{str(error) or repr(error)}"
                _log.warning("%s; the workers could not be started anew", reason)
        self._give_up(f"{reason} (after {self._restarts.max_restarts} restarts)")
        await self._executor.shutdown()

    def _renewed(self) -> Executor:
        if self._renew is None:
            raise EngineDeadError("this kind of executor cannot be started anew")
        return self._renew()

    def _resume(self, report: WorkerReport) -> None:
        """Goes on with new workers.

        Raises `EngineDeadError` if requests that were admitted are too long for them.
        """
        if report.max_model_len < self.report.max_model_len:
            raise EngineDeadError(
                f"the new workers can hold only {report.max_model_len} tokens of a request, "
                f"{self.report.max_model_len} are promised"
            )
        waiting = [r for r in self._sequences if r.status is not Status.FINISHED]
        self.scheduler.restart(self._limits(report), waiting)
        _log.warning("%sthe workers serve again; %d requests go on", self._name, len(waiting))
        self.begin_service()
        self._plan_and_post()

    # ---------------------------------------------------------------- checks

    def _check_later(self) -> None:
        self._next_check = asyncio.get_running_loop().call_later(_CHECK_EVERY_S, self._check)

    def _check(self) -> None:
        """Checks the records once a minute while there are requests, and once more after the last
        has ended."""
        self._next_check = None
        if self.state is not EngineState.DEAD:
            if self._sequences:
                self._check_later()
            self.check_records()

    def check_records(self) -> None:
        """Checks that every request which was accepted is known to the scheduler, and to nobody
        else, and that the scheduler's own records agree.

        What contradicts that is a fault of this program. It is logged and counted; requests that it
        concerns end with an error, so that no client waits for ever. It takes about 0.1 us a KV
        block and 2 us a request: 5 to 10 ms with 80 000 blocks and 600 requests.
        """
        self._emit_rest()  # else requests that have ended are still open
        try:
            self.scheduler.check_integrity()
        except Exception as error:  # records that are wrong may also break the check
            self._report_violation(f"{error!r}; the requests that ran are ended")
            self._rebuild_scheduler()
        known = set(self.scheduler.requests())
        for request, sequence in list(self._sequences.items()):
            if request not in known and request in self._sequences:
                self._report_violation(f"request {request.request_id} was in no queue")
                request.status = Status.FINISHED
                self._fail(sequence.output, GenerationError("the server has lost the request"))
        for request in known - self._sequences.keys():
            self._report_violation(f"request {request.request_id} had nobody to go to")
            self.scheduler.finish(request, "abort")
        for request in self.metrics.open_requests - self._sequences.keys():
            self._report_violation(f"request {request.request_id} was counted as open")
            self.metrics.end(request, "error")

    def _report_violation(self, what: str) -> None:
        self.metrics.violations += 1
        _log.error("%sa check of the records failed: %s", self._name, what)

    def _rebuild_scheduler(self) -> None:
        """Makes the scheduler's records anew. Requests that ran end, since what is in their KV
        blocks is not certain; those that wait go on."""
        kept: list[Request] = []
        ended: list[Request] = []
        for request in self._sequences:
            waits = request.status in (Status.WAITING, Status.BLOCKED) and request.slot < 0
            (kept if waits and not request.num_pending else ended).append(request)
        self.scheduler.rebuild(kept, ended)
        for request in ended:
            if request in self._sequences:
                message = "the server's records of running requests were wrong: they were ended"
                self._fail(self._sequences[request].output, GenerationError(message))
        self._plan_soon()

    # ---------------------------------------------------------------- the step loop

    def _step(self, result: StepResult) -> None:
        """Handles the result of step N-1 while the workers execute step N.

        take    the executor has read the result from the ring; text of step N-2 that is not emitted
                yet goes out now, since `update` changes the state of its requests
        update  the scheduler appends the tokens and ends requests: blocks and slots become free
        plan    step N+1 is made of what remains and of new requests
        post    it goes to the workers before anything else is done: they never wait for text
        emit    tokens become text, and text goes to the clients, in portions between which the
                event loop does other work
        """
        if self.state is not EngineState.SERVING:
            return  # of workers that are about to be ended: the step counts as never posted
        timer = self.metrics.timer
        timer.begin()
        self._emit_rest()
        self._text_is_whole = False
        with timer.update:
            output = self.scheduler.update(result)
            if result.sections:
                self._prompt_outputs.accept(result)
        self._emission = self._emit(output, result)
        self._text_is_whole = True
        self._plan_and_post()
        self.metrics.record_step(result, output.requests, output.tokens)
        self._emit_portion()

    def _plan_and_post(self) -> None:
        """Plans steps and posts them until enough are in flight or nothing is left to compute."""
        self._planning_is_due = False
        timer = self.metrics.timer
        try:
            while (
                self.scheduler.num_in_flight < self._pipeline_depth
                and self.state is EngineState.SERVING
            ):
                with timer.plan:
                    plan = self.scheduler.schedule()
                if plan is None:
                    return
                with timer.post:
                    self._executor.post(plan)
                self.metrics.record_plan(plan, self.scheduler.running)
                scored, pooled = self.scheduler.last_scored, self.scheduler.last_pooled
                if scored or pooled:
                    self._prompt_outputs.expect(plan.step_id, scored, pooled)
        # a step that cannot be posted would leave every request waiting for ever
        except Exception as error:
            self._handle_loss(EngineDeadError(f"a step could not be planned or posted: {error!r}"))

    def _plan_soon(self) -> None:
        """Plans once the event loop has handled what is ready: requests that arrive together share
        a step."""
        if not self._planning_is_due:
            self._planning_is_due = True
            asyncio.get_running_loop().call_soon(self._plan_and_post)

    def _emit_portion(self) -> None:
        """Emits a portion of a step's tokens, and has the event loop call it again for the next."""
        if self._advance_emission():
            asyncio.get_running_loop().call_soon(self._emit_portion)

    def _emit_rest(self) -> None:
        """Emits all that is left of a step's tokens."""
        while self._advance_emission():
            pass

    def _advance_emission(self) -> bool:
        """Emits up to `_PORTION` tokens. Returns whether more are left."""
        with self.metrics.timer.emit:
            try:
                return next(self._emission, _ALL_EMITTED) is not _ALL_EMITTED
            except Exception as error:
                self._text_is_whole = False
                self._handle_loss(EngineDeadError(f"tokens could not be emitted: {error!r}"))
                return False

    def _emit(self, output: StepOutput, result: StepResult) -> Iterator[None]:
        """Appends each new token to its sequence, and ends the requests whose text ends in a stop
        string.

        Yields between two portions of the tokens, so that many streams do not keep new requests
        waiting.
        """
        stopped, num_more, several = False, 0, result.tokens.shape[1] > 1
        sequences, logprobs = self._sequences, result.logprobs
        for number, (request, token, row) in enumerate(
            zip(output.requests, output.tokens, output.rows, strict=True), 1
        ):
            sequence = sequences.get(request)
            if sequence is None:
                continue  # its request was aborted, failed, or stopped earlier in this step
            if token < 0:
                self._fail(sequence.output, GenerationError("the model's logits held NaN"))
                continue
            if several:
                num_more = _count_equal(output.requests, number)
            try:
                stop = sequence.append(
                    token,
                    None if logprobs is None else _logprob(logprobs, row, token, request.params),
                    num_more,
                )
            except Exception as error:  # one request's text must not end the others
                self._fail(
                    sequence.output,
                    GenerationError(f"the tokens could not be turned into text: {error!r}"),
                )
                continue
            if stop is not None:
                self.scheduler.finish(request, "stop", stop)
                stopped = True
            if request.finish_reason is not None and (stop is not None or not num_more):
                self._forget(request, request.finish_reason)
            if number % _PORTION == 0:
                yield
        if stopped:
            self._plan_soon()


def _no_progress(phase: str, done: int, total: int) -> None:
    """Ignores the progress."""


def _count_equal(requests: Sequence[Request], start: int) -> int:
    """Returns how many of `requests`, from `start` on, are `requests[start - 1]`."""
    end = start
    while end < len(requests) and requests[end] is requests[start - 1]:
        end += 1
    return end - start


def _logprob(
    logprobs: Logprobs, row: int, token: int, params: SamplingParams
) -> TokenLogprob | None:
    if params.logprobs is None:
        return None
    top = zip(
        logprobs.top_tokens[row, : params.logprobs].tolist(),
        logprobs.top_logprobs[row, : params.logprobs].tolist(),
        strict=True,
    )
    return TokenLogprob(token, float(logprobs.sampled[row]), list(top))
