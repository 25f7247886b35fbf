"""The engine: one replica of the model, and the step loop that keeps it busy.

Everything here runs on one event loop. The step loop is `Engine._step`, which runs when a result
arrives:

    take step N-1's result ─► update the scheduler ─► plan step N+1 ─► post it ─► emit N-1's text

Meanwhile the workers execute step N, so they never wait for text. The loop neither polls nor
blocks: results wake it through the executor, and new requests through `add`. An idle engine does
nothing. `Frontend` owns the engines and routes requests to them.

The other tasks of an engine have modules of their own: `emission` turns a step's tokens into text,
`beam_searches` decides how beams go on, `recovery` restarts workers that were lost, `record_check`
compares the records.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from aioinfer.config import Config
from aioinfer.engine.beam_searches import BeamSearches
from aioinfer.engine.emission import Emission
from aioinfer.engine.lockstep import Lockstep
from aioinfer.engine.masking import Masking
from aioinfer.engine.metrics import EngineMetrics
from aioinfer.engine.output import Delta, OutputSequence, RequestOutput
from aioinfer.engine.prompt_outputs import PromptOutputs
from aioinfer.engine.record_check import RecordCheck
from aioinfer.engine.recovery import EngineState, Recovery
from aioinfer.errors import EngineDeadError
from aioinfer.executor.base import Executor, ProgressCallback, StageTime, WorkerReport
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.request import Request, Status
from aioinfer.scheduler.scheduler import Scheduler


class Engine:
    """A scheduler, the workers that it plans for, and the requests that they serve. All methods are
    called on one event loop.

    Attributes:
        number: which of the engines it is.
        name: the start of messages about it; empty if there is one engine only.
        metrics: its counts and times.
        masking: the constraints of its requests.
        scheduler, report: set once `start` has returned; `report` has the sizes of the workers.
        start_s: seconds that the first start of the workers took.
        state: whether it serves.
        dead_reason: why it serves no more requests, or None.
        is_paused: whether no further step is planned until `resume`.
        lockstep: of the engines that share experts; None for others.
        emission, beam_searches, recovery: see there.
    """

    scheduler: Scheduler
    report: WorkerReport
    start_s: float

    def __init__(
        self,
        number: int,
        config: Config,
        executor: Executor,
        on_death: Callable[[Engine, str], None],
        new_executor: Callable[[], Executor] | None = None,
    ):
        """Makes an engine; nothing runs before `start`.

        Args:
            number: which of the engines it is, from 0 on.
            config: the whole configuration.
            executor: runs its workers.
            on_death: called with the engine and the reason when it serves no more requests, because
                its workers died or hung. Requests that it does not take over, by `export_requests`
                and `release`, are ended then.
            new_executor: makes an executor of the same kind, for a restart; without it there is no
                restart.
        """
        self.number = number
        self.name = f"engine {number}: " if config.parallel.data_parallel_size > 1 else ""
        self.metrics = EngineMetrics()
        self.prompt_outputs = PromptOutputs()
        self.masking = Masking(
            self.metrics,
            lambda request: self.scheduler.finish(request, "stop"),
            lambda request, tokens: self.scheduler.force(request, tokens),
            self._fail_request,
            self._plan_and_post,
        )
        self.state = EngineState.STARTING
        self.dead_reason: str | None = None
        self.is_paused = False
        self.lockstep: Lockstep | None = None
        self._config = config
        self._executor = executor
        # a step for each stage, and one ahead
        self._pipeline_depth = config.parallel.pipeline_parallel_size + config.scheduler.plan_ahead
        self._sequences: dict[Request, OutputSequence] = {}
        self._planning_is_due = False
        self._idle = asyncio.Event()
        self.emission = Emission(self, self._sequences)
        self.beam_searches = BeamSearches(self, self._sequences)
        self.recovery = Recovery(
            self,
            self._sequences,
            config.parallel.restart_workers,
            new_executor,
            lambda reason: on_death(self, reason),
        )
        self._record_check = RecordCheck(self, self._sequences)

    # ---------------------------------------------------------------- life

    async def start(self, on_progress: ProgressCallback) -> None:
        """Starts the workers, and makes the scheduler with the limits that they report.

        Raises:
            ConfigError: the configuration does not go with the model or the machine.
            EngineDeadError: a worker failed to start.
        """
        began = time.monotonic()
        try:
            self.report = await self.start_workers(on_progress)
        except EngineDeadError as error:
            raise EngineDeadError(f"{self.name}{error}") from error
        self.start_s = time.monotonic() - began
        self.scheduler = Scheduler(self.limits(self.report))

    def limits(self, report: WorkerReport) -> SchedulerLimits:
        """Returns the scheduler's limits for workers of these sizes."""
        limits = self._config.scheduler
        return SchedulerLimits(
            groups=report.groups,
            num_blocks=report.num_blocks,
            block_size=report.block_size,
            max_num_seqs=limits.max_num_seqs,
            token_budget=limits.max_num_batched_tokens,
            prefill_cap=self._config.max_prefill_tokens_beside_decode,
            paces_prefill=self._config.paces_prefill,
            target_itl_s=None if limits.target_itl_ms is None else limits.target_itl_ms / 1000,
            prefix_caching=self._config.cache.enable_prefix_caching,
            by_priority=limits.policy == "priority",
            num_stages=self._config.parallel.pipeline_parallel_size,
            plan_ahead=limits.plan_ahead,
        )

    async def start_workers(self, on_progress: ProgressCallback) -> WorkerReport:
        """Starts the workers; see `Executor.start`."""
        return await self._executor.start(self._step, self.handle_loss, on_progress)

    async def end_workers(self) -> None:
        """Ends the workers, and waits until they are gone. Safe to call twice."""
        await self._executor.shutdown()

    def stage_times(self) -> Sequence[StageTime]:
        """Returns the busy and idle time of each pipeline stage since its workers started; empty if
        there is one stage."""
        if self._config.parallel.pipeline_parallel_size == 1:
            return ()
        return self._executor.stage_times()

    def replace_workers(self, executor: Executor) -> None:
        """Replaces workers that have ended by workers that have not been started."""
        self._executor = executor

    def begin_service(self) -> None:
        """Makes the engine serve, once all engines have started. From now on its workers may be
        restarted."""
        self.state = EngineState.SERVING
        self.metrics.is_serving = True
        self.recovery.policy.begin_service()

    @property
    def is_idle(self) -> bool:
        """Whether every request has ended and all of its text is emitted."""
        return not self._sequences

    @property
    def num_requests(self) -> int:
        """Requests that have not ended, however many sequences they have."""
        return len({sequence.output for sequence in self._sequences.values()})

    async def wait_idle(self) -> None:
        """Returns when no request is left."""
        if self._sequences:
            self._idle.clear()
            await self._idle.wait()

    def set_dead(self, reason: str) -> None:
        """Makes the engine take no further step. Its requests are left as they are."""
        self.state = EngineState.DEAD
        self.metrics.is_serving = False
        if self.dead_reason is None:
            self.dead_reason = reason

    def end_all(self, reason: str) -> None:
        """Ends all requests with an error, and takes no further step."""
        self.set_dead(reason)
        for sequence in list(self._sequences.values()):
            sequence.output.fail(EngineDeadError(self.dead_reason))
        self._sequences.clear()
        self.metrics.end_all("error")
        self._idle.set()

    async def shutdown(self) -> None:
        """Ends the workers, and waits until they are gone. Safe to call twice."""
        self._record_check.end()
        await self.recovery.end()
        self.masking.shutdown()
        await self.end_workers()

    def handle_loss(self, error: Exception) -> None:
        """Restarts the workers, or gives up; see `Recovery.handle_loss`."""
        was_serving = self.state is EngineState.SERVING
        self.recovery.handle_loss(error)
        if self.lockstep is not None and was_serving:
            self.lockstep.lose(self, error)

    def check_records(self) -> None:
        """Checks that the scheduler knows every accepted request and no other, and that its own
        records agree.

        A contradiction is a fault of this program. It is logged and counted; requests that it
        concerns end with an error, so that no client waits without end. It takes about 0.1 us a KV
        block and 2 us a request: 5 to 10 ms with 80 000 blocks and 600 requests.
        """
        self._record_check.check()

    def pause(self) -> None:
        """Plans no further step until `resume`. Steps that were posted end, requests wait."""
        self.is_paused = True

    def resume(self) -> None:
        """Goes on with all requests, after `pause`."""
        self.is_paused = False
        self.plan_soon()

    # ---------------------------------------------------------------- requests

    def add(self, output: RequestOutput, arrived: float) -> None:
        """Queues the sequences of a request that was submitted at `arrived` (of
        `time.perf_counter`)."""
        for sequence in output.sequences:
            if sequence.request.status is Status.FINISHED:
                continue  # its client has all of it
            self._sequences[sequence.request] = sequence
            sequence.times = self.metrics.begin(
                sequence.request, arrived, counts_prompt=sequence.index == 0
            )
            if sequence.constraint is not None:
                self.masking.add(sequence.request, sequence.constraint)
            self.scheduler.add(sequence.request)
        self._record_check.begin()
        self.plan_soon()

    def abort(self, output: RequestOutput, reason: str = "abort") -> None:
        """Ends the sequences of a request. Their blocks are free for the next plan."""
        for sequence in output.sequences:
            self.scheduler.finish(sequence.request, reason)
            # also where the scheduler had finished it: its text may have failed after that
            self.forget(sequence.request, reason)
        self.plan_soon()

    def open_outputs(self) -> list[RequestOutput]:
        """Returns the outputs of all requests that have not ended."""
        return list(dict.fromkeys(sequence.output for sequence in self._sequences.values()))

    def cut_short(self, output: RequestOutput) -> None:
        """Ends a request on behalf of another caller than its reader; the reader gets the tokens
        generated so far, with "abort" as the finish reason."""
        self.emission.emit_rest()  # else sequences that have ended are still open
        if output.params.beam_search is not None:
            self.beam_searches.cut_short(output.sequences[0])
            self.plan_soon()
            return
        unfinished = [s.index for s in output.sequences if s.request in self._sequences]
        self.abort(output)
        for index in unfinished:
            output.put(Delta(index, finish_reason="abort"))

    def fail(self, output: RequestOutput, error: Exception) -> None:
        """Ends one request with an error; the others go on."""
        self.abort(output, "error")
        output.fail(error)

    def _fail_request(self, request: Request, error: Exception) -> None:
        """Ends the request that a sequence belongs to with an error."""
        if request in self._sequences:
            self.fail(self._sequences[request].output, error)

    def forget(self, request: Request, outcome: str) -> None:
        """Records that a request has ended and that its text is emitted."""
        sequence = self._sequences.pop(request, None)
        if sequence is not None:
            sequence.finish_reason = outcome
        self.masking.forget(request)
        self.metrics.end(request, outcome, 0 if sequence is None else sequence.num_output)
        if not self._sequences:
            self._idle.set()

    def export_requests(self) -> list[OutputSequence]:
        """Ends the requests that cannot go on with another engine, once this one is dead. Returns
        the sequences of the other requests, in the order in which they would have been served."""
        self.recovery.prepare_move(self.dead_reason or "")
        return sorted(self._sequences.values(), key=lambda sequence: sequence.request.key)

    def release(self, sequences: Iterable[OutputSequence]) -> None:
        """Hands sequences over to another engine: they no longer belong to this one. Its scheduler,
        which still has them, is cleared once `on_death` returns."""
        for sequence in sequences:
            del self._sequences[sequence.request]
            self.masking.forget(sequence.request)
            self.metrics.release(sequence.request)
        if not self._sequences:
            self._idle.set()

    def import_requests(self, sequences: Iterable[OutputSequence]) -> None:
        """Queues sequences that another engine has released: their known tokens are recomputed, as
        after a preemption."""
        for sequence in sequences:
            request = sequence.request
            request.detach()
            self._sequences[request] = sequence
            if sequence.times is not None:
                self.metrics.import_request(request, sequence.times)
            if sequence.constraint is not None:
                self.masking.add(request, sequence.constraint)
            self.scheduler.add(request)
            sequence.output.on_abort = self.abort
        self._record_check.begin()
        self.plan_soon()

    # ---------------------------------------------------------------- the step loop

    def _step(self, result: StepResult) -> None:
        """Handles the result of step N-1 while the workers execute step N.

        take    the executor has read the result from the ring
        update  the scheduler appends the tokens and ends requests: blocks and slots become free;
                constraints take in their tokens, and the masks of step N are filled, if it has any
        plan    step N+1 is made of the remaining requests and of new ones
        post    it goes to the workers before anything else is done: they never wait for text
        emit    tokens become text, and text goes to the clients, in portions between which the
                event loop does other work; the rest of step N-2 goes first
        """
        timer, emission = self.metrics.timer, self.emission
        timer.begin()
        if self.state is not EngineState.SERVING:
            return  # of workers that are about to be ended: the step counts as never posted
        emission.is_whole = False
        with timer.update:
            output = self.scheduler.update(result, timer.began)
            self.prompt_outputs.accept(result)
            if result.sections:
                self.metrics.expert_load.accept(result)
            output = self.masking.accept(output)
            searched = self.beam_searches.accept(output, result) if output.beam_rows else []
        self.masking.fill()
        emission.add(output, result)
        emission.is_whole = True
        self._plan_and_post()
        requests, tokens = output.requests, output.tokens
        if searched:  # a search counts as one token a round
            requests, tokens = [*requests, *searched], [*tokens, *[0] * len(searched)]
        self.metrics.record_step(result, requests, tokens)
        emission.emit_portion()

    def _plan_and_post(self) -> None:
        """Plans steps and posts them until enough are in flight or nothing is left to compute."""
        self._planning_is_due = False
        timer = self.metrics.timer
        try:
            while (
                self.scheduler.num_in_flight < self._pipeline_depth
                and self.state is EngineState.SERVING
                and not self.masking.is_due
            ):
                with timer.plan:
                    plan = self._next_plan()
                if plan is None:
                    return
                with timer.post:
                    self._executor.post(plan)
                if self.lockstep is not None:
                    self.lockstep.record_post(self)
                self.metrics.record_plan(plan, self.scheduler.running)
                self.prompt_outputs.expect(
                    plan.step_id, self.scheduler.last_scored, self.scheduler.last_pooled,
                    self.scheduler.last_stated, self.scheduler.last_advanced,
                )  # fmt: skip
                self.masking.plan(plan, self.scheduler.last_sampled, self._executor)
        # a step that cannot be posted would leave every request waiting without end
        except Exception as error:
            self.handle_loss(EngineDeadError(f"a step could not be planned or posted: {error!r}"))

    def _next_plan(self) -> StepPlan | None:
        """Returns the next step; None if there is nothing to compute, or the engine is paused, and
        no other engine waits for it."""
        plan = None if self.is_paused else self.scheduler.schedule()
        if plan is None and self.lockstep is not None and self.lockstep.is_behind(self):
            plan = self.scheduler.schedule_nothing()
        return plan

    def plan_soon(self) -> None:
        """Plans once the event loop has handled all ready events: requests that arrive together
        share a step."""
        if not self._planning_is_due:
            self._planning_is_due = True
            asyncio.get_running_loop().call_soon(self._plan_and_post)
