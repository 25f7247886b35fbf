"""The engine: one replica of the model, and the step loop that keeps it busy.

Everything here runs on one event loop. The step loop is `Engine._step`, which runs when a result
arrives:

    take step N-1's result ─► update the scheduler ─► plan step N+1 ─► post it ─► emit N-1's text

Meanwhile the workers execute step N, so they never wait for text. The loop neither polls nor
blocks: results wake it through the executor, and new requests through `add`. An idle engine does
nothing. `Frontend` owns the engines and routes requests to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from aioinfer.config import Config
from aioinfer.engine.metrics import EngineMetrics
from aioinfer.engine.output import OutputSequence, RequestOutput, TokenLogprob
from aioinfer.errors import EngineDeadError, GenerationError
from aioinfer.executor.base import Executor, ProgressCallback, WorkerReport
from aioinfer.ipc.plan import Logprobs, StepResult
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.scheduler import Scheduler, StepOutput

#: Tokens that are emitted in one go, in about 2 ms.
_PORTION = 256
_ALL_EMITTED = object()


class Engine:
    """A scheduler, the workers that it plans for, and the requests that they serve. All methods are
    called on one event loop.

    Attributes:
        number: which of the engines it is, from 0 on.
        metrics: its counts and times.
        scheduler, report: set once `start` has returned; `report` has the sizes of the workers.
        dead_reason: why it serves no more requests, or None.
    """

    scheduler: Scheduler
    report: WorkerReport

    def __init__(
        self, number: int, config: Config, executor: Executor, on_death: Callable[[str], None]
    ):
        """`on_death` is called with the reason when a worker has died or hung. It must call
        `end_all`."""
        self.number = number
        self.metrics = EngineMetrics()
        self.dead_reason: str | None = None
        self._config = config
        self._executor = executor
        self._on_death = on_death
        self._name = f"engine {number}: " if config.parallel.data_parallel_size > 1 else ""
        self._pipeline_depth = 2 if config.scheduler.plan_ahead else 1
        self._sequences: dict[Request, OutputSequence] = {}
        self._planning_is_due = False
        self._emission: Iterator[None] = iter(())
        self._idle = asyncio.Event()

    # ---------------------------------------------------------------- life

    async def start(self, on_progress: ProgressCallback) -> None:
        """Starts the workers, and makes the scheduler with the limits that they report.

        Raises:
            ConfigError: the configuration does not go with the model or the machine.
            EngineDeadError: a worker failed to start.
        """
        try:
            self.report = report = await self._executor.start(self._step, self._die, on_progress)
        except EngineDeadError as error:
            raise EngineDeadError(f"{self._name}{error}") from error
        limits = self._config.scheduler
        self.scheduler = Scheduler(
            SchedulerLimits(
                groups=report.groups,
                num_blocks=report.num_blocks,
                block_size=report.block_size,
                max_num_seqs=limits.max_num_seqs,
                token_budget=limits.max_num_batched_tokens,
                prefill_cap=self._config.max_prefill_tokens_beside_decode,
                prefix_caching=self._config.cache.enable_prefix_caching,
                by_priority=limits.policy == "priority",
            )
        )

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
        if self.dead_reason is None:
            self.dead_reason = reason
        for sequence in list(self._sequences.values()):
            sequence.output.fail(EngineDeadError(self.dead_reason))
        self._sequences.clear()
        self.metrics.end_all("error")
        self._idle.set()

    async def shutdown(self) -> None:
        """Ends the workers, and waits until they are gone. Safe to call twice."""
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

    def _die(self, error: Exception) -> None:
        """Reports that this engine cannot go on: a worker died or hung."""
        self._on_death(f"{self._name}{error}")

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
        timer = self.metrics.timer
        timer.begin()
        self._emit_rest()
        with timer.update:
            output = self.scheduler.update(result)
        self._plan_and_post()
        self.metrics.record_step(result, output.requests, output.tokens)
        self._emission = self._emit(output, result)
        self._emit_portion()

    def _plan_and_post(self) -> None:
        """Plans steps and posts them until enough are in flight or nothing is left to compute."""
        self._planning_is_due = False
        timer = self.metrics.timer
        try:
            while self.scheduler.num_in_flight < self._pipeline_depth and self.dead_reason is None:
                with timer.plan:
                    plan = self.scheduler.schedule()
                if plan is None:
                    return
                with timer.post:
                    self._executor.post(plan)
                self.metrics.record_plan(plan, self.scheduler.running)
        # a step that cannot be posted would leave every request waiting for ever
        except Exception as error:
            self._die(EngineDeadError(f"a step could not be planned or posted: {error!r}"))

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
                self._die(EngineDeadError(f"tokens could not be emitted: {error!r}"))
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
