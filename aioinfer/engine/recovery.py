"""Recovery of an engine after its workers died or hung: its states, how often and how soon its
workers are restarted, and which of its requests go on.

The requests stay meanwhile: waiting requests are not touched, and running ones are queued again
with all tokens known so far, as after a preemption. Posted steps without a result are computed
again. `Engine` owns a `Recovery`. Once an engine is dead, `relocation` moves its requests to
others.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from aioinfer.engine.beam_searches import BeamSearches
from aioinfer.engine.emission import Emission, EmittingEngine
from aioinfer.engine.masking import Masking
from aioinfer.engine.output import OutputSequence
from aioinfer.engine.prompt_outputs import PromptOutputs
from aioinfer.errors import EngineDeadError, GenerationError
from aioinfer.executor.base import Executor, ProgressCallback, WorkerReport
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.request import Request, Status

#: So many seconds of service make up for the restarts before them.
STABLE_S = 600.0
_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 60.0
#: A request that was running so many times when workers were lost may be the cause.
MAX_INTERRUPTIONS = 2
#: The end of killed workers may take so long; a new start so long, or `SLOWEST_START` times as long
#: as the first one. A start that takes longer hangs.
MAX_END_S = 60.0
MAX_START_S = 300.0
SLOWEST_START = 5.0
_log = logging.getLogger(__name__)


class EngineState(enum.Enum):
    """Whether an engine serves.

    STARTING: not yet. SERVING: its workers execute steps. RESTARTING: its workers were lost and
    come back; it takes requests, which wait. DEAD: it serves no more requests.
    """

    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    DEAD = "dead"


class RestartPolicy:
    """Bounds the consecutive restarts of an engine's workers, with delays that double.

    `STABLE_S` seconds of service reset the count. (A bound on the restarts in a span of time would
    never be reached where each attempt takes longer than the span allows.)

    Attributes:
        max_restarts: consecutive restarts that are allowed.
        num_restarts: consecutive restarts that were begun, the one under way included.
    """

    def __init__(self, max_restarts: int):
        """Allows `max_restarts` consecutive restarts; 0 allows none."""
        self.max_restarts = max_restarts
        self.num_restarts = 0
        self._serving_since: float | None = None

    def begin_service(self) -> None:
        """Records that the workers serve from now on."""
        self._serving_since = time.monotonic()

    def next_delay_s(self) -> float | None:
        """Returns the seconds to wait before the next restart, which is counted, or None if there
        may be no more."""
        since, self._serving_since = self._serving_since, None
        if since is not None and time.monotonic() - since >= STABLE_S:
            self.num_restarts = 0
        if self.num_restarts >= self.max_restarts:
            return None
        self.num_restarts += 1
        return min(_FIRST_DELAY_S * 2.0 ** (self.num_restarts - 1), _MAX_DELAY_S)


class RecoverableEngine(EmittingEngine, Protocol):
    """The part of an engine that recovery and the check of records use. See `Engine`."""

    name: str
    state: EngineState
    report: WorkerReport
    start_s: float
    emission: Emission
    beam_searches: BeamSearches
    masking: Masking
    prompt_outputs: PromptOutputs

    async def start_workers(self, on_progress: ProgressCallback) -> WorkerReport: ...

    async def end_workers(self) -> None: ...

    def replace_workers(self, executor: Executor) -> None: ...

    def limits(self, report: WorkerReport) -> SchedulerLimits: ...

    def begin_service(self) -> None: ...

    def set_dead(self, reason: str) -> None: ...

    def end_all(self, reason: str) -> None: ...

    def check_records(self) -> None: ...


class Recovery:
    """Restarts the workers of one engine, or gives the engine up.

    Attributes:
        policy: how often and how soon they are restarted.
        new_executor: makes an executor of the engine's kind, or None: then there is no restart.
    """

    def __init__(
        self,
        engine: RecoverableEngine,
        sequences: Mapping[Request, OutputSequence],
        max_restarts: int,
        new_executor: Callable[[], Executor] | None,
        on_death: Callable[[str], None],
    ):
        """`sequences` are the engine's open sequences, by request; `on_death` is called with the
        reason once it is dead, and takes its requests over or leaves them to be ended."""
        self.policy = RestartPolicy(max_restarts if new_executor else 0)
        self.new_executor = new_executor
        self._engine = engine
        self._sequences = sequences
        self._on_death = on_death
        self._task: asyncio.Future[None] | None = None

    async def end(self) -> None:
        """Cancels a restart that is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def handle_loss(self, error: Exception) -> None:
        """Restarts the workers, or gives up: one of them died or hung, or the step loop failed and
        does not know any more which state they have."""
        engine = self._engine
        reason = f"{engine.name}{error}"
        if engine.state is EngineState.SERVING and self.policy.max_restarts:
            engine.state = EngineState.RESTARTING
            engine.metrics.is_serving = False
            _log.warning("%s; the workers are started anew", reason)
            self._requeue_all(reason)
            self._task = asyncio.ensure_future(self._restart(reason))
        elif engine.state is EngineState.RESTARTING and not engine.emission.is_whole:
            self._requeue_all(reason)  # the last tokens of the lost workers could not be emitted
        elif engine.state in (EngineState.STARTING, EngineState.SERVING):
            self._give_up(reason)
            self._task = asyncio.ensure_future(engine.end_workers())

    def _give_up(self, reason: str) -> None:
        """Makes the engine dead. Its requests go to other engines, or end."""
        engine = self._engine
        has_requests = engine.state is not EngineState.STARTING
        engine.set_dead(reason)
        self._on_death(reason)
        engine.end_all(reason)
        if has_requests:  # it counts for nothing while other engines go on
            engine.scheduler.restart(engine.scheduler.limits, ())

    def prepare_move(self, reason: str) -> None:
        """Ends the requests that cannot go on with another engine, now that this one is dead, and
        leaves the others detached from it and with all the text that was taken.

        Only where another engine lives: otherwise all requests end for the same reason.
        """
        engine = self._engine
        engine.emission.emit_rest()
        engine.beam_searches.emit_rest()
        self._requeue_all(reason)
        engine.masking.begin_anew()  # no thread may use constraints that move

    def _requeue_all(self, reason: str) -> None:
        """Puts the running requests back into the queue, and ends requests that cannot be resumed:

        - text of the output may be missing, since the step loop failed between taking a step's
          tokens and emitting them;
        - the request ran each time when workers were lost, `MAX_INTERRUPTIONS` times: it may be the
          cause, and would end the new workers as well.
        """
        engine = self._engine
        ended: list[OutputSequence] = []
        waiting: list[Request] = []
        for request, sequence in self._sequences.items():
            if request.slot >= 0:
                request.num_interruptions += 1
                engine.metrics.interrupted += 1
            has_begun = request.status is Status.FINISHED or request.num_output > 0
            if request.num_interruptions >= MAX_INTERRUPTIONS or (
                has_begun and not engine.emission.is_whole
            ):
                ended.append(sequence)
            if request.status is not Status.FINISHED:  # else only its text is still to come
                waiting.append(request)
        engine.scheduler.restart(engine.scheduler.limits, waiting)
        engine.masking.forget_step()
        engine.prompt_outputs.clear()
        engine.metrics.steps.forget_posted()
        engine.emission.is_whole = True
        cause = reason.partition("\n")[0]  # without a traceback
        for sequence in ended:
            message = f"the request ran when workers were lost, and cannot be resumed: {cause}"
            engine.fail(sequence.output, GenerationError(message))

    async def _restart(self, reason: str) -> None:
        """Ends the remaining worker processes and starts new workers, until they serve or there
        were too many attempts."""
        engine = self._engine
        while (delay_s := self.policy.next_delay_s()) is not None:
            try:
                async with asyncio.timeout(MAX_END_S):
                    await engine.end_workers()
                await asyncio.sleep(delay_s)
                engine.replace_workers(self._replacement_executor())
                engine.metrics.restarts += 1
                async with asyncio.timeout(max(MAX_START_S, SLOWEST_START * engine.start_s)):
                    report = await engine.start_workers(no_progress)
                self._resume(report)
                return
            except Exception as error:  # whatever it is, the next attempt may do better
                reason = f"{engine.name}{str(error) or repr(error)}"
                _log.warning("%s; the workers could not be started anew", reason)
        self._give_up(f"{reason} (after {self.policy.max_restarts} restarts)")
        await engine.end_workers()

    def _replacement_executor(self) -> Executor:
        if self.new_executor is None:
            raise EngineDeadError("this kind of executor cannot be started anew")
        return self.new_executor()

    def _resume(self, report: WorkerReport) -> None:
        """Goes on with new workers.

        Raises `EngineDeadError` if requests that were admitted are too long for them.
        """
        engine = self._engine
        if report.max_model_len < engine.report.max_model_len:
            raise EngineDeadError(
                f"the new workers can hold only {report.max_model_len} tokens of a request, "
                f"{engine.report.max_model_len} are promised"
            )
        engine.masking.begin_anew()
        waiting = [r for r in self._sequences if r.status is not Status.FINISHED]
        engine.scheduler.restart(engine.limits(report), waiting)
        _log.warning("%sthe workers serve again; %d requests go on", engine.name, len(waiting))
        engine.begin_service()
        engine.plan_soon()


def no_progress(phase: str, done: int, total: int) -> None:
    """Ignores the progress of a start."""
