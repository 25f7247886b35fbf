"""The engine: one replica of the model, and the step loop that keeps it busy, the heart of the
system.

Everything here runs on one event loop. A turn of the step loop begins when a result arrives:

    result of step N-1 ─► scheduler.update ─► schedule N+1 ─► post it ─► detokenize and emit N-1's tokens

While it runs, the workers execute step N, so they never wait for text. The loop neither polls nor
blocks: results wake it through the executor, and new requests through `add`. An idle engine does
nothing. `Frontend` owns the engines and gives them their requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from aioinfer.config import Config
from aioinfer.engine.metrics import EngineMetrics
from aioinfer.engine.output import Choice, Generation, TokenLogprob
from aioinfer.errors import EngineDeadError, GenerationError
from aioinfer.executor.base import Executor, ProgressCallback, WorkerReport
from aioinfer.ipc.plan import Logprobs, StepResult
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.scheduler import Scheduler, SchedulerLimits, StepOutput

#: Tokens that are emitted in one go, in about 2 ms.
_PORTION = 256


class Engine:
    """A scheduler, the workers that it plans for, and the requests that it serves. All methods are
    called on one event loop.

    Attributes:
        number: which of the engines it is, from 0 on.
        metrics: its books.
        scheduler, report: what the workers can hold; there once `start` has returned.
        dead_reason: why it serves no more requests, or None.
    """

    scheduler: Scheduler
    report: WorkerReport

    def __init__(
        self, number: int, config: Config, executor: Executor, on_death: Callable[[str], None]
    ):
        """`on_death` is called with the reason when a worker has died or hung; it is to call
        `end_all`."""
        self.number = number
        self.metrics = EngineMetrics()
        self.dead_reason: str | None = None
        self._config = config
        self._executor = executor
        self._on_death = on_death
        self._name = f"engine {number}: " if config.parallel.data_parallel_size > 1 else ""
        self._pipeline_depth = 2 if config.scheduler.plan_ahead else 1
        self._choices: dict[Request, Choice] = {}
        self._turn_is_due = False
        self._emission: Iterator[None] = iter(())
        self._emit_s = 0.0
        self._idle = asyncio.Event()

    # ---------------------------------------------------------------- life

    async def start(self, on_progress: ProgressCallback) -> None:
        """Starts the workers, and makes the scheduler for what they can hold.

        Raises:
            ConfigError: the configuration does not go with the model or the machine.
            EngineDeadError: a worker failed to start.
        """
        try:
            self.report = report = await self._executor.start(self._turn, self._die, on_progress)
        except EngineDeadError as error:
            raise EngineDeadError(f"{self._name}{error}") from error
        limits = self._config.scheduler
        self.scheduler = Scheduler(
            SchedulerLimits(
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
        """Whether every request has ended and its last text is made."""
        return not self._choices

    async def wait_idle(self) -> None:
        """Returns when no request is left."""
        if self._choices:
            self._idle.clear()
            await self._idle.wait()

    def end_all(self, reason: str) -> None:
        """Ends all requests with an error, and takes no further step."""
        if self.dead_reason is None:
            self.dead_reason = reason
        for choice in list(self._choices.values()):
            choice.generation.fail(EngineDeadError(self.dead_reason))
        self._choices.clear()
        self.metrics.end_all("error")
        self._idle.set()

    async def shutdown(self) -> None:
        """Ends the workers, and waits until they are gone. Safe to call twice."""
        await self._executor.shutdown()

    # ---------------------------------------------------------------- requests

    def add(self, generation: Generation, arrived: float) -> None:
        """Queues the requests of a generation, which was submitted at `arrived` (of
        `time.perf_counter`)."""
        for choice in generation.choices:
            self._choices[choice.request] = choice
            self.metrics.begin(choice.request, arrived, counts_prompt=choice.index == 0)
            self.scheduler.add(choice.request)
        self._kick()

    def abort(self, generation: Generation, reason: str = "abort") -> None:
        """Ends a generation's requests; their blocks are free for the plan that is drawn up
        next."""
        for choice in generation.choices:
            self.scheduler.finish(choice.request, reason)
            # what the scheduler had finished already, too: its text failed
            self._forget(choice.request, reason)
        self._kick()

    def _fail(self, generation: Generation, error: Exception) -> None:
        """Ends one generation with an error; the others go on."""
        self.abort(generation, "error")
        generation.fail(error)

    def _forget(self, request: Request, outcome: str) -> None:
        self._choices.pop(request, None)
        self.metrics.end(request, outcome)
        if not self._choices:
            self._idle.set()

    def _die(self, error: Exception) -> None:
        """Tells that nothing can go on: a worker died or hung."""
        self._on_death(f"{self._name}{error}")

    # ---------------------------------------------------------------- the step loop

    def _turn(self, result: StepResult) -> None:
        """A turn: take a result, plan and post the next step, and only then make text of the
        result's tokens.

        The time that this takes is noted with the next turn: it may go on after this one.
        """
        came = time.perf_counter()
        # those of the step before, before their requests change
        self._emit_portions(all_of_them=True)
        began, emitted_s, self._emit_s = time.perf_counter(), self._emit_s, 0.0
        output = self.scheduler.update(result)
        updated = time.perf_counter()
        self._fill_pipeline()
        self.metrics.take_tokens(output.requests, output.tokens, came)
        self.metrics.take_turn(result, updated - began, emitted_s)
        self._emission = self._emit(output, result)
        self._emit_portions()

    def _fill_pipeline(self) -> None:
        self._turn_is_due = False
        try:
            while self.scheduler.num_in_flight < self._pipeline_depth and self.dead_reason is None:
                began = time.perf_counter()
                plan = self.scheduler.schedule()
                if plan is None:
                    return
                planned = time.perf_counter()
                self._executor.post(plan)
                self.metrics.take_plan(plan, planned - began, time.perf_counter() - planned)
                if plan.admissions:
                    self.metrics.take_admissions(
                        self.scheduler.running, plan.admissions.records["slot"].tolist(), planned
                    )
        # a step that cannot be posted would leave every request waiting for ever
        except Exception as error:
            self._die(EngineDeadError(f"a step could not be planned or posted: {error!r}"))

    def _kick(self) -> None:
        """Fills the pipeline once the event loop has handled what is ready: requests that arrive
        together share a step."""
        if not self._turn_is_due:
            self._turn_is_due = True
            asyncio.get_running_loop().call_soon(self._fill_pipeline)

    def _emit_portions(self, *, all_of_them: bool = False) -> None:
        """Emits a portion of a step's tokens, and the next one when the event loop has looked at
        what else is there."""
        began = time.perf_counter()
        try:
            for _ in self._emission:
                if not all_of_them:
                    asyncio.get_running_loop().call_soon(self._emit_portions)
                    break
        except Exception as error:
            self._die(EngineDeadError(f"tokens could not be handed on: {error!r}"))
        self._emit_s += time.perf_counter() - began

    def _emit(self, output: StepOutput, result: StepResult) -> Iterator[None]:
        """Hands each new token to its completion, and ends the requests whose text ran into a stop
        string.

        Yields between two portions of the tokens, so that many streams do not keep new requests
        waiting.
        """
        stopped = False
        choices, logprobs = self._choices, result.logprobs
        for number, (request, token, row) in enumerate(
            zip(output.requests, output.tokens, output.rows, strict=True), 1
        ):
            choice = choices.get(request)
            if choice is None:
                continue  # aborted, or its generation failed, earlier in this round
            if token < 0:
                self._fail(choice.generation, GenerationError("the model's logits held NaN"))
                continue
            try:
                stop = choice.take(
                    token,
                    None if logprobs is None else _logprob(logprobs, row, token, request.params),
                )
            except Exception as error:  # one request's text must not end the others
                self._fail(
                    choice.generation,
                    GenerationError(f"the tokens could not be turned into text: {error!r}"),
                )
                continue
            if stop is not None:
                self.scheduler.finish(request, "stop", stop)
                stopped = True
            if request.finish_reason is not None:
                self._forget(request, request.finish_reason)
            if number % _PORTION == 0:
                yield
        if stopped:
            self._kick()


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
