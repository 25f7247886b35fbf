"""The check of an engine's records: every request that was accepted is known to engine, scheduler
and metrics, and the scheduler's own records agree.

`Engine` owns a `RecordCheck`, which runs once a minute while there are requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from aioinfer.engine.output import OutputSequence
from aioinfer.engine.recovery import EngineState, RecoverableEngine
from aioinfer.errors import GenerationError
from aioinfer.scheduler.request import Finish, Request, Status

#: Seconds between two checks, while there are requests.
_CHECK_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class RecordCheck:
    """Checks the records of one engine, and ends the requests about which they are wrong.

    Attributes:
        next_check: the timer of the next check, if one is due.
    """

    def __init__(self, engine: RecoverableEngine, sequences: Mapping[Request, OutputSequence]):
        """`sequences` are the engine's open sequences, by request."""
        self.next_check: asyncio.TimerHandle | None = None
        self._engine = engine
        self._sequences = sequences

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
        if self._engine.state is not EngineState.DEAD:
            if self._sequences:
                self._check_later()
            self._engine.check_records()

    def check(self) -> None:
        """See `Engine.check_records`."""
        engine, sequences = self._engine, self._sequences
        engine.emission.emit_rest()  # else requests that have ended are still open
        engine.beam_searches.emit_rest()
        try:
            engine.scheduler.check_integrity()
        except Exception as error:  # records that are wrong may also break the check
            self._report(f"{error!r}; the requests that ran are ended")
            self._rebuild_scheduler()
        known = set(engine.scheduler.requests())
        for request, sequence in list(sequences.items()):
            if request not in known and request in sequences:
                self._report(f"request {request.request_id} was in no queue")
                request.end(Finish("error"))
                engine.fail(sequence.output, GenerationError("the server has lost the request"))
        for request in known - sequences.keys():
            self._report(f"request {request.request_id} had nobody to go to")
            engine.scheduler.finish(request, "abort")
        for request in engine.metrics.open_requests - sequences.keys():
            self._report(f"request {request.request_id} was counted as open")
            engine.metrics.end(request, "error")

    def _report(self, what: str) -> None:
        self._engine.metrics.violations += 1
        _log.error("%sa check of the records failed: %s", self._engine.name, what)

    def _rebuild_scheduler(self) -> None:
        """Rebuilds the scheduler's records. Running requests end, since the contents of their KV
        blocks are not certain; waiting requests go on."""
        kept: list[Request] = []
        ended: list[Request] = []
        for request in self._sequences:
            waits = request.status is Status.WAITING and request.slot < 0
            (kept if waits and not request.num_pending else ended).append(request)
        self._engine.scheduler.rebuild(kept, ended)
        for request in ended:
            if request in self._sequences:
                message = "the server's records of running requests were wrong: they were ended"
                self._engine.fail(self._sequences[request].output, GenerationError(message))
        self._engine.plan_soon()
