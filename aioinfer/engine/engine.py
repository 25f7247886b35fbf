"""The engine: one replica of the model, and the step loop that keeps it busy.

Everything here runs on one event loop. The step loop is `Engine._step`, which runs when a result
arrives:

    take step N-1's result ─► update the scheduler ─► plan step N+1 ─► post it ─► emit N-1's text

Meanwhile the workers execute step N, so they never wait for text. The loop neither polls nor
blocks: results wake it through the executor, and new requests through `add`. An idle engine does
nothing. `Frontend` owns the engines and routes requests to them.

An engine is made of the scheduler, its features (`aioinfer.features`), and parts with modules of
their own: `open_requests` has the requests, `emission` turns a step's tokens into text, `recovery`
restarts workers that were lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from aioinfer.config import Config
from aioinfer.engine.beam_search import BeamSearches
from aioinfer.engine.emission import Emission
from aioinfer.engine.metrics import EngineMetrics
from aioinfer.engine.open_requests import OpenRequests
from aioinfer.engine.output import FIRST_VERSION, Delta, OutputSequence, RequestOutput
from aioinfer.engine.recovery import EngineState, Lockstep, RecordCheck, Recovery, Workers
from aioinfer.errors import ConfigError, EngineDeadError
from aioinfer.executor.base import Executor, ProgressCallback, StageTime, WorkerReport
from aioinfer.features import load_halves
from aioinfer.features.host import Host
from aioinfer.ipc.kv_files import KVFiles, list_common
from aioinfer.ipc.kv_spec import blocks_in
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.ipc.sections import Section
from aioinfer.scheduler.features import StepFeatures
from aioinfer.scheduler.kv_connector import DiskLimits
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.peer_connector import PeerLimits
from aioinfer.scheduler.scheduler import Scheduler


class Engine:
    """A scheduler, the workers that it plans for, and the requests that they serve. All methods are
    called on one event loop.

    Attributes:
        number: which of the engines it is.
        metrics: its counts and times.
        requests: its open requests.
        features: what requests may ask of a step beside tokens.
        scheduler: set once `start` has returned.
        is_paused: whether no further step is planned until `resume`, but to save KV blocks.
        weight_version: of the weights that its workers have.
        turn: set by each turn of the step loop, and when workers are lost.
        lockstep: of the engines that share experts; None for others.
        emission, recovery: see there.
    """

    scheduler: Scheduler

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
                its workers died or hung. Requests that it does not take over (see
                `router.relocate`) are ended then.
            new_executor: makes an executor of the same kind, for a restart; without it there is no
                restart.
        """
        self.number = number
        self._name = f"engine {number}: " if config.parallel.data_parallel_size > 1 else ""
        self._config = config
        self.metrics = EngineMetrics()
        self.is_paused = False
        self.weight_version = FIRST_VERSION
        self.lockstep: Lockstep | None = None
        # a step for each stage, and one ahead
        self._pipeline_depth = config.parallel.pipeline_parallel_size + config.scheduler.plan_ahead
        self._planning_is_due = False
        self.turn = asyncio.Event()
        list_files = self._list_kv_files if config.cache.disk_path else None
        self._workers = Workers(executor, self._step, self.handle_loss, list_files)
        self.requests = OpenRequests(self.metrics, self.plan_soon)
        self.emission = Emission(self.requests, self.handle_loss)
        self.features = self._make_features()
        self.recovery = Recovery(
            self._name,
            self.requests,
            self._workers,
            self.emission,
            self.features,
            self._limits,
            config.parallel.restart_workers,
            new_executor,
            lambda reason: on_death(self, reason),
        )
        self._record_check = RecordCheck(self._name, self.requests, self.emission)

    def _make_features(self) -> StepFeatures:
        host = Host(
            lambda: self.scheduler,
            lambda: self._workers.executor,
            self.requests.fail_request,
            self._tell,
            self._plan_and_post,
            self.metrics,
            self._config,
        )
        halves = load_halves("planning", tuple(self._config.model.features))
        searches = BeamSearches(host, self.requests, self.emission)
        return StepFeatures([*(half.Planning(host) for half in halves), searches])

    # ---------------------------------------------------------------- life

    @property
    def state(self) -> EngineState:
        """Whether the engine serves."""
        return self.recovery.state

    @property
    def dead_reason(self) -> str | None:
        """Why it serves no more requests, or None."""
        return self.recovery.dead_reason

    @property
    def report(self) -> WorkerReport:
        """The sizes of its workers, once they have started."""
        return self._workers.report

    async def start(self, on_progress: ProgressCallback) -> None:
        """Starts the workers, and makes the scheduler with the limits that they report.

        Raises:
            ConfigError: the configuration does not go with the model or the machine.
            EngineDeadError: a worker failed to start.
        """
        cache = self._config.cache
        if cache.peer_key_file and not cache.host_bytes:  # not of a gateway, which has no engine
            raise ConfigError("cache.peer_key_file needs cache.host_bytes: blocks cross the host")
        began = time.monotonic()
        try:
            report = await self._workers.start(on_progress)
        except EngineDeadError as error:
            raise EngineDeadError(f"{self._name}{error}") from error
        self._workers.report = report
        self._workers.start_s = time.monotonic() - began
        self.scheduler = Scheduler(self._limits(report), features=self.features)
        self.requests.scheduler = self.scheduler

    def _limits(self, report: WorkerReport) -> SchedulerLimits:
        """Returns the scheduler's limits for workers of these sizes."""
        limits = self._config.scheduler
        return SchedulerLimits(
            groups=report.groups,
            num_blocks=report.num_blocks,
            block_size=report.block_size,
            max_num_seqs=limits.max_num_seqs,
            token_budget=limits.max_num_batched_tokens,
            prefill_cap=self._config.prefill_cap,
            paces_prefill=self._config.paces_prefill,
            target_itl_s=limits.target_itl_ms / 1000 if limits.target_itl_ms else None,
            prefix_caching=self._config.cache.enable_prefix_caching,
            num_stages=self._config.parallel.pipeline_parallel_size,
            max_lookahead=report.max_lookahead,
            step_times=report.step_times,
            num_stored=blocks_in(
                self._config.cache.host_bytes, report.num_blocks, report.kv_cache_bytes
            ),
            disk=self._disk_limits(report),
            peers=self._peer_limits(),
            plan_ahead=limits.plan_ahead,
        )

    def _disk_limits(self, report: WorkerReport) -> DiskLimits | None:
        """Returns what files hold of the KV store, if it has a disk."""
        cache = self._config.cache
        if not cache.disk_path:
            return None
        memory = cache.disk_bytes // self._config.parallel.world_size
        num_files = blocks_in(memory, report.num_blocks, report.kv_cache_bytes)
        return DiskLimits(num_files, report.kv_files)

    def _peer_limits(self) -> PeerLimits | None:
        """Returns how prompts are handed over between servers, if they are."""
        cache, ranks = self._config.cache, self._config.parallel.world_size
        if not cache.peer_key_file:
            return None
        return PeerLimits(cache.peer_address, self.number * ranks, ranks)

    def _list_kv_files(self, report: WorkerReport) -> list[list[bytes]]:
        """Returns `WorkerReport.kv_files`."""
        path, ranks = self._config.cache.disk_path or "", self._config.parallel.world_size
        files = [KVFiles.of(path, self.number, rank) for rank in range(ranks)]
        return list_common(files, len(report.groups))

    @property
    def executor(self) -> Executor:
        """What runs its workers; another one after a restart."""
        return self._workers.executor

    def stage_times(self) -> Sequence[StageTime]:
        """Returns the busy and idle time of each pipeline stage since its workers started; empty if
        there is one stage."""
        if self._config.parallel.pipeline_parallel_size == 1:
            return ()
        return self._workers.executor.stage_times()

    @property
    def is_idle(self) -> bool:
        """Whether every request has ended and all of its text is emitted."""
        return not self.requests.sequences

    @property
    def num_requests(self) -> int:
        """Requests that have not ended, however many sequences they have."""
        return len(self.requests.outputs())

    async def shutdown(self) -> None:
        """Ends the workers, and waits until they are gone. Safe to call twice. Its requests have
        ended: it lets go of them."""
        self._record_check.end()
        self.turn.set()
        await self.recovery.end()
        for feature in self.features:
            feature.close()
        self._forget_requests()
        await self._workers.end()

    def _forget_requests(self) -> None:
        """Lets go of all requests, with what they have in memory, such as pictures: posted steps
        would keep them as long as anything refers to the engine."""
        self.emission.emit_rest()
        for feature in self.features:
            feature.lose()
            feature.restart()
        if hasattr(self, "scheduler"):  # else the start has failed
            if self.scheduler.is_idle:
                self.scheduler.forget_posted()
            else:
                self.scheduler.restart(self.scheduler.limits, ())

    def handle_loss(self, error: Exception) -> None:
        """Restarts the workers, or gives up; see `Recovery.handle_loss`."""
        was_serving = self.state is EngineState.SERVING
        self.turn.set()
        self.recovery.handle_loss(error)
        if self.lockstep is not None and was_serving:
            self.lockstep.lose(self.number, error)

    def check_records(self) -> None:
        """See `RecordCheck.check`."""
        self._record_check.check()

    def pause(self) -> None:
        """Plans no further step until `resume`. Steps that were posted end, requests wait."""
        self.is_paused = True

    def resume(self) -> None:
        """Goes on with all requests, after `pause`."""
        self.is_paused = False
        self.scheduler.set_admission(is_open=True)
        self.plan_soon()

    # ---------------------------------------------------------------- requests

    def add(self, output: RequestOutput, arrived: float) -> None:
        """Queues the sequences of a request that was submitted at `arrived` (of
        `time.perf_counter`)."""
        self.requests.add(output, arrived)
        self._record_check.begin()
        self.plan_soon()

    def cut_short(self, output: RequestOutput) -> None:
        """Ends a request on behalf of another caller than its reader; the reader gets the tokens
        generated so far, with "abort" as the finish reason."""
        self.emission.emit_rest()  # else sequences that have ended are still open
        if output.params.beam_search is not None:
            self.features.of(BeamSearches).cut_short(output)
            self.plan_soon()
            return
        unfinished = [s.index for s in output.sequences if s.request in self.requests.sequences]
        self.requests.abort(output)
        for index in unfinished:
            output.put(Delta(index, finish_reason="abort"))

    def import_requests(self, sequences: Sequence[OutputSequence]) -> None:
        """Queues sequences that another engine has exported; see `OpenRequests.import_from`."""
        for sequence in sequences:
            sequence.output.note_weights(self.weight_version)
        self.requests.import_from(sequences)
        self._record_check.begin()

    # ---------------------------------------------------------------- the step loop

    def _step(self, result: StepResult) -> None:
        """Handles the result of step N-1 while the workers execute step N.

        take    the executor has read the result from the ring
        update  the scheduler appends the tokens and ends requests: blocks and slots become free;
                features take their parts of the result
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
        emission.add(output, result)
        emission.is_whole = True
        self._plan_and_post()
        self.metrics.record_step(result, output.requests, output.tokens)
        emission.emit_portion()

    def _plan_and_post(self) -> None:
        """Plans steps and posts them until enough are in flight or nothing is left to compute."""
        self._planning_is_due = False
        self.turn.set()
        timer, scheduler = self.metrics.timer, self.scheduler
        try:
            while (
                scheduler.num_in_flight < self._pipeline_depth
                and self.state is EngineState.SERVING
                and not self.features.are_waiting
            ):
                with timer.plan:
                    plan = self._next_plan()
                if plan is None:
                    return
                self.post(plan)
        # a step that cannot be posted would leave every request waiting without end
        except Exception as error:
            self.handle_loss(EngineDeadError(f"a step could not be planned or posted: {error!r}"))

    def post(self, plan: StepPlan) -> None:
        """Hands a plan of the scheduler to the workers."""
        with self.metrics.timer.post:
            self._workers.executor.post(plan)
        if self.lockstep is not None:
            self.lockstep.record_post(self.number)
        self.metrics.record_plan(plan, self.scheduler.running)
        self.scheduler.confirm_post()

    def _tell(self, section: Section) -> None:
        """Hands a section to the workers, whatever is in flight."""
        if self.state is EngineState.SERVING:
            self._workers.executor.post_section(section)

    def _next_plan(self) -> StepPlan | None:
        """Returns the next step; None if there is nothing to compute, or the engine is paused, and
        no other engine waits for it."""
        plan = None if self.is_paused else self.scheduler.schedule()
        if plan is None and self.lockstep is not None and self.lockstep.is_behind(self.number):
            plan = self.scheduler.schedule_nothing()
        return plan

    def plan_soon(self) -> None:
        """Plans once the event loop has handled all ready events: requests that arrive together
        share a step."""
        if not self._planning_is_due:
            self._planning_is_due = True
            asyncio.get_running_loop().call_soon(self._plan_and_post)
