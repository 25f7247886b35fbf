"""Recovery of an engine after its workers died or hung: its states, how often and how soon its
workers are restarted, and which of its requests go on.

The requests stay meanwhile: waiting requests are not touched, and running ones are queued again
with all tokens known so far, as after a preemption. Posted steps without a result are computed
again. `Engine` owns a `Recovery`. Once an engine is dead, `router.relocate` moves its requests to
others.

A `RecordCheck` recovers from contradicting records, once a minute while there are requests: every
request that was accepted has to be known to engine, scheduler and metrics, and the scheduler's own
records have to agree.

A `Lockstep` keeps engines in step, and recovers them together, if their workers compute together
(`parallel.expert_parallel` between engines). Their ranks exchange tokens in every layer, so the
n-th step of one engine needs the n-th step of all others. Each engine plans for itself: its own
scheduler decides on the rows of a step. An engine that has posted fewer steps than another posts
steps without rows until it has caught up, so that no engine waits longer than for a turn of the
event loop; when no engine has anything to compute, none posts anything. No engine waits without
end: the steps that it has posted end once the others have posted as many, and it posts further ones
as its results come.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from aioinfer.engine.emission import Emission
from aioinfer.engine.open_requests import OpenRequests
from aioinfer.engine.output import OutputSequence
from aioinfer.errors import EngineDeadError, GenerationError
from aioinfer.executor.base import Executor, ProgressCallback, WorkerReport
from aioinfer.ipc.plan import StepResult
from aioinfer.scheduler.features import StepFeatures
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.request import Finish, Request, RequestStatus
from aioinfer.tasks import end_tasks

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
#: Requests wait so long for new workers, or `OUTAGE_STARTS` times as long as the first start took;
#: then they end, and others are refused.
MAX_OUTAGE_S = 30.0
OUTAGE_STARTS = 2.0
#: When a client should try again that was refused for that reason.
OUTAGE_RETRY_S = 10
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

    def take_back(self) -> None:
        """Records that the restart under way is put off: it has not failed, and does not count."""
        self.num_restarts -= 1


class Workers:
    """The workers of an engine, which another executor may replace.

    Attributes:
        executor: runs them.
        report: their sizes, once they have started.
        start_s: seconds that their first start took.
    """

    report: WorkerReport
    start_s: float

    def __init__(
        self,
        executor: Executor,
        on_result: Callable[[StepResult], None],
        on_loss: Callable[[Exception], None],
        list_kv_files: Callable[[WorkerReport], Sequence[Sequence[bytes]]] | None = None,
    ):
        """See `Executor.start` for the callbacks. `list_kv_files` returns `WorkerReport.kv_files`,
        in a thread."""
        self.executor = executor
        self._list_kv_files = list_kv_files
        self._on_result, self._on_loss = on_result, on_loss

    async def start(self, on_progress: ProgressCallback) -> WorkerReport:
        """Starts the workers and returns their sizes; see `Executor.start`."""
        report = await self.executor.start(self._on_result, self._on_loss, on_progress)
        if self._list_kv_files is not None:
            files = await asyncio.to_thread(self._list_kv_files, report)
            report = dataclasses.replace(report, kv_files=files)
        return report

    async def end(self) -> None:
        """Ends the workers, and waits until they are gone. Safe to call twice."""
        await self.executor.shutdown()


class Recovery:
    """The state of one engine: restarts its workers, or gives the engine up.

    Attributes:
        state: whether the engine serves.
        dead_reason: why it serves no more requests, or None.
        outage: why requests do not wait for new workers any more, which still may come; or None.
        policy: how often and how soon the workers are restarted.
        new_executor: makes an executor of the engine's kind, or None: then there is no restart.
        on_restart: called when new workers serve, before any step is planned for them.
        on_outage: called with the reason when requests have waited too long for new workers, and
            again as often while there are none; takes the requests over, or ends them.
        until_may_restart: awaited before new workers are started.
        are_current: whether new workers that have started have the weights that they should have:
            others may have been loaded meanwhile.
    """

    def __init__(
        self,
        name: str,
        requests: OpenRequests,
        workers: Workers,
        emission: Emission,
        features: StepFeatures,
        limits_of: Callable[[WorkerReport], SchedulerLimits],
        max_restarts: int,
        new_executor: Callable[[], Executor] | None,
        on_death: Callable[[str], None],
    ):
        """Makes it for an engine that has not started.

        Args:
            name: the start of messages about the engine.
            requests, workers, emission, features: of the engine.
            limits_of: returns the scheduler's limits for workers of these sizes.
            max_restarts: consecutive restarts that are allowed.
            new_executor: see the attribute.
            on_death: called with the reason once the engine is dead; takes its requests over or
                leaves them to be ended.
        """
        self.state = EngineState.STARTING
        self.dead_reason: str | None = None
        self.outage: str | None = None
        self.policy = RestartPolicy(max_restarts if new_executor else 0)
        self.new_executor = new_executor
        self._name = name
        self._requests, self._workers = requests, workers
        self._emission, self._features = emission, features
        self._metrics = requests.metrics
        self._limits_of = limits_of
        self._on_death = on_death
        self.on_outage: Callable[[str], None] = lambda reason: None
        self._outage_timer: asyncio.TimerHandle | None = None
        self.on_restart: Callable[[], None] = lambda: None
        self.until_may_restart: Callable[[], Awaitable[object]] = partial(asyncio.sleep, 0)
        self.are_current: Callable[[], bool] = lambda: True
        self._task: asyncio.Future[None] | None = None

    def begin_service(self) -> None:
        """Makes the engine serve: from now on its workers may be restarted."""
        self.state = EngineState.SERVING
        self._metrics.is_serving = True
        self.policy.begin_service()
        self._end_outage()

    def set_dead(self, reason: str) -> None:
        """Makes the engine take no further step. Its requests are left as they are."""
        self.state = EngineState.DEAD
        self._metrics.is_serving = False
        self._end_outage()
        if self.dead_reason is None:
            self.dead_reason = reason

    def end_all(self, reason: str) -> None:
        """Ends all requests with an error, and takes no further step."""
        self.set_dead(reason)
        self._requests.end_all(EngineDeadError(self.dead_reason))

    async def end(self) -> None:
        """Cancels a restart that is under way."""
        self._end_outage()
        if self._task is not None:
            await end_tasks([self._task])

    def handle_loss(self, error: Exception) -> None:
        """Restarts the workers, or gives up: one of them died or hung, or the step loop failed and
        does not know any more which state they have."""
        reason = f"{self._name}{error}"
        if self.state is EngineState.SERVING and self.policy.max_restarts:
            self.state = EngineState.RESTARTING
            self._metrics.is_serving = False
            _log.warning("%s; the workers are restarted", reason)
            self._requeue_all(reason)
            self._task = asyncio.ensure_future(self._restart(reason))
        elif self.state is EngineState.RESTARTING and not self._emission.is_whole:
            self._requeue_all(reason)  # the last tokens of the lost workers could not be emitted
        elif self.state in (EngineState.STARTING, EngineState.SERVING):
            self._give_up(reason)
            self._task = asyncio.ensure_future(self._workers.end())

    def _give_up(self, reason: str) -> None:
        """Makes the engine dead. Its requests go to other engines, or end."""
        has_requests = self.state is not EngineState.STARTING
        self.set_dead(reason)
        self._on_death(reason)
        self.end_all(reason)
        if has_requests:  # it counts for nothing while other engines go on
            scheduler = self._requests.scheduler
            scheduler.restart(scheduler.limits, ())

    def export_requests(self) -> list[OutputSequence]:
        """Ends the requests that cannot go on with another engine, now that this one has no
        workers, and leaves the others detached from it and with all the text that was taken.
        Returns their sequences, in the order in which they would have been served.

        Only where another engine lives: otherwise all requests end for the same reason.
        """
        self._emission.emit_rest()
        self._requeue_all(self.dead_reason or "")
        for feature in self._features:
            feature.restart()  # no thread may use what moves
        sequences = self._requests.sequences.values()
        return sorted(sequences, key=lambda sequence: sequence.request.key)

    def _requeue_all(self, reason: str) -> None:
        """Puts the running requests back into the queue, and ends requests that cannot be resumed:

        - text of the output may be missing, since the step loop failed between taking a step's
          tokens and emitting them;
        - the request ran each time when workers were lost, `MAX_INTERRUPTIONS` times: it may be the
          cause, and would end the new workers as well.
        """
        requests, emission = self._requests, self._emission
        ended: list[OutputSequence] = []
        waiting: list[Request] = []
        for request, sequence in requests.sequences.items():
            if request.slot >= 0:
                request.num_interruptions += 1
                self._metrics.interrupted += 1
            has_begun = request.status is RequestStatus.FINISHED or request.num_output > 0
            if request.num_interruptions >= MAX_INTERRUPTIONS or (
                has_begun and not emission.is_whole
            ):
                ended.append(sequence)
            if request.status is not RequestStatus.FINISHED:  # else only its text is still to come
                waiting.append(request)
        requests.scheduler.restart(requests.scheduler.limits, waiting)
        for feature in self._features:
            feature.lose()
        self._metrics.steps.forget_posted()
        emission.is_whole = True
        cause = reason.partition("\n")[0]  # without a traceback
        for sequence in ended:
            message = f"the request ran when workers were lost, and cannot be resumed: {cause}"
            requests.fail(sequence.output, GenerationError(message))

    async def _restart(self, reason: str) -> None:
        """Ends the remaining worker processes and starts new workers, until they serve or there
        were too many attempts."""
        workers = self._workers
        while (delay_s := self.policy.next_delay_s()) is not None:
            try:
                async with asyncio.timeout(MAX_END_S):
                    await workers.end()
                await asyncio.sleep(delay_s)
                await self.until_may_restart()
                if self._outage_timer is None:
                    self._bound_outage()
                workers.executor = self._replacement_executor()
                self._metrics.restarts += 1
                async with asyncio.timeout(max(MAX_START_S, SLOWEST_START * workers.start_s)):
                    report = await workers.start(no_progress)
                if self.are_current():
                    self._resume(report)
                    return
                self.policy.take_back()
                _log.warning(
                    "%sthe weights were replaced while new workers started; they start again",
                    self._name,
                )
            except asyncio.CancelledError:
                self.policy.take_back()
                raise
            except Exception as error:  # whatever it is, the next attempt may do better
                reason = f"{self._name}{str(error) or repr(error)}"
                _log.warning("%s; the workers could not be restarted", reason)
        self._give_up(f"{reason} (after {self.policy.max_restarts} restarts)")
        await workers.end()

    async def defer(self) -> None:
        """Puts off the restart that is under way, if one is, which does not count then: the next
        one begins once `until_may_restart` returns, and until then requests wait for it."""
        if self.state is EngineState.RESTARTING:
            reason = self.outage or ""
            await self.end()
            self._task = asyncio.ensure_future(self._restart(reason))

    def _bound_outage(self) -> None:
        """Has requests wait for new workers no longer than they may from now on."""
        limit_s = max(MAX_OUTAGE_S, OUTAGE_STARTS * self._workers.start_s)
        loop = asyncio.get_running_loop()
        self._outage_timer = loop.call_later(limit_s, self._declare_outage, limit_s)

    def _declare_outage(self, limit_s: float) -> None:
        self._bound_outage()  # for requests that are queued nevertheless, with other engines lost
        if self.outage is None:
            self.outage = (
                f"{self._name}the workers were lost, and have not come back within {limit_s:.0f} s"
            )
            _log.error("%s; requests do not wait for them any more", self.outage)
        self.on_outage(self.outage)
        self._requests.scheduler.restart(self._requests.scheduler.limits, ())

    def _end_outage(self) -> None:
        self.outage = None
        if self._outage_timer is not None:
            self._outage_timer.cancel()
            self._outage_timer = None

    async def replace_workers(self) -> None:
        """Has new workers take the place of workers that are not needed any more: no request has a
        slot, and no step is in flight.

        Raises:
            ConfigError: they cannot be started; then there are none.
            EngineDeadError: as before; or the engine was closed meanwhile.
        """
        self.state = EngineState.RESTARTING
        self._metrics.is_serving = False
        await self._workers.end()
        self._require_life()
        self._workers.executor = self._replacement_executor()
        report = await self._workers.start(no_progress)
        self._require_life()
        self._resume(report)

    def _require_life(self) -> None:
        if self.state is EngineState.DEAD:
            raise EngineDeadError(self.dead_reason or "the engine is dead")

    def _replacement_executor(self) -> Executor:
        if self.new_executor is None:
            raise EngineDeadError("this kind of executor cannot be started again")
        return self.new_executor()

    def _resume(self, report: WorkerReport) -> None:
        """Goes on with new workers.

        Raises `EngineDeadError` if requests that were admitted are too long for them.
        """
        promised = self._workers.report.max_model_len
        if report.max_model_len < promised:
            raise EngineDeadError(
                f"the new workers can hold only {report.max_model_len} tokens of a request, "
                f"{promised} are promised"
            )
        for feature in self._features:
            feature.restart()
        waiting = [r for r in self._requests.sequences if r.status is not RequestStatus.FINISHED]
        self._requests.scheduler.restart(self._limits_of(report), waiting)
        _log.warning("%sthe workers serve again; %d requests go on", self._name, len(waiting))
        self.begin_service()
        self.on_restart()
        self._requests.plan_soon()


def no_progress(phase: str, done: int, total: int) -> None:
    """Ignores the progress of a start."""


def _awaits_beams(sequence: OutputSequence, known: Collection[Request]) -> bool:
    """Whether a sequence is a beam that has sampled its last token, and the scheduler still has
    another beam of its search."""
    if not sequence.is_beam or sequence.request.status is not RequestStatus.FINISHED:
        return False
    return any(each.request in known for each in sequence.output.sequences)


#: Seconds between two checks, while there are requests.
_CHECK_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class RecordCheck:
    """Checks the records of one engine, and ends the requests about which they are wrong.

    Attributes:
        next_check: the timer of the next check, if one is due.
    """

    def __init__(self, name: str, requests: OpenRequests, emission: Emission):
        """`name`: the start of messages about the engine, whose parts the others are."""
        self.next_check: asyncio.TimerHandle | None = None
        self._name = name
        self._requests = requests
        self._emission = emission

    def begin(self) -> None:
        """Starts the checks, which go on until no request is left."""
        if self.next_check is None:
            self._check_later()

    def end(self) -> None:
        """Cancels the next check."""
        if self.next_check is not None:
            self.next_check.cancel()

    def _check_later(self) -> None:
        loop = asyncio.get_running_loop()
        self.next_check = loop.call_later(_CHECK_EVERY_S, self._check_now)

    def _check_now(self) -> None:
        """Checks the records while there are requests, and once more after the last has ended."""
        self.next_check = None
        if self._requests.sequences:
            self._check_later()
        self.check()

    def check(self) -> None:
        """Checks that the scheduler knows every accepted request and no other, and that its own
        records agree.

        A contradiction is a fault of this program. It is logged and counted; requests that it
        concerns end with an error, so that no client waits without end. It takes about 0.1 us a KV
        block and 2 us a request: 5 to 10 ms with 80 000 blocks and 600 requests.
        """
        requests, scheduler = self._requests, self._requests.scheduler
        sequences, metrics = requests.sequences, requests.metrics
        self._emission.emit_rest()  # else requests that have ended are still open
        try:
            scheduler.check_integrity()
        except Exception as error:  # records that are wrong may also break the check
            self._report(f"{error!r}; the requests that ran are ended")
            self._rebuild_scheduler()
        known = set(scheduler.requests())
        for request, sequence in list(sequences.items()):
            is_lost = request not in known and request in sequences
            if is_lost and not _awaits_beams(sequence, known):
                self._report(f"request {request.request_id} was in no queue")
                request.end(Finish("error"))
                scheduler.features.drop(request)
                requests.fail(sequence.output, GenerationError("the server has lost the request"))
        for request in known - sequences.keys():
            self._report(f"request {request.request_id} belonged to no output")
            scheduler.finish(request, "abort")
        for request in metrics.open_requests - sequences.keys():
            self._report(f"request {request.request_id} was counted as open")
            metrics.end(request, "error")

    def _report(self, what: str) -> None:
        self._requests.metrics.violations += 1
        _log.error("%sa check of the records failed: %s", self._name, what)

    def _rebuild_scheduler(self) -> None:
        """Rebuilds the scheduler's records. Running requests end, since the contents of their KV
        blocks are not certain; requests that wait or load go on."""
        kept: list[Request] = []
        ended: list[Request] = []
        requests = self._requests
        for request in requests.sequences:
            waits = request.slot < 0 and request.status is not RequestStatus.FINISHED
            (kept if waits and not request.num_pending else ended).append(request)
        requests.scheduler.rebuild(kept, ended)
        for request in ended:
            if request in requests.sequences:
                message = "the server's records of running requests were wrong: they were ended"
                requests.fail_request(request, GenerationError(message))
        requests.plan_soon()


@dataclass(slots=True)
class _Member:
    """An engine in lockstep.

    Attributes:
        recovery: of the engine.
        plan_soon: makes it plan a step.
        num_posted: steps that it has posted since all workers started together.
    """

    recovery: Recovery
    plan_soon: Callable[[], None]
    num_posted: int = 0


class Lockstep:
    """Counts the steps that the engines have posted since their workers started together. Engines
    are named by their numbers."""

    def __init__(self) -> None:
        self._members: list[_Member] = []

    def join(self, recovery: Recovery, plan_soon: Callable[[], None]) -> None:
        """Adds the engine of the next number."""
        self._members.append(_Member(recovery, plan_soon))

    def is_behind(self, number: int) -> bool:
        """Whether another engine has posted more steps."""
        most = max(member.num_posted for member in self._members)
        return self._members[number].num_posted < most

    def record_post(self, number: int) -> None:
        """Records that an engine has posted a step, and makes the engines that are behind plan
        soon."""
        self._members[number].num_posted += 1
        for other, member in enumerate(self._members):
            if self.is_behind(other):
                member.plan_soon()

    def lose(self, number: int, error: Exception) -> None:
        """Records that an engine that served has lost its workers. The other engines' workers
        cannot go on without them: all workers are restarted, or given up."""
        reason = str(error).partition("\n")[0]
        for member in self._members:
            member.num_posted = 0
        for other, member in enumerate(self._members):
            if other != number and member.recovery.state is EngineState.SERVING:
                message = f"it shares experts with engine {number}: {reason}"
                member.recovery.handle_loss(EngineDeadError(message))
                member.plan_soon()
